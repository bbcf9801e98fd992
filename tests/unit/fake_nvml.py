"""A stand-in for the module pynvml: any number of devices, any fault on any call. Works across a fork."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

GIB = 1024**3
HANG = "hang"
CRASH = "crash"


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML {value}")
        self.value = value


class Fabric(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
        ("healthSummary", ctypes.c_uint8),
    ]


class OldFabric(ctypes.Structure):
    _fields_ = Fabric._fields_[:-1]


def device(index: int, **changes: Any) -> dict[str, Any]:
    values = {
        "uuid": f"GPU-{index:08d}",
        "bus": f"00000000:{0x18 + index:02X}:00.0".encode(),
        "name": "NVIDIA H100 80GB HBM3",
        "processes": [],
        "mig": None,
        "nvlinks": 0,
        "persistence": 1,
    }
    return {**values, **changes}


class FakeNvml:
    """``faults`` maps (function, device index or None) to a code, HANG, CRASH, or seconds of delay as a float."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_TEMPERATURE_GPU = 0
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_STATUS_OK = 0
    nvmlMemory_v2 = 0x02000028
    c_nvmlGpuFabricInfo_v3_t = Fabric
    c_nvmlGpuFabricInfo_v2_t = OldFabric

    def __init__(self, devices: list[dict[str, Any]], faults: dict[tuple[str, int | None], Any] | None = None) -> None:
        self.devices = devices
        self.faults = faults or {}

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvml"):
            raise AttributeError(function)

        def call(*args: Any) -> Any:
            on = args[0] if args and isinstance(args[0], int) else None
            if isinstance(on, int) and on >= 1000:  # a MIG device
                on = on // 1000 - 1
            for key in ((function, on), (function, None)):
                if key in self.faults:
                    self._fault(self.faults[key])
                    break
            return getattr(self, f"_{function}")(*args)

        return call

    @staticmethod
    def _fault(fault: Any) -> None:
        if fault == HANG:
            time.sleep(60)
        elif fault == CRASH:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif isinstance(fault, float):
            time.sleep(fault)
        else:
            raise NVMLError(fault)

    def _nvmlInit(self):
        return None

    def _nvmlSystemGetNVMLVersion(self):
        return "12.550.163.01"

    def _nvmlSystemGetDriverVersion(self):
        return "550.163.01"

    def _nvmlSystemGetCudaDriverVersion(self):
        return 12040

    def _nvmlDeviceGetCount(self):
        return len(self.devices)

    def _nvmlDeviceGetHandleByIndex(self, index):
        return index

    def _nvmlDeviceGetUUID(self, gpu):
        if gpu >= 1000:
            return f"MIG-{gpu}"
        return self.devices[gpu]["uuid"]

    def _nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=self.devices[gpu]["bus"])

    def _nvmlDeviceGetName(self, gpu):
        if gpu >= 1000:
            return f"{self.devices[gpu // 1000 - 1]['name']} MIG 1g.10gb"
        return self.devices[gpu]["name"]

    def _nvmlDeviceGetArchitecture(self, gpu):
        return 9

    def _nvmlDeviceGetCudaComputeCapability(self, gpu):
        return (9, 0)

    def _nvmlDeviceGetMinorNumber(self, gpu):
        return gpu

    def _nvmlDeviceGetMemoryInfo(self, gpu, version=None):
        if gpu >= 1000:
            return SimpleNamespace(total=10 * GIB, free=9 * GIB, used=GIB)
        info = SimpleNamespace(total=80 * GIB, free=78 * GIB, used=GIB)
        if version:
            info.reserved = GIB
        return info

    def _nvmlDeviceGetPersistenceMode(self, gpu):
        return self.devices[gpu]["persistence"]

    def _nvmlDeviceGetComputeMode(self, gpu):
        return 0

    def _nvmlDeviceGetAccountingMode(self, gpu):
        return 0

    def _nvmlDeviceGetPowerManagementLimit(self, gpu):
        return 700_000

    _nvmlDeviceGetPowerManagementDefaultLimit = _nvmlDeviceGetPowerManagementLimit

    def _nvmlDeviceGetPowerUsage(self, gpu):
        return 70_000

    def _nvmlDeviceGetPowerManagementLimitConstraints(self, gpu):
        return [200_000, 700_000]

    def _nvmlDeviceGetClockInfo(self, gpu, clock):
        return 345

    def _nvmlDeviceGetMaxClockInfo(self, gpu, clock):
        return 1980

    def _nvmlDeviceGetEccMode(self, gpu):
        return [1, 1]

    def _nvmlDeviceGetMigMode(self, gpu):
        if self.devices[gpu]["mig"] is None:
            return [0, 0]
        return [1, 1]

    def _nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, number):
        if number >= self.devices[gpu]["mig"]:
            raise NVMLError(6)
        return (gpu + 1) * 1000 + number

    def _nvmlDeviceGetGpuInstanceId(self, gpu):
        return gpu % 1000 + 7

    def _nvmlDeviceGetComputeInstanceId(self, gpu):
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, gpu):
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.devices[gpu]["processes"]]

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, gpu):
        return []

    _nvmlDeviceGetGraphicsRunningProcesses_v3 = _nvmlDeviceGetMPSComputeRunningProcesses_v3

    def _nvmlDeviceGetComputeRunningProcesses_v2(self, gpu):
        return self._nvmlDeviceGetComputeRunningProcesses_v3(gpu)

    _nvmlDeviceGetMPSComputeRunningProcesses_v2 = _nvmlDeviceGetMPSComputeRunningProcesses_v3
    _nvmlDeviceGetGraphicsRunningProcesses_v2 = _nvmlDeviceGetMPSComputeRunningProcesses_v3

    def _nvmlDeviceGetTemperature(self, gpu, sensor):
        return 31

    def _nvmlDeviceGetRemappedRows(self, gpu):
        return (0, 0, 0, 0)

    def _nvmlDeviceGetRetiredPagesPendingStatus(self, gpu):
        raise NVMLError(3)

    def _nvmlDeviceGetFieldValues(self, gpu, fields):
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))]

    def _nvmlDeviceGetGpuFabricInfoV(self, gpu, info):
        info._obj.state = 3
        if hasattr(info._obj, "healthSummary"):
            info._obj.healthSummary = 1
        return 0

    def _nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 50

    def _nvmlDeviceGetP2PStatus(self, one, other, index):
        return 0

    def _nvmlDeviceGetNvLinkState(self, gpu, link):
        if not self.devices[gpu]["nvlinks"]:
            raise NVMLError(3)
        return int(link < self.devices[gpu]["nvlinks"])

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        return 2
