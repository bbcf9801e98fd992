"""The module gpu_state on the simulated NVML library, through the real bindings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gpufleet.inference.plugins.modules import gpu_state
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp

REPOSITORY = Path(__file__).resolve().parents[3]
SIMULATOR = REPOSITORY / "tests/testbed/gpusim"
LIBRARY = REPOSITORY / ".build/gpusim"


@pytest.fixture(scope="module", autouse=True)
def library():
    subprocess.run(["make", "-s", "-C", str(SIMULATOR)], check=True, capture_output=True)


class Simulated:
    def __init__(self, folder: Path, profile: str) -> None:
        self.folder = folder
        self.root = folder / "var/lib/gpusim/root"
        state = folder / "var/lib/gpusim/state"
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARY), "GPUSIM_STATE": str(state)}
        folder.mkdir()
        self.sim("init", "--profile", profile, "--cpus", "profile")
        self.sim("set", "system.anyone_may_set", "1")

    def sim(self, *words: str) -> str:
        command = [sys.executable, str(SIMULATOR / "gpusim.py"), "--root", str(self.folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=self.environment).stdout

    def runs(self, runs: list[dict]) -> list[dict]:
        command = [sys.executable, str(REPOSITORY / "tests/unit/host/set_simulator.py"), str(self.root)]
        done = subprocess.run(
            command, input=json.dumps(runs), capture_output=True, text=True, env=self.environment, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run(self, *devices: dict, check: bool = False, **arguments: object) -> dict:
        return self.runs([{"arguments": {"devices": list(devices), **arguments}, "check": check}])[0]

    def restore(self, pyz: Path, *words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-I", str(pyz), "restore", "--root", str(self.root), "--deadline", "20", *words]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)

    def start(self, pyz: Path, *gpus: str) -> subprocess.CompletedProcess:
        locks = self.folder / "locks"
        locks.mkdir(exist_ok=True)
        command = [sys.executable, "-I", str(pyz), "start", "--root", str(self.root), "--instance", "chat"]
        command += ["--deadline", "5", "--hold", "0", "--lock-directory", str(locks)]
        command += [word for gpu in gpus for word in ("--gpu", gpu)]
        command += ["--", "/bin/echo", "engine"]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False, timeout=30)

    def boot(self) -> None:
        self.sim("reboot")
        shutil.rmtree(self.root / "run/gpufleet")


@pytest.fixture
def simulated(tmp_path):
    return lambda profile: Simulated(tmp_path / profile, profile)


@pytest.fixture(scope="module")
def pyz(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("helper") / "gpufleet.pyz"
    path.write_bytes(_zipapp.build())
    return path


LONG = pytest.mark.long  # the same behaviour once more

# What each setting is created with, modified to and reset to; the key of the simulator and its value each time.
ON = {"persistence_mode": True}
CASES = {
    "persistence_mode": ("persistence_mode", [(True, "1"), (False, "0"), (True, "1")]),
    "compute_mode": ("compute_mode", [("exclusive_process", "3"), ("prohibited", "2"), ("default", "0")]),
    "power_limit": ("power.limit", [(66.5, "66500"), ("61", "61000"), ("default", "70000")]),
    "locked_clocks": (
        "clocks.locked_gpu",
        [
            ({"min_mhz": 800, "max_mhz": 1200}, "800,1200"),
            ({"min_mhz": 900, "max_mhz": 900}, "900,900"),
            ("reset", None),
        ],
    ),
    "ecc": ("ecc.pending", [(False, "0"), (True, "1"), (False, "0")]),
    "accounting": ("accounting_mode", [(True, "1"), (False, "0"), (True, "1")]),
}
WATTS = {"h100x8": [("300", "300000"), (450.5, "450500"), ("default", "700000")]}
WATTS["gb10"] = [("default", None)] * 3  # it has no power limit
WATTS["l40sx2"] = [("120", "120000"), (300.5, "300500"), ("default", "350000")]
UNSUPPORTED = {"gb10": {"power_limit", "ecc", "accounting"}}


@pytest.mark.parametrize("profile", ["t4x1", "gb10", *(pytest.param(p, marks=LONG) for p in ("h100x8", "l40sx2"))])
def test_each_setting_is_created_modified_and_reset_and_check_mode_says_the_same(simulated, profile):
    host = simulated(profile)
    runs, expected = [], []
    for setting, (key, steps) in CASES.items():
        for value, after in WATTS.get(profile, steps) if setting == "power_limit" else steps:
            entry = {"all": True, **({} if setting == "persistence_mode" else ON), setting: value}
            runs += [{"arguments": {"devices": [entry]}, "check": check} for check in (True, False, True, False)]
            expected += [(setting, key, after)] * 4
    host.runs([{"arguments": {"devices": [{"all": True, **ON}]}, "check": False}])
    before = None
    results = host.runs(runs)
    for number, (result, (setting, key, after)) in enumerate(zip(results, expected)):
        step, where = number % 4, (setting, number)
        assert not result.get("failed"), (where, result)
        if step == 1:
            said = results[number - 1]
            assert (result["changed"], result["changes"]) == (said["changed"], said["changes"]), where
            assert result["diff"] == said["diff"], where
        if step in (0, 2):
            assert before in (None, result["state"]), where
        if step >= 2:
            assert (result["changed"], result["changes"], result["diff"]) == (False, [], []), where
        unsupported = setting in UNSUPPORTED.get(profile, ())
        assert ("gpu_state_unsupported" in {finding["code"] for finding in result["findings"]}) == unsupported, where
        if unsupported:
            assert [change for change in result["changes"] if change["setting"] == setting] == []
        elif step in (1, 3):
            keys = [f"gpu.{index}.{key}" for index in range(count(profile))]
            assert {result["state"].get(name) for name in keys} == {after}, where
        before = result["state"]
    touched = {setting for (setting, _key, _after), result in zip(expected, results) if result["changes"]}
    assert touched == set(CASES) - UNSUPPORTED.get(profile, set())


def count(profile: str) -> int:
    return {"h100x8": 8, "l40sx2": 2}.get(profile, 1)


def test_only_gpus_that_differ_are_touched(simulated):
    host = simulated("h100x8")
    host.run({"index": 3, **ON, "power_limit": 400})
    result = host.run({"all": True, **ON, "power_limit": 400})
    assert {change["index"] for change in result["changes"]} == set(range(8)) - {3}


def test_persistence_is_switched_off_last_and_on_first(simulated):
    host = simulated("l40sx2")
    result = host.run({"index": 0, "compute_mode": "prohibited", "accounting": True, **ON})
    assert [change["setting"] for change in result["changes"]] == ["persistence_mode", "accounting", "compute_mode"]
    result = host.run({"index": 0, "compute_mode": "default", "accounting": False, "persistence_mode": False})
    assert [change["setting"] for change in result["changes"]] == ["accounting", "compute_mode", "persistence_mode"]


def test_limits_are_refused_in_figures_before_anything_is_set(simulated):
    host = simulated("l40sx2")
    fast = {"min_mhz": 300, "max_mhz": 9000}
    wanted = [{"index": 0, "compute_mode": "prohibited"}, {"index": 1, **ON, "power_limit": 900, "locked_clocks": fast}]
    result = host.run(*wanted)
    assert result["error_code"] == "gpu_state_refused"
    assert "power_limit wants 900 W, and the GPU takes 100 W to 350 W" in result["msg"]
    assert "up to 9000 MHz, and the GPU ends at 2520 MHz" in result["msg"]
    assert result["state"]["gpu.0.compute_mode"] == "0"
    assert not (host.root / "var/lib/gpufleet").exists()


def test_a_foreign_process_is_named_and_a_narrower_compute_mode_refused(simulated):
    host = simulated("l40sx2")
    host.sim("process", "add", "--device", "1", "--bytes", "1G", "--pid", str(os.getpid()), "--pinned")
    result = host.run({"all": True, "compute_mode": "exclusive_process"})
    assert result["error_code"] == "gpu_state_refused"
    assert f"(pid {os.getpid()}, " in result["msg"]
    assert result["state"]["gpu.0.compute_mode"] == result["state"]["gpu.1.compute_mode"] == "0"
    assert host.run({"all": True, "power_limit": 300})["state"]["gpu.1.power.limit"] == "300000"


def test_an_exclusive_mode_is_refused_for_instances_that_need_more_processes(simulated):
    host = simulated("l40sx2")
    uuids = [host.sim("show", f"gpu.{index}.uuid").strip().partition("=")[2] for index in (0, 1)]
    wanted = {"all": True, "compute_mode": "exclusive_process"}
    result = host.run(wanted, instances=[{"name": "wide", "devices": uuids}])
    assert "wide runs on 2 GPUs" in result["msg"]
    both = [{"name": name, "devices": uuids[:1]} for name in ("one", "two")]
    assert "2 instances share the GPU: one, two" in host.run(wanted, instances=both)["msg"]
    assert not host.run(wanted, instances=both[:1]).get("failed")


def test_ecc_is_pending_until_the_reboot_and_said_so(simulated):
    host = simulated("h100x8")
    wanted = {"index": 2, "ecc": False}
    codes = {finding["code"] for finding in host.run(wanted)["findings"]}
    assert codes == {"ecc_pending"}
    assert "ECC is on until the next reset of the GPU or reboot, off from then on" in str(host.run(wanted)["findings"])
    host.sim("reboot")
    assert host.run(wanted)["findings"] == []


SETTERS = {
    "persistence_mode": "nvmlDeviceSetPersistenceMode",
    "ecc": "nvmlDeviceSetEccMode",
    "power_limit": "nvmlDeviceSetPowerManagementLimit",
    "locked_clocks": "nvmlDeviceSetGpuLockedClocks",
    "accounting": "nvmlDeviceSetAccountingMode",
    "compute_mode": "nvmlDeviceSetComputeMode",
}
EVERYTHING = {"all": True, **ON, "ecc": False, "power_limit": 200, "locked_clocks": {"min_mhz": 300, "max_mhz": 900}}
EVERYTHING.update({"accounting": True, "compute_mode": "prohibited"})
FAULTS = [
    ("power_limit", ["--code", "999"], "NVML 999"),
    ("compute_mode", ["--silent"], "read back as"),
    ("locked_clocks", ["--late-code", "4"], "no permission (NVML 4)"),
    ("ecc", ["--crash"], "died of signal"),
    ("compute_mode", ["--hang"], "no answer within"),
]
REST = [(setting, ["--code", "999"], "NVML 999") for setting in SETTERS]
REST += [(setting, ["--silent"], "read back as") for setting in SETTERS if setting != "locked_clocks"]
REST += [("power_limit", ["--late-code", "4"], "no permission (NVML 4)")]
FAULTS += [pytest.param(*fault, marks=LONG) for fault in REST if fault not in FAULTS]


@pytest.mark.parametrize(("setting", "fault", "said"), FAULTS, ids=str)
def test_a_failure_in_any_step_leaves_the_other_gpu_done_and_a_second_run_converges(simulated, setting, fault, said):
    host = simulated("l40sx2")
    if setting == "persistence_mode":
        host.sim("set", "gpu.*.persistence_mode", "0")
    host.sim("fault", "add", "--call", SETTERS[setting], "--device", "0", *fault)
    run = {"arguments": {"devices": [EVERYTHING], "deadline": 6}, "check": False}
    broken, _clear, mended, again = host.runs([run, {"sim": ["fault", "clear"]}, run, run])
    assert broken["error_code"] == "gpu_state_failed"
    first = broken["details"]["failed"][0]
    assert (first["index"], first["setting"]) == (0, setting)
    assert said in first["error"]
    order = list(SETTERS)
    assert [entry["setting"] for entry in broken["details"]["failed"]] == order[order.index(setting) :]
    assert [entry["setting"] for entry in broken["details"]["done"] if entry["index"] == 1] == order
    assert not mended.get("failed"), mended
    assert {change["index"] for change in mended["changes"]} <= {0}
    assert mended["state"]["gpu.0.compute_mode"] == "2"
    assert mended["state"]["gpu.0.clocks.locked_gpu"] == "300,900"
    assert (again["changed"], again["changes"]) == (False, [])


def test_a_gpu_that_cannot_be_read_is_refused_not_called_unsupported(simulated):
    host = simulated("l40sx2")
    host.sim("fault", "add", "--call", "nvmlDeviceGetComputeMode", "--device", "1", "--code", "999")
    result = host.run({"all": True, "compute_mode": "prohibited"})
    assert "compute_mode cannot be read" in result["msg"]
    assert result["state"]["gpu.0.compute_mode"] == "0"


def test_a_lock_that_another_hand_lifted_is_set_again_once_the_gpu_runs_faster(simulated):
    host = simulated("l40sx2")
    lock = {"index": 0, **ON, "locked_clocks": {"min_mhz": 300, "max_mhz": 900}}
    host.run(lock)
    host.sim("set", "gpu.0.clocks.locked_gpu", "--unset")
    host.sim("set", "gpu.0.clocks.sm", "2400")
    assert [change["setting"] for change in host.run(lock)["changes"]] == ["locked_clocks"]
    assert host.run(lock)["changes"] == []


def test_the_state_is_restored_after_a_boot_without_the_controller(simulated, pyz):
    host = simulated("h100x8")
    lock = {"min_mhz": 1000, "max_mhz": 1500}
    wanted = [
        {"all": True, **ON, "power_limit": 500},
        {"index": 1, "compute_mode": "prohibited", "locked_clocks": lock},
    ]
    before = host.run(*wanted)["state"]
    host.boot()
    assert host.sim("show", "gpu.1.power.limit").strip().endswith("=700000")
    done = host.restore(pyz)
    assert done.returncode == 0, done.stderr
    result = host.run(*wanted)
    assert (result["changed"], result["changes"]) == (False, [])
    names = ("persistence_mode", "power.limit", "compute_mode", "clocks.locked_gpu")
    keys = [key for key in before if key.split(".", 2)[2] in names]
    assert keys
    assert {key: result["state"][key] for key in keys} == {key: before[key] for key in keys}


def test_an_instance_does_not_start_on_a_gpu_that_was_not_restored_and_says_why(simulated, pyz):
    host = simulated("l40sx2")
    uuids = [host.sim("show", f"gpu.{index}.uuid").strip().partition("=")[2] for index in (0, 1)]
    assert host.start(pyz, *uuids).stdout.endswith("engine\n")  # no state is recorded
    host.run({"all": True, **ON, "power_limit": 250})
    assert host.start(pyz, *uuids).stdout.endswith("engine\n")
    host.boot()
    refused = host.start(pyz, uuids[0])
    assert refused.returncode == 1
    assert "gpufleet-restore.service did not run" in refused.stderr
    host.sim("fault", "add", "--call", "nvmlDeviceSetPowerManagementLimit", "--device", "1", "--code", "4")
    failed = host.restore(pyz)
    assert failed.returncode == 1
    assert "GPU 1" in failed.stderr
    assert "no permission (NVML 4)" in failed.stderr
    refused = host.start(pyz, *uuids)
    assert refused.returncode == 1
    assert "no permission (NVML 4)" in refused.stderr
    assert host.start(pyz, uuids[0]).stdout.endswith("engine\n")
    host.sim("fault", "clear")
    assert host.restore(pyz).returncode == 0
    assert host.start(pyz, *uuids).stdout.endswith("engine\n")


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}', '{"gpus": {"GPU-1": {"power_limit": "much"}}}'])
def test_a_record_that_cannot_be_read_keeps_instances_from_starting(simulated, pyz, content):
    host = simulated("t4x1")
    record = host.root / "var/lib/gpufleet/gpu_state.json"
    record.parent.mkdir(parents=True)
    record.write_text(content)
    assert host.restore(pyz).returncode == 1
    assert host.start(pyz, "GPU-1").returncode == 1


def test_without_a_record_restoring_does_nothing(simulated, pyz):
    host = simulated("t4x1")
    done = host.restore(pyz)
    assert (done.returncode, done.stdout) == (0, "gpufleet restore: no state is recorded\n")


def test_a_gpu_that_is_gone_at_boot_keeps_only_its_own_instances_down(simulated, pyz):
    host = simulated("l40sx2")
    host.run({"all": True, **ON})
    record = host.root / "var/lib/gpufleet/gpu_state.json"
    content = json.loads(record.read_text())
    content["gpus"]["GPU-gone"] = {"persistence_mode": True}
    record.write_text(json.dumps(content))
    host.boot()
    assert "GPU-gone is not there" in host.restore(pyz).stderr
    uuid = host.sim("show", "gpu.0.uuid").strip().partition("=")[2]
    assert host.start(pyz, uuid).stdout.endswith("engine\n")
    assert "is not there" in host.start(pyz, "GPU-gone").stderr


def test_without_bindings_nothing_can_be_set_and_it_is_said(capsys):
    with patch_module_args({"devices": [], "_ansible_check_mode": True}), pytest.raises(SystemExit):
        gpu_state.main()
    assert json.loads(capsys.readouterr().out)["error_code"] == "no_bindings"
