# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The simulator, driven by the real pynvml in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("GPUSIM_BUILD", HERE.parents[2] / ".build/gpusim"))
PYNVML = Path(pytest.importorskip("pynvml").__file__).parent
PRELUDE = f"""
import sys; sys.path.append({str(PYNVML)!r})
import ctypes, json, os
from pynvml import *
def code(f, *a):
    try: f(*a)
    except NVMLError as e: return e.value
    return 0
def mem(h):
    return nvmlDeviceGetMemoryInfo(h, version=nvmlMemory_v2)
def dev(i=0):
    return nvmlDeviceGetHandleByIndex(i)
out = None
"""
INIT = "nvmlInit()\n"


class Sim:
    """One simulated host in a folder, without a root file system around it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.env = {**os.environ, "GPUSIM_STATE": str(self.state), "LD_LIBRARY_PATH": str(BUILD)}

    def tool(self, *words: str, ok: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "-S", str(HERE / "gpusim.py"), *words],
            env=self.env, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout if ok else done.stderr

    def init(self, profile: str) -> Sim:
        self.tool("init", "--profile", profile, "--seed", "test", "--state-only")
        return self

    def start(self, code: str) -> subprocess.Popen[str]:
        program = PRELUDE + code + "\nprint(json.dumps(out))"
        return subprocess.Popen(
            [sys.executable, "-S", "-c", program],
            env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, code: str) -> Any:
        """The value that the code leaves in `out`."""
        child = self.start(INIT + code)
        try:
            stdout, stderr = child.communicate(timeout=20)
        finally:
            child.kill()
        assert child.returncode == 0, stderr
        return json.loads(stdout)

    def keys(self, pattern: str) -> dict[str, str]:
        lines = self.tool("show", pattern).splitlines()
        return dict(line.split("=", 1) for line in lines)


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


# ---- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "index", "name", "capability", "torch_gib"),
    [
        ("h100x8", 7, "NVIDIA H100 80GB HBM3", [9, 0], 79.19),
        ("l40sx2", 1, "NVIDIA L40S", [8, 9], 44.39),
        ("a100x4-40gb", 3, "NVIDIA A100-SXM4-40GB", [8, 0], 39.39),
        ("t4x1", 0, "Tesla T4", [7, 5], 14.56),
        ("b200x8", 7, "NVIDIA B200", [10, 0], 178.35),
        ("a100x16-40gb", 15, "NVIDIA A100-SXM4-40GB", [8, 0], 39.39),
    ],
)
def test_a_profile_has_its_devices_with_the_memory_that_torch_sees(sim, profile, index, name, capability, torch_gib):
    got = sim.init(profile).run(
        f"h = dev({index}); m = mem(h); o = nvmlDeviceGetMemoryInfo(h)\n"
        "out = [nvmlDeviceGetCount(), nvmlDeviceGetName(h), nvmlDeviceGetCudaComputeCapability(h), nvmlDeviceGetIndex(h),"
        " (m.total - m.reserved) / 2**30, m.free + m.used + m.reserved == m.total, [o.total, o.free, o.used] == "
        "[m.total, m.free, m.used + m.reserved]]"
    )
    assert got[:4] == [index + 1, name, capability, index]
    assert got[4] == pytest.approx(torch_gib, abs=0.006)
    assert got[5:] == [True, True]


def test_devices_are_found_by_uuid_serial_and_address_and_refused_when_unknown(sim):
    got = sim.init("h100x8").run(
        "h = dev(5); uuid = nvmlDeviceGetUUID(h); bus = nvmlDeviceGetPciInfo(h).busId\n"
        "index = nvmlDeviceGetIndex\n"
        "stray = ctypes.cast(ctypes.create_string_buffer(64), c_nvmlDevice_t)\n"
        "out = [index(nvmlDeviceGetHandleByUUID(uuid.encode())), index(nvmlDeviceGetHandleByPciBusId(bus.encode())),"
        " index(nvmlDeviceGetHandleByPciBusId(b'0000:c3:00.0')),"
        " index(nvmlDeviceGetHandleBySerial(nvmlDeviceGetSerial(h).encode())), bus,"
        " code(dev, 8), code(nvmlDeviceGetHandleByUUID, b'GPU-none'), code(nvmlDeviceGetHandleByPciBusId, b'0000:ff:00.0'),"
        " code(nvmlDeviceGetName, stray), code(nvmlDeviceGetName, None)]"
    )
    assert got == [5, 5, 5, 5, "00000000:C3:00.0", 2, 6, 6, 2, 2]


def test_links_fabric_and_topology_of_an_nvswitch_host(sim):
    got = sim.init("h100x8").run(
        "a, b, far = dev(0), dev(1), dev(4); f = c_nvmlGpuFabricInfo_v3_t(); nvmlDeviceGetGpuFabricInfoV(a, ctypes.byref(f))\n"
        "links = [nvmlDeviceGetNvLinkState(a, i) for i in range(18)]\n"
        "fields = nvmlDeviceGetFieldValues(a, [NVML_FI_DEV_NVLINK_LINK_COUNT, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 999])\n"
        "out = [links, code(nvmlDeviceGetNvLinkState, a, 18), nvmlDeviceGetNvLinkVersion(a, 0),"
        " [nvmlDeviceGetNvLinkRemotePciInfo(a, i).busId for i in (0, 3, 4)], [f.state, f.healthSummary],"
        " [nvmlDeviceGetTopologyCommonAncestor(a, b), nvmlDeviceGetTopologyCommonAncestor(a, far)],"
        " nvmlDeviceGetP2PStatus(a, far, NVML_P2P_CAPS_INDEX_NVLINK), list(nvmlDeviceGetMemoryAffinity(far, 1, 0)),"
        " [[v.nvmlReturn, v.value.uiVal] for v in fields]]"
    )
    first = "00000000:07:00.0"
    assert got == [
        [1] * 18,
        2,
        6,
        [first, "00000000:0A:00.0", first],
        [3, 1],
        [40, 50],
        0,
        [2],
        [[0, 18], [0, 0], [3, 0]],
    ]


def test_what_a_device_cannot_do_is_not_supported(sim):
    sim.init("gb10")
    assert sim.run(
        "h = dev(); out = [code(nvmlDeviceGetMemoryInfo, h), code(mem, h), code(nvmlDeviceGetPowerManagementLimit, h)]"
    ) == [3, 3, 3]
    sim.init("t4x1")
    assert sim.run(
        "h = dev(); out = [code(nvmlDeviceGetRemappedRows, h), code(nvmlDeviceGetMigMode, h),"
        " nvmlDeviceGetRetiredPagesPendingStatus(h), code(nvmlDeviceGetNvLinkState, h, 0), code(nvmlDeviceGetFanSpeedRPM, h)]"
    ) == [3, 3, 0, 3, 13]  # 13: the simulator does not have that function at all


def test_a_host_without_gpus_starts_and_one_without_driver_does_not(sim):
    assert sim.init("no-device").run("out = nvmlDeviceGetCount()") == 0
    assert sim.init("no-driver").start("out = code(nvmlInit)").communicate(timeout=20)[0].strip() == "9"


def test_library_and_kernel_module_of_different_versions_do_not_work_together(sim):
    sim.init("l40sx2").tool("set", "system.kernel_driver_version", "580.82.07")
    assert sim.start("out = code(nvmlInit)").communicate(timeout=20)[0].strip() == "18"


def test_any_value_can_stand_for_an_error_code(sim):
    sim.init("l40sx2").tool("set", "gpu.1.power.draw", "!17")
    assert sim.run("out = [code(nvmlDeviceGetPowerUsage, dev(i)) for i in (0, 1)]") == [0, 17]


# ---- settings ---------------------------------------------------------------------------------


def test_settings_outlive_the_process_and_a_reboot_loses_what_a_real_one_loses(sim):
    sim.init("a100x4-40gb").run(
        "h = dev(); nvmlDeviceSetPersistenceMode(h, 1); nvmlDeviceSetComputeMode(h, 3)\n"
        "nvmlDeviceSetPowerManagementLimit(h, 250000); nvmlDeviceSetEccMode(h, 0); nvmlDeviceSetGpuLockedClocks(h, 900, 900)\n"
        "out = nvmlDeviceSetMigMode(h, 1)"
    )
    read = (
        "h = dev(); out = [nvmlDeviceGetPersistenceMode(h), nvmlDeviceGetComputeMode(h), nvmlDeviceGetPowerManagementLimit(h),"
        " nvmlDeviceGetEnforcedPowerLimit(h), nvmlDeviceGetEccMode(h), nvmlDeviceGetClockInfo(h, NVML_CLOCK_SM),"
        " nvmlDeviceGetMigMode(h), nvmlDeviceGetPersistenceMode(dev(1))]"
    )
    assert sim.run(read) == [1, 3, 250000, 250000, [1, 0], 900, [1, 1], 0]
    sim.tool("reboot")
    assert sim.run(read) == [0, 0, 400000, 400000, [0, 0], 210, [1, 1], 0]  # Ampere keeps MIG, and ECC is now off


def test_hopper_loses_its_mig_mode_at_a_reboot_and_any_gpu_its_instances(sim):
    assert sim.init("h100x8-mig").run("out = nvmlDeviceGetMigMode(dev(0))") == [1, 1]
    sim.tool("reboot")
    assert sim.run("out = nvmlDeviceGetMigMode(dev(0))") == [0, 0]
    assert "gi" not in sim.tool("show", "gpu.*.gi.*")


def test_values_out_of_range_are_refused_and_change_nothing(sim):
    got = sim.init("l40sx2").run(
        "h = dev(); out = [code(nvmlDeviceSetPowerManagementLimit, h, 99), code(nvmlDeviceSetPowerManagementLimit, h, 10**6),"
        " code(nvmlDeviceSetComputeMode, h, 1), code(nvmlDeviceSetPersistenceMode, h, 2), code(nvmlDeviceSetMigMode, h, 1),"
        " code(nvmlDeviceSetGpuLockedClocks, h, 2000, 1000), nvmlDeviceGetPowerManagementLimit(h)]"
    )
    assert got == [2, 2, 2, 2, 3, 2, 350000]


def test_ordinary_users_read_but_do_not_set(sim):
    if os.geteuid() != 0:
        pytest.skip("needs root, to run a program as somebody else")
    got = sim.init("h100x8-mig").run(
        "os.setuid(65534); h = dev(7); m = dev(0); out = [code(nvmlDeviceSetPersistenceMode, h, 1), nvmlDeviceGetPersistenceMode(h),"
        " code(mem, h), code(mem, m), code(nvmlDeviceGetComputeRunningProcesses, m),"
        " nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(m, 0))[:4]]"
    )
    assert got == [4, 0, 0, 4, 4, "MIG-"]


def test_setters_of_many_processes_do_not_lose_each_other(sim):
    sim.init("h100x8")
    children = [sim.start(INIT + f"out = nvmlDeviceSetPersistenceMode(dev({i}), 1)") for i in range(8)]
    assert [child.wait(timeout=20) for child in children] == [0] * 8
    assert set(sim.keys("gpu.*.persistence_mode").values()) == {"1"}
    for child in children:
        child.communicate()


# ---- processes --------------------------------------------------------------------------------


def test_memory_is_held_until_the_process_ends_even_when_nobody_waits_for_it(sim):
    sim.init("l40sx2")
    holder = subprocess.Popen(["sleep", "60"])
    sim.tool(
        "process", "add", "--device", "1", "--bytes", "20G", "--pid", str(holder.pid), "--name", "VLLM::EngineCore x"
    )
    read = (
        "p = nvmlDeviceGetComputeRunningProcesses(dev(1)); out = [[[x.pid, x.usedGpuMemory] for x in p],"
        " mem(dev(1)).used, mem(dev(0)).used, [nvmlSystemGetProcessName(x.pid) for x in p]]"
    )
    assert sim.run(read) == [[[holder.pid, 20 << 30]], 20 << 30, 0, ["VLLM::EngineCore x"]]
    holder.kill()  # and is not waited for: a zombie
    time.sleep(0.1)
    assert sim.run(read) == [[], 0, 0, []]
    holder.wait()


def test_an_engine_registers_itself_by_dropping_a_file(sim):
    sim.init("h100x8-mig")
    slice_uuid = sim.run("out = nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(dev(0), 2))")
    whole_uuid = sim.run("out = nvmlDeviceGetUUID(dev(6))")
    folder = sim.folder / "processes"
    (folder / str(os.getpid())).write_text(
        f"name=vllm serve\ndevice=7\nbytes=1073741824\ndevice={whole_uuid}\nbytes=2G\nkind=mps\ndevice={slice_uuid}\nbytes=3G\n",
        encoding="utf-8",
    )
    (folder / "4194300").write_text("device=7\nbytes=5G\n", encoding="utf-8")  # no such process
    (folder / "note.txt").write_text("device=7\nbytes=5G\n", encoding="utf-8")
    (folder / str(os.getppid())).write_bytes(b"\xff\x00device\n=\nbytes=\nname\ndevice=99\n")
    got = sim.run(
        "m = nvmlDeviceGetMigDeviceHandleByIndex(dev(0), 2); p = nvmlDeviceGetComputeRunningProcesses\n"
        "out = [[x.usedGpuMemory for x in p(dev(7))], [x.usedGpuMemory for x in p(dev(6))],"
        " [x.usedGpuMemory for x in nvmlDeviceGetMPSComputeRunningProcesses(dev(6))], [x.pid for x in p(m)],"
        " [[x.gpuInstanceId, x.computeInstanceId] for x in p(dev(0))], nvmlDeviceGetMemoryInfo(m).used]"
    )
    assert got == [[1 << 30], [], [2 << 30], [os.getpid()], [[3, 0]], 3 << 30]


def test_a_pinned_process_needs_no_real_one_and_a_made_up_pid_is_refused(sim):
    sim.init("l40sx2").tool("process", "add", "--bytes", "100MiB", "--pid", "77777", "--pinned")
    assert sim.run("out = [x.pid for x in nvmlDeviceGetComputeRunningProcesses(dev())]") == [77777]
    assert "no process 4194300" in sim.tool("process", "add", "--bytes", "1G", "--pid", "4194300", ok=False)
    sim.tool("process", "remove", "1")
    assert sim.run("out = len(nvmlDeviceGetComputeRunningProcesses(dev()))") == 0


# ---- faults -----------------------------------------------------------------------------------


def test_a_fault_hits_its_call_on_its_device_only(sim):
    sim.init("l40sx2").tool("fault", "add", "--call", "nvmlDeviceGetMemoryInfo", "--device", "1", "--code", "999")
    read = "out = [code(mem, dev(0)), code(mem, dev(1)), code(nvmlDeviceGetMemoryInfo, dev(1)), code(nvmlDeviceGetName, dev(1))]"
    assert sim.run(read) == [0, 999, 999, 0]  # both versions of the call
    sim.tool("fault", "clear")
    assert sim.run(read) == [0, 0, 0, 0]


def test_a_lost_gpu_fails_in_every_call_and_leaves_the_others_alone(sim):
    sim.init("l40sx2").tool("set", "gpu.1.lost", "15")
    assert sim.run("out = [nvmlDeviceGetCount(), code(dev, 0), code(dev, 1)]") == [2, 0, 15]
    sim.tool("set", "gpu.1.lost", "--unset")
    got = sim.run(
        "h = dev(1); import re; s = open(os.environ['GPUSIM_STATE']).read(); open(os.environ['GPUSIM_STATE'], 'a').write("
        "'gpu.1.lost=15\\n')\nout = [code(nvmlDeviceGetName, h), code(mem, h), code(nvmlDeviceGetName, dev(0))]"
    )
    assert got == [15, 15, 0]


def test_faults_by_count(sim):
    sim.init("l40sx2")
    sim.tool("fault", "add", "--call", "nvmlDeviceGetName", "--code", "10", "--nth", "2")
    assert sim.run("h = dev(); out = [code(nvmlDeviceGetName, h) for i in range(3)]") == [0, 10, 0]
    sim.tool("fault", "clear")
    sim.tool("fault", "add", "--call", "nvmlDeviceGetName", "--code", "10", "--times", "2")
    assert sim.run("h = dev(); out = code(nvmlDeviceGetName, h)") == 10
    assert sim.run("h = dev(); out = [code(nvmlDeviceGetName, h) for i in range(2)]") == [10, 0]  # counted on the host


def test_setters_can_lie_and_can_do_their_work_and_still_fail(sim):
    sim.init("l40sx2")
    sim.tool("fault", "add", "--call", "nvmlDeviceSetPersistenceMode", "--device", "0", "--silent")
    sim.tool("fault", "add", "--call", "nvmlDeviceSetPersistenceMode", "--device", "1", "--late-code", "999")
    got = sim.run(
        "out = [[code(nvmlDeviceSetPersistenceMode, dev(i), 1), nvmlDeviceGetPersistenceMode(dev(i))] for i in (0, 1)]"
    )
    assert got == [[0, 0], [999, 1]]


def test_a_delay_holds_the_call_up(sim):
    sim.init("l40sx2").tool("fault", "add", "--call", "nvmlDeviceGetName", "--delay-ms", "300")
    got = sim.run("import time; h = dev(); t = time.monotonic(); nvmlDeviceGetName(h); out = time.monotonic() - t")
    assert 0.3 <= got < 3


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetTemperatureV"])
def test_a_hang_holds_the_global_lock_for_ever(sim, call):
    sim.init("l40sx2").tool("fault", "add", "--call", call, "--hang")
    child = sim.start(
        "import threading, time\n"
        + ("nvmlInit(); h = dev()\n" if call != "nvmlInit" else "_ = nvmlInitWithFlags\n")
        + f"f = {'nvmlInit' if call == 'nvmlInit' else 'lambda: nvmlDeviceGetTemperatureV(h, 0)'}\n"
        "threading.Thread(target=f, daemon=True).start(); print('ready', flush=True); time.sleep(0.2)\n"
        "out = code(nvmlShutdown)"
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.6)
    child.terminate()
    assert child.wait(timeout=5) == -signal.SIGTERM
    child.communicate()


def test_a_stubborn_hang_ends_by_sigkill_only(sim):
    sim.init("l40sx2").tool("fault", "add", "--call", "nvmlInit", "--hang", "stubborn")
    child = sim.start("print('ready', flush=True); out = nvmlInit()")
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        child.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.3)
    child.kill()
    assert child.wait(timeout=5) == -signal.SIGKILL
    child.communicate()


def test_an_unkillable_hang_outlives_sigkill_until_it_is_thawed(sim):
    if not os.access("/sys/fs/cgroup/freezer/cgroup.procs", os.W_OK):
        pytest.skip("needs root and a cgroup v1 freezer")
    sim.init("l40sx2").tool("fault", "add", "--call", "nvmlInit", "--hang", "unkillable")
    child = sim.start("print('ready', flush=True); out = nvmlInit()")
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(0.3)
    child.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.5)
    assert f"gpusim-{child.pid}" in sim.tool("thaw")
    assert child.wait(timeout=5) == -signal.SIGKILL
    child.communicate()


def test_a_crash_aborts_the_calling_process(sim):
    sim.init("l40sx2").tool("fault", "add", "--call", "nvmlDeviceGetUUID", "--crash")
    child = sim.start(INIT + "out = nvmlDeviceGetUUID(dev())")
    child.communicate(timeout=20)
    assert child.returncode == -signal.SIGABRT


# ---- MIG --------------------------------------------------------------------------------------


def test_mig_instances_from_mode_to_slice_and_back(sim):
    got = sim.init("h100x8").run(
        "h = dev(); steps = []\n"
        "steps.append([code(nvmlDeviceGetGpuInstanceRemainingCapacity, h, 9), nvmlDeviceSetMigMode(h, 1), nvmlDeviceGetMigMode(h)])\n"
        "info = nvmlDeviceGetGpuInstanceProfileInfo(h, NVML_GPU_INSTANCE_PROFILE_3_SLICE)\n"
        "steps.append([info.id, info.name, info.memorySizeMB, info.instanceCount, info.sliceCount])\n"
        "n = ctypes.c_uint(0); nvmlDeviceGetGpuInstancePossiblePlacements(h, info.id, None, ctypes.byref(n))\n"
        "room = (c_nvmlGpuInstancePlacement_t * n.value)(); nvmlDeviceGetGpuInstancePossiblePlacements(h, info.id, room, ctypes.byref(n))\n"
        "steps.append([[p.start, p.size] for p in room])\n"
        "place = c_nvmlGpuInstancePlacement_t(0, 4); g = nvmlDeviceCreateGpuInstanceWithPlacement(h, info.id, ctypes.byref(place))\n"
        "small = nvmlDeviceCreateGpuInstance(h, 19); i = nvmlGpuInstanceGetInfo(small)\n"
        "steps.append([nvmlDeviceGetGpuInstanceRemainingCapacity(h, 9), nvmlDeviceGetGpuInstanceRemainingCapacity(h, 19), i.placement.start])\n"
        "steps.append([code(nvmlDeviceCreateGpuInstance, h, 0), code(nvmlDeviceCreateGpuInstance, h, 77)])\n"
        "c = nvmlGpuInstanceCreateComputeInstance(g, NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE)\n"
        "m = nvmlDeviceGetMigDeviceHandleByIndex(h, 0); a = nvmlDeviceGetAttributes(m)\n"
        "steps.append([nvmlDeviceGetName(m), nvmlDeviceIsMigDeviceHandle(m).value, nvmlDeviceGetMemoryInfo(m).total >> 20,"
        " [a.gpuInstanceSliceCount, a.multiprocessorCount], nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m))])\n"
        "uuid = nvmlDeviceGetUUID(m); same = nvmlDeviceGetHandleByUUID(uuid.encode())\n"
        "steps.append([nvmlDeviceGetGpuInstanceId(same) == nvmlGpuInstanceGetInfo(g).id, code(nvmlDeviceGetPowerUsage, m),"
        " code(nvmlDeviceGetMigDeviceHandleByIndex, h, 1)])\n"
        "steps.append([code(nvmlGpuInstanceDestroy, g), code(nvmlDeviceSetMigMode, h, 0), code(nvmlComputeInstanceDestroy, c),"
        " code(nvmlDeviceGetName, m), code(nvmlGpuInstanceDestroy, g), code(nvmlGpuInstanceDestroy, small),"
        " nvmlDeviceSetMigMode(h, 0), nvmlDeviceGetMigMode(h)])\n"
        "out = steps"
    )
    assert got == [
        [3, 0, [1, 1]],
        [9, "MIG 3g.40gb", 40448, 2, 3],
        [[0, 4], [4, 4]],
        [0, 2, 6],
        [23, 2],
        ["NVIDIA H100 80GB HBM3 MIG 3g.40gb", 1, 40448, [3, 60], 0],
        [True, 2, 6],
        [19, 19, 0, 2, 0, 0, 0, [0, 0]],
    ]


def test_a_partitioned_profile_has_the_uuids_that_creating_the_same_slices_gives(sim):
    listing = "out = [nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(dev(2), i)) for i in range(2)]"
    before = sim.init("h100x8-mig").run(listing)
    after = sim.run(
        "h = dev(2)\n"
        "for k in (2, 1):\n"
        "    g = nvmlDeviceGetGpuInstanceById(h, k); nvmlComputeInstanceDestroy(nvmlGpuInstanceGetComputeInstanceById(g, 0)); nvmlGpuInstanceDestroy(g)\n"
        "for k in (0, 4):\n"
        "    p = c_nvmlGpuInstancePlacement_t(k, 4); g = nvmlDeviceCreateGpuInstanceWithPlacement(h, 9, ctypes.byref(p))\n"
        "    nvmlGpuInstanceCreateComputeInstance(g, 2)\n" + listing
    )
    assert len(set(before)) == 2 and before == after


def test_mig_mode_waits_for_the_clients_of_the_gpu(sim):
    sim.init("a100x4-40gb").tool("process", "add", "--bytes", "1G", "--pinned")
    got = sim.run("h = dev(); out = [nvmlDeviceSetMigMode(h, 1), nvmlDeviceGetMigMode(h)]")
    assert got == [19, [0, 1]]  # in use: pending only
    sim.tool("set", "gpu.1.mig.activation", "16")
    assert sim.run("h = dev(1); out = [nvmlDeviceSetMigMode(h, 1), nvmlDeviceGetMigMode(h)]") == [16, [0, 1]]


# ---- the interface itself ---------------------------------------------------------------------


def test_every_exported_function_is_one_that_pynvml_calls_or_an_older_version_of_it():
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", BUILD / "libnvidia-ml.so.1"], capture_output=True, text=True, check=True
    )
    symbols = {line.split()[-1] for line in listed.stdout.splitlines() if "asan" not in line}
    source = (PYNVML / "pynvml.py").read_text(encoding="utf-8")
    older = {
        "nvmlInit",
        "nvmlInit_v2",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetHandleByPciBusId",
    }
    assert {name for name in symbols - older if f'"{name}"' not in source} == set()
    assert len(symbols) > 140


def test_wrong_struct_versions_and_short_buffers_are_refused(sim):
    got = sim.init("l40sx2").run(
        "h = dev(); lib = ctypes.CDLL('libnvidia-ml.so.1'); buffer = ctypes.create_string_buffer(4)\n"
        "m = c_nvmlMemory_v2_t(); m.version = 0x02000029\n"
        "one = ctypes.c_uint(1); clocks = ctypes.c_uint()\n"
        "out = [lib.nvmlDeviceGetMemoryInfo_v2(h, ctypes.byref(m)), lib.nvmlDeviceGetName(h, buffer, 4), buffer.raw == bytes(4),"
        " lib.nvmlDeviceGetMemoryInfo(h, None), lib.nvmlDeviceGetSupportedMemoryClocks(h, ctypes.byref(one), ctypes.byref(clocks)), one.value]"
    )
    assert got == [25, 7, True, 2, 7, 2]


def test_calls_before_init_and_after_shutdown_are_refused(sim):
    sim.init("l40sx2")
    child = sim.start("nvmlInit(); h = dev(); nvmlShutdown(); out = [code(nvmlDeviceGetName, h), code(nvmlShutdown)]")
    assert json.loads(child.communicate(timeout=20)[0]) == [1, 1]


@pytest.mark.parametrize(
    ("content", "expected"), [(None, 9), (b"profile\n", 999), (b"a=b\n=c\n", 999), (b"a=\x00b\n", 999)]
)
def test_a_bad_state_file_is_an_nvml_error_that_names_the_line(sim, content, expected):
    if content is not None:
        sim.state.write_bytes(content)
    child = sim.start("out = code(nvmlInit)")
    stdout, stderr = child.communicate(timeout=20)
    assert (child.returncode, stdout.strip()) == (0, str(expected))
    assert content is None or "not a key=value line" in stderr


def test_no_content_of_the_state_crashes_a_reader(sim):
    sim.init("h100x8-mig")
    (sim.folder / "processes" / str(os.getpid())).write_text("device=0\nbytes=1G\n", encoding="utf-8")
    got = sim.run(
        "import inspect, os, random\n"
        "path = os.environ['GPUSIM_STATE']; good = open(path).read().splitlines(); calls = 0\n"
        "getters = [f for n, f in sorted(globals().items()) if n.startswith('nvmlDeviceGet') and callable(f)\n"
        "  and len([p for p in inspect.signature(f).parameters.values() if p.default is p.empty]) == 1 and 'HandleBy' not in n and n != 'nvmlDeviceGetAccountingPids']\n"
        "junk = ['', '!', '!3', '-1', 'x' * 300, '99999999999999999999', '0,0', ',,,,', '1;2;;', '0-99999', '!999', '1,1,MIG-', '4294967295']\n"
        "for seed in range(15):\n"
        "    r = random.Random(seed); lines = [l.split('=', 1)[0] + '=' + r.choice(junk) if r.random() < 0.3 and not l.startswith('system.gpus')\n"
        "      else l for l in good if r.random() > 0.05]\n"
        "    open(path + '.new', 'w').write('\\n'.join(lines) + '\\n'); os.replace(path + '.new', path)\n"
        "    for i in range(4):\n"
        "        try: handles = [dev(i)]\n"
        "        except NVMLError: continue\n"
        "        for k in range(7):\n"
        "            try: handles.append(nvmlDeviceGetMigDeviceHandleByIndex(handles[0], k))\n"
        "            except NVMLError: pass\n"
        "        for h in handles:\n"
        "            for f in getters: code(f, h); calls += 1\n"
        "            for link in range(20): code(nvmlDeviceGetNvLinkRemotePciInfo, h, link)\n"
        "            code(mem, h); code(nvmlDeviceGetCpuAffinity, h, 2); code(nvmlDeviceGetFieldValues, h, list(range(1, 240)))\n"
        "            for p in range(18): code(nvmlDeviceGetGpuInstanceProfileInfo, h, p)\n"
        "            code(nvmlDeviceCreateGpuInstance, h, 19)\n"
        "out = calls"
    )
    assert got > 5000


# ---- the tool ---------------------------------------------------------------------------------


def test_a_host_gets_library_stand_ins_and_unit_and_loses_them_again(tmp_path):
    def tool(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", str(HERE / "gpusim.py"), "--root", str(tmp_path), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert tool("init", "--profile", "h100x8-mig").returncode == 0
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

    assert tool("set", "gpu.3.pci.gone", "1").returncode == 0  # fell off the bus
    assert not (tree / "sys/bus/pci/devices/0000:61:00.0").exists()
    assert tool("init", "--profile", "no-driver").returncode == 0
    assert not library.exists() and not any((tree / "proc/driver").iterdir())
    assert not (tree / "sys/module/nvidia").exists() and not (tree / "dev.list").read_text()
    assert sorted(p.name for p in (tree / "sys/bus/pci/devices").iterdir()) == ["0000:17:00.0", "0000:ca:00.0"]

    assert tool("uninstall").returncode == 0
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == []


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
    sim.tool("init", "--profile", "h100x8", "--seed", "other", "--state-only")
    other = sim.keys("gpu.*.uuid")
    assert len(set(one.values())) == 8 and one == again
    assert not set(one.values()) & set(other.values())


def test_affinities_name_processors_that_this_machine_has(sim):
    online = os.sched_getaffinity(0)
    masks = sim.init("h100x8").run("out = [list(nvmlDeviceGetCpuAffinity(dev(i), 4)) for i in (0, 7)]")
    for words in masks:
        cpus = {64 * w + bit for w, word in enumerate(words) for bit in range(64) if word >> bit & 1}
        assert cpus and cpus <= online
    sim.tool("init", "--profile", "h100x8", "--cpus", "profile", "--state-only")
    assert sim.keys("gpu.7.cpus") == {"gpu.7.cpus": "56-111,168-223"}
