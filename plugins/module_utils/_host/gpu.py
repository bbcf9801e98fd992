# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of a host's GPUs, put together from PCI, procfs, NVML and systemd. Private to gpufleet.inference."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import time
from typing import Any, Callable, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.gpu_findings import gpu_findings
from ansible_collections.gpufleet.inference.plugins.module_utils._host import children, nvml, procfs
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner
from ansible_collections.gpufleet.inference.plugins.module_utils._host.systemd_read import show_units

HELPER = "/usr/local/lib/gpufleet/gpufleet.pyz"
CONFIGURATION = "/etc/vllm"
PROFILES = "/var/lib/gpufleet/profiles"
_MPS_CONTROL = "nvidia-cuda-mps"  # the kernel keeps 15 characters: control daemon and server alike
_MPS_PATIENCE_S = 2.0
_FABRIC_MANAGER = "nvidia-fabricmanager.service"
_GENERATION = re.compile(r"^[0-9a-f]{12}$")

ReadNvml = Callable[[Any, float], nvml.Reading]


def gather(
    root: Root,
    runner: Runner,
    bindings: Optional[Any],
    deadline: float,
    *,
    read_nvml: ReadNvml = nvml.read,
) -> dict[str, Any]:
    """Facts in the schema of gpu_facts. Reads only; NVML gets what is left of ``deadline`` seconds.

    ``bindings`` is the module pynvml, or None when there is none to ask with.
    """
    started = time.monotonic()
    gpus, others, switches = procfs.pci_gpus(root)
    running, flavour = procfs.running_driver(root)
    modules = procfs.driver_modules(root)
    on_disk = modules.get(os.uname().release)
    library, library_version = procfs.library_version(root, "libnvidia-ml.so.1")
    _path, cuda_version = procfs.library_version(root, "libcuda.so.1")
    said = procfs.driver_gpus(root)
    for entry in gpus:
        entry["name"] = said.get(str(entry["address"]), {}).get("Model")
    unavailable: dict[str, str] = {}
    facts: dict[str, Any] = {
        "present": bool(gpus),
        "pci": gpus,
        "other_gpus": others,
        "driver": {
            "running": running,
            "installed": on_disk["version"] if on_disk else None,
            "userland": library_version,
            "libcuda": cuda_version,
            "flavour": flavour or (on_disk["flavour"] if on_disk else None),
            "modules_by_kernel": modules,
        },
        "cuda_driver_version": None,
        "devices": [],
        "nvml_count": None,
        "links": {"matrix": None, "peer_access": None},
        "fabric": {"devices": {}, "switches": switches, "manager": None},
        "mps": [],
        "instances": [],
        "helper": {"digest": helper_digest(root)},
        "profiles": _profiles(root),
        "unavailable": unavailable,
    }
    _explain_driver(facts, on_disk)
    if not switches:
        unavailable["fabric.manager"] = "not asked: no NVSwitch on the PCI bus"
    facts["mps"] = _mps_daemons(root, unavailable)
    _read_instances(facts, root, runner, switches > 0)
    reading = None
    if not gpus and library is None:
        unavailable["nvml"] = "not asked: no NVIDIA GPU on the PCI bus and no NVML library"
    elif bindings is None:
        unavailable["nvml"] = "not asked: no NVML bindings came with the task"
    else:
        reading = read_nvml(bindings, max(1.0, deadline - (time.monotonic() - started)))
        _merge(facts, reading)
    _known_to_driver(facts, said)
    prefix = procfs.manager_prefix(root)
    for number, device in enumerate(facts["devices"]):
        device["numa_node"], device["cpu_affinity"] = procfs.pci_locality(root, device["pci_address"] or "")
        if device["cpu_affinity"] is None:
            unavailable[f"devices.{number}.cpu_affinity"] = "sysfs has no local_cpulist for its PCI address"
        if device["numa_node"] is None:
            unavailable[f"devices.{number}.numa_node"] = (
                "sysfs names no NUMA node: the machine has one only, or is virtual"
            )
        for process in device["processes"] or []:
            process["name"] = procfs.process_name(root, process["pid"])
            process["unit"] = procfs.unit_of(root, process["pid"], prefix)
    facts["findings"] = [finding.to_dict() for finding in gpu_findings(facts)]
    del facts["nvml_count"]
    return facts


def _explain_driver(facts: dict[str, Any], on_disk: Optional[dict[str, Any]]) -> None:
    """A reason for each version that is null."""
    driver = facts["driver"]
    unavailable = facts["unavailable"]
    if driver["running"] is None:
        unavailable["driver.running"] = "no NVIDIA kernel module is loaded"
    if driver["flavour"] is None:
        unavailable["driver.flavour"] = "no NVIDIA kernel module tells its flavour"
    if driver["installed"] is None:
        reason = f"no NVIDIA module for the running kernel {os.uname().release} under /lib/modules"
        if on_disk:
            reason = f"{on_disk['path']} is compressed and DKMS does not know its version"
        unavailable["driver.installed"] = reason
    for kernel, module in driver["modules_by_kernel"].items():
        if None in (module["version"], module["flavour"]):
            unavailable[f"driver.modules_by_kernel.{kernel}"] = f"{module['path']} is compressed"
    for key, library in (("userland", "libnvidia-ml.so.1"), ("libcuda", "libcuda.so.1")):
        if driver[key] is None:
            unavailable[f"driver.{key}"] = f"no {library} whose file name carries a version"
    if facts["helper"]["digest"] is None:
        unavailable["helper.digest"] = f"{HELPER} is not there"


def helper_digest(root: Root) -> Optional[str]:
    """The sha256 of the host helper; None when it is not installed."""
    data = root.read_bytes(HELPER)
    return None if data is None else hashlib.sha256(data).hexdigest()


# -- NVML into the schema ----------------------------------------------------------------------------------------------


def _merge(facts: dict[str, Any], reading: nvml.Reading) -> None:
    """Put the values in their places; what failed keeps its null and gets its reason."""
    unavailable = facts["unavailable"]
    if reading.fatal is not None:
        unavailable["nvml"] = str(reading.fatal)
    facts["nvml_count"] = reading.device_count()
    facts["devices"] = [_empty_device(index) for index in range(reading.device_count() or 0)]
    for path, value in reading.values.items():
        if path != "count":
            _place(facts, path, value)
    if reading.device_count() in (0, 1):
        unavailable["links"] = "fewer than two GPUs"
    for path, failure in reading.failures.items():
        unavailable[path] = str(failure)
    silent = [path.split(".")[1] for path in reading.failures if re.fullmatch(r"devices\.\d+", path)]
    if silent:
        unavailable.setdefault("links", f"GPU {', '.join(silent)} does not answer")
    if facts["driver"]["running"] is None and facts["driver"].get("nvml"):
        facts["driver"]["running"] = facts["driver"]["nvml"]
        unavailable.pop("driver.running", None)
    facts["driver"].pop("nvml", None)


def _place(facts: dict[str, Any], path: str, value: Any) -> None:
    """Set facts["a"][0]["b"] for the path "a.0.b"."""
    *parents, last = path.split(".")
    place: Any = facts
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if last == "userland" and place[last]:
        return  # the name of the library's file is more exact
    facts["unavailable"].pop(path, None)
    place[last] = value


def _empty_device(index: Optional[int], address: Optional[str] = None) -> dict[str, Any]:
    device: dict[str, Any] = {"index": index, "pci_address": address}
    device.update(copy.deepcopy(nvml.DEVICE_FIELDS))
    device.update({"numa_node": None, "cpu_affinity": None})
    return device


def _known_to_driver(facts: dict[str, Any], said: dict[str, dict[str, str]]) -> None:
    """Fill gaps from what the kernel module says: devices when NVML counted none, names and UUIDs of silent ones."""
    if facts["nvml_count"] is None:
        facts["devices"] = [_empty_device(None, address) for address in sorted(said)]
        reason = facts["unavailable"].get("nvml") or facts["unavailable"].get("devices", "")
        if reason:
            facts["unavailable"]["devices"] = reason
            for path in ("cuda_driver_version", "links", "fabric.devices"):
                facts["unavailable"].setdefault(path, reason)
    addresses = {device["pci_address"] for device in facts["devices"]}
    unnamed = [device for device in facts["devices"] if device["pci_address"] is None]
    rest = [address for address in sorted(said) if address not in addresses]
    if len(unnamed) == len(rest):
        for device, address in zip(unnamed, rest):
            device["pci_address"] = address
    for device in facts["devices"]:
        known = said.get(device["pci_address"] or "", {})
        device["name"] = device["name"] or known.get("Model")
        device["uuid"] = device["uuid"] or _uuid(known.get("GPU UUID"))


def _uuid(text: Optional[str]) -> Optional[str]:
    """The kernel module writes question marks until the GPU was first used."""
    return None if text is None or "?" in text else text


# -- MPS and instances -------------------------------------------------------------------------------------------------


def _mps_daemons(root: Root, unavailable: dict[str, str]) -> list[dict[str, Any]]:
    """Control daemons with their pipe directory. A child reads their environment: it can sleep with its process."""
    candidates = [pid for pid in procfs.pids(root) if procfs.process_name(root, pid) == _MPS_CONTROL]
    if not candidates:
        return []
    found: list[dict[str, Any]] = []

    def work(emit: children.Emit) -> None:
        for pid in candidates:
            words = (root.read_text(f"/proc/{pid}/cmdline") or "").split("\0")
            if words[0].rsplit("/", 1)[-1] != "nvidia-cuda-mps-control":
                continue
            directory = procfs.environment(root, pid).get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
            emit({"pid": pid, "pipe_directory": directory, "user": procfs.owner(root, pid)}, True)

    def receive(message: Any) -> float:
        found.append(message)
        return _MPS_PATIENCE_S

    outcome = children.watch(work, receive, _MPS_PATIENCE_S)
    if not outcome.done:
        unavailable["mps"] = outcome.died or f"/proc gave no answer within {_MPS_PATIENCE_S:g} s for an MPS process"
    prefix = procfs.manager_prefix(root)
    for daemon in found:
        daemon["unit"] = procfs.unit_of(root, daemon["pid"], prefix)
        daemon["user"] = _user(daemon["user"])
    return found


def _user(uid: Optional[int]) -> Optional[str]:
    import pwd

    if uid is None:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read_instances(facts: dict[str, Any], root: Root, runner: Runner, fabric: bool) -> None:
    """Our instances from their generations and, in one call, the state of their units."""
    instances = [entry for entry in (_instance(root, name) for name in root.listdir(CONFIGURATION)) if entry]
    units = [entry["unit"] for entry in instances]
    asked = [*units, _FABRIC_MANAGER] if fabric else units
    if not asked:
        return
    states = show_units(runner, asked, ("LoadState", "ActiveState", "SubState", "MainPID"))
    if not states:
        facts["unavailable"]["instances"] = "systemctl show gave no answer"
    for entry in instances:
        state = states.get(entry["unit"], {})
        entry["active_state"] = state.get("ActiveState")
        entry["sub_state"] = state.get("SubState")
        entry["main_pid"] = int(state.get("MainPID") or 0) or None
    if fabric:
        manager = states.get(_FABRIC_MANAGER, {})
        loaded = manager.get("LoadState") == "loaded"
        facts["fabric"]["manager"] = manager.get("ActiveState") if loaded else "not-found"
    facts["instances"] = instances


def _instance(root: Root, name: str) -> Optional[dict[str, Any]]:
    """One instance by its folder; None for a folder that holds no generation."""
    folder = f"{CONFIGURATION}/{name}"
    generations = [entry for entry in root.listdir(folder) if _GENERATION.match(entry)]
    if not generations:
        return None
    current = root.readlink(f"{folder}/current")
    current = current.rstrip("/").rsplit("/", 1)[-1] if current else None
    record = _record(root, f"{folder}/{current}/instance.json") if current else None
    waiting = [entry for entry in generations if entry != current]
    newest = max(waiting, key=lambda entry: _changed(root, f"{folder}/{entry}"), default=None)
    staged = newest
    if newest and current and _changed(root, f"{folder}/{newest}") <= _changed(root, f"{folder}/{current}"):
        staged = None
    record = record or {}
    return {
        "name": name,
        "unit": f"vllm-{name}.service",
        "active_state": None,
        "sub_state": None,
        "main_pid": None,
        "generation": current,
        "staged_generation": staged,
        "port": record.get("port"),
        "devices": record.get("devices") or [],
        "arguments": record.get("arguments") or [],
        "record": record or None,
    }


def _profiles(root: Root) -> list[dict[str, Any]]:
    """What earlier starts on this host logged, for the planner."""
    found = (_record(root, f"{PROFILES}/{name}") for name in root.listdir(PROFILES) if name.endswith(".json"))
    return [profile for profile in found if profile]


def _record(root: Root, path: str) -> Optional[dict[str, Any]]:
    try:
        record = json.loads(root.read_text(path) or "")
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _changed(root: Root, path: str) -> float:
    try:
        return os.stat(root.path(path)).st_mtime
    except OSError:
        return 0.0
