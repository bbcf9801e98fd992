# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulator, driven by the real pynvml in processes of their own.

Functions that are given to `sim.run` or `sim.start` are sent to such a process as source text: they see pynvml as `n`
and the helpers `code`, `memory`, `gpu` and `mig` below, and nothing else of this file.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

n: Any = pytest.importorskip("pynvml")

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("GPUSIM_BUILD", HERE.parents[2] / ".build/gpusim"))
PYNVML = Path(n.__file__)


# ---- what the processes under test see --------------------------------------------------------


def code(function, *arguments):
    """NVML code of a call, 0 for success."""
    try:
        function(*arguments)
    except n.NVMLError as error:
        return error.value
    return 0


def memory(handle):
    return n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)


def gpu(index=0):
    return n.nvmlDeviceGetHandleByIndex(index)


def mig(index, slice_index):
    return n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), slice_index)


PRELUDE = "\n".join(
    [
        "import sys",
        f"sys.path.append({str(PYNVML.parent)!r})",
        "import ctypes, json, os, time",
        "import pynvml as n",
        *(inspect.getsource(helper) for helper in (code, memory, gpu, mig)),
    ]
)


class Sim:
    """One simulated host in a folder, without a root file system around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.env = {**os.environ, "GPUSIM_STATE": str(self.state), "LD_LIBRARY_PATH": str(BUILD)}

    def tool(self, *words: str, ok: bool = True) -> str:
        command = [sys.executable, "-S", str(HERE / "gpusim.py"), *words]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=20, check=False)
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout if ok else done.stderr

    def init(self, profile: str, *words: str) -> Sim:
        self.tool("init", "--profile", profile, "--seed", "test", "--state-only", *words)
        return self

    def start(self, function: Callable[..., Any], *arguments: Any, init: bool = True) -> subprocess.Popen[str]:
        lines = [
            PRELUDE,
            textwrap.dedent(inspect.getsource(function)),
            "n.nvmlInit()" if init else "",
            f"result = {function.__name__}(*json.loads({json.dumps(arguments)!r}))",
            "print(json.dumps(result))",
        ]
        return subprocess.Popen(
            [sys.executable, "-S", "-c", "\n".join(lines)],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, function: Callable[..., Any], *arguments: Any, init: bool = True) -> Any:
        """What the function returns in a process that has called nvmlInit."""
        child = self.start(function, *arguments, init=init)
        try:
            stdout, stderr = child.communicate(timeout=20)
        finally:
            child.kill()
        assert child.returncode == 0, stderr
        return json.loads(stdout)

    def keys(self, pattern: str) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.tool("show", pattern).splitlines())

    def fault(self, *words: str) -> None:
        self.tool("fault", "add", *words)


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    if "GPUSIM_BUILD" not in os.environ:
        subprocess.run(["make", "--silent", "-C", str(HERE)], check=True)


@pytest.fixture
def sim() -> Iterator[Sim]:
    folder = Path(tempfile.mkdtemp(prefix="gpusim-test-"))
    folder.chmod(0o755)  # other users read it, as in a host
    yield Sim(folder)
    shutil.rmtree(folder)


def wait_ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None and child.stdout.readline() == "ready\n"


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "waited 10 s"
        time.sleep(0.02)


def status_of(child: subprocess.Popen[str], field: str) -> str:
    lines = Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8").splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{field}:"))


def still_runs(child: subprocess.Popen[str], seconds: float) -> bool:
    try:
        child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


# ---- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "last", "expected"),
    [
        ("h100x8", 7, ["NVIDIA H100 80GB HBM3", [9, 0], 79.19]),
        ("l40sx2", 1, ["NVIDIA L40S", [8, 9], 44.39]),
        ("a100x4-40gb", 3, ["NVIDIA A100-SXM4-40GB", [8, 0], 39.39]),
        ("t4x1", 0, ["Tesla T4", [7, 5], 14.56]),
        ("b200x8", 7, ["NVIDIA B200", [10, 0], 178.35]),
        ("a100x16-40gb", 15, ["NVIDIA A100-SXM4-40GB", [8, 0], 39.39]),
    ],
)
def test_a_profile_has_its_devices_with_the_memory_that_torch_sees(sim, profile, last, expected):
    def look(index):
        handle = gpu(index)
        new, old = memory(handle), n.nvmlDeviceGetMemoryInfo(handle)
        assert new.free + new.used + new.reserved == new.total
        assert [old.total, old.free, old.used] == [new.total, new.free, new.used + new.reserved]
        torch_gib = round((new.total - new.reserved) / 2**30, 2)
        what = [n.nvmlDeviceGetName(handle), n.nvmlDeviceGetCudaComputeCapability(handle), torch_gib]
        return [n.nvmlDeviceGetCount(), n.nvmlDeviceGetIndex(handle), what]

    assert sim.init(profile).run(look, last) == [last + 1, last, expected]


def test_devices_are_found_by_uuid_serial_and_address_and_refused_when_unknown(sim):
    def look():
        handle, index = gpu(5), n.nvmlDeviceGetIndex
        bus = n.nvmlDeviceGetPciInfo(handle).busId
        stray = ctypes.cast(ctypes.create_string_buffer(64), n.c_nvmlDevice_t)
        found = [
            index(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(handle).encode())),
            index(n.nvmlDeviceGetHandleBySerial(n.nvmlDeviceGetSerial(handle).encode())),
            index(n.nvmlDeviceGetHandleByPciBusId(bus.encode())),
            index(n.nvmlDeviceGetHandleByPciBusId(b"0000:c3:00.0")),
        ]
        unknown = [
            code(gpu, 8),
            code(n.nvmlDeviceGetHandleByUUID, b"GPU-none"),
            code(n.nvmlDeviceGetHandleByPciBusId, b"0000:ff:00.0"),
            code(n.nvmlDeviceGetName, stray),
            code(n.nvmlDeviceGetName, None),
        ]
        return [bus, found, unknown]

    assert sim.init("h100x8").run(look) == ["00000000:C3:00.0", [5, 5, 5, 5], [2, 6, 6, 2, 2]]


def test_links_fabric_and_topology_of_an_nvswitch_host(sim):
    def look():
        one, near, far = gpu(0), gpu(1), gpu(4)
        fabric = n.c_nvmlGpuFabricInfo_v3_t()
        n.nvmlDeviceGetGpuFabricInfoV(one, ctypes.byref(fabric))
        fields = [n.NVML_FI_DEV_NVLINK_LINK_COUNT, n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 999]
        return {
            "states": [n.nvmlDeviceGetNvLinkState(one, link) for link in range(18)],
            "beyond": code(n.nvmlDeviceGetNvLinkState, one, 18),
            "version": n.nvmlDeviceGetNvLinkVersion(one, 0),
            "remote": [n.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId[9:] for link in (0, 3, 4)],
            "fabric": [fabric.state, fabric.healthSummary],
            "ancestors": [n.nvmlDeviceGetTopologyCommonAncestor(one, other) for other in (near, far)],
            "p2p": n.nvmlDeviceGetP2PStatus(one, far, n.NVML_P2P_CAPS_INDEX_NVLINK),
            "node mask": list(n.nvmlDeviceGetMemoryAffinity(far, 1, 0)),
            "fields": [[v.nvmlReturn, v.value.uiVal] for v in n.nvmlDeviceGetFieldValues(one, fields)],
        }

    assert sim.init("h100x8").run(look) == {
        "states": [1] * 18,
        "beyond": 2,
        "version": n.NVML_NVLINK_VERSION_4_0,
        "remote": ["07:00.0", "0A:00.0", "07:00.0"],
        "fabric": [n.NVML_GPU_FABRIC_STATE_COMPLETED, n.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY],
        "ancestors": [n.NVML_TOPOLOGY_NODE, n.NVML_TOPOLOGY_SYSTEM],
        "p2p": n.NVML_P2P_STATUS_OK,
        "node mask": [2],
        "fields": [[0, 18], [0, 0], [3, 0]],
    }


def test_what_a_device_cannot_do_is_not_supported(sim):
    def unified():
        calls = (n.nvmlDeviceGetMemoryInfo, memory, n.nvmlDeviceGetPowerManagementLimit)
        return [code(call, gpu()) for call in calls]

    def turing():
        calls = (n.nvmlDeviceGetRemappedRows, n.nvmlDeviceGetMigMode, n.nvmlDeviceGetRetiredPagesPendingStatus)
        return [*(code(call, gpu()) for call in calls), code(n.nvmlDeviceGetNvLinkState, gpu(), 0)]

    def absent():
        return code(n.nvmlDeviceGetFanSpeedRPM, gpu())

    assert sim.init("gb10").run(unified) == [3, 3, 3]
    assert sim.init("t4x1").run(turing) == [3, 3, 0, 3]
    assert sim.run(absent) == 13  # a function that the library does not have


def test_a_host_without_gpus_starts_and_one_without_driver_does_not(sim):
    def count():
        return n.nvmlDeviceGetCount()

    def start():
        return code(n.nvmlInit)

    assert sim.init("no-device").run(count) == 0
    assert sim.init("no-driver").run(start, init=False) == 9
    sim.init("l40sx2").tool("set", "system.kernel_driver_version", "580.82.07")
    assert sim.run(start, init=False) == 18  # library and kernel module of different versions


def test_an_update_shows_three_versions_until_the_reboot(sim):
    def versions():
        return [
            n.nvmlSystemGetDriverVersion(),
            n.nvmlSystemGetNVMLVersion(),
            n.nvmlDeviceGetGspFirmwareVersion(gpu()).decode(),
        ]

    sim.init("l40sx2").tool("set", "system.kernel_driver_version", "580.95.05")
    assert sim.run(versions) == ["580.95.05", "13.580.95.05", "580.95.05"]
    sim.tool("set", "system.driver_version", "580.105.08")  # a package was updated under the running module
    assert sim.keys("gpu.0.gsp.version") == {"gpu.0.gsp.version": "580.95.05"}
    with pytest.raises(AssertionError, match="version mismatch"):
        sim.run(versions)
    sim.tool("reboot")
    assert sim.run(versions) == ["580.105.08", "13.580.105.08", "580.105.08"]


def test_any_value_can_stand_for_an_error_code(sim):
    def draw():
        return [code(n.nvmlDeviceGetPowerUsage, gpu(index)) for index in (0, 1)]

    sim.init("l40sx2").tool("set", "gpu.1.power.draw", "!17")
    assert sim.run(draw) == [0, 17]


# ---- settings ---------------------------------------------------------------------------------


def test_settings_outlive_the_process_and_a_reboot_loses_what_a_real_one_loses(sim):
    def change():
        handle = gpu()
        n.nvmlDeviceSetPersistenceMode(handle, 1)
        n.nvmlDeviceSetComputeMode(handle, 3)
        n.nvmlDeviceSetPowerManagementLimit(handle, 250000)
        n.nvmlDeviceSetEccMode(handle, 0)
        n.nvmlDeviceSetGpuLockedClocks(handle, 900, 900)
        return n.nvmlDeviceSetMigMode(handle, 1)

    def read():
        handle = gpu()
        return {
            "persistence": [n.nvmlDeviceGetPersistenceMode(gpu(index)) for index in (0, 1)],
            "compute": n.nvmlDeviceGetComputeMode(handle),
            "power": [n.nvmlDeviceGetPowerManagementLimit(handle), n.nvmlDeviceGetEnforcedPowerLimit(handle)],
            "ecc": n.nvmlDeviceGetEccMode(handle),
            "clock": n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
            "mig": n.nvmlDeviceGetMigMode(handle),
        }

    assert sim.init("a100x4-40gb").run(change) == 0
    set_now = {"compute": 3, "power": [250000, 250000], "ecc": [1, 0], "clock": 900, "mig": [1, 1]}
    assert sim.run(read) == {"persistence": [1, 0], **set_now}
    sim.tool("reboot")
    after = {"compute": 0, "power": [400000, 400000], "ecc": [0, 0], "clock": 210, "mig": [1, 1]}
    assert sim.run(read) == {"persistence": [0, 0], **after}  # Ampere keeps MIG mode, pending ECC has come


def test_hopper_loses_its_mig_mode_at_a_reboot_and_any_gpu_its_instances(sim):
    def modes():
        return n.nvmlDeviceGetMigMode(gpu())

    assert sim.init("h100x8-mig").run(modes) == [1, 1]
    assert sim.keys("gpu.*.gi.*")
    sim.tool("reboot")
    assert sim.run(modes) == [0, 0]
    assert not sim.keys("gpu.*.gi.*")


def test_values_out_of_range_are_refused_and_change_nothing(sim):
    def change():
        handle = gpu()
        return [
            code(n.nvmlDeviceSetPowerManagementLimit, handle, 99),
            code(n.nvmlDeviceSetPowerManagementLimit, handle, 10**6),
            n.nvmlDeviceGetPowerManagementLimit(handle),
            code(n.nvmlDeviceSetComputeMode, handle, n.NVML_COMPUTEMODE_EXCLUSIVE_THREAD),
            code(n.nvmlDeviceSetPersistenceMode, handle, 2),
            code(n.nvmlDeviceSetGpuLockedClocks, handle, 2000, 1000),
            code(n.nvmlDeviceSetMigMode, handle, 1),
        ]

    assert sim.init("l40sx2").run(change) == [2, 2, 350000, 2, 2, 2, 3]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_ordinary_users_read_but_do_not_set(sim):
    def act():
        os.setuid(65534)
        whole, parent = gpu(7), gpu(0)
        return [
            code(n.nvmlDeviceSetPersistenceMode, whole, 1),
            n.nvmlDeviceGetPersistenceMode(whole),
            code(memory, whole),
            code(memory, parent),
            code(n.nvmlDeviceGetComputeRunningProcesses, parent),
            n.nvmlDeviceGetUUID(mig(0, 0))[:4],
        ]

    assert sim.init("h100x8-mig").run(act) == [4, 0, 0, 4, 4, "MIG-"]


def test_setters_of_many_processes_do_not_lose_each_other(sim):
    def change(index):
        return n.nvmlDeviceSetPersistenceMode(gpu(index), 1)

    sim.init("h100x8")
    children = [sim.start(change, index) for index in range(8)]
    for child in children:
        child.communicate(timeout=20)
    assert [child.returncode for child in children] == [0] * 8
    assert set(sim.keys("gpu.*.persistence_mode").values()) == {"1"}


# ---- processes --------------------------------------------------------------------------------


def test_memory_is_held_until_the_process_ends_even_when_nobody_waits_for_it(sim):
    def look():
        found = n.nvmlDeviceGetComputeRunningProcesses(gpu(1))
        names = [n.nvmlSystemGetProcessName(p.pid) for p in found]
        return [[[p.pid, p.usedGpuMemory] for p in found], names, memory(gpu(1)).used, memory(gpu(0)).used]

    sim.init("l40sx2")
    holder = subprocess.Popen(["sleep", "60"])
    add = ("process", "add", "--device", "1", "--bytes", "20G", "--pid", str(holder.pid))
    sim.tool(*add, "--name", "VLLM::EngineCore x")
    assert sim.run(look) == [[[holder.pid, 20 << 30]], ["VLLM::EngineCore x"], 20 << 30, 0]
    holder.kill()  # and is not waited for: a zombie
    wait_until(lambda: status_of(holder, "State") == "Z")
    assert sim.run(look) == [[], [], 0, 0]
    holder.wait()


def test_an_engine_registers_itself_by_dropping_a_file(sim):
    def uuids():
        return n.nvmlDeviceGetUUID(mig(0, 2)), n.nvmlDeviceGetUUID(gpu(6))

    def look():
        def held(call, handle):
            return [p.usedGpuMemory >> 30 for p in call(handle)]

        plain, mps = n.nvmlDeviceGetComputeRunningProcesses, n.nvmlDeviceGetMPSComputeRunningProcesses
        return {
            "7": held(plain, gpu(7)),
            "6": held(plain, gpu(6)),
            "6 mps": held(mps, gpu(6)),
            "slice": [held(plain, mig(0, 2)), n.nvmlDeviceGetMemoryInfo(mig(0, 2)).used >> 30],
            "parent": [[p.gpuInstanceId, p.computeInstanceId] for p in plain(gpu(0))],
        }

    slice_uuid, whole_uuid = sim.init("h100x8-mig").run(uuids)
    folder = sim.folder / "processes"
    lines = ["name=vllm serve", "device=7", "bytes=1073741824", f"device={whole_uuid}", "bytes=2G", "kind=mps"]
    (folder / str(os.getpid())).write_text("\n".join([*lines, f"device={slice_uuid}", "bytes=3G"]), encoding="utf-8")
    (folder / "4194300").write_text("device=7\nbytes=5G\n", encoding="utf-8")  # no such process
    (folder / "note.txt").write_text("device=7\nbytes=5G\n", encoding="utf-8")
    (folder / str(os.getppid())).write_bytes(b"\xff\x00device\n=\nbytes=\nname\ndevice=99\n")
    assert sim.run(look) == {"7": [1], "6": [], "6 mps": [2], "slice": [[3], 3], "parent": [[3, 0]]}


def test_a_pinned_process_needs_no_real_one_and_a_made_up_pid_is_refused(sim):
    def pids():
        return [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(gpu())]

    sim.init("l40sx2").tool("process", "add", "--bytes", "100MiB", "--pid", "77777", "--pinned")
    assert sim.run(pids) == [77777]
    assert "no process 4194300" in sim.tool("process", "add", "--bytes", "1G", "--pid", "4194300", ok=False)
    sim.tool("process", "remove", "1")
    assert sim.run(pids) == []


# ---- faults -----------------------------------------------------------------------------------


def test_a_fault_hits_its_call_on_its_device_only(sim):
    def look():
        other = [code(memory, gpu(0)), code(n.nvmlDeviceGetName, gpu(1))]
        return [other, [code(memory, gpu(1)), code(n.nvmlDeviceGetMemoryInfo, gpu(1))]]

    sim.init("l40sx2").fault("--call", "nvmlDeviceGetMemoryInfo", "--device", "1", "--code", "999")
    assert sim.run(look) == [[0, 0], [999, 999]]  # both versions of the call
    sim.tool("fault", "clear")
    assert sim.run(look) == [[0, 0], [0, 0]]


def test_a_lost_gpu_fails_in_every_call_and_leaves_the_others_alone(sim):
    def find():
        return [n.nvmlDeviceGetCount(), code(gpu, 0), code(gpu, 1)]

    def lose():
        handle = gpu(1)
        with open(os.environ["GPUSIM_STATE"], "a") as state:
            state.write("gpu.1.lost=15\n")
        return [code(n.nvmlDeviceGetName, handle), code(memory, handle), code(n.nvmlDeviceGetName, gpu(0))]

    sim.init("l40sx2").tool("set", "gpu.1.lost", "15")
    assert sim.run(find) == [2, 0, 15]
    sim.tool("set", "gpu.1.lost", "--unset")
    assert sim.run(lose) == [15, 15, 0]  # with a handle from before


def test_faults_by_count(sim):
    def three():
        handle = gpu()
        return [code(n.nvmlDeviceGetName, handle) for _ in range(3)]

    def one():
        return code(n.nvmlDeviceGetName, gpu())

    name = ("--call", "nvmlDeviceGetName", "--code", "10")
    sim.init("l40sx2").fault(*name, "--nth", "2")
    assert sim.run(three) == sim.run(three) == [0, 10, 0]  # counted in each process
    sim.tool("fault", "clear")
    sim.fault(*name, "--times", "2")
    assert sim.run(one) == 10
    assert sim.run(three) == [10, 0, 0]  # counted on the host


def test_setters_can_lie_and_can_do_their_work_and_still_fail(sim):
    def change():
        set_mode, get_mode = n.nvmlDeviceSetPersistenceMode, n.nvmlDeviceGetPersistenceMode
        return [[code(set_mode, gpu(index), 1), get_mode(gpu(index))] for index in (0, 1)]

    sim.init("l40sx2")
    sim.fault("--call", "nvmlDeviceSetPersistenceMode", "--device", "0", "--silent")
    sim.fault("--call", "nvmlDeviceSetPersistenceMode", "--device", "1", "--late-code", "999")
    assert sim.run(change) == [[0, 0], [999, 1]]


def test_a_delay_holds_the_call_up(sim):
    def measure():
        handle, began = gpu(), time.monotonic()
        n.nvmlDeviceGetName(handle)
        return time.monotonic() - began

    sim.init("l40sx2").fault("--call", "nvmlDeviceGetName", "--delay-ms", "300")
    assert 0.3 <= sim.run(measure) < 3


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetTemperatureV"])
def test_a_hang_holds_the_global_lock_for_ever(sim, call):
    def hang(name):
        import threading

        n.nvmlInitWithFlags(0) if name != "nvmlInit" else n._LoadNvmlLibrary()
        action = n.nvmlInit if name == "nvmlInit" else lambda: n.nvmlDeviceGetTemperatureV(gpu(), 0)
        threading.Thread(target=action, daemon=True).start()
        time.sleep(0.5)
        print("ready", flush=True)
        n.nvmlShutdown()  # of this thread: never comes back
        print("came back", flush=True)

    sim.init("l40sx2").fault("--call", call, "--hang")
    child = sim.start(hang, call, init=False)
    wait_ready(child)
    assert still_runs(child, 0.5)
    child.terminate()
    assert child.communicate(timeout=5)[0] == ""
    assert child.returncode == -signal.SIGTERM


def start_nvml():
    n.nvmlInit()


def test_a_stubborn_hang_ends_by_sigkill_only(sim):
    sim.init("l40sx2").fault("--call", "nvmlInit", "--hang", "stubborn")
    child = sim.start(start_nvml, init=False)
    wait_until(lambda: int(status_of(child, "SigBlk"), 16) != 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        child.send_signal(number)
    assert still_runs(child, 0.3)
    child.kill()
    child.communicate(timeout=5)
    assert child.returncode == -signal.SIGKILL


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/freezer/cgroup.procs", os.W_OK), reason="needs root and a cgroup v1 freezer"
)
def test_an_unkillable_hang_outlives_sigkill_until_it_is_thawed(sim):
    sim.init("l40sx2").fault("--call", "nvmlInit", "--hang", "unkillable")
    child = sim.start(start_nvml, init=False)
    groups = Path("/sys/fs/cgroup/freezer")
    states = f"gpusim-{child.pid}-*/freezer.state"
    wait_until(lambda: [path.read_text() for path in groups.glob(states)] == ["FROZEN\n"])
    child.kill()
    assert still_runs(child, 0.5)
    assert f"gpusim-{child.pid}" in sim.tool("thaw")
    child.communicate(timeout=5)
    assert child.returncode == -signal.SIGKILL


def test_a_crash_aborts_the_calling_process(sim):
    def crash():
        return n.nvmlDeviceGetUUID(gpu())

    sim.init("l40sx2").fault("--call", "nvmlDeviceGetUUID", "--crash")
    child = sim.start(crash)
    child.communicate(timeout=20)
    assert child.returncode == -signal.SIGABRT


# ---- MIG --------------------------------------------------------------------------------------


def test_mig_instances_from_mode_to_slice_and_back(sim):
    def act():
        handle, steps = gpu(), {}

        def room(profile_id):
            return n.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile_id)

        steps["off"] = code(room, 9)
        steps["on"] = [n.nvmlDeviceSetMigMode(handle, 1), n.nvmlDeviceGetMigMode(handle)]
        info = n.nvmlDeviceGetGpuInstanceProfileInfo(handle, n.NVML_GPU_INSTANCE_PROFILE_3_SLICE)
        steps["profile"] = [info.id, info.name, info.memorySizeMB, info.instanceCount, info.sliceCount]
        count = ctypes.c_uint(0)
        n.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, None, ctypes.byref(count))
        places = (n.c_nvmlGpuInstancePlacement_t * count.value)()
        n.nvmlDeviceGetGpuInstancePossiblePlacements(handle, info.id, places, ctypes.byref(count))
        steps["placements"] = [[place.start, place.size] for place in places]

        first = n.c_nvmlGpuInstancePlacement_t(0, 4)
        big = n.nvmlDeviceCreateGpuInstanceWithPlacement(handle, info.id, ctypes.byref(first))
        small = n.nvmlDeviceCreateGpuInstance(handle, 19)
        steps["room left"] = [room(9), room(19), n.nvmlGpuInstanceGetInfo(small).placement.start]
        create = n.nvmlDeviceCreateGpuInstance
        steps["refused"] = [code(create, handle, 0), code(create, handle, 77)]

        compute = n.nvmlGpuInstanceCreateComputeInstance(big, n.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE)
        device = mig(0, 0)
        attributes = n.nvmlDeviceGetAttributes(device)
        parent = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
        steps["slice"] = [
            n.nvmlDeviceGetName(device),
            n.nvmlDeviceIsMigDeviceHandle(device).value,
            n.nvmlDeviceGetMemoryInfo(device).total >> 20,
            [attributes.gpuInstanceSliceCount, attributes.multiprocessorCount],
            n.nvmlDeviceGetIndex(parent),
        ]
        same = n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(device).encode())
        steps["by uuid"] = n.nvmlDeviceGetGpuInstanceId(same) == n.nvmlGpuInstanceGetInfo(big).id
        steps["not there"] = [code(n.nvmlDeviceGetPowerUsage, device), code(mig, 0, 1)]

        steps["in use"] = [code(n.nvmlGpuInstanceDestroy, big), code(n.nvmlDeviceSetMigMode, handle, 0)]
        n.nvmlComputeInstanceDestroy(compute)
        steps["gone"] = code(n.nvmlDeviceGetName, device)
        n.nvmlGpuInstanceDestroy(big)
        n.nvmlGpuInstanceDestroy(small)
        steps["off again"] = [n.nvmlDeviceSetMigMode(handle, 0), n.nvmlDeviceGetMigMode(handle)]
        return steps

    assert sim.init("h100x8").run(act) == {
        "off": 3,
        "on": [0, [1, 1]],
        "profile": [9, "MIG 3g.40gb", 40448, 2, 3],
        "placements": [[0, 4], [4, 4]],
        "room left": [0, 2, 6],
        "refused": [23, 2],
        "slice": ["NVIDIA H100 80GB HBM3 MIG 3g.40gb", 1, 40448, [3, 60], 0],
        "by uuid": True,
        "not there": [2, 6],
        "in use": [19, 19],
        "gone": 2,
        "off again": [0, [0, 0]],
    }
    assert not sim.keys("gpu.*.gi.*")


def test_a_partitioned_profile_has_the_uuids_that_creating_the_same_slices_gives(sim):
    def uuids():
        return [n.nvmlDeviceGetUUID(mig(2, index)) for index in range(2)]

    def recreate():
        handle = gpu(2)
        for number in (2, 1):
            instance = n.nvmlDeviceGetGpuInstanceById(handle, number)
            n.nvmlComputeInstanceDestroy(n.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
            n.nvmlGpuInstanceDestroy(instance)
        for start in (0, 4):
            place = n.c_nvmlGpuInstancePlacement_t(start, 4)
            instance = n.nvmlDeviceCreateGpuInstanceWithPlacement(handle, 9, ctypes.byref(place))
            n.nvmlGpuInstanceCreateComputeInstance(instance, n.NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE)

    before = sim.init("h100x8-mig").run(uuids)
    sim.run(recreate)
    assert len(set(before)) == 2
    assert sim.run(uuids) == before


def test_mig_mode_waits_for_the_clients_of_the_gpu(sim):
    def switch(index):
        return [n.nvmlDeviceSetMigMode(gpu(index), 1), n.nvmlDeviceGetMigMode(gpu(index))]

    sim.init("a100x4-40gb").tool("process", "add", "--bytes", "1G", "--pinned")
    assert sim.run(switch, 0) == [19, [0, 1]]  # in use: pending only
    sim.tool("set", "gpu.1.mig.activation", "16")  # a virtual machine: reset required
    assert sim.run(switch, 1) == [16, [0, 1]]


# ---- the interface itself ---------------------------------------------------------------------


def test_every_exported_function_is_one_that_pynvml_calls_or_an_older_version_of_it():
    command = ["nm", "-D", "--defined-only", str(BUILD / "libnvidia-ml.so.1")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in listed.splitlines() if "asan" not in line}
    source = PYNVML.read_text(encoding="utf-8")
    by_index = {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByPciBusId"}
    assert {name for name in symbols if f'"{name}"' not in source} == {"nvmlInit", "nvmlInit_v2", *by_index}
    assert len(symbols) > 140


def test_wrong_struct_versions_and_short_buffers_are_refused(sim):
    def call():
        handle, library, ref = gpu(), ctypes.CDLL("libnvidia-ml.so.1"), ctypes.byref
        short, clock, count = ctypes.create_string_buffer(4), ctypes.c_uint(), ctypes.c_uint(1)
        info = n.c_nvmlMemory_v2_t()
        info.version = n.nvmlMemory_v2 + 1
        return [
            library.nvmlDeviceGetMemoryInfo_v2(handle, ref(info)),
            library.nvmlDeviceGetMemoryInfo(handle, None),
            [library.nvmlDeviceGetName(handle, short, 4), short.raw == bytes(4)],
            [library.nvmlDeviceGetSupportedMemoryClocks(handle, ref(count), ref(clock)), count.value],
        ]

    assert sim.init("l40sx2").run(call) == [25, 2, [7, True], [7, 2]]


def test_calls_before_init_and_after_shutdown_are_refused(sim):
    def call():
        n._LoadNvmlLibrary()
        before = code(n.nvmlDeviceGetCount)
        n.nvmlInit()
        handle = gpu()
        n.nvmlShutdown()
        return [before, code(n.nvmlDeviceGetName, handle), code(n.nvmlShutdown)]

    assert sim.init("l40sx2").run(call, init=False) == [1, 1, 1]


@pytest.mark.parametrize(
    ("content", "expected"), [(None, 9), (b"profile\n", 999), (b"a=b\n=c\n", 999), (b"a=\x00b\n", 999)]
)
def test_a_bad_state_file_is_an_nvml_error_that_names_the_line(sim, content, expected):
    def call():
        return code(n.nvmlInit)

    if content is not None:
        sim.state.write_bytes(content)
    child = sim.start(call, init=False)
    stdout, stderr = child.communicate(timeout=20)
    assert (child.returncode, stdout.strip()) == (0, str(expected))
    assert content is None or "not a key=value line" in stderr


def test_no_content_of_the_state_crashes_a_reader(sim):
    def read_junk(rounds):
        import inspect
        import random

        path = os.environ["GPUSIM_STATE"]
        with open(path) as file:
            good = file.read().splitlines()
        junk = [
            "",
            "!",
            "!3",
            "-1",
            "x" * 300,
            "9" * 20,
            "0,0",
            ",,,,",
            "1;2;;",
            "0-99999",
            "!999",
            "1,1,MIG-",
            str(2**32 - 1),
        ]
        getters = []
        for name, function in sorted(vars(n).items()):
            # that one makes pynvml ask for a list of as many pids as the (junk) buffer size says
            if name.startswith("nvmlDeviceGet") and "HandleBy" not in name and name != "nvmlDeviceGetAccountingPids":
                needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
                getters += [function] if len(needed) == 1 else []
        calls = 0
        for seed in range(rounds):
            random.seed(seed)
            lines = []
            for line in good:
                spoil = random.random() < 0.3 and not line.startswith("system.gpus")
                if random.random() > 0.05:
                    lines.append(line.split("=")[0] + "=" + random.choice(junk) if spoil else line)
            with open(path + ".new", "w") as file:
                file.write("\n".join(lines) + "\n")
            os.replace(path + ".new", path)
            for index in range(4):
                handles = []
                for find in [lambda i=index: gpu(i), *(lambda i=index, k=k: mig(i, k) for k in range(7))]:
                    if code(find) == 0:
                        handles.append(find())
                for handle in handles:
                    for getter in getters:
                        code(getter, handle)
                        calls += 1
                    for link in range(20):
                        code(n.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
                    for profile in range(18):
                        code(n.nvmlDeviceGetGpuInstanceProfileInfo, handle, profile)
                    code(memory, handle)
                    code(n.nvmlDeviceGetCpuAffinity, handle, 2)
                    code(n.nvmlDeviceGetFieldValues, handle, list(range(1, 240)))
                    code(n.nvmlDeviceCreateGpuInstance, handle, 19)
        return calls

    sim.init("h100x8-mig")
    (sim.folder / "processes" / str(os.getpid())).write_text("device=0\nbytes=1G\n", encoding="utf-8")
    assert sim.run(read_junk, 15) > 5000


# ---- the tool ---------------------------------------------------------------------------------


def test_a_host_gets_library_stand_ins_and_unit_and_loses_them_again(tmp_path):
    def tool(*words: str) -> None:
        subprocess.run([sys.executable, "-S", str(HERE / "gpusim.py"), "--root", str(tmp_path), *words], check=True)

    tool("init", "--profile", "h100x8-mig")
    tree = tmp_path / "var/lib/gpusim/root"
    device = tree / "sys/bus/pci/devices/0000:9d:00.0"
    names = ("vendor", "device", "class", "numa_node")
    assert [(device / name).read_text() for name in names] == ["0x10de\n", "0x2330\n", "0x030200\n", "1\n"]
    assert (device / "driver").resolve().name == "nvidia"
    assert "Open Kernel Module for" in (tree / "proc/driver/nvidia/version").read_text()
    assert "H100" in (tree / "proc/driver/nvidia/gpus/0000:1b:00.0/information").read_text()
    assert (tree / "sys/module/nvidia/version").read_text() == "580.95.05\n"
    library = next(tmp_path.glob("usr/lib/*/libnvidia-ml.so.1"))
    assert library.resolve().name == "libnvidia-ml.so.580.95.05"
    nodes = (tree / "dev.list").read_text().split()
    assert {"nvidia0", "nvidia7", "nvidiactl", "nvidia-nvswitch3", "nvidia-caps/nvidia-cap2"} <= set(nodes)
    access = (tree / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access").read_text()
    assert f"nvidia-caps/nvidia-cap{access.split()[1]}" in nodes

    tool("set", "gpu.3.pci.gone", "1")  # fell off the bus
    assert not (tree / "sys/bus/pci/devices/0000:61:00.0").exists()
    tool("init", "--profile", "no-driver")
    assert not library.exists() and not any((tree / "proc/driver").iterdir())
    assert not (tree / "sys/module/nvidia").exists() and not (tree / "dev.list").read_text()
    assert sorted(p.name for p in (tree / "sys/bus/pci/devices").iterdir()) == ["0000:17:00.0", "0000:ca:00.0"]

    tool("uninstall")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize("profile", sorted(path.stem for path in (HERE / "profiles").glob("*.json")))
def test_every_profile_is_complete(profile, tmp_path, monkeypatch):
    """Each lays down, reboots and lists; every model names where its figures come from."""
    monkeypatch.syspath_prepend(str(HERE))
    import gpusim
    import standins

    values = gpusim.state_of_profile(profile, "test", "real")
    gpus = standins.indices(values, "gpu")
    assert len(gpus) == int(values["system.gpus"])
    assert len({values[f"gpu.{i}.pci.address"] for i in gpus}) == len(gpus)
    gpusim.after_reboot(values)
    standins.write_tree(tmp_path, values)
    loaded = values["system.driver_loaded"] == "1"
    assert len(standins.device_nodes(values)) >= (len(gpus) + 4 if loaded else 0)
    for entry in json.loads((HERE / "profiles" / f"{profile}.json").read_text(encoding="utf-8"))["gpus"]:
        assert json.loads((HERE / "models" / f"{entry['model']}.json").read_text(encoding="utf-8"))["_source"]


def test_mistakes_are_answered_with_what_would_work(sim):
    assert "h100x8, " in sim.tool("init", "--profile", "h200x8", ok=False)
    assert "run `init" in sim.tool("show", ok=False)
    sim.init("l40sx2")
    assert "has 2 GPU(s)" in sim.tool("set", "gpu.2.lost", "15", ok=False)
    assert "not a size" in sim.tool("process", "add", "--bytes", "much", ok=False)
    assert "say what goes wrong" in sim.tool("fault", "add", "--call", "nvmlInit", ok=False)


def test_hosts_differ_in_uuids_and_a_host_keeps_its_own(sim):
    one = sim.init("h100x8").keys("gpu.*.uuid")
    again = sim.init("h100x8").keys("gpu.*.uuid")
    other = sim.init("h100x8", "--seed", "other").keys("gpu.*.uuid")
    assert len(set(one.values())) == 8
    assert one == again
    assert not set(one.values()) & set(other.values())


def test_affinities_name_processors_that_this_machine_has(sim):
    def masks():
        return [list(n.nvmlDeviceGetCpuAffinity(gpu(index), 4)) for index in (0, 7)]

    online = os.sched_getaffinity(0)
    for words in sim.init("h100x8").run(masks):
        cpus = {64 * w + bit for w, word in enumerate(words) for bit in range(64) if word >> bit & 1}
        assert cpus and cpus <= online
    assert sim.init("h100x8", "--cpus", "profile").keys("gpu.7.cpus") == {"gpu.7.cpus": "56-111,168-223"}
