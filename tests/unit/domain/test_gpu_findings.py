from __future__ import annotations

import copy

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.gpu_findings import gpu_findings, ranges

DEVICE = {
    "index": 0,
    "uuid": "GPU-0",
    "pci_address": "0000:18:00.0",
    "name": "NVIDIA H100 80GB HBM3",
    "persistence_mode": True,
    "mig": {"mode": False, "pending": False, "devices": []},
    "ecc": {"current": True, "pending": True},
    "processes": [],
    "health": {"remapped_rows": None, "retired_pages_pending": None, "recovery_action": None},
}
FACTS = {
    "pci": [{"address": "0000:18:00.0", "driver": "nvidia"}],
    "other_gpus": [],
    "driver": {"running": "580.95.05", "installed": "580.95.05", "userland": "580.95.05"},
    "devices": [DEVICE],
    "nvml_count": 1,
    "fabric": {"devices": {}},
    "instances": [],
    "unavailable": {},
}


def found(**device):
    facts = copy.deepcopy(FACTS)
    facts["devices"][0].update(device)
    return gpu_findings(facts)


def rows(**changes):
    health = {
        **DEVICE["health"],
        "remapped_rows": {"correctable": 0, "uncorrectable": 2, "pending": False, "failed": False, **changes},
    }
    return {"health": health}


def test_a_healthy_gpu_has_no_finding():
    assert found() == []
    assert found(**rows()) == []


@pytest.mark.parametrize(
    ("device", "code", "severity"),
    [
        ({"persistence_mode": False}, "persistence_off", "warning"),
        ({"mig": {"mode": False, "pending": True, "devices": []}}, "mig_pending", "info"),
        ({"ecc": {"current": True, "pending": False}}, "ecc_pending", "info"),
        (rows(failed=True), "row_remap_failed", "error"),
        (rows(pending=True), "memory_repair_pending", "warning"),
        ({"health": {**DEVICE["health"], "retired_pages_pending": True}}, "memory_repair_pending", "warning"),
        ({"health": {**DEVICE["health"], "recovery_action": "drain_and_reset"}}, "recovery_due", "error"),
    ],
)
def test_the_state_of_a_device_becomes_one_finding_about_it(device, code, severity):
    (finding,) = found(**device)
    assert (finding.code, finding.severity, finding.subject) == (code, severity, "GPU 0 (0000:18:00.0)")
    assert finding.remedy


def test_what_is_unknown_is_no_finding():
    assert (
        found(persistence_mode=None, ecc={"current": None, "pending": None}, mig={"mode": None, "pending": None}) == []
    )


def test_gpus_with_one_trouble_are_named_together():
    facts = copy.deepcopy(FACTS)
    facts["devices"] = [{**copy.deepcopy(DEVICE), "index": n, "persistence_mode": n == 2} for n in range(4)]
    (finding,) = gpu_findings(facts)
    assert finding.subject == "GPU 0-1, 3"


def test_the_worst_comes_first():
    severities = [
        finding.severity
        for finding in found(persistence_mode=False, **rows(failed=True), ecc={"current": True, "pending": False})
    ]
    assert severities == ["error", "warning", "info"]


@pytest.mark.parametrize(
    ("userland", "codes"),
    [("580.95.05", []), ("580.95", []), (None, []), ("570.10.1", ["driver_library_mismatch"])],
)
def test_versions_are_compared_as_far_as_both_go(userland, codes):
    facts = copy.deepcopy(FACTS)
    facts["driver"]["userland"] = userland
    assert [finding.code for finding in gpu_findings(facts)] == codes


def test_an_installed_driver_that_is_not_loaded_is_an_error():
    facts = copy.deepcopy(FACTS)
    facts.update(devices=[], nvml_count=None)
    facts["driver"]["running"] = None
    assert [finding.code for finding in gpu_findings(facts)] == ["driver_not_loaded"]


def test_an_unhealthy_fabric_names_its_gpus():
    facts = copy.deepcopy(FACTS)
    facts["fabric"]["devices"] = {
        "0": {"state": "completed", "health": "healthy"},
        "3": {"state": "completed", "health": "unhealthy"},
    }
    (finding,) = gpu_findings(facts)
    assert (finding.code, finding.severity) == ("fabric_unhealthy", "warning")
    assert "GPU 3" in finding.text


@pytest.mark.parametrize(("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7")])
def test_numbers_are_written_as_people_do(numbers, text):
    assert ranges(numbers) == text
