from __future__ import annotations

from collections import UserDict

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_bool, to_native


class TaggedStr(str):
    __slots__ = ()


class TaggedDict(dict):
    pass


def test_tagged_values_become_plain_ones_at_every_depth():
    value = to_native(TaggedDict({TaggedStr("a"): [TaggedStr("b"), (1, 2)], "c": UserDict(x=1)}))
    assert value == {"a": ["b", [1, 2]], "c": {"x": 1}}
    assert type(value) is dict
    assert type(value["a"][0]) is str


def test_what_is_no_plain_data_is_refused_in_words():
    with pytest.raises(FleetError, match="plain data"):
        to_native({"a": object()})
    with pytest.raises(FleetError, match="plain data"):
        to_native(b"bytes")


@pytest.mark.parametrize(
    ("value", "flag"),
    [(True, True), ("true", True), ("Yes", True), (1, True), ("no", False), (0, False), ("", False), (None, False)],
)
def test_flags_from_the_command_line_are_understood(value, flag):
    assert to_bool(value, "site_allow_disruption") is flag


def test_a_flag_that_is_neither_names_its_variable():
    with pytest.raises(FleetError, match="site_allow_disruption must be true or false, found 'maybe'"):
        to_bool("maybe", "site_allow_disruption")
