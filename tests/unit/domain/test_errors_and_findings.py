from __future__ import annotations

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding, worst


def test_an_error_ends_with_its_next_step_and_keeps_its_figures():
    error = FleetError("refused_kv", "Wanted 8 GiB, found 4 GiB.", "Lower max_model_len.", wanted=8, found=4)
    assert error.as_result() == {
        "msg": "Wanted 8 GiB, found 4 GiB. Lower max_model_len.",
        "error_code": "refused_kv",
        "hint": "Lower max_model_len.",
        "details": {"wanted": 8, "found": 4},
    }


def test_an_error_without_hint_or_details_has_neither_in_its_message():
    assert FleetError("x", "Broken.").as_result() == {"msg": "Broken.", "error_code": "x", "hint": ""}


def test_a_finding_with_an_unknown_severity_is_a_programming_error():
    with pytest.raises(ValueError, match="fatal"):
        Finding("x", "fatal", "gpu 0", "text")


def test_the_worst_severity_wins():
    info = Finding("a", "info", "s", "t").to_dict()
    error = Finding("b", "error", "s", "t").to_dict()
    assert worst([info, error]) == "error"
    assert worst([info]) == "info"
    assert worst([]) == ""
