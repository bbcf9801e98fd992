"""What the engine sees and holds of the GPUs: NVML through ctypes, device nodes, and its own footprint."""

import ctypes
import os

from vllm import VERSION

GIB = 1 << 30
# Where the simulator reads them: beside its state (GPUSIM_STATE), else in the folder of a host and in the second one.
_STATE = os.environ.get("GPUSIM_STATE")
_ON_A_HOST = ("/var/lib/gpusim/processes", "/dev/shm/gpusim")
REGISTRATIONS = (os.path.join(os.path.dirname(_STATE), "processes"),) if _STATE else _ON_A_HOST


class DeviceError(RuntimeError):
    """The GPU part of a start failed; the text is vLLM's or CUDA's."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _MemoryV2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class Device:
    """One visible GPU: CUDA ordinal, NVML index, UUID, and memory as CUDA reports it."""

    def __init__(self, library, ordinal, index, handle):
        self._library, self.ordinal, self.index, self._handle = library, ordinal, index, handle
        text = ctypes.create_string_buffer(96)
        _check(library.nvmlDeviceGetUUID(handle, text, 96), "nvmlDeviceGetUUID")
        self.uuid = text.value.decode()
        minor = ctypes.c_uint(index)
        if hasattr(library, "nvmlDeviceGetMinorNumber"):
            library.nvmlDeviceGetMinorNumber(handle, ctypes.byref(minor))
        self.minor = minor.value

    def memory(self):
        """(free, total) in bytes as cudaMemGetInfo gives them: without the driver's reserved part."""
        if hasattr(self._library, "nvmlDeviceGetMemoryInfo_v2"):
            info = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | (2 << 24))
            if self._library.nvmlDeviceGetMemoryInfo_v2(self._handle, ctypes.byref(info)) == 0:
                return info.free, info.total - info.reserved
        plain = _Memory()
        _check(self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(plain)), "nvmlDeviceGetMemoryInfo")
        return plain.free, plain.total

    def name(self):
        text = ctypes.create_string_buffer(96)
        self._library.nvmlDeviceGetName(self._handle, text, 96)
        return text.value.decode()


def _check(code, call):
    if code:
        raise DeviceError(f"NVMLError: {call} returned {code}")


def _library():
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        raise DeviceError(
            "Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` "
            "to turn on verbose logging to help debug the issue."
        ) from None
    _check(library.nvmlInit_v2(), "nvmlInit_v2")
    return library


def _index_of(library, text):
    """NVML index of one entry of CUDA_VISIBLE_DEVICES; a UUID only where the release resolves it (0.24.0)."""
    if VERSION < (0, 24, 0):
        return int(text)
    if text.startswith(("GPU-", "MIG-")):
        handle, index = ctypes.c_void_p(), ctypes.c_uint()
        if library.nvmlDeviceGetHandleByUUID(text.encode(), ctypes.byref(handle)):
            raise DeviceError(f"CUDA_VISIBLE_DEVICES names {text}, which NVML does not know")
        _check(library.nvmlDeviceGetIndex(handle, ctypes.byref(index)), "nvmlDeviceGetIndex")
        return index.value
    return int(text)


def visible(device_ids=None):
    """The GPUs CUDA would enumerate for this process, in CUDA order."""
    library = _library()
    count = ctypes.c_uint()
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount_v2")
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = list(range(count.value)) if setting is None else [_index_of(library, t) for t in setting.split(",") if t]
    if device_ids:
        indices = [_index_of(library, t) if t.startswith(("GPU-", "MIG-")) else indices[int(t)] for t in device_ids]
    devices = []
    for ordinal, index in enumerate(indices):
        handle = ctypes.c_void_p()
        if index >= count.value or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            raise DeviceError(f"CUDA error: invalid device ordinal ({index} of {count.value} GPUs)")
        devices.append(Device(library, ordinal, index, handle))
    if not devices:
        raise DeviceError("RuntimeError: No CUDA GPUs are available")
    return devices


def open_nodes(devices):
    """Open the device nodes a CUDA process of these GPUs opens; the descriptors stay open as long as it lives."""
    root = os.environ.get("GPUFLEET_STUB_DEV", "/dev")
    names = ["nvidiactl", "nvidia-uvm", *(f"nvidia{device.minor}" for device in devices)]
    descriptors = []
    for name in names:
        try:
            descriptors.append(os.open(os.path.join(root, name), os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise DeviceError(
                f"RuntimeError: No CUDA GPUs are available (cuInit: cannot open {root}/{name}: {error.strerror})"
            ) from None
    return descriptors


def refuse_if_short(device, utilization):
    """vLLM's own check at start (from 0.9.1): free memory must cover the share it was asked to take."""
    free, total = device.memory()
    requested = int(total * utilization)
    if VERSION >= (0, 9, 1) and free < requested:
        where = f"device cuda:{device.ordinal}" if VERSION >= (0, 14, 0) else "device"
        raise ValueError(
            f"Free memory on {where} ({free / GIB:.2f}/{total / GIB:.2f} GiB) on startup is less than desired GPU "
            f"memory utilization ({utilization}, {requested / GIB:.2f} GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes."
        )
    return requested


def hold(device, size):
    """Let the simulated GPU count `size` bytes for this process as long as it lives (a later call replaces the size).

    The simulator reads one file per process and drops those whose process is gone. A sandboxed unit sees /var
    read-only; the second folder is the simulator's as well and is never read-only.
    """
    with open("/proc/self/stat", encoding="utf-8") as source:
        started = source.read().rsplit(")", 1)[1].split()[19]
    with open("/proc/self/comm", encoding="utf-8") as source:
        name = source.read().strip()
    text = f"name={name}\nstart={started}\ndevice={device.uuid}\nbytes={size}\n"
    for folder in REGISTRATIONS:
        try:
            if folder.startswith("/dev/") and not os.path.isdir(folder):
                os.mkdir(folder)
                os.chmod(folder, 0o1777)
            partial = os.path.join(folder, f".{os.getpid()}")
            with open(partial, "w", encoding="utf-8") as target:
                target.write(text)
            os.replace(partial, os.path.join(folder, str(os.getpid())))
            return
        except OSError as error:
            problem = error
    raise DeviceError(f"the GPU simulator takes no registrations: {problem}")
