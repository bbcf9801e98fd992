# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPUs by PCI device id, for plans of hosts on which no driver runs yet. Private to gpufleet.inference."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB, MIB

NVIDIA = "10de"


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


def _hex(text: Any) -> str:
    value = str(text).lower()
    return value[2:] if value.startswith("0x") else value
