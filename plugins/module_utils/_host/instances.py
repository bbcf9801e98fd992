# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Converge the instances of a host: read, decide, change, wait for tokens, read back (private to this collection)."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import profiles as profile_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain import serving, unitfile
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.serving import Found, Generation, Step
from ansible_collections.gpufleet.inference.plugins.module_utils._host import files
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.systemd import Outcome, Systemd

PROFILES = "/var/lib/gpufleet/profiles"
_DIGEST = re.compile(r"^[0-9a-f]{12}$")
_TAIL = 15
_ACTS = {"start": "start", "restart": "restart", "stop": "stop", "remove": "stop"}


@dataclass(frozen=True)
class Work:
    """What a run would change, computed without changing anything."""

    wanted: Sequence[Generation]
    found: dict[str, Found]
    steps: dict[str, Step]
    changes: list[files.Change]
    acts: dict[str, str]

    @property
    def changed(self) -> bool:
        """True when anything differs."""
        return bool(self.changes or self.acts)


def observe(root: Root, systemd: Systemd, names: Sequence[str]) -> dict[str, Found]:
    """The named instances as they are on the host."""
    units = [unitfile.unit_name(name) for name in names]
    states = systemd.show(units) if units else {}
    return {name: _observe(root, name, states.get(unit, {})) for name, unit in zip(names, units)}


def known(root: Root) -> list[str]:
    """Instances of ours on the host, by their folders with a generation."""
    names = root.listdir(serving.CONFIGURATION)
    return [name for name in names if _generations(root, f"{serving.CONFIGURATION}/{name}")]


def check_keys(root: Root, wanted: Sequence[Generation]) -> list[dict[str, Any]]:
    """Findings about key files. FleetError `bad_key_file` when one is missing, empty or not one line, never shown."""
    findings = []
    for entry in wanted:
        for path in entry.key_files:
            content = root.read_bytes(path)
            lines = (content or b"").strip().splitlines()
            if len(lines) != 1:
                found = "it cannot be read" if content is None else f"it holds {len(lines)} lines"
                raise FleetError(
                    "bad_key_file",
                    f"{entry.name} wants the key of its clients in {path} on the host, one line, and {found}.",
                    hint="Put the key there with mode 0600, for example from a vault, before site runs.",
                )
            mode = stat.S_IMODE(os.stat(root.path(path)).st_mode)
            if mode & 0o004:
                findings.append(serving.open_key_finding(entry.name, path, mode))
    return findings


def prepare(root: Root, systemd: Systemd, wanted: Sequence[Generation], *, allow_disruption: bool) -> Work:
    """Compare the host with what is wanted. Writes nothing."""
    found = observe(root, systemd, [entry.name for entry in wanted])
    steps, entries, acts = {}, [], {}
    for entry in wanted:
        step = serving.decide(entry, found[entry.name], allow_disruption=allow_disruption)
        steps[entry.name] = step
        act = _ACTS.get(step.verb)
        if act and (act != "stop" or found[entry.name].serving):
            acts[entry.name] = act
        for item in serving.files(entry, found[entry.name], step):
            content = item.pop("content", None)
            entries.append(files.parse(item, None if content is None else content.encode("utf-8")))
    changes = [_against_current(root, found.values(), change) for change in files.plan(root, entries)]
    return Work(wanted, found, steps, changes, acts)


def _against_current(root: Root, found: Iterable[Found], change: files.Change) -> files.Change:
    """A file of a new generation, compared for people with the one of the generation that runs."""
    folder, name = os.path.split(change.wanted.path)
    base, digest = os.path.split(folder)
    for one in found:
        if (
            change.action == "create"
            and base == f"{serving.CONFIGURATION}/{one.name}"
            and one.current not in (None, digest)
        ):
            return replace(change, before=root.read_text(f"{base}/{one.current}/{name}") or "")
    return change


def carry_out(
    root: Root,
    systemd: Systemd,
    work: Work,
    *,
    deadline: float,
    stop_deadline: float,
    wall: Callable[[], float] = time.time,
) -> dict[str, Outcome]:
    """Make the changes, start in order, wait for every token. Times in seconds. The outcome of every awaited start."""
    acts = work.acts
    stops = [unitfile.unit_name(name) for name, act in acts.items() if act == "stop"]
    if stops:
        systemd.stop(stops, stop_deadline)
    if work.changes:
        files.apply(root, work.changes)
        left = files.plan(root, [change.wanted for change in work.changes])
        if left:
            raise FleetError("not_applied", f"Written, but read back different: {left[0].wanted.path}.")
    if any(_concerns_systemd(change.wanted.path) for change in work.changes):
        systemd.reload()
    sequence = serving.order(work.wanted)
    for act in ("start", "restart"):
        units = [unitfile.unit_name(name) for name in sequence if acts.get(name) == act]
        if units:
            systemd.start(units, restart=act == "restart")
    awaited = [name for name in sequence if acts.get(name) in ("start", "restart") or _loads(work, name)]
    if not awaited:
        return {}
    patient = [unitfile.unit_name(name) for name in awaited if name not in acts]
    outcomes = systemd.wait([unitfile.unit_name(name) for name in awaited], deadline * len(awaited), patient)
    return {name: _read_back(root, work, name, outcomes[unitfile.unit_name(name)]) for name in awaited}


def profiles(root: Root, systemd: Systemd, work: Work, outcomes: dict[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Read back what the engines of our own starts logged, and keep it as profiles on the host."""
    result: dict[str, dict[str, Any]] = {}
    keep = []
    for entry in work.wanted:
        outcome = outcomes.get(entry.name)
        if outcome is None or outcome.state != "active" or work.acts.get(entry.name) not in ("start", "restart"):
            continue
        record = json.loads(entry.record)
        figures = profile_rules.parse_log("\n".join(systemd.log_of(outcome.invocation)))
        result[entry.name] = {"profile": figures, "deviation": profile_rules.deviation(record, figures)}
        profile = profile_rules.make(record, entry.gpu, figures)
        if profile:
            content = json.dumps(profile, indent=1, sort_keys=True) + "\n"
            path = f"{PROFILES}/{profile['key'][:16]}.json"
            keep.append(files.parse({"path": path}, content.encode("utf-8")))
    unique = {wanted.path: wanted for wanted in keep}
    files.converge(root, list(unique.values()), check_mode=False)
    return result


def report(
    work: Work, outcomes: dict[str, Outcome], figures: Optional[dict[str, dict[str, Any]]] = None
) -> list[dict[str, Any]]:
    """One entry per instance, as plain data."""
    result = []
    for entry in work.wanted:
        step, before = work.steps[entry.name], work.found[entry.name]
        outcome = outcomes.get(entry.name)
        result.append(
            {
                "name": entry.name,
                "action": work.acts.get(entry.name) or step.verb,
                "changed": step.verb != "none",
                "due": step.due,
                "reason": step.reason,
                "state": outcome.state if outcome else before.active_state,
                "main_pid": outcome.main_pid if outcome else None,
                "generation": before.current if step.due else entry.digest or None,
                "staged_generation": entry.digest if step.due else None,
                **((figures or {}).get(entry.name) or {"profile": None, "deviation": []}),
            }
        )
    return result


def failures(systemd: Systemd, outcomes: dict[str, Outcome], since: float) -> list[str]:
    """A sentence for every start that gave no token, with the last lines of its journal."""
    texts = []
    for name, outcome in outcomes.items():
        if outcome.state != "active":
            tail = " | ".join(line.strip() for line in systemd.journal(outcome.unit, since, _TAIL) if line.strip())
            texts.append(f"{name}: {outcome.text}. Its journal ends with: {tail or '(nothing)'}")
    return texts


def _loads(work: Work, name: str) -> bool:
    found, step = work.found[name], work.steps[name]
    state = next(entry.state for entry in work.wanted if entry.name == name)
    return state == "started" and not step.due and found.active_state in serving.STARTING


def _read_back(root: Root, work: Work, name: str, outcome: Outcome) -> Outcome:
    if outcome.state != "active":
        return outcome
    digest = next(entry.digest for entry in work.wanted if entry.name == name)
    used = root.readlink(f"{serving.CONFIGURATION}/{name}/current")
    if used != digest:
        return Outcome(outcome.unit, "failed", f"it runs generation {used}, not {digest}", outcome.main_pid)
    if not root.exists(f"/run/vllm-{name}/ready-{outcome.invocation}"):
        return Outcome(outcome.unit, "failed", "systemd calls it active, but no token was seen", outcome.main_pid)
    return outcome


def _observe(root: Root, name: str, state: dict[str, str]) -> Found:
    base = f"{serving.CONFIGURATION}/{name}"
    unit = unitfile.unit_name(name)
    linked = root.readlink(f"{serving.SYSTEMD}/{unit}") == f"{base}/current/{unit}"
    current = root.readlink(f"{base}/current")
    return Found(
        name=name,
        active_state=state.get("ActiveState") or "inactive",
        sub_state=state.get("SubState") or "dead",
        current=current.rstrip("/").rsplit("/", 1)[-1] if current else None,
        generations=frozenset(_generations(root, base)),
        unit_linked=linked,
        enabled=root.readlink(f"{serving.SYSTEMD}/multi-user.target.wants/{unit}") is not None,
        exists=linked or root.isdir(base),
    )


def _generations(root: Root, base: str) -> list[str]:
    unit = unitfile.unit_name(base.rsplit("/", 1)[-1])
    return [
        entry
        for entry in root.listdir(base)
        if _DIGEST.match(entry) and all(root.exists(f"{base}/{entry}/{file}") for file in ("instance.json", unit))
    ]


def _concerns_systemd(path: str) -> bool:
    return path.startswith(serving.SYSTEMD) or path.endswith("/current")
