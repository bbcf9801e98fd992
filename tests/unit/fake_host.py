"""Lays out a host's files in a folder: PCI devices, procfs, libraries and instances as the adapters expect them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder@host)  Mon Aug  4\n"
    "GCC version: 12\n"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Jan  2 09:00:00 UTC 2025\nGCC version: 12\n"


class FakeHost:
    """``root`` is what the adapters read; each method adds one thing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = Root(str(folder))
        self.file("/proc/1/cgroup", "0::/init.scope\n")

    def file(self, path: str, content: str | bytes = "") -> FakeHost:
        target = self.folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return self

    def link(self, path: str, to: str) -> FakeHost:
        link = self.folder / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(to)
        return self

    def pci(self, address: str, vendor: str, device: str, kind: str, driver: str | None = None) -> FakeHost:
        base = f"/sys/bus/pci/devices/{address}"
        self.file(f"{base}/vendor", vendor + "\n").file(f"{base}/device", device + "\n").file(
            f"{base}/class", kind + "\n"
        )
        self.file(f"{base}/numa_node", "0\n").file(f"{base}/local_cpulist", "0-31\n")
        if driver:
            self.link(f"{base}/driver", f"../../../../bus/pci/drivers/{driver}")
        return self

    def h100(self, address: str, driver: str | None = "nvidia") -> FakeHost:
        return self.pci(address, "0x10de", "0x2330", "0x030200", driver)

    def running(self, version: str = "550.163.01", text: str = OPEN) -> FakeHost:
        return self.file("/proc/driver/nvidia/version", text.format(version)).file(
            "/sys/module/nvidia/version", version
        )

    def known_to_driver(self, address: str, uuid: str) -> FakeHost:
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\nGPU UUID: \t {uuid}\nBus Location: \t {address}\n"
        return self.file(f"/proc/driver/nvidia/gpus/{address}/information", text)

    def library(self, version: str = "550.163.01", folder: str = "/usr/lib/x86_64-linux-gnu") -> FakeHost:
        for name in ("libnvidia-ml.so", "libcuda.so"):
            self.file(f"{folder}/{name}.{version}").link(f"{folder}/{name}.1", f"{name}.{version}")
        return self

    def module(
        self, version: str, kernel: str | None = None, name: str = "nvidia.ko", licence: str = "Dual MIT/GPL"
    ) -> FakeHost:
        kernel = kernel or os.uname().release
        self.file(
            f"/lib/modules/{kernel}/modules.dep",
            f"kernel/drivers/video/fbdev/nvidia/nvidiafb.ko:\nupdates/dkms/{name}:\n",
        )
        return self.file(f"/lib/modules/{kernel}/updates/dkms/{name}", module_file(version, licence))

    def process(
        self, pid: int, name: str, cgroup: str, environ: dict[str, str] | None = None, argv: str = ""
    ) -> FakeHost:
        self.file(f"/proc/{pid}/comm", name[:15] + "\n").file(f"/proc/{pid}/cgroup", cgroup)
        self.file(f"/proc/{pid}/cmdline", "\0".join((argv or name).split()) + "\0")
        return self.file(f"/proc/{pid}/environ", "".join(f"{key}={value}\0" for key, value in (environ or {}).items()))

    def instance(self, name: str, generation: str, record: dict[str, Any], current: bool = True) -> FakeHost:
        self.file(f"/etc/vllm/{name}/{generation}/instance.json", json.dumps(record))
        if current:
            self.link(f"/etc/vllm/{name}/current", generation)
        return self


def module_file(version: str, licence: str) -> bytes:
    """The smallest ELF file with a .modinfo section."""
    import struct

    names = b"\0.modinfo\0.shstrtab\0"
    info = f"license={licence}\0version={version}\0srcversion=ABC\0".encode()
    at_info, at_names = 64, 64 + len(info)
    table = at_names + len(names)
    section = "<IIQQQQIIQQ"
    sections = struct.pack(section, *[0] * 10)
    sections += struct.pack(section, 1, 1, 0, 0, at_info, len(info), 0, 0, 1, 0)
    sections += struct.pack(section, 10, 3, 0, 0, at_names, len(names), 0, 0, 1, 0)
    header = (
        b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    )
    return header + info + names + sections
