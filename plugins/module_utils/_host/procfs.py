# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What /proc and /sys tell about processes, devices and sockets. Private to gpufleet.inference."""

from __future__ import annotations

import os
import re
import struct
from typing import Iterator, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

NVIDIA = "0x10de"
AMD = "0x1002"
INTEL = "0x8086"
# PCI classes: 0x0300 VGA, 0x0302 3D controller, 0x0380 other display, 0x1200 processing accelerator.
_DISPLAY = ("0x0300", "0x0302", "0x0380")
_ACCELERATOR = "0x1200"
_SWITCH = "0x0680"  # bridge, other: an NVSwitch when the vendor is NVIDIA


# -- PCI ---------------------------------------------------------------------------------------------------------------


def pci_gpus(root: Root) -> tuple[list[dict[str, Optional[str]]], list[dict[str, Optional[str]]], int]:
    """NVIDIA GPUs, other vendors' GPUs, and the number of NVSwitches, by PCI address.

    Intel's class 0x0300 is left out: it is the display part of a processor on most machines.
    """
    ours: list[dict[str, Optional[str]]] = []
    others: list[dict[str, Optional[str]]] = []
    switches = 0
    base = "/sys/bus/pci/devices"
    for address in root.listdir(base):
        vendor = _line(root, f"{base}/{address}/vendor")
        if vendor != NVIDIA and vendor not in (AMD, INTEL):
            continue
        kind = (_line(root, f"{base}/{address}/class") or "")[:6]
        if vendor == NVIDIA and kind == _SWITCH:
            switches += 1
        if kind not in _DISPLAY and kind != _ACCELERATOR:
            continue
        driver = root.readlink(f"{base}/{address}/driver")
        entry = {
            "address": address,
            "vendor_id": vendor,
            "device_id": _line(root, f"{base}/{address}/device"),
            "class_id": _line(root, f"{base}/{address}/class"),
            "name": None,
            "driver": driver.rsplit("/", 1)[-1] if driver else None,
        }
        if vendor == NVIDIA:
            ours.append(entry)
        elif vendor != INTEL or kind != "0x0300":
            others.append(entry)
    return ours, others, switches


def pci_locality(root: Root, address: str) -> tuple[Optional[int], Optional[str]]:
    """The NUMA node (None when the machine has a single one) and the CPU list next to a PCI device."""
    base = f"/sys/bus/pci/devices/{address}"
    node = _line(root, f"{base}/numa_node")
    cpus = _line(root, f"{base}/local_cpulist")
    return (int(node) if node and node.isdigit() else None), cpus or None


def driver_gpus(root: Root) -> dict[str, dict[str, str]]:
    """What the NVIDIA kernel module itself says about each GPU, by PCI address: {"Model": …, "GPU UUID": …}."""
    found = {}
    for address in root.listdir("/proc/driver/nvidia/gpus"):
        text = root.read_text(f"/proc/driver/nvidia/gpus/{address}/information") or ""
        pairs = (line.partition(":") for line in text.splitlines())
        found[address] = {key.strip(): value.strip() for key, _colon, value in pairs if value.strip()}
    return found


# -- the three driver versions -----------------------------------------------------------------------------------------

_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
_MODULE = re.compile(r"^nvidia(?:-[a-z0-9.-]+)?\.ko(?:\.(?:xz|zst|gz))?$")
_MODULE_PARTS = re.compile(r"-(?:drm|modeset|uvm|peermem|fs|wmi-ec-backlight|gpu|cspmu|vgpu-vfio)\.ko")
_LIBRARY = re.compile(r"\.so\.(\d{3,}(?:\.\d+)+)$")
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/local/lib",
    "/usr/lib/wsl/lib",
)


def running_driver(root: Root) -> tuple[Optional[str], Optional[str]]:
    """Version and flavour ("open" or "proprietary") of the loaded kernel module; (None, None) when none is loaded."""
    text = root.read_text("/proc/driver/nvidia/version") or ""
    first = text.splitlines()[0] if text else ""
    match = _VERSION.search(first)
    version = match.group(1) if match else None
    if version is None:
        version = _line(root, "/sys/module/nvidia/version") or None
    if version is None:
        return None, None
    if not first:
        return version, None
    return version, "open" if "Open Kernel Module" in first else "proprietary"


def library_version(root: Root, name: str) -> tuple[Optional[str], Optional[str]]:
    """Path and version of a driver library ("libcuda.so.1") by the name of the file behind its links.

    The version is None when the file's name carries none.
    """
    for folder in _LIBRARY_FOLDERS:
        path = f"{folder}/{name}"
        if root.exists(path):
            real = root.realpath(path)
            match = _LIBRARY.search(real)
            return real, match.group(1) if match else None
    return None, None


def driver_modules(root: Root) -> dict[str, dict[str, Optional[str]]]:
    """The NVIDIA module on disk per kernel: {kernel: {path, version, flavour}}.

    Found through modules.dep (what modprobe can load), version and licence read from the module itself, else from the
    folder that DKMS built it in; None when the file is compressed and DKMS does not know it.
    """
    found: dict[str, dict[str, Optional[str]]] = {}
    for base in ("/lib/modules", "/usr/lib/modules"):
        for kernel in root.listdir(base):
            if kernel in found:
                continue
            path = _module_path(root, f"{base}/{kernel}")
            if path is None:
                continue
            info = module_info(root, path)
            licence = info.get("license")
            version = info.get("version") or _dkms_version(root, kernel)
            flavour = None
            if licence:
                flavour = "open" if "MIT" in licence or "GPL" in licence else "proprietary"
            found[kernel] = {"path": path, "version": version, "flavour": flavour}
    return found


def _module_path(root: Root, folder: str) -> Optional[str]:
    names = []
    listing = root.read_text(f"{folder}/modules.dep")
    if listing is not None:
        names = [line.partition(":")[0] for line in listing.splitlines() if "nvidia" in line.partition(":")[0]]
    else:
        for place in (
            "updates/dkms",
            "updates",
            "extra",
            "extra/nvidia",
            "kernel/drivers/video",
            "weak-updates/nvidia",
        ):
            names += [f"{place}/{name}" for name in root.listdir(f"{folder}/{place}")]
    for name in names:
        file = name.rsplit("/", 1)[-1]
        if _MODULE.match(file) and not _MODULE_PARTS.search(file):
            return name if name.startswith("/") else f"{folder}/{name}"
    return None


def _dkms_version(root: Root, kernel: str) -> Optional[str]:
    for name in root.listdir("/var/lib/dkms"):
        if not name.startswith("nvidia") or name.startswith("nvidia-fs"):
            continue
        for version in root.listdir(f"/var/lib/dkms/{name}"):
            if _VERSION.fullmatch(version) and root.exists(f"/var/lib/dkms/{name}/{version}/{kernel}"):
                return version
    return None


def module_info(root: Root, path: str) -> dict[str, str]:
    """The keys of an uncompressed kernel module's .modinfo section; empty for anything else."""
    try:
        with open(root.path(path), "rb") as stream:
            header = stream.read(64)
            if header[:6] != b"\x7fELF\x02\x01":
                return {}
            offset = struct.unpack_from("<Q", header, 40)[0]
            size, count, names = struct.unpack_from("<HHH", header, 58)
            stream.seek(offset)
            table = stream.read(size * count)
            sections = [struct.unpack_from("<IIQQQQ", table, size * number) for number in range(count)]
            stream.seek(sections[names][4])
            strings = stream.read(sections[names][5])
            for section in sections:
                if strings[section[0] : section[0] + 9] == b".modinfo\0":
                    stream.seek(section[4])
                    text = stream.read(section[5]).decode("utf-8", "replace")
                    pairs = (entry.partition("=") for entry in text.split("\0") if entry)
                    return {key: value for key, _equals, value in pairs}
    except (OSError, struct.error, IndexError):
        pass
    return {}


# -- processes ---------------------------------------------------------------------------------------------------------


def pids(root: Root) -> list[int]:
    """All process ids, ascending."""
    return sorted(int(name) for name in root.listdir("/proc") if name.isdigit())


def process_name(root: Root, pid: int) -> Optional[str]:
    """The name of a process as the kernel keeps it (at most 15 characters); never blocks on the process."""
    return _line(root, f"/proc/{pid}/comm")


def manager_prefix(root: Root) -> str:
    """The control group above the one of the service manager: "" on a machine, longer in some containers."""
    path = _control_group(root, 1) or ""
    for tail in ("/init.scope", "/systemd"):
        if path.endswith(tail):
            return path[: -len(tail)]
    return "" if path == "/" else path


def unit_of(root: Root, pid: int, prefix: str = "") -> Optional[str]:
    """The systemd unit of a process by its control group (version 1, 2 and hybrid); None when it has none."""
    path = _control_group(root, pid)
    if path is None:
        return None
    if prefix and path.startswith(prefix + "/"):
        path = path[len(prefix) :]
    return next((part for part in path.split("/") if part.endswith((".service", ".scope"))), None)


def _control_group(root: Root, pid: int) -> Optional[str]:
    unified = None
    for line in (root.read_text(f"/proc/{pid}/cgroup") or "").splitlines():
        _number, _colon, rest = line.partition(":")
        controllers, _colon, path = rest.partition(":")
        if controllers == "name=systemd":
            return path
        if line.startswith("0::"):
            unified = path
    return unified


def owner(root: Root, pid: int) -> Optional[int]:
    """The user id of a process."""
    try:
        return os.stat(root.path(f"/proc/{pid}")).st_uid
    except OSError:
        return None


def environment(root: Root, pid: int) -> dict[str, str]:
    """The environment a process was started with. Can sleep with a process that sleeps: read it in a child."""
    text = root.read_text(f"/proc/{pid}/environ") or ""
    pairs = (entry.partition("=") for entry in text.split("\0") if entry)
    return {key: value for key, _equals, value in pairs}


# -- sockets -----------------------------------------------------------------------------------------------------------


def listening(root: Root) -> Iterator[tuple[str, int, str]]:
    """(address, port, socket inode) of each listening TCP socket."""
    for name in ("tcp", "tcp6"):
        for line in (root.read_text(f"/proc/net/{name}") or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A":
                address, _colon, port = fields[1].partition(":")
                yield _address(address), int(port, 16), fields[9]


def _address(text: str) -> str:
    import socket

    words = bytes.fromhex(text)
    data = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def descriptors(root: Root, pid: int) -> list[str]:
    """Where the open descriptors of a process point ("socket:[123]", "/dev/nvidia0"); empty without the right."""
    folder = f"/proc/{pid}/fd"
    links = (root.readlink(f"{folder}/{name}") for name in root.listdir(folder))
    return [link for link in links if link]


def _line(root: Root, path: str) -> Optional[str]:
    text = root.read_text(path)
    return None if text is None else text.strip()
