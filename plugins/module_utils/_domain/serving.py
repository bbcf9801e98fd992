# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From a planned instance to its generation, and from a host's state to the steps. Private to gpufleet.inference.

A generation is the unit and the planned record under the digest of both. `current` points at the generation that runs,
and moves only in the step that starts or restarts the instance.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import unitfile
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.pooling import POOLING

CONFIGURATION = "/etc/vllm"
SYSTEMD = "/etc/systemd/system"
# What a plan says about this moment and not about the instance.
_MOMENT = ("kept", "state")
_HOMES = ("/home/", "/root/", "/run/user/")
SERVING = ("active", "reloading", "refreshing")
STARTING = ("activating",)
UPGRADE_HINT = "due: run upgrade"


@dataclass(frozen=True)
class Options:
    """What the role decides for all instances of a host; times in seconds."""

    user: str = "vllm"
    group: str = "vllm"
    engine_root: str = "/opt/vllm"
    hardening: Mapping[str, bool] = field(default_factory=dict)
    ready_deadline: int = 900
    lock_deadline: int = 3600
    stop_deadline: int = 30
    numa: bool = True


@dataclass(frozen=True)
class Generation:
    """One instance as it should be; the texts are empty when its state is absent."""

    name: str
    state: str
    digest: str = ""
    unit: str = ""
    record: str = ""
    start_after: Tuple[str, ...] = ()
    gpu: str = ""
    key_files: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """One instance as it is on the host; `generations` are the digests of the complete ones."""

    name: str
    active_state: str = "inactive"
    sub_state: str = "dead"
    current: Optional[str] = None
    generations: FrozenSet[str] = frozenset()
    unit_linked: bool = False
    enabled: bool = False
    exists: bool = False

    @property
    def serving(self) -> bool:
        """True while it answers, loads, or waits for its next try."""
        return self.active_state in SERVING + STARTING


@dataclass(frozen=True)
class Step:
    """What is to be done with one instance. `verb`: none, stage, start, restart, stop, remove."""

    name: str
    verb: str
    due: bool
    reason: str


def generation(
    entry: Mapping[str, Any],
    options: Options,
    gpu: Mapping[str, Any],
    host: Optional[Mapping[str, Any]] = None,
) -> Generation:
    """The generation of one entry of the plan.

    entry: see vllm_plan. gpu, host: facts, for device nodes, CPUs and memory nodes near the GPUs.
    FleetError `not_planned` for an entry that does not fit or whose devices are not on the host.
    """
    name, state = str(entry["name"]), str(entry.get("state") or "started")
    if state == "absent":
        return Generation(name, state)
    if not entry.get("fits"):
        reason = (entry.get("reason") or {}).get("text") or "the plan does not fit"
        raise FleetError("not_planned", f"{name}: {reason}.")
    devices = [_device(uuid, gpu) for uuid in entry["devices"]]
    lost = [uuid for uuid, device in zip(entry["devices"], devices) if device is None]
    if lost:
        raise FleetError(
            "not_planned",
            f"{name} is planned on {', '.join(map(str, lost))}, which this host's driver does not show.",
            hint="The plan was made from what is expected; run it again when the driver runs.",
        )
    record = _recorded(name, gpu) if entry.get("kept") else None
    record = record or {key: value for key, value in entry.items() if key not in _MOMENT}
    text = unitfile.render(_unit(record, options, [device for device in devices if device], host or {}))
    decisive = json.dumps(record.get("settings") or {}, sort_keys=True)
    digest = hashlib.sha256(f"{text}\n{decisive}".encode()).hexdigest()[:12]
    return Generation(
        name=name,
        state=state,
        digest=digest,
        unit=text,
        record=json.dumps(record, indent=1, sort_keys=True) + "\n",
        start_after=tuple(entry.get("start_after") or ()),
        gpu=str((devices[0] or {}).get("name") or "") if devices else "",
        key_files=(str(record["api_key_file"]),) if record.get("api_key_file") else (),
    )


def decide(wanted: Generation, found: Found, *, allow_disruption: bool) -> Step:
    """The step for one instance. A serving one is never restarted without consent; naming a state is consent to it."""
    name = wanted.name
    if wanted.state == "absent":
        return Step(name, "remove" if found.exists else "none", False, "state is absent" if found.exists else "")
    same = found.current == wanted.digest
    if wanted.state == "stopped":
        if found.serving:
            return Step(name, "stop", False, "state is stopped")
        stage = wanted.digest not in found.generations or found.enabled
        return Step(name, "stage" if stage else "none", False, "")
    if not found.serving:
        return Step(name, "start", False, f"unit is {found.active_state}" if found.exists else "new")
    if same:
        return Step(name, "none" if found.unit_linked and found.enabled else "stage", False, "")
    if allow_disruption:
        return Step(name, "restart", False, f"generation {found.current or 'none'} is replaced by {wanted.digest}")
    return Step(
        name,
        "none" if wanted.digest in found.generations else "stage",
        True,
        f"serves with generation {found.current or 'none'}, {wanted.digest} is staged",
    )


def files(wanted: Generation, found: Found, step: Step) -> List[Dict[str, Any]]:
    """The paths of one instance as its step leaves them, in the form of host_files."""
    base = f"{CONFIGURATION}/{wanted.name}"
    unit = unitfile.unit_name(wanted.name)
    link = f"{SYSTEMD}/{unit}"
    wants = f"{SYSTEMD}/multi-user.target.wants/{unit}"
    if step.verb == "none":
        return []
    if step.verb == "remove":
        return [
            {"path": wants, "state": "absent"},
            {"path": link, "state": "absent"},
            {"path": base, "state": "absent", "purge": True},
            {"path": f"/var/cache/vllm/{wanted.name}", "state": "absent", "purge": True},
        ]
    folder = f"{base}/{wanted.digest}"
    result: List[Dict[str, Any]] = []
    if wanted.digest not in found.generations:
        result += [
            {"path": base, "state": "directory"},
            {"path": folder, "state": "directory"},
            {"path": f"{folder}/instance.json", "content": wanted.record},
            {"path": f"{folder}/{unit}", "content": wanted.unit},
        ]
    flips = step.verb in ("start", "restart")
    if flips and found.current != wanted.digest:
        result.append({"path": f"{base}/current", "state": "link", "target": wanted.digest})
    if flips or (found.serving and wanted.state == "started"):
        result += [
            {"path": link, "state": "link", "target": f"{base}/current/{unit}"},
            {"path": wants, "state": "link", "target": f"../{unit}"},
        ]
    if wanted.state == "stopped":
        result.append({"path": wants, "state": "absent"})
    if wanted.digest not in found.generations or (flips and found.current != wanted.digest):
        # The generation that ran so far is kept for the way back; older ones go.
        old = found.generations - {wanted.digest, found.current or ""}
        result += [{"path": f"{base}/{digest}", "state": "absent", "purge": True} for digest in sorted(old)]
    return result


def order(wanted: Sequence[Generation]) -> List[str]:
    """Names in the order of their starts: what others come after first, then by name. Cycles end by name."""
    left = {entry.name: set(entry.start_after) for entry in wanted}
    result: List[str] = []
    while left:
        free = sorted(name for name, after in left.items() if not after & set(left))
        name = free[0] if free else sorted(left)[0]
        result.append(name)
        del left[name]
    return result


def due_finding(step: Step) -> Dict[str, str]:
    """The finding for an instance whose new generation waits."""
    remedy = "Run site again with -e site_allow_disruption=true; that restarts what is due, host by host."
    return Finding("due", "warning", step.name, f"{UPGRADE_HINT} ({step.name} {step.reason})", remedy).to_dict()


def open_key_finding(name: str, path: str, mode: int) -> Dict[str, str]:
    """The finding for a key that every user of the host can read."""
    text = f"the key file {path} has mode {mode:04o}: every user of the host can read it"
    return Finding("open_key", "warning", name, text, f"chmod 0600 {path}; systemd reads it as root.").to_dict()


def unlisted_finding(name: str, active_state: str) -> Dict[str, str]:
    """The finding for an instance of ours that the list does not name any more."""
    return Finding(
        "unlisted",
        "warning",
        name,
        f"{name} is {active_state} on the host and not in vllm_instances_list; it was left alone",
        f"Add it with `state: absent` to remove it: {{name: {name}, state: absent}}.",
    ).to_dict()


def _recorded(name: str, gpu: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """The record of the generation that an instance runs: what is kept, is kept to the byte."""
    for fact in gpu.get("instances") or []:
        if fact.get("name") == name and fact.get("record"):
            return dict(fact["record"])
    return None


def _device(uuid: str, gpu: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    for device in gpu.get("devices") or []:
        if device.get("uuid") == uuid:
            return dict(device)
        for piece in (device.get("mig") or {}).get("devices") or []:
            if piece.get("uuid") == uuid:
                return {**device, "uuid": uuid}
    return None


def _unit(
    entry: Mapping[str, Any], options: Options, devices: Sequence[Mapping[str, Any]], host: Mapping[str, Any]
) -> unitfile.Unit:
    version, path = str(entry["engine_version"]), str(entry.get("model_path") or "")
    environment = {str(key): str(value) for key, value in (entry.get("environment") or {}).items()}
    cpus, nodes = _near(devices, host) if options.numa else ("", "")
    key = entry.get("api_key_file")
    return unitfile.Unit(
        name=str(entry["name"]),
        description=f"vLLM {version}, instance {entry['name']}, model {entry.get('model')}",
        user=options.user,
        group=options.group,
        program=f"{options.engine_root}/{version}/bin/vllm",
        arguments=[str(word) for word in entry["arguments"]],
        environment=environment,
        gpus=sorted(str(uuid) for uuid in entry["devices"]),
        served_name=str(entry["name"]),
        address=str(entry.get("listen_address") or "127.0.0.1"),
        port=int(entry["port"]),
        device_nodes=unitfile.device_nodes(devices, environment.get("CUDA_VISIBLE_DEVICES", "")),
        start_after=[str(name) for name in entry.get("start_after") or ()],
        credentials={"api_key": str(key)} if key else {},
        cpus=cpus,
        numa_nodes=nodes,
        home_hidden=not any(text.startswith(_HOMES) for text in (path, options.engine_root)),
        hardening=options.hardening,
        ready_deadline=options.ready_deadline,
        lock_deadline=options.lock_deadline,
        stop_deadline=options.stop_deadline,
        requires_path=f"{options.engine_root}/{version}/.gpufleet.json",
        pooling=entry.get("task") == POOLING,
    )


def _near(devices: Sequence[Mapping[str, Any]], host: Mapping[str, Any]) -> Tuple[str, str]:
    """CPUs and memory node of an instance whose GPUs all hang on one of the host's several nodes."""
    numa = (host.get("cpus") or {}).get("numa") or {}
    nodes = {device.get("numa_node") for device in devices}
    if len(numa) < 2 or len(nodes) != 1:
        return "", ""
    node = str(nodes.pop())
    cpus = numa.get(node)
    return (str(cpus), node) if cpus else ("", "")
