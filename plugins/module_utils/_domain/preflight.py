# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What speaks against changing a host, found before the first change. Private to gpufleet.inference.

An `error` refuses the host, all of them in one message. A host with GPUs of other vendors only is left out with a word.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.catalogue import silent
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import Instance, normalise
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import ReleaseTable
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import gib

# LoadCredential= came with 247 (systemd NEWS).
OLDEST_SYSTEMD = 247
# The helper's sources are written for this Python.
OLDEST_PYTHON = (3, 9)
HELPER_PYTHON = "/usr/bin/python3"
_EVERYWHERE = ("0.0.0.0", "::", "*")
_LOOPBACK = ("127.", "::1")


def preflight(request: Mapping[str, Any], table: ReleaseTable) -> Dict[str, Any]:
    """Findings of one host: `{findings, refused, skipped, message}`, plain data.

    request: ``gpu`` and ``host`` (facts), ``instances`` (the user's list), ``engine_version``, ``models`` (the user's
    mapping), ``paths`` (directories that programs run from), ``disk_needed`` (path to bytes), ``driver_required``.
    FleetError ``bad_instances`` for a malformed list.
    """
    gpu, host = request.get("gpu") or {}, request.get("host") or {}
    others = gpu.get("other_gpus") or []
    if others and not gpu.get("present"):
        finding = _other_vendor(others)
        return {"findings": [finding.to_dict()], "refused": False, "skipped": True, "message": finding.text}
    instances = normalise(request.get("instances") or [], request.get("engine_version"))
    live = [instance for instance in instances if instance.state != "absent"]
    findings: List[Finding] = [
        *_releases(live, table),
        *_models(live, request.get("models") or {}),
        *_devices(live, gpu),
        *_base(host, request),
        *_ports(live, host),
        *_units(live, host),
        *_processes(gpu),
        *_open_listeners(live),
    ]
    if not request.get("driver_required", True):
        findings = [_softened(finding) for finding in findings]
    errors = [finding for finding in findings if finding.severity == "error"]
    return {
        "findings": [finding.to_dict() for finding in findings],
        "refused": bool(errors),
        "skipped": False,
        "message": message(errors),
    }


def message(errors: Sequence[Finding]) -> str:
    """All refusals in one message, each with its next step."""
    return " ".join(
        f"({number}) {finding.subject}: {finding.text.rstrip('.')}. {finding.remedy}".rstrip()
        for number, finding in enumerate(errors, start=1)
    )


def _softened(finding: Finding) -> Finding:
    if finding.code != "no_driver":
        return finding
    return Finding(finding.code, "warning", finding.subject, finding.text, finding.remedy)


def _error(code: str, subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(code, "error", subject, text, remedy)


def _other_vendor(others: Sequence[Mapping[str, Any]]) -> Finding:
    names = {"0x1002": "AMD", "0x8086": "Intel"}
    vendors = sorted({names.get(str(entry.get("vendor_id")), str(entry.get("vendor_id"))) for entry in others})
    text = f"{len(others)} GPU(s) of {' and '.join(vendors)} and none of NVIDIA; the host is left out"
    return Finding("other_vendor", "warning", "host", text, "This collection serves NVIDIA GPUs only.")


def _releases(instances: Sequence[Instance], table: ReleaseTable) -> Iterator[Finding]:
    for version in sorted({instance.engine_version for instance in instances}):
        try:
            table.release(version)
        except FleetError as exc:
            names = ", ".join(instance.name for instance in instances if instance.engine_version == version)
            yield _error("unknown_engine", names, exc.message, exc.hint)


def _models(instances: Sequence[Instance], models: Mapping[str, Any]) -> Iterator[Finding]:
    for instance in instances:
        if instance.model not in models:
            known = ", ".join(sorted(models)) or "none"
            yield _error(
                "unknown_model",
                instance.name,
                f"model `{instance.model}` is not in vllm_models_list, which has {known}",
                "Add it there with its source, or correct `model:`.",
            )


def _devices(instances: Sequence[Instance], gpu: Mapping[str, Any]) -> Iterator[Finding]:
    if not instances:
        return
    if not gpu.get("present"):
        yield _error(
            "no_gpu",
            "host",
            f"{len(instances)} instance(s) are wanted and there is no NVIDIA GPU on the PCI bus",
            "Take the host out of the group of GPU hosts, or check its seating and BIOS settings.",
        )
        return
    if not (gpu.get("driver") or {}).get("running"):
        count = len(gpu.get("pci") or [])
        yield _error(
            "no_driver",
            "host",
            f"{count} NVIDIA GPU(s) and no driver that runs",
            "Install a driver and load it; instances are started only where one runs.",
        )
        return
    mute = silent(gpu)
    if mute:
        yield mute


def _base(host: Mapping[str, Any], request: Mapping[str, Any]) -> Iterator[Finding]:
    systemd = host.get("systemd")
    if systemd is None and host:
        yield _error("no_systemd", "host", "systemctl gives no answer", "Use a host that systemd manages.")
    elif systemd is not None and int(systemd) < OLDEST_SYSTEMD:
        yield _error("old_systemd", "systemd", f"version {systemd}; the oldest that works is {OLDEST_SYSTEMD}")
    pythons = host.get("python")
    if pythons is not None and not any(_fits(entry) for entry in pythons):
        found = ", ".join(f"{entry.get('path')} {entry.get('version')}" for entry in pythons) or "none"
        wanted = ".".join(map(str, OLDEST_PYTHON))
        yield _error(
            "no_python",
            HELPER_PYTHON,
            f"Python {wanted} or newer is wanted there for the host helper, found {found}",
            "Install the distribution's python3.",
        )
    noexec = [str(path) for path in host.get("noexec_paths") or []]
    for path in request.get("paths") or []:
        mount = next((entry for entry in noexec if path == entry or path.startswith(entry.rstrip("/") + "/")), None)
        if mount:
            yield _error(
                "noexec",
                path,
                f"programs run from there and {mount} is mounted noexec",
                f"Mount it with exec, or choose another directory: `mount -o remount,exec {mount}`.",
            )
    for path, needed in sorted((request.get("disk_needed") or {}).items()):
        free = (host.get("disk") or {}).get(path)
        if free is not None and int(free) < int(needed):
            yield _error(
                "disk", path, f"{gib(int(needed))} are needed and {gib(int(free))} are free", "Make room there."
            )


def _ports(instances: Sequence[Instance], host: Mapping[str, Any]) -> Iterator[Finding]:
    for instance in instances:
        if instance.state != "started":
            continue
        said = set()
        for entry in host.get("ports") or []:
            taken = (
                int(entry.get("port") or 0) == instance.port and entry.get("unit") != f"vllm-{instance.name}.service"
            )
            overlap = _overlap(instance.listen_address, str(entry.get("address") or ""))
            if taken and overlap and entry.get("pid") not in said:
                said.add(entry.get("pid"))
                who = entry.get("process") or "a process"
                unit = f" of {entry['unit']}" if entry.get("unit") else ""
                yield _error(
                    "port_conflict",
                    instance.name,
                    f"port {instance.port} is taken by {who} (process {entry.get('pid') or 'unknown'}{unit})",
                    "Stop it, or give the instance another `port:`.",
                )


def _units(instances: Sequence[Instance], host: Mapping[str, Any]) -> Iterator[Finding]:
    names = {f"vllm-{instance.name}.service": instance.name for instance in instances}
    for entry in host.get("vllm_units") or []:
        unit = str(entry.get("unit"))
        if entry.get("ours"):
            continue
        if unit in names:
            yield _error(
                "foreign_unit",
                names[unit],
                f"a unit {unit} exists that this collection did not write",
                "Rename the instance, or stop and remove that unit.",
            )
        else:
            yield Finding("foreign_unit", "warning", unit, "a vLLM unit that is not ours; it is left alone")
    for entry in host.get("containers_with_gpu") or []:
        yield Finding("gpu_container", "warning", str(entry.get("id")), "a container that uses GPUs; it is left alone")


def _processes(gpu: Mapping[str, Any]) -> Iterator[Finding]:
    for device in gpu.get("devices") or []:
        foreign = [
            process
            for process in device.get("processes") or []
            if not str(process.get("unit") or "").startswith("vllm-")
        ]
        if foreign:
            used = sum(int(process.get("used") or 0) for process in foreign)
            names = ", ".join(f"{process.get('name')} ({process.get('pid')})" for process in foreign)
            text = f"{names} use {gib(used)} and are not ours; they are left alone and planned around"
            yield Finding("foreign_process", "info", f"GPU {device.get('index')}", text)


def _open_listeners(instances: Sequence[Instance]) -> Iterator[Finding]:
    for instance in instances:
        if not instance.listen_address.startswith(_LOOPBACK) and not instance.api_key_file:
            yield Finding(
                "open_listener",
                "warning",
                instance.name,
                f"listens on {instance.listen_address}:{instance.port} and wants no key from its clients",
                "Set `api_key_file:`, or `listen_address: 127.0.0.1` behind a gateway.",
            )


def _overlap(wanted: str, found: str) -> bool:
    return wanted == found or wanted in _EVERYWHERE or found in _EVERYWHERE or found == f"::ffff:{wanted}"


def _fits(entry: Mapping[str, Any]) -> bool:
    numbers: Tuple[int, ...] = tuple(
        int(part) for part in str(entry.get("version") or "0").split(".")[:2] if part.isdigit()
    )
    return str(entry.get("path") or "").startswith(HELPER_PYTHON) and numbers >= OLDEST_PYTHON
