from __future__ import annotations

import functools
import os
import random
import re
import time

import pytest
from fake_host import FakeHost
from fake_nvml import GIB, HANG, FakeNvml, device
from support import ScriptedRunner

from ansible_collections.gpufleet.inference.plugins.module_utils._host import gpu, nvml

# Nulls that say something by themselves and need no reason.
TELLING = {
    "staged_generation",
    "generation",
    "driver",
    "port",
    "record",
    "active_state",
    "sub_state",
    "main_pid",
    "used",
    "unit",
}


def nulls(value, path=""):
    if value is None:
        yield path
    elif isinstance(value, dict):
        for key, entry in value.items():
            if path or key != "unavailable":
                yield from nulls(entry, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from nulls(entry, f"{path}.{number}")


def unexplained(facts):
    reasons = facts["unavailable"]
    return [
        path
        for path in nulls(facts)
        if path.rsplit(".", 1)[-1] not in TELLING
        and not re.fullmatch(r"(pci|other_gpus)\.\d+\.name", path)
        and not any(path == reason or path.startswith(reason + ".") for reason in reasons)
    ]


@pytest.fixture
def host(tmp_path):
    host = FakeHost(tmp_path)
    for index in range(2):
        host.h100(f"0000:{0x18 + index:02x}:00.0").known_to_driver(f"0000:{0x18 + index:02x}:00.0", f"GPU-{index:08d}")
    return host.running().library().module("550.163.01")


def gather(host, bindings, runner=None, deadline=10, **reading):
    read = functools.partial(nvml.read, **reading)
    return gpu.gather(host.root, runner or ScriptedRunner(), bindings, deadline, read_nvml=read)


def two(faults=None, **changes):
    return FakeNvml([device(index, **changes) for index in range(2)], faults)


def test_a_healthy_host_has_three_versions_all_devices_and_no_finding(host):
    facts = gather(host, two())
    assert facts["present"]
    assert facts["driver"]["running"] == facts["driver"]["installed"] == facts["driver"]["userland"] == "550.163.01"
    assert facts["driver"]["libcuda"] == "550.163.01"
    assert facts["driver"]["flavour"] == "open"
    assert facts["cuda_driver_version"] == "12.4"
    assert [entry["name"] for entry in facts["pci"]] == ["NVIDIA H100 80GB HBM3"] * 2
    first = facts["devices"][0]
    assert (first["index"], first["uuid"], first["pci_address"]) == (0, "GPU-00000000", "0000:18:00.0")
    assert (first["numa_node"], first["cpu_affinity"]) == (0, "0-31")
    assert first["memory"]["reserved"] == GIB
    assert facts["links"]["matrix"] == [["X", "SYS"], ["SYS", "X"]]
    assert facts["findings"] == []
    assert unexplained(facts) == []


def test_processes_are_joined_with_their_unit_and_strangers_are_found(host):
    host.process(100, "VLLM::EngineCore", "0::/system.slice/vllm-a.service\n")
    host.process(200, "python3", "0::/user.slice/user-0.slice/session-1.scope\n")
    host.instance("a", "0123456789ab", {"port": 8000, "devices": ["GPU-00000000"], "arguments": ["serve", "m"]})
    runner = ScriptedRunner(
        {("systemctl", "show"): "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=99\n"}
    )
    facts = gather(host, two(processes=[(100, 60 * GIB), (200, 2 * GIB)]), runner)
    processes = facts["devices"][0]["processes"]
    assert [(entry["name"], entry["unit"]) for entry in processes] == [
        ("VLLM::EngineCor", "vllm-a.service"),
        ("python3", "session-1.scope"),
    ]
    finding = facts["findings"][0]
    assert finding["code"] == "foreign_process"
    assert "2.00 GiB: python3 (pid 200, session-1.scope)" in finding["text"]
    assert "pid 100" not in finding["text"]


def test_instances_carry_their_record_and_the_state_of_their_unit_in_one_call(host):
    host.instance("a", "0123456789ab", {"port": 8000, "devices": ["GPU-1"], "arguments": ["serve", "m"]})
    host.instance("b", "aaaaaaaaaaaa", {"port": 8001}).file("/etc/vllm/empty/notes")
    time.sleep(0.02)
    host.instance("b", "bbbbbbbbbbbb", {"port": 8002}, current=False)
    show = (
        "LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=99\n\n"
        "LoadState=loaded\nActiveState=inactive\nSubState=dead\nMainPID=0\n"
    )
    runner = ScriptedRunner({("systemctl", "show"): show})
    first, second = gather(host, two(), runner)["instances"]
    assert (first["name"], first["unit"], first["active_state"], first["main_pid"]) == (
        "a",
        "vllm-a.service",
        "active",
        99,
    )
    assert (first["generation"], first["staged_generation"], first["port"]) == ("0123456789ab", None, 8000)
    assert first["arguments"] == ["serve", "m"]
    assert (second["generation"], second["staged_generation"], second["main_pid"]) == (
        "aaaaaaaaaaaa",
        "bbbbbbbbbbbb",
        None,
    )
    assert len(runner.calls) == 1


def test_a_host_without_instances_runs_no_command(host):
    runner = ScriptedRunner()
    gather(host, two(), runner)
    assert runner.calls == []


def test_mps_daemons_are_found_by_their_environment(host):
    name = "nvidia-cuda-mps-control"
    host.process(
        300, name, "0::/system.slice/gpu-mps-0.service\n", {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps/0"}, f"{name} -f"
    )
    host.process(301, "nvidia-cuda-mps-server", "0::/system.slice/gpu-mps-0.service\n")
    assert [(entry["pid"], entry["pipe_directory"], entry["unit"]) for entry in gather(host, two())["mps"]] == [
        (300, "/run/mps/0", "gpu-mps-0.service")
    ]


def test_a_bare_host_keeps_its_pci_devices_and_says_what_is_missing(tmp_path):
    facts = gather(FakeHost(tmp_path).h100("0000:18:00.0", None), FakeNvml([], {("nvmlInit", None): 12}))
    assert facts["present"]
    assert facts["devices"] == []
    assert facts["driver"]["running"] is None
    assert "libnvidia-ml.so.1 is missing (NVML 12)" in facts["unavailable"]["nvml"]
    assert [finding["code"] for finding in facts["findings"]] == ["driver_missing"]
    assert unexplained(facts) == []


def test_a_hang_in_the_initialisation_keeps_what_pci_and_procfs_know(host):
    started = time.monotonic()
    facts = gather(host, two({("nvmlInit", None): HANG}), deadline=1)
    assert time.monotonic() - started < 20
    assert [entry["address"] for entry in facts["pci"]] == ["0000:18:00.0", "0000:19:00.0"]
    first = facts["devices"][0]
    assert (first["uuid"], first["name"], first["numa_node"]) == ("GPU-00000000", "NVIDIA H100 80GB HBM3", 0)
    assert first["memory"] == {"total": None, "reserved": None, "free": None, "used": None}
    assert facts["driver"]["running"] == "550.163.01"
    assert re.fullmatch(r"nvmlInit_v2: no answer within (0\.\d|1) s", facts["unavailable"]["nvml"])
    assert facts["unavailable"]["devices"] == facts["unavailable"]["nvml"]
    assert [finding["code"] for finding in facts["findings"]] == ["nvml_unavailable"]
    assert unexplained(facts) == []


def test_a_library_of_another_version_than_the_module_is_found(tmp_path):
    host = FakeHost(tmp_path).h100("0000:18:00.0").running("550.163.01").library("580.82.07").module("580.82.07")
    facts = gather(host, FakeNvml([], {("nvmlInit", None): 18}))
    mismatch, due = facts["findings"]
    assert mismatch["code"] == "driver_library_mismatch"
    assert "kernel runs driver 550.163.01, the user-space library is 580.82.07" in mismatch["text"]
    assert "reload" in mismatch["remedy"]
    assert due["code"] == "driver_reload_due"
    assert unexplained(facts) == []


def test_a_reload_that_would_not_help_is_not_proposed(tmp_path):
    host = FakeHost(tmp_path).h100("0000:18:00.0").running("550.163.01").library("580.82.07").module("550.163.01")
    finding = gather(host, FakeNvml([], {("nvmlInit", None): 18}))["findings"][0]
    assert "a reload would not help" in finding["remedy"]


def test_a_lost_gpu_keeps_its_address_from_the_kernel_module(host):
    facts = gather(host, two({("nvmlDeviceGetHandleByIndex", 1): nvml.GPU_LOST}))
    lost = facts["devices"][1]
    assert (lost["pci_address"], lost["uuid"]) == ("0000:19:00.0", "GPU-00000001")
    assert facts["devices"][0]["memory"]["total"] == 80 * GIB
    assert [finding["code"] for finding in facts["findings"]] == ["gpu_lost"]
    assert unexplained(facts) == []


def test_a_gpu_that_the_driver_does_not_know_is_named_by_its_address(host):
    facts = gather(host.h100("0000:2a:00.0", None), two())
    assert [(f["code"], f["subject"]) for f in facts["findings"]] == [("gpu_missing", "0000:2a:00.0")]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"persistence": 0}, "persistence_off"),
        ({"name": None}, None),
    ],
)
def test_findings_follow_the_devices_state(host, changes, code):
    codes = {finding["code"] for finding in gather(host, two(**changes))["findings"]}
    assert codes == ({code} if code else set())


def test_gpus_of_several_kinds_are_pointed_out(host):
    bindings = FakeNvml([device(0), device(1, name="NVIDIA L40S")])
    finding = gather(host, bindings)["findings"][0]
    assert (finding["code"], finding["severity"]) == ("mixed_gpus", "info")
    assert "2 kinds: NVIDIA H100 80GB HBM3, NVIDIA L40S" in finding["text"]


def test_a_fabric_that_is_not_ready_is_an_error(host):
    class Starting(FakeNvml):
        def _nvmlDeviceGetGpuFabricInfoV(self, gpu, info):
            info._obj.state = 2
            return 0

    host.pci("0000:85:00.0", "0x10de", "0x22a3", "0x068000")
    show = "LoadState=loaded\nActiveState=failed\nSubState=failed\nMainPID=0\n"
    facts = gather(host, Starting([device(0), device(1)]), ScriptedRunner({("systemctl", "show"): show}))
    assert facts["fabric"]["manager"] == "failed"
    assert facts["fabric"]["switches"] == 1
    assert facts["findings"][0]["code"] == "fabric_not_ready"


def test_a_host_of_another_vendor_is_named_and_not_asked(tmp_path):
    facts = gather(FakeHost(tmp_path).pci("0000:05:00.0", "0x1002", "0x74a1", "0x120000", "amdgpu"), None)
    assert not facts["present"]
    assert [finding["code"] for finding in facts["findings"]] == ["other_vendor"]
    assert "AMD" in facts["findings"][0]["text"]
    assert unexplained(facts) == []


def test_nouveau_on_a_gpu_is_found(tmp_path):
    facts = gather(FakeHost(tmp_path).h100("0000:18:00.0", "nouveau"), FakeNvml([], {("nvmlInit", None): 12}))
    assert "other_driver" in {finding["code"] for finding in facts["findings"]}


def check_random(seed, folder):
    rng = random.Random(seed)
    host = FakeHost(folder)
    count = rng.choice([0, 1, 2, 3])
    for index in range(count):
        host.h100(f"0000:{0x18 + index:02x}:00.0", rng.choice(["nvidia", None, "nouveau"]))
    if rng.random() < 0.7:
        host.running(rng.choice(["550.163.01", "580.82.07"]))
        for index in range(count):
            host.known_to_driver(f"0000:{0x18 + index:02x}:00.0", rng.choice([f"GPU-{index}", "GPU-????"]))
    if rng.random() < 0.7:
        host.library()
    if rng.random() < 0.6:
        host.module("550.163.01", rng.choice([None, "5.0.0"]))
    functions = [name[1:] for name in dir(FakeNvml) if name.startswith("_nvml")]
    faults = {
        (rng.choice(functions), rng.choice([None, 0, 1])): rng.choice(
            [*(code for code in nvml.CODES if code > 0), 77, "crash"]
        )
        for _ in range(rng.choice([0, 1, 2, 4]))
    }
    if rng.random() < 0.03:
        faults[(rng.choice(functions), 0)] = HANG
    bindings = rng.choice(
        [
            None,
            *[
                FakeNvml(
                    [device(n, mig=rng.choice([None, 2])) for n in range(max(0, count - rng.choice([0, 0, 1])))], faults
                )
            ]
            * 6,
        ]
    )
    started = time.monotonic()
    facts = gather(host, bindings, deadline=1.0, stall=0.2)
    assert time.monotonic() - started < 20, seed
    assert unexplained(facts) == [], seed
    assert all(finding["text"] and finding["severity"] for finding in facts["findings"]), seed


@pytest.mark.parametrize("seed", range(40))
def test_in_any_state_each_null_has_a_reason(seed, tmp_path):
    check_random(seed, tmp_path)


@pytest.mark.long
def test_in_ten_thousand_states_each_null_has_a_reason(tmp_path):
    for seed in range(10_000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check_random(seed, folder)


def test_the_helper_digest_is_that_of_the_file(host):
    import hashlib

    host.file(gpu.HELPER, b"pyz")
    assert gpu.helper_digest(host.root) == hashlib.sha256(b"pyz").hexdigest()
    assert os.path.basename(gpu.HELPER) == "gpufleet.pyz"
