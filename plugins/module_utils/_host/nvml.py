# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVML read through a child that may be abandoned at any call. Private to gpufleet.inference.

The child announces each call before it makes it and sends each value when it has it. When it falls silent, what was
read is kept, the call that gave no answer is named, and a new child goes on with the devices that were not read yet.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import itertools
import os
import re
import sys
import time
import types
import zlib
from typing import Any, Callable, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._host import children

# NVML's return codes (nvml.h, nvmlReturn_t); the words are ours.
CODES = {
    1: "NVML is not initialised",
    2: "invalid argument",
    3: "not supported",
    4: "no permission",
    6: "not found",
    7: "buffer too small",
    8: "power cable not connected",
    9: "the driver is not loaded",
    10: "time-out in the driver",
    12: "libnvidia-ml.so.1 is missing",
    13: "the library lacks the function",
    14: "infoROM corrupt",
    15: "the GPU is lost",
    16: "the GPU needs a reset",
    17: "blocked by the operating system",
    18: "library and kernel module differ in version",
    19: "in use",
    20: "out of memory",
    21: "no data",
    22: "vGPU ECC not supported",
    23: "out of resources",
    24: "frequency not supported",
    25: "structure version not supported",
    26: "deprecated",
    27: "not ready",
    28: "no GPU",
    29: "bad state",
    999: "unknown error",
    -1: "the answer cannot be read",
}
NOT_SUPPORTED = 3
UNREADABLE = -1
FUNCTION_MISSING = 13
GPU_LOST = 15
VERSION_MISMATCH = 18
_OLD_CALL = (FUNCTION_MISSING, 25, NOT_SUPPORTED)

# nvml.h, NVML_DEVICE_ARCH_*.
ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}
# nvml.h, nvmlComputeMode_t.
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
# nvml.h, nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`.
TOPOLOGY = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvml.h, NVML_GPU_FABRIC_STATE_* and NVML_GPU_FABRIC_HEALTH_SUMMARY_*.
FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
FABRIC_HEALTH = {0: "not_supported", 1: "healthy", 2: "unhealthy", 3: "limited_capacity"}
# nvml.h, nvmlDeviceGpuRecoveryAction_t, read as field 230.
RECOVERY_ACTIONS = {0: "none", 1: "reset", 2: "reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "imex_reset"}
_FIELD_RECOVERY_ACTION = 230
_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH

_MIG_PROFILE = re.compile(r"\bMIG (\S+)")

# The fields that NVML alone can tell, as they stand when nothing is known.
DEVICE_FIELDS: dict[str, Any] = {
    "uuid": None,
    "name": None,
    "architecture": None,
    "compute_capability": None,
    "minor": None,
    "memory": {"total": None, "reserved": None, "free": None, "used": None},
    "persistence_mode": None,
    "compute_mode": None,
    "accounting_mode": None,
    "power": {"limit_mw": None, "default_mw": None, "min_mw": None, "max_mw": None, "draw_mw": None},
    "clocks": {"sm_mhz": None, "memory_mhz": None, "max_sm_mhz": None, "max_memory_mhz": None},
    "ecc": {"current": None, "pending": None},
    "mig": {"mode": None, "pending": None, "devices": []},
    "processes": None,
    "health": {"temperature_c": None, "remapped_rows": None, "retired_pages_pending": None, "recovery_action": None},
}


class Failure:
    """A call that gave no value: ``code`` is NVML's, or None when there was no answer at all."""

    def __init__(self, function: str, subject: str, code: Optional[int], text: str) -> None:
        self.function = function
        self.subject = subject
        self.code = code
        self.text = text

    def __str__(self) -> str:
        place = f"{self.function} on {self.subject}" if self.subject else self.function
        return f"{place}: {self.text}" + (f" (NVML {self.code})" if self.code and self.code > 0 else "")


class Reading:
    """What was read: values and failures by path ("devices.0.memory.total"), and the failure that ended it, if any."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.failures: dict[str, Failure] = {}
        self.fatal: Optional[Failure] = None
        self.seconds = 0.0

    def device_count(self) -> Optional[int]:
        """How many devices NVML has; None when it did not say."""
        return self.values.get("count")


def pack_bindings(source: bytes) -> str:
    """The text that carries the source of pynvml to a host."""
    return base64.b64encode(zlib.compress(source, 9)).decode("ascii")


def load_bindings(packed: str) -> types.ModuleType:
    """pynvml from the text of pack_bindings, in memory only. The library itself is not loaded before its first call."""
    return _module(zlib.decompress(base64.b64decode(packed)))


def load_bindings_from_helper(path: str, digest: str) -> Optional[types.ModuleType]:
    """pynvml from the host helper when the artefact at path has this digest, else None."""
    import zipimport

    try:
        with open(path, "rb") as stream:
            if hashlib.sha256(stream.read()).hexdigest() != digest:
                return None
        source = zipimport.zipimporter(path).get_source("pynvml")
    except (OSError, ImportError):
        return None
    return None if source is None else _module(source.encode())


def _module(source: bytes) -> types.ModuleType:
    module = types.ModuleType("gpufleet_pynvml")
    sys.modules[module.__name__] = module  # its own start-up looks itself up there
    exec(compile(source, "pynvml.py", "exec"), module.__dict__)
    return module


def read(
    bindings: Any,
    deadline: float,
    *,
    stall: Optional[float] = None,
    links: bool = True,
    kill: Callable[[int, int], None] = os.kill,
    clock: Callable[[], float] = time.monotonic,
) -> Reading:
    """Everything NVML tells, with or without ``links`` between GPUs, in at most ``deadline`` seconds.

    ``stall`` is how long one call on a device may take (default: a quarter of the deadline, at least one second); the
    initialisation may take the whole deadline, because it starts every GPU when persistence is off.
    """
    reading = Reading()
    started = clock()
    stall = stall if stall is not None else max(1.0, deadline / 4)
    done: dict[int, bool] = {}  # devices that need no reading any more: whether they answer
    while True:
        left = deadline - (clock() - started)
        session = _Session(reading, started + deadline, stall, clock)
        if left <= 0:
            _give_up(reading, done, links, f"not read: the deadline of {deadline:g} s had passed")
            break
        work = _Work(bindings, done, links)
        outcome = children.watch(work, session.receive, left, kill=kill, clock=clock)
        done.update(session.finished)
        if outcome.done:
            break
        text = outcome.died or f"no answer within {round(session.allowed if session.call else left, 1):g} s"
        failure = Failure(session.function, session.subject, None, text)
        if session.device is not None:
            reading.failures[f"devices.{session.device}"] = failure
            done[session.device] = False
        elif session.subject == "links":
            reading.failures["links"] = failure
            links = False
        elif reading.device_count() is None:
            reading.fatal = failure
            break
        else:  # an earlier child got through: what it read stands
            _give_up(reading, done, links, f"not read: {failure}")
            break
    reading.seconds = clock() - started
    return reading


def _give_up(reading: Reading, done: dict[int, bool], links: bool, text: str) -> None:
    """Name everything that was not reached."""
    count = reading.device_count()
    if count is None:
        reading.fatal = reading.fatal or Failure("NVML", "", None, text)
        return
    for index in range(count):
        if index not in done:
            reading.failures.setdefault(f"devices.{index}", Failure("NVML", f"GPU {index}", None, text))
    if links:
        reading.failures.setdefault("links", Failure("NVML", "links", None, text))


class _Session:
    """The parent's view of one child: what it has said and which call it is in."""

    def __init__(self, reading: Reading, until: float, stall: float, clock: Callable[[], float]) -> None:
        self._reading = reading
        self._until = until
        self._stall = stall
        self._clock = clock
        self.path = ""
        self.subject = ""
        self.function = "nvmlInit_v2"
        self.device: Optional[int] = None
        self.call = False
        self.allowed = 0.0
        self.finished: dict[int, bool] = {}

    def receive(self, message: list[Any]) -> float:
        """Take one message of the child; returns the seconds that the next may take."""
        kind = message[0]
        if kind == "call":
            _kind, self.path, self.subject, self.function, self.device = message
            self.call = True
        elif kind == "value":
            self._reading.values[message[1]] = message[2]
        elif kind == "fail":
            _kind, path, subject, function, code = message
            failure = Failure(function, subject, code, CODES.get(code, "unknown code"))
            if path:
                self._reading.failures[path] = failure
            else:
                self._reading.fatal = failure
        elif kind == "finished":
            self.finished[message[1]] = message[2]
        left = self._until - self._clock()
        self.allowed = left if self.function == "nvmlInit_v2" else min(self._stall, left)
        return self.allowed


class _Gone(Exception):
    """A device, or the whole library, can tell nothing more."""


class _Work:
    """The child's part: asks NVML call by call. Runs after the fork only."""

    def __init__(self, bindings: Any, done: dict[int, bool], links: bool) -> None:
        self._nvml = bindings
        self._done = dict(done)
        self._links = links
        self._emit: Any = None  # known once the child runs
        self._subject = ""
        self._device: Optional[int] = None

    def __call__(self, emit: children.Emit) -> None:
        self._emit = emit
        try:
            self._system()
        except _Gone:
            return
        for index in range(self._count):
            if index in self._done:
                continue
            self._device, self._subject = index, f"GPU {index}"
            try:
                self._one_device(f"devices.{index}", self._handle(index))
                answers = True
            except _Gone:
                answers = False
            self._emit(["finished", index, answers], True)
            self._done[index] = answers
        if self._links:
            self._device, self._subject = None, "links"
            handles = {
                index: self._ask("links", "nvmlDeviceGetHandleByIndex", index)
                for index in self._done
                if self._done[index]
            }
            self._read_links({index: handle for index, handle in handles.items() if handle is not None})

    # -- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, path: str, function: str, *args: Any, old: Optional[Callable[[], Any]] = None) -> Any:
        """One call; None after a failure, which is told under path (a path of "?" tells nothing)."""
        self._emit(["call", path, self._subject, function, self._device], True)
        try:
            return getattr(self._nvml, function)(*args)
        except self._nvml.NVMLError as exc:
            code = int(exc.value)
        except AttributeError:  # bindings older than the function
            code = FUNCTION_MISSING
        except Exception:
            code = UNREADABLE
        if old is not None and code in _OLD_CALL:
            return old()
        if path != "?":
            self._emit(["fail", path, self._subject, function, code], False)
        if code == GPU_LOST and self._device is not None:
            self._emit(["fail", f"devices.{self._device}", self._subject, function, code], True)
            raise _Gone
        return None

    def _tell(self, path: str, value: Any) -> None:
        if value is not None:
            self._emit(["value", path, value], False)

    # -- the whole machine --------------------------------------------------------------------------------------------

    def _system(self) -> None:
        self._emit(["call", "", "", "nvmlInit_v2", None], True)
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as exc:
            self._emit(["fail", "", "", "nvmlInit_v2", int(exc.value)], True)
            self._library_version()
            raise _Gone from None
        self._library_version()
        self._tell("driver.nvml", _text(self._ask("driver.nvml", "nvmlSystemGetDriverVersion")))
        version = self._ask("cuda_driver_version", "nvmlSystemGetCudaDriverVersion")
        if version is not None:
            self._tell("cuda_driver_version", f"{version // 1000}.{version % 1000 // 10}")
        count = self._ask("devices", "nvmlDeviceGetCount")
        if count is None:
            raise _Gone
        self._count = int(count)
        self._tell("count", self._count)

    def _library_version(self) -> None:
        try:
            version = _text(self._nvml.nvmlSystemGetNVMLVersion())
        except self._nvml.NVMLError:
            return
        self._emit(["value", "driver.userland", version.split(".", 1)[-1]], True)

    def _handle(self, index: int) -> Any:
        handle = self._ask(f"devices.{index}", "nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            raise _Gone
        return handle

    # -- one device ---------------------------------------------------------------------------------------------------

    def _one_device(self, at: str, gpu: Any) -> None:
        nvml = self._nvml
        ask, tell = self._ask, self._tell
        tell(f"{at}.uuid", _text(ask(f"{at}.uuid", "nvmlDeviceGetUUID", gpu)))
        pci = ask(f"{at}.pci_address", "nvmlDeviceGetPciInfo", gpu)
        if pci is not None:
            tell(f"{at}.pci_address", pci_address(_text(pci.busId)))
        tell(f"{at}.name", _text(ask(f"{at}.name", "nvmlDeviceGetName", gpu)))
        architecture = ask(f"{at}.architecture", "nvmlDeviceGetArchitecture", gpu)
        if architecture is not None:
            tell(f"{at}.architecture", ARCHITECTURES.get(architecture, f"unknown-{architecture}"))
        capability = ask(f"{at}.compute_capability", "nvmlDeviceGetCudaComputeCapability", gpu)
        if capability is not None:
            tell(f"{at}.compute_capability", f"{capability[0]}.{capability[1]}")
        tell(f"{at}.minor", ask(f"{at}.minor", "nvmlDeviceGetMinorNumber", gpu))
        self._memory(f"{at}.memory", gpu)
        mode = ask(f"{at}.persistence_mode", "nvmlDeviceGetPersistenceMode", gpu)
        if mode is not None:
            tell(f"{at}.persistence_mode", bool(mode))
        mode = ask(f"{at}.compute_mode", "nvmlDeviceGetComputeMode", gpu)
        if mode is not None:
            tell(f"{at}.compute_mode", COMPUTE_MODES.get(mode, f"unknown-{mode}"))
        mode = ask(f"{at}.accounting_mode", "nvmlDeviceGetAccountingMode", gpu)
        if mode is not None:
            tell(f"{at}.accounting_mode", bool(mode))
        for name, function in (
            ("limit_mw", "nvmlDeviceGetPowerManagementLimit"),
            ("default_mw", "nvmlDeviceGetPowerManagementDefaultLimit"),
            ("draw_mw", "nvmlDeviceGetPowerUsage"),
        ):
            tell(f"{at}.power.{name}", ask(f"{at}.power.{name}", function, gpu))
        limits = ask(f"{at}.power", "nvmlDeviceGetPowerManagementLimitConstraints", gpu)
        if limits is not None:
            tell(f"{at}.power.min_mw", limits[0])
            tell(f"{at}.power.max_mw", limits[1])
        for name, function, clock in (
            ("sm_mhz", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            ("memory_mhz", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            ("max_sm_mhz", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            ("max_memory_mhz", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        ):
            tell(f"{at}.clocks.{name}", ask(f"{at}.clocks.{name}", function, gpu, clock))
        modes = ask(f"{at}.ecc", "nvmlDeviceGetEccMode", gpu)
        if modes is not None:
            tell(f"{at}.ecc", {"current": bool(modes[0]), "pending": bool(modes[1])})
        self._mig(f"{at}.mig", gpu)
        self._processes(f"{at}.processes", gpu)
        self._health(f"{at}.health", gpu)
        self._fabric(at.replace("devices", "fabric.devices"), gpu)

    def _memory(self, at: str, gpu: Any) -> None:
        """v2 tells the reserved part; its ``used`` leaves it out (nvml.h, nvmlMemory_v2_t)."""

        def older() -> Any:
            return self._ask(at, "nvmlDeviceGetMemoryInfo", gpu)

        info = self._ask(at, "nvmlDeviceGetMemoryInfo", gpu, self._nvml.nvmlMemory_v2, old=older)
        if info is not None:
            reserved = getattr(info, "reserved", None)
            if reserved is None:
                function = "nvmlDeviceGetMemoryInfo_v2"
                self._emit(["fail", f"{at}.reserved", self._subject, function, FUNCTION_MISSING], False)
            self._tell(at, {"total": info.total, "reserved": reserved, "free": info.free, "used": info.used})

    def _mig(self, at: str, gpu: Any) -> None:
        modes = self._ask(at, "nvmlDeviceGetMigMode", gpu)
        if modes is None:
            return
        mig: dict[str, Any] = {"mode": bool(modes[0]), "pending": bool(modes[1]), "devices": []}
        if modes[0]:
            for number in range(self._ask(f"{at}.devices", "nvmlDeviceGetMaxMigDeviceCount", gpu) or 0):
                device = self._ask("?", "nvmlDeviceGetMigDeviceHandleByIndex", gpu, number)
                if device is not None:
                    mig["devices"].append(self._mig_device(f"{at}.devices", device))
        self._tell(at, mig)

    def _mig_device(self, at: str, device: Any) -> dict[str, Any]:
        name = _text(self._ask(at, "nvmlDeviceGetName", device)) or ""
        profile = _MIG_PROFILE.search(name)
        info = self._ask(at, "nvmlDeviceGetMemoryInfo", device)
        return {
            "uuid": _text(self._ask(at, "nvmlDeviceGetUUID", device)),
            "profile": profile.group(1) if profile else None,
            "gi": self._ask(at, "nvmlDeviceGetGpuInstanceId", device),
            "ci": self._ask(at, "nvmlDeviceGetComputeInstanceId", device),
            "memory": None if info is None else {"total": info.total, "free": info.free, "used": info.used},
        }

    def _processes(self, at: str, gpu: Any) -> None:
        """All kinds; the kind that NVML lists first wins when a process is on two lists."""
        found: dict[int, dict[str, Any]] = {}
        answered = False
        for kind, function in (
            ("compute", "nvmlDeviceGetComputeRunningProcesses_v"),
            ("mps", "nvmlDeviceGetMPSComputeRunningProcesses_v"),
            ("graphics", "nvmlDeviceGetGraphicsRunningProcesses_v"),
        ):
            path = at if kind == "compute" else "?"
            older = functools.partial(self._ask, path, f"{function}2", gpu)
            rows = self._ask(path, f"{function}3", gpu, old=older)
            answered = answered or rows is not None
            for row in rows or []:
                gi = getattr(row, "gpuInstanceId", None)
                entry = {"pid": row.pid, "used": row.usedGpuMemory, "kind": kind}
                if gi is not None and gi != 0xFFFFFFFF:
                    entry["gi"] = gi
                found.setdefault(row.pid, entry)
        if answered:
            self._tell(at, [found[pid] for pid in sorted(found)])

    def _health(self, at: str, gpu: Any) -> None:
        nvml = self._nvml
        self._tell(
            f"{at}.temperature_c",
            self._ask(f"{at}.temperature_c", "nvmlDeviceGetTemperature", gpu, nvml.NVML_TEMPERATURE_GPU),
        )
        rows = self._ask(f"{at}.remapped_rows", "nvmlDeviceGetRemappedRows", gpu)
        if rows is not None:
            value = {
                "correctable": rows[0],
                "uncorrectable": rows[1],
                "pending": bool(rows[2]),
                "failed": bool(rows[3]),
            }
            self._tell(f"{at}.remapped_rows", value)
        pending = self._ask(f"{at}.retired_pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus", gpu)
        if pending is not None:
            self._tell(f"{at}.retired_pages_pending", bool(pending))
        path = f"{at}.recovery_action"
        fields = self._ask(path, "nvmlDeviceGetFieldValues", gpu, [_FIELD_RECOVERY_ACTION])
        if fields is not None:
            if fields[0].nvmlReturn == 0:
                number = fields[0].value.uiVal
                self._tell(path, RECOVERY_ACTIONS.get(number, f"unknown-{number}"))
            else:
                self._emit(["fail", path, self._subject, "nvmlDeviceGetFieldValues", fields[0].nvmlReturn], False)

    def _fabric(self, at: str, gpu: Any) -> None:
        nvml = self._nvml
        info = nvml.c_nvmlGpuFabricInfo_v3_t()

        def older() -> Any:
            nonlocal info
            info = nvml.c_nvmlGpuFabricInfo_v2_t()
            return self._ask(at, "nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(info))

        if self._ask(at, "nvmlDeviceGetGpuFabricInfoV", gpu, ctypes.byref(info), old=older) is None:
            return
        summary = getattr(info, "healthSummary", None)
        fabric = {
            "state": FABRIC_STATES.get(info.state, f"unknown-{info.state}"),
            "status": info.status,
            "clique_id": info.cliqueId,
            "cluster_uuid": bytes(info.clusterUuid).hex(),
            "health": None if summary is None else FABRIC_HEALTH.get(summary, f"unknown-{summary}"),
        }
        self._tell(at, fabric)

    # -- links --------------------------------------------------------------------------------------------------------

    def _read_links(self, handles: dict[int, Any]) -> None:
        """The matrix in the words of `nvidia-smi topo -m`: NV<links> where NVLink connects, else the PCI path."""
        nvml, ask = self._nvml, self._ask
        if len(handles) < 2:
            return
        size = self._count
        matrix: list[list[Any]] = [["X" if a == b else None for b in range(size)] for a in range(size)]
        peer: list[list[Any]] = [[True if a == b else None for b in range(size)] for a in range(size)]
        to_switch, to_gpu = self._nvlinks(handles)
        for (a, one), (b, other) in itertools.combinations(sorted(handles.items()), 2):
            count = min(to_switch[a], to_switch[b]) or to_gpu.get((a, b), 0)
            if count:
                matrix[a][b] = matrix[b][a] = f"NV{count}"
            else:
                level = ask("links.matrix", "nvmlDeviceGetTopologyCommonAncestor", one, other)
                matrix[a][b] = matrix[b][a] = None if level is None else TOPOLOGY.get(level, str(level))
            status = ask(
                "links.peer_access",
                "nvmlDeviceGetP2PStatus",
                one,
                other,
                nvml.NVML_P2P_CAPS_INDEX_WRITE,
            )
            peer[a][b] = peer[b][a] = None if status is None else status == nvml.NVML_P2P_STATUS_OK
        self._tell("links.matrix", matrix)
        self._tell("links.peer_access", peer)

    def _nvlinks(self, handles: dict[int, Any]) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
        """Active links of each device to a switch, and of each pair of devices directly."""
        to_switch = dict.fromkeys(handles, 0)
        to_gpu: dict[tuple[int, int], int] = {}
        address: dict[str, int] = {}
        for index, gpu in handles.items():
            pci = self._ask("?", "nvmlDeviceGetPciInfo", gpu)
            if pci is not None:
                address[pci_address(_text(pci.busId) or "")] = index
        for index, gpu in handles.items():
            for link in range(_NVLINKS):
                state = self._ask("?", "nvmlDeviceGetNvLinkState", gpu, link)
                if state is None:
                    break
                if not state:
                    continue
                if self._ask("?", "nvmlDeviceGetNvLinkRemoteDeviceType", gpu, link) == _SWITCH:
                    to_switch[index] += 1
                    continue
                remote = self._ask("?", "nvmlDeviceGetNvLinkRemotePciInfo", gpu, link)
                other = None if remote is None else address.get(pci_address(_text(remote.busId) or ""))
                if other is not None and index < other:
                    to_gpu[(index, other)] = to_gpu.get((index, other), 0) + 1
        return to_switch, to_gpu


def pci_address(bus_id: Optional[str]) -> str:
    """NVML's "00000000:18:00.0" as sysfs writes it: "0000:18:00.0" (longer domains stay)."""
    domain, _colon, rest = (bus_id or "").lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}"
    except ValueError:
        return bus_id or ""


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
