"""gpu_facts' reader against the simulated NVML library, through the real bindings."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SIMULATOR = REPOSITORY / "tests/testbed/gpusim"
LIBRARY = REPOSITORY / ".build/gpusim"
GIB = 1024**3


@pytest.fixture(scope="session", autouse=True)
def library():
    subprocess.run(["make", "-s", "-C", str(SIMULATOR)], check=True, capture_output=True)


class Simulated:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(LIBRARY),
            "GPUSIM_STATE": str(folder / "var/lib/gpusim/state"),
        }

    def sim(self, *arguments: str) -> str:
        command = [sys.executable, str(SIMULATOR / "gpusim.py"), "--root", str(self.folder), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=self.environment)
        return done.stdout

    def fault(self, *arguments: str) -> None:
        self.sim("fault", "add", *arguments)

    def read(self, deadline: float = 30, stall: float = 2, *words: str) -> tuple[dict, float, list[int]]:
        root = self.folder / "var/lib/gpusim/root"
        script = Path(__file__).with_name("read_simulator.py")
        command = [sys.executable, str(script), str(root), str(deadline), str(stall), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        result = json.loads(done.stdout)
        assert result["seconds"] < deadline + 20  # a child left behind sleeps for minutes
        return result["facts"], result["seconds"], result["left"]


@pytest.fixture
def simulated(tmp_path):
    def make(profile: str) -> Simulated:
        host = Simulated(tmp_path / profile)
        host.folder.mkdir()
        host.sim("init", "--profile", profile, "--cpus", "profile")
        return host

    yield make
    shutil.rmtree(tmp_path, ignore_errors=True)


def codes(facts):
    return sorted({finding["code"] for finding in facts["findings"]})


def test_eight_h100_with_nvswitch(simulated):
    facts, _seconds, _left = simulated("h100x8").read()
    assert len(facts["devices"]) == len(facts["pci"]) == 8
    first = facts["devices"][0]
    assert first["name"] == "NVIDIA H100 80GB HBM3"
    assert first["compute_capability"] == "9.0"
    assert first["memory"]["total"] - first["memory"]["reserved"] == first["memory"]["free"]
    assert first["pci_address"] == facts["pci"][0]["address"]
    assert facts["driver"]["running"] == facts["driver"]["userland"]
    assert {link for row in facts["links"]["matrix"] for link in row} == {"X", "NV18"}
    assert {entry["state"] for entry in facts["fabric"]["devices"].values()} == {"completed"}
    assert facts["fabric"]["switches"] == 4
    assert {device["numa_node"] for device in facts["devices"]} == {0, 1}


def test_two_l40s_without_nvlink(simulated):
    facts, _seconds, _left = simulated("l40sx2").read()
    assert [device["name"] for device in facts["devices"]] == ["NVIDIA L40S"] * 2
    assert facts["devices"][0]["architecture"] == "ada"
    assert facts["links"]["matrix"][0][1] in ("PIX", "PXB", "PHB", "NODE", "SYS")
    assert facts["devices"][0]["mig"]["mode"] is None
    assert "not supported (NVML 3)" in facts["unavailable"]["devices.0.mig"]


def test_mig_devices_carry_the_name_of_their_profile(simulated):
    facts, _seconds, _left = simulated("h100x8-mig").read()
    parts = [part for device in facts["devices"] for part in device["mig"]["devices"]]
    assert parts
    assert all(part["uuid"].startswith("MIG-") and part["profile"] and part["memory"]["total"] for part in parts)
    assert len({part["uuid"] for part in parts}) == len(parts)


@pytest.mark.parametrize("profile", ["no-device", "no-driver", "amd-only", "mixed", "gb10", "t4x1", "vgpu"])
def test_every_profile_is_read_without_a_trace(simulated, profile):
    facts, _seconds, _left = simulated(profile).read()
    assert set(facts) >= {"present", "devices", "findings", "unavailable"}
    if profile == "no-driver":
        assert facts["present"]
        assert facts["devices"] == []
        assert "driver_missing" in codes(facts)
    elif profile in ("no-device", "amd-only"):
        assert not facts["present"]
    else:
        assert facts["devices"]


def test_memory_that_a_process_holds_is_seen_with_its_pid(simulated):
    host = simulated("l40sx2")
    host.sim("process", "add", "--device", "1", "--bytes", str(3 * GIB), "--pid", str(os.getpid()), "--pinned")
    facts, _seconds, _left = host.read()
    assert facts["devices"][0]["processes"] == []
    process = facts["devices"][1]["processes"][0]
    assert (process["pid"], process["used"]) == (os.getpid(), 3 * GIB)
    assert "foreign_process" in codes(facts)


@pytest.mark.parametrize("code", [1, 2, 4, 12, 15, 16, 17, 18, 27, 999])
def test_a_code_from_one_call_costs_that_field_of_that_device(simulated, code):
    host = simulated("l40sx2")
    host.fault("--call", "nvmlDeviceGetPersistenceMode", "--device", "1", "--code", str(code))
    facts, _seconds, _left = host.read()
    assert facts["devices"][0]["persistence_mode"] is not None
    assert facts["devices"][1]["persistence_mode"] is None
    path = "devices.1" if code == 15 else "devices.1.persistence_mode"
    assert facts["unavailable"][path].startswith("nvmlDeviceGetPersistenceMode on GPU 1: ")
    assert facts["devices"][1]["memory"]["total"] > 0


@pytest.mark.parametrize("code", [9, 12, 17, 18, 999])
def test_a_code_from_the_initialisation_keeps_pci_and_procfs(simulated, code):
    host = simulated("l40sx2")
    host.fault("--call", "nvmlInit", "--code", str(code))
    facts, _seconds, _left = host.read()
    assert len(facts["pci"]) == 2
    assert [device["name"] for device in facts["devices"]] == ["NVIDIA L40S"] * 2
    assert facts["devices"][0]["memory"]["total"] is None
    assert facts["unavailable"]["nvml"].endswith(f"(NVML {code})")
    assert ("driver_library_mismatch" if code == 18 else "nvml_unavailable") in codes(facts)


def test_a_delay_is_waited_for_inside_the_deadline(simulated):
    host = simulated("l40sx2")
    host.fault("--call", "nvmlDeviceGetName", "--delay-ms", "300")
    facts, seconds, _left = host.read()
    assert seconds > 0.6
    assert facts["devices"][1]["name"] == "NVIDIA L40S"


@pytest.mark.parametrize("kind", ["plain", "stubborn", "unkillable"])
def test_a_hang_in_the_initialisation_ends_at_the_deadline(simulated, kind):
    host = simulated("h100x8")
    host.fault("--call", "nvmlInit", "--hang", kind)
    try:
        facts, seconds, _left = host.read(1.5)
    finally:
        host.sim("thaw")
    assert seconds > 1.4
    assert len(facts["pci"]) == 8
    assert facts["devices"][3]["numa_node"] is not None
    assert facts["devices"][3]["memory"]["total"] is None
    assert facts["unavailable"]["nvml"].startswith("nvmlInit_v2: no answer within 1")


@pytest.mark.parametrize("kind", ["plain", "stubborn", "unkillable"])
def test_a_hang_in_a_call_costs_its_device_only(simulated, kind):
    host = simulated("l40sx2")
    host.fault("--call", "nvmlDeviceGetComputeMode", "--device", "0", "--hang", kind)
    try:
        facts, _seconds, _left = host.read(30)
    finally:
        host.sim("thaw")
    assert facts["unavailable"]["devices.0"] == "nvmlDeviceGetComputeMode on GPU 0: no answer within 2 s"
    assert facts["devices"][0]["memory"]["total"] > 0
    assert facts["devices"][1]["compute_mode"] == "default"


def test_a_child_that_ignores_the_kill_does_not_keep_the_reader(simulated):
    host = simulated("h100x8")
    host.fault("--call", "nvmlInit", "--hang")
    facts, _seconds, left = host.read(1.5, 2, "deaf")
    assert facts["unavailable"]["nvml"].startswith("nvmlInit_v2: no answer within 1")
    assert len(left) == 1
    os.kill(left[0], 0)
    os.kill(left[0], signal.SIGKILL)
    for _ in range(50):
        if not Path(f"/proc/{left[0]}").exists():
            break
        time.sleep(0.02)


def test_a_library_that_aborts_costs_its_device_only(simulated):
    host = simulated("l40sx2")
    host.fault("--call", "nvmlDeviceGetPowerUsage", "--device", "0", "--crash")
    facts, _seconds, _left = host.read()
    assert "the reading process died of signal" in facts["unavailable"]["devices.0"]
    assert facts["devices"][1]["power"]["draw_mw"] > 0


def test_a_lost_gpu_leaves_the_other_seven(simulated):
    host = simulated("h100x8")
    host.fault("--call", "*", "--device", "5", "--code", "15")
    facts, _seconds, _left = host.read()
    assert [device["memory"]["total"] is None for device in facts["devices"]] == [index == 5 for index in range(8)]
    assert facts["devices"][5]["pci_address"] == facts["pci"][5]["address"]
    assert "gpu_lost" in codes(facts)


CALLS = [
    "nvmlInit",
    "nvmlDeviceGetCount*",
    "nvmlDeviceGetHandleByIndex*",
    "nvmlDeviceGetMemoryInfo*",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetComputeRunningProcesses*",
    "nvmlDeviceGet*",
    "*",
]


def check_random(host: Simulated, seed: int) -> None:
    rng = random.Random(seed)
    host.sim("fault", "clear")
    for _ in range(rng.randrange(1, 4)):
        fault = rng.choice(
            [["--code", str(rng.choice([1, 2, 3, 4, 6, 9, 13, 15, 16, 18, 25, 999]))], ["--delay-ms", "2"], ["--crash"]]
        )
        if rng.random() < 0.1:
            fault = ["--hang"]
        where = ["--device", str(rng.randrange(2))] if rng.random() < 0.6 else []
        host.fault("--call", rng.choice(CALLS), *where, *fault)
    facts, _seconds, _left = host.read(1.5, 0.2)
    assert len(facts["pci"]) == 2, seed
    for index, device in enumerate(facts["devices"]):
        if device["memory"]["total"] is None:
            reasons = (f"devices.{index}.memory", f"devices.{index}", "devices")
            assert any(reason in facts["unavailable"] for reason in reasons), seed


@pytest.mark.parametrize("seed", range(8))
def test_in_any_state_of_the_simulator_each_missing_value_has_a_reason(simulated, seed):
    check_random(simulated("l40sx2"), seed)


@pytest.mark.long
def test_in_a_thousand_states_of_the_simulator_each_missing_value_has_a_reason(simulated):
    host = simulated("l40sx2")
    for seed in range(1_000):
        check_random(host, seed)
