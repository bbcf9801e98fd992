"""Refusals before the first change: each names what is wanted, what was found, and the next step."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.preflight import preflight
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import table
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

REQUEST: dict[str, Any] = {
    "engine_version": "0.19.1",
    "instances": [{"name": "chat", "model": "tiny", "port": 8000}],
    "models": {"tiny": {"path": "/srv/models/tiny"}},
    "paths": ["/opt/vllm"],
    "disk_needed": {"/var/lib": 100},
    "gpu": {
        "present": True,
        "pci": [{"address": "0000:18:00.0"}],
        "other_gpus": [],
        "driver": {"running": "550.90.07"},
        "devices": [{"index": 0, "uuid": "GPU-a", "compute_capability": "9.0", "processes": []}],
    },
    "host": {
        "systemd": 252,
        "python": [{"path": "/usr/bin/python3.11", "version": "3.11"}],
        "noexec_paths": [],
        "disk": {"/var/lib": 1000},
        "ports": [],
        "vllm_units": [{"unit": "vllm-chat.service", "ours": True}],
        "containers_with_gpu": [],
    },
}


SILENT = [{"index": None, "uuid": "GPU-a", "compute_capability": None, "memory": {"total": None}}]
MISMATCH = {
    "code": "driver_library_mismatch",
    "text": "The kernel runs driver 550.90.07, the user-space library is 550.127.05.",
    "remedy": "Reload the driver, or reboot.",
}


def check(**changes: Any) -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    for path, value in changes.items():
        place, _, key = path.rpartition("__")
        (request[place] if place else request)[key] = value
    return preflight(request, table(planner_data()["releases"]))


def test_a_host_that_is_fine_is_not_refused_and_has_no_findings():
    assert check() == {"findings": [], "refused": False, "skipped": False, "message": ""}


FOREIGN_PORT = {"address": "0.0.0.0", "port": 8000, "pid": 77, "process": "nginx", "unit": "nginx.service"}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"engine_version": "0.1.0"}, "unknown_engine", ["chat", "0.1.0"]),
        ({"models": {}}, "unknown_model", ["chat", "`tiny`", "vllm_models_list"]),
        ({"gpu__present": False}, "no_gpu", ["1 instance", "PCI"]),
        ({"gpu__driver": {"running": None}}, "no_driver", ["1 NVIDIA GPU", "no driver"]),
        ({"gpu__devices": [], "gpu__unavailable": {"nvml": "no answer in 20 s"}}, "no_devices", ["no answer in 20 s"]),
        (
            {"gpu__devices": SILENT, "gpu__unavailable": {"nvml": "no answer in 20 s"}},
            "nvml_unavailable",
            ["550.90.07", "none of 1 GPU(s)", "no answer in 20 s", "nvidia-smi"],
        ),
        (
            {"gpu__devices": SILENT, "gpu__findings": [MISMATCH]},
            "driver_library_mismatch",
            ["550.90.07", "550.127.05", "Reload the driver"],
        ),
        ({"host__systemd": 239}, "old_systemd", ["239", "247"]),
        ({"host__systemd": None}, "no_systemd", ["systemctl"]),
        ({"host__python": []}, "no_python", ["/usr/bin/python3", "3.9", "none"]),
        ({"host__python": [{"path": "/usr/bin/python3.6", "version": "3.6"}]}, "no_python", ["3.6"]),
        ({"host__noexec_paths": ["/opt"]}, "noexec", ["/opt/vllm", "noexec", "remount"]),
        ({"host__disk": {"/var/lib": 10}}, "disk", ["/var/lib", "needed", "free"]),
        ({"host__ports": [FOREIGN_PORT]}, "port_conflict", ["chat", "8000", "nginx", "77", "nginx.service"]),
        (
            {"host__vllm_units": [{"unit": "vllm-chat.service", "ours": False}]},
            "foreign_unit",
            ["vllm-chat.service", "did not write"],
        ),
    ],
)
def test_what_cannot_work_is_refused_with_figures_and_a_next_step(changes, code, words):
    result = check(**changes)
    assert result["refused"] is True
    assert [finding["code"] for finding in result["findings"] if finding["severity"] == "error"] == [code]
    for word in words:
        assert word in result["message"]
    assert all(finding["remedy"] for finding in result["findings"] if code not in ("old_systemd",))


def test_all_refusals_are_in_one_message():
    result = check(models={}, host__noexec_paths=["/opt/vllm"])
    assert "(1)" in result["message"]
    assert "(2)" in result["message"]


@pytest.mark.parametrize(
    ("instances", "words"),
    [
        ([{"name": "chat", "model": "tiny", "port": 8000, "prot": 1}], ["prot", "port"]),
        ([{"name": "chat", "model": "tiny", "port": 8000}] * 2, ["chat"]),
        ([{"name": name, "model": "tiny", "port": 8000} for name in "ab"], ["8000"]),
        ("chat", ["list"]),
    ],
)
def test_a_malformed_list_is_refused_before_anything_else(instances, words):
    with pytest.raises(FleetError) as caught:
        check(instances=instances)
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(("vendor", "name"), [("0x1002", "AMD"), ("0x8086", "Intel")])
def test_a_host_of_another_vendor_is_left_out_with_a_word(vendor, name):
    result = check(gpu__present=False, gpu__other_gpus=[{"vendor_id": vendor}, {"vendor_id": vendor}])
    assert (result["skipped"], result["refused"]) == (True, False)
    assert f"2 GPU(s) of {name}" in result["message"]


def test_a_host_with_both_vendors_is_served():
    assert check(gpu__other_gpus=[{"vendor_id": "0x8086"}])["skipped"] is False


@pytest.mark.parametrize(
    "port",
    [
        {"address": "127.0.0.1", "port": 8000, "pid": 9, "process": "vllm", "unit": "vllm-chat.service"},
        {"address": "127.0.0.1", "port": 8001, "pid": 9, "process": "nginx", "unit": None},
        {"address": "10.0.0.1", "port": 8000, "pid": 9, "process": "nginx", "unit": None},
    ],
)
def test_our_own_listener_another_port_and_another_address_are_no_conflict(port):
    assert check(host__ports=[port])["refused"] is False


def test_a_process_that_listens_on_both_families_is_one_conflict():
    result = check(host__ports=[FOREIGN_PORT, {**FOREIGN_PORT, "address": "::"}])
    assert len(result["findings"]) == 1


def test_what_is_not_wanted_to_run_needs_neither_port_nor_gpu():
    absent = [{"name": "chat", "model": "tiny", "port": 8000, "state": "absent"}]
    assert check(instances=absent, gpu__present=False, host__ports=[FOREIGN_PORT])["refused"] is False


def test_before_the_driver_stage_a_missing_driver_is_a_warning():
    result = check(gpu__driver={"running": None}, driver_required=False)
    assert result["refused"] is False
    assert [(finding["code"], finding["severity"]) for finding in result["findings"]] == [("no_driver", "warning")]


def test_a_silent_nvml_is_refused_before_the_driver_stage_too():
    assert check(gpu__devices=SILENT, driver_required=False)["refused"] is True


def test_foreign_processes_units_and_containers_are_listed_not_refused():
    process = {"pid": 5, "name": "python3", "used": 1 << 30, "unit": None}
    result = check(
        gpu__devices=[
            {
                "index": 0,
                "compute_capability": "9.0",
                "processes": [process, {"pid": 6, "unit": "vllm-chat.service"}],
            }
        ],
        host__vllm_units=[{"unit": "my-vllm.service", "ours": False}],
        host__containers_with_gpu=[{"id": "c0ffee", "runtime": "docker"}],
    )
    assert result["refused"] is False
    assert [finding["code"] for finding in result["findings"]] == ["foreign_unit", "gpu_container", "foreign_process"]
    assert "python3 (5)" in result["findings"][2]["text"]
    assert "(6)" not in result["findings"][2]["text"]


def test_an_open_listener_without_a_key_is_a_warning():
    instance = {"name": "chat", "model": "tiny", "port": 8000, "listen_address": "0.0.0.0"}
    assert [finding["code"] for finding in check(instances=[instance])["findings"]] == ["open_listener"]
    assert check(instances=[{**instance, "api_key_file": "/etc/keys/chat"}])["findings"] == []
