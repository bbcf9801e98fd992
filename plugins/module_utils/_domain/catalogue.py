# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPUs by PCI device id, for plans of hosts on which no driver runs yet. Private to gpufleet.inference.

Where a driver runs, the GPUs speak for themselves or not at all: the catalogue never fills in for a silent NVML.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB, MIB

NVIDIA = "10de"
# Findings of the facts that say why NVML told nothing.
SILENT = ("driver_library_mismatch", "nvml_unavailable")


def entry(data: Mapping[str, Any], device_id: str) -> Optional[Mapping[str, Any]]:
    """The catalogue's entry for a PCI device id ("0x2330" or "2330"); None when it is not listed."""
    text = str(device_id).lower()
    found = data["devices"].get(text[2:] if text.startswith("0x") else text)
    return found if isinstance(found, Mapping) else None


def torch_total(data: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    """Bytes that torch will see on such a GPU; 0 where it shares the host's memory.

    From a recorded start where there is one, else NVML's total less what drivers reserve (the table says how much).
    """
    if found.get("torch_gib"):
        return int(found["torch_gib"] * GIB)
    if not found.get("nvml_mib"):
        return 0
    nvml = int(found["nvml_mib"]) * MIB
    rule = data["torch_rule"]
    return nvml - max(int(rule["reserved_mib"]) * MIB, int(nvml * rule["reserved_share"]))


def expected_devices(data: Mapping[str, Any], pci: List[Mapping[str, Any]]) -> Tuple[List[Dict[str, Any]], List[str]]:
    """Device facts for the NVIDIA GPUs of a PCI list, as gpu_facts would show them, marked ``expected``.

    Also returns the PCI addresses of GPUs that the catalogue does not know. There are no UUIDs without a driver: the
    PCI address stands in for them.
    """
    devices: List[Dict[str, Any]] = []
    unknown: List[str] = []
    ours = [item for item in pci if _hex(item.get("vendor_id") or NVIDIA) == NVIDIA]
    for index, item in enumerate(sorted(ours, key=lambda item: str(item.get("address")))):
        address = str(item.get("address"))
        found = entry(data, str(item.get("device_id") or ""))
        if found is None:
            unknown.append(address)
            continue
        total = torch_total(data, found)
        devices.append(
            {
                "index": index,
                "uuid": address,
                "pci_address": address,
                "name": found["name"],
                "architecture": found["architecture"],
                "compute_capability": found["capability"],
                "memory": {"total": total or None, "reserved": 0, "free": total or None, "used": 0},
                "mig": {"mode": "disabled", "devices": []},
                "processes": [],
                "numa_node": item.get("numa_node"),
                "expected": True,
            }
        )
    return devices, unknown


def silent(gpu: Mapping[str, Any]) -> Optional[Finding]:
    """Why no GPU of a running driver tells what it is; None where one does, or where no driver runs.

    gpu: facts. A GPU without memory of its own answers with its compute capability alone.
    """
    running = (gpu.get("driver") or {}).get("running")
    devices = gpu.get("devices") or []
    if not running or any(device.get("compute_capability") for device in devices):
        return None
    unavailable = gpu.get("unavailable") or {}
    reason = unavailable.get("nvml") or unavailable.get("devices") or unavailable.get("devices.0") or "no reason given"
    known = next((item for item in gpu.get("findings") or [] if item.get("code") in SILENT), None) or {}
    count = len(devices or gpu.get("pci") or [])
    text = f"driver {running} runs and NVML tells memory and compute capability of none of {count} GPU(s) ({reason})"
    if known.get("text"):
        text = f"{text}; {known['text']}"
    return Finding(
        str(known.get("code") or ("nvml_unavailable" if devices else "no_devices")),
        "error",
        "driver",
        text,
        str(known.get("remedy") or "Compare `nvidia-smi` on the host and its kernel log."),
    )


def silent_devices(gpu: Mapping[str, Any], why: str) -> List[Dict[str, Any]]:
    """The devices of a silent NVML as facts: those that the kernel module names, else one for each PCI function.

    They are there to be refused: ``silent`` carries the reason ``why``.
    """
    pci = sorted(gpu.get("pci") or [], key=lambda item: str(item.get("address")))
    named = gpu.get("devices") or [{"pci_address": item.get("address"), "name": item.get("name")} for item in pci]
    return [{**device, "index": index, "silent": why} for index, device in enumerate(named)]


def _hex(text: Any) -> str:
    value = str(text).lower()
    return value[2:] if value.startswith("0x") else value
