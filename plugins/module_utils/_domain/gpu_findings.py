# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the GPU facts of a host mean for a person. Private to gpufleet.inference."""

from __future__ import annotations

from typing import Any, Mapping

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import gib

_MPS = ("nvidia-cuda-mps", "nvidia-persiste")


def gpu_findings(gpu: dict[str, Any]) -> list[Finding]:
    """The findings of facts in the schema of gpu_facts (without their own ``findings``), worst first."""
    found = [*_hardware(gpu), *driver_findings(gpu), *_devices(gpu), *_fabric(gpu), *_processes(gpu)]
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def _hardware(gpu: dict[str, Any]) -> list[Finding]:
    found = []
    if not gpu["pci"] and gpu["other_gpus"]:
        vendors = sorted({"AMD" if entry["vendor_id"] == "0x1002" else "Intel" for entry in gpu["other_gpus"]})
        found.append(
            Finding(
                "other_vendor",
                "warning",
                "host",
                f"The host has {len(gpu['other_gpus'])} GPU(s) of {' and '.join(vendors)} and none of NVIDIA.",
                "Take the host out of the group gpu_hosts: only NVIDIA GPUs are managed.",
            )
        )
    elif not gpu["pci"] and not gpu["devices"]:
        found.append(
            Finding("no_gpu", "warning", "host", "No GPU on the PCI bus.", "Take the host out of the group gpu_hosts.")
        )
    taken = sorted({entry["driver"] for entry in gpu["pci"] if entry["driver"] not in (None, "nvidia")})
    if taken:
        found.append(
            Finding(
                "other_driver",
                "warning",
                ", ".join(entry["address"] for entry in gpu["pci"] if entry["driver"] in taken),
                f"The kernel driver {' and '.join(taken)} holds GPUs that the NVIDIA driver should have.",
                "Unbind it (for nouveau: blacklist it and reboot).",
            )
        )
    return found


def driver_findings(gpu: Mapping[str, Any]) -> list[Finding]:
    """What differs between the running module, the module on disk and the libraries, and what would help."""
    driver = gpu["driver"]
    running, installed, userland = driver["running"], driver["installed"], driver["userland"]
    nvml = gpu["unavailable"].get("nvml", "")
    found = []
    if gpu["pci"] and running is None:
        if installed:
            text = f"The NVIDIA driver {installed} is installed but not loaded."
            remedy = "Load it (modprobe nvidia) or look for the reason in the kernel log (dmesg | grep NVRM)."
            found.append(Finding("driver_not_loaded", "error", "driver", text, remedy))
        else:
            text = f"{len(gpu['pci'])} NVIDIA GPU(s) on the PCI bus and no NVIDIA driver for the running kernel."
            found.append(Finding("driver_missing", "warning", "driver", text, "Install a driver."))
    elif running and (nvml.endswith("(NVML 18)") or _differ(userland, running)):
        text = f"The kernel runs driver {running}, the user-space library is {userland or 'of another version'}."
        remedy = _what_helps(running, installed, userland)
        found.append(Finding("driver_library_mismatch", "error", "driver", text, remedy))
    elif running and nvml:
        remedy = "Look in the kernel log for lines with NVRM or Xid."
        if nvml.endswith("(NVML 12)"):
            remedy = "Install the library of the running driver's version."
        found.append(Finding("nvml_unavailable", "error", "driver", f"NVML tells nothing: {nvml}.", remedy))
    if running and installed and running != installed:
        text = f"Driver {installed} is installed for the running kernel, {running} is loaded."
        found.append(Finding("driver_reload_due", "info", "driver", text, "Reload the driver or reboot when it suits."))
    return found


def _what_helps(running: str, installed: Any, userland: Any) -> str:
    """Loading the module on disk helps only where that one is of the libraries' version."""
    if not installed:
        return "Build the module for the running kernel first: none is on disk, so a reload or reboot would not help."
    if installed == running:
        return f"Bring the libraries to {running}: a reload would not help, the module on disk is {installed} too."
    if _differ(userland, installed):
        return (
            f"Neither a reload nor a reboot would help: the module on disk is {installed}. Bring module and libraries "
            "to one version, from one repository."
        )
    return "Stop the GPU's users and reload the driver, or reboot."


def _differ(userland: Any, running: str) -> bool:
    """Compare as far as the shorter version goes: some messages carry two fields only."""
    if not userland:
        return False
    left, right = str(userland).split("."), running.split(".")
    size = min(len(left), len(right))
    return left[:size] != right[:size]


def _devices(gpu: dict[str, Any]) -> list[Finding]:
    found = []
    unavailable = gpu["unavailable"]
    devices = gpu["devices"]
    alike: dict[tuple[str, str, str, str], list[int]] = {}
    for number, device in enumerate(devices):
        reason = unavailable.get(f"devices.{number}", "")
        index = device["index"] if device["index"] is not None else number
        subject = f"GPU {index} ({device['pci_address']})"
        if "(NVML 15)" in reason:
            remedy = "Drain the host and power-cycle it; when it comes back, have the GPU checked."
            found.append(Finding("gpu_lost", "error", subject, f"The GPU is lost: {reason}.", remedy))
        elif reason:
            remedy = "Look in the kernel log for Xid lines of this GPU; a reset or reboot is likely due."
            found.append(Finding("gpu_silent", "error", subject, f"The GPU does not answer: {reason}.", remedy))
        for about in _device(subject, device):
            alike.setdefault((about.code, about.severity, about.text, about.remedy), []).append(number)
    for (code, severity, text, remedy), numbers in alike.items():
        first = devices[numbers[0]]
        subject = f"GPU {ranges(numbers)}" if len(numbers) > 1 else f"GPU {first['index']} ({first['pci_address']})"
        found.append(Finding(code, severity, subject, text, remedy))
    kinds = sorted({device["name"] for device in devices if device["name"]})
    if len(kinds) > 1:
        text = f"The host has GPUs of {len(kinds)} kinds: {', '.join(kinds)}."
        found.append(Finding("mixed_gpus", "info", "host", text, "Name the GPUs of each instance (gpus: [UUID, …])."))
    if gpu["nvml_count"] is not None and len(gpu["pci"]) > gpu["nvml_count"]:
        known = {device["pci_address"] for device in devices if device["uuid"]}
        lost = [entry["address"] for entry in gpu["pci"] if entry["address"] not in known]
        text = f"{len(gpu['pci'])} NVIDIA GPU(s) on the PCI bus, {gpu['nvml_count']} known to the driver."
        remedy = "Look in the kernel log for lines with NVRM that name these addresses."
        found.append(Finding("gpu_missing", "error", ", ".join(lost), text, remedy))
    return found


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as people write them: "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _device(subject: str, device: dict[str, Any]) -> list[Finding]:
    found = []
    if device["persistence_mode"] is False:
        text = "Persistence mode is off: each first use initialises the GPU anew, and settings are lost in between."
        found.append(Finding("persistence_off", "warning", subject, text, "Run nvidia-persistenced."))
    for name, words in (("mig", "MIG mode"), ("ecc", "ECC")):
        key = "mode" if name == "mig" else "current"
        now, pending = device[name][key], device[name]["pending"]
        if now is not None and pending is not None and now != pending:
            text = f"{words} is {'on' if now else 'off'}, {'on' if pending else 'off'} after the next reset or reboot."
            found.append(Finding(f"{name}_pending", "info", subject, text, "Reset the GPU or reboot when it suits."))
    health = device["health"]
    rows = health["remapped_rows"] or {}
    if rows.get("failed"):
        text = f"Row remapping failed ({rows['uncorrectable']} uncorrectable rows): the memory has no spare rows left."
        found.append(Finding("row_remap_failed", "error", subject, text, "Replace the GPU."))
    elif rows.get("pending") or health["retired_pages_pending"]:
        text = "Faulty memory rows or pages are set aside only at the next reset."
        found.append(Finding("memory_repair_pending", "warning", subject, text, "Drain the host and reset the GPU."))
    if health["recovery_action"] not in (None, "none"):
        action = health["recovery_action"].replace("_", " ")
        found.append(
            Finding("recovery_due", "error", subject, f"The driver asks for: {action}.", "Drain the host first.")
        )
    return found


def _fabric(gpu: dict[str, Any]) -> list[Finding]:
    states = {entry["state"] for entry in gpu["fabric"]["devices"].values()} - {"completed", "not_supported"}
    found = []
    if states:
        text = (
            f"NVLink fabric state {' and '.join(sorted(states))}: no CUDA context can be made before it is completed."
        )
        remedy = "See that nvidia-fabricmanager runs in the driver's version."
        found.append(Finding("fabric_not_ready", "error", "fabric", text, remedy))
    unhealthy = sorted(
        index
        for index, entry in gpu["fabric"]["devices"].items()
        if entry["health"] in ("unhealthy", "limited_capacity")
    )
    if unhealthy:
        text = f"The NVLink fabric of GPU {', '.join(unhealthy)} is not healthy."
        found.append(Finding("fabric_unhealthy", "warning", "fabric", text, "See the fabric manager's log."))
    return found


def _processes(gpu: dict[str, Any]) -> list[Finding]:
    ours = {instance["unit"] for instance in gpu["instances"]}
    found = []
    for device in gpu["devices"]:
        strangers = [
            process
            for process in device["processes"] or []
            if process["unit"] not in ours and not (process["name"] or "").startswith(_MPS)
        ]
        if strangers:
            used = sum(process["used"] or 0 for process in strangers)
            names = ", ".join(
                f"{process['name'] or '?'} (pid {process['pid']}, {process['unit'] or 'no unit'})"
                for process in strangers
            )
            text = f"Processes that are not ours hold {gib(used)}: {names}."
            remedy = "The plan leaves their memory alone; end them to have it."
            found.append(Finding("foreign_process", "warning", f"GPU {device['index']}", text, remedy))
    return found
