from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import units


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1024, 1024),
        ("0", 0),
        ("512M", 512 * units.MIB),
        ("512 MiB", 512 * units.MIB),
        ("1.5g", 3 * units.GIB // 2),
        ("2GB", 2 * units.GIB),
        ("1T", units.TIB),
        ("12b", 12),
    ],
)
def test_sizes_people_write_become_bytes(text, count):
    assert units.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "-1", -1, "1.2.3G", "five", "10 X", True, 1.5, "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="not a"):
        units.parse_size(text)


def test_bytes_are_shown_in_gib():
    assert units.gib(80 * units.GIB) == "80.00 GiB"
    assert units.mib(256 * units.MIB) == "256 MiB"


@given(st.integers(0, 2**50), st.integers(1, 2**30))
def test_rounding_brackets_the_value_by_less_than_a_step(count, step):
    low, high = units.round_down(count, step), units.round_up(count, step)
    assert low <= count <= high
    assert low % step == high % step == 0
    assert count - low < step
    assert high - count < step
