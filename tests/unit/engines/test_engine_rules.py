"""A release is refused with figures when it cannot run on a host, and the newest that can is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import engine_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

DATA = Path(__file__).resolve().parents[3] / "plugins/plugin_utils/_data/releases.json"
VERSIONS = json.loads(DATA.read_text(encoding="utf-8"))["versions"]


def gpu(version: str, driver: str = "", **capabilities: str) -> list[dict[str, str]]:
    return engine_rules.check_gpu(VERSIONS, version, driver, capabilities)


@pytest.mark.parametrize(
    ("specifier", "version", "holds"),
    [
        ("<3.15,>=3.11", "3.11.2", True),
        ("<3.15,>=3.11", "3.10.12", False),
        ("<3.15,>=3.11", "3.15.0", False),
        (">=3.8", "3.14", True),
        ("==3.11.*", "3.11.9", True),
        ("!=5.0.*,>=4", "5.0.1", False),
        ("", "3.11", True),
    ],
)
def test_specifiers_are_read(specifier, version, holds):
    assert engine_rules.accepts(specifier, version) is holds


def test_a_specifier_in_another_form_is_an_error():
    with pytest.raises(FleetError, match=r"~=3\.9"):
        engine_rules.accepts("~=3.9", "3.9")


def test_a_driver_below_the_floor_is_refused_with_the_newest_release_that_runs():
    with pytest.raises(FleetError) as caught:
        gpu("0.32.0", "570.195.03", H100="9.0")
    assert caught.value.code == "driver_too_old"
    assert "580.65.06" in caught.value.message
    assert "570.195.03" in caught.value.message
    assert "0.19.1" in caught.value.hint


def test_a_driver_between_floor_and_toolkit_is_a_warning():
    assert [problem["code"] for problem in gpu("0.19.1", "535.261.03", H100="9.0")] == ["driver_below_toolkit"]
    assert gpu("0.19.1", "580.95.05", H100="9.0") == []


def test_a_gpu_without_kernels_in_the_wheel_is_refused():
    with pytest.raises(FleetError, match=r"V100 has compute capability 7\.0") as old:
        gpu("0.32.0", "580.95.05", V100="7.0")
    assert "0.19.1" in old.value.hint
    with pytest.raises(FleetError, match="no kernels for Blackwell"):
        gpu("0.9.2", "580.95.05", B200="10.0")
    assert gpu("0.10.2", "580.95.05", B200="10.0") == []


def test_nothing_known_about_the_gpus_refuses_nothing():
    assert gpu("0.32.0") == []


def test_an_unknown_release_is_refused_with_the_known_range():
    with pytest.raises(FleetError, match=r"holds 0\.5\.4 to "):
        gpu("9.9.9")


@pytest.mark.parametrize(
    ("version", "machine", "glibc", "words"),
    [
        ("0.10.1", "aarch64", "2.36", "no wheel for aarch64"),
        ("0.32.0", "ppc64le", "2.36", "no wheel for ppc64le"),
        ("0.20.1", "x86_64", "2.31", "glibc 2.35 or newer; this host has 2.31"),
    ],
)
def test_a_host_whose_loader_or_processor_does_not_fit_is_refused(version, machine, glibc, words):
    with pytest.raises(FleetError, match=words) as caught:
        engine_rules.check_host(version, VERSIONS[version], machine, glibc)
    assert caught.value.code == "unsupported_host"


def test_a_host_that_fits_passes():
    assert engine_rules.check_host("0.21.0", VERSIONS["0.21.0"], "aarch64", "2.31") is None


def test_the_newest_interpreter_that_the_release_accepts_is_taken():
    found = [{"path": f"/usr/bin/python{v}", "version": v} for v in ("3.9.2", "3.11.2", "3.13.5", "3.15.0")]
    assert engine_rules.choose_python("0.32.0", "<3.15,>=3.11", found)["version"] == "3.13.5"


def test_without_a_fitting_interpreter_the_three_ways_are_named():
    with pytest.raises(FleetError) as caught:
        engine_rules.choose_python("0.32.0", "<3.15,>=3.11", [{"path": "/usr/bin/python3.9", "version": "3.9.2"}])
    assert "/usr/bin/python3.9 (3.9.2)" in caught.value.message
    assert all(word in caught.value.hint for word in ("`path`", "`package`", "`archive`"))
