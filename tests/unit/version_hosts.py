"""Facts of hosts for the version rules and baselines: a good one, and a way to spoil it."""

from __future__ import annotations

import copy
from typing import Any

PCI = {"h100": "0x2330", "b200": "0x2901", "v100": "0x1db5", "rtx4090": "0x2684", "gh200": "0x2342", "h200": "0x2335"}
KINDS = {
    "h100": ("NVIDIA H100 80GB HBM3", "hopper", "9.0"),
    "h200": ("NVIDIA H200", "hopper", "9.0"),
    "gh200": ("NVIDIA GH200 120GB", "hopper", "9.0"),
    "b200": ("NVIDIA B200", "blackwell", "10.0"),
    "v100": ("Tesla V100-SXM2-32GB", "volta", "7.0"),
    "rtx4090": ("NVIDIA GeForce RTX 4090", "ada", "8.9"),
}
KERNEL = "6.1.0-40-amd64"
NEXT = "6.1.0-41-amd64"
TODAY = "2026-11-29"


def gpu_facts(kind: str = "h100", driver: str = "580.95.05", **changes: Any) -> dict[str, Any]:
    """A host with one GPU on which everything agrees; ``changes`` go to its driver."""
    name, architecture, capability = KINDS[kind]
    module = {"path": "/lib/modules/x/nvidia.ko", "version": driver, "flavour": "open"}
    facts: dict[str, Any] = {
        "present": True,
        "pci": [{"address": "0000:18:00.0", "vendor_id": "0x10de", "device_id": PCI[kind], "driver": "nvidia"}],
        "driver": {
            "running": driver,
            "installed": driver,
            "userland": driver,
            "libcuda": driver,
            "flavour": "open",
            "modules_by_kernel": {KERNEL: module, NEXT: dict(module)},
        },
        "cuda_driver_version": "13.0" if driver.startswith("58") else "12.4",
        "devices": [
            {
                "index": 0,
                "pci_address": "0000:18:00.0",
                "name": name,
                "architecture": architecture,
                "compute_capability": capability,
            }
        ],
        "fabric": {"devices": {}, "switches": 0, "manager": None},
        "instances": [],
        "findings": [],
        "unavailable": {},
    }
    facts["driver"].update(changes)
    return facts


def with_switches(facts: dict[str, Any], manager: str | None = "active") -> dict[str, Any]:
    facts = copy.deepcopy(facts)
    facts["fabric"].update(switches=4, manager=manager)
    return facts


def host_facts(packages: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    wheels = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.16.1"}
    facts: dict[str, Any] = {
        "arch": "x86_64",
        "glibc": "2.36",
        "kernel": KERNEL,
        "kernels": [KERNEL, NEXT],
        "python": [{"path": "/usr/bin/python3.12", "version": "3.12"}],
        "packages": {
            name: {"version": version, "held": False, "candidate": None} for name, version in (packages or {}).items()
        },
        "engines": [{"version": "0.32.0", "complete": True, "python": "3.12.4", "wheels": wheels}],
        "findings": [],
    }
    facts.update(changes)
    return facts
