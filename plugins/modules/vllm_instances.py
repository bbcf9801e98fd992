#!/usr/bin/python
# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_instances
short_description: Converge the vLLM instances of a host to its plan
version_added: 0.1.0
author:
  - The gpufleet.inference authors (@gpufleet)
description:
  - Writes the unit and the record of every instance as a generation, all in one transaction, starts what is new,
    stopped or failed, and waits until each has returned a token under its own name.
  - A serving instance is never restarted without O(allow_disruption). Its new generation is only staged, and the result
    says that it is due.
  - The unit and the record are rendered on the controller from the plan.
attributes:
  check_mode:
    support: full
    description: Reports exactly what a run would change.
  diff_mode:
    support: full
    description: Shows the texts of units and records.
options:
  plan:
    description:
      - The plan, as P(gpufleet.inference.vllm_plan#module) returns it. The default is the fact C(gpufleet_plan).
    type: dict
  absent:
    description: Names of instances to remove in place of what a plan says.
    type: list
    elements: str
  user:
    description: User of the services.
    type: str
    default: vllm
  group:
    description: Group of the services.
    type: str
    default: vllm
  engine_root:
    description: Directory with one environment per vLLM release.
    type: path
    default: /opt/vllm
  hardening:
    description:
      - Switches of the hardening groups of the units, all on by default. The groups are C(filesystem), C(privileges),
        C(kernel), C(syscalls), C(network) and C(devices).
    type: dict
    default: {}
  numa:
    description: Whether an instance whose GPUs hang on one NUMA node runs on the CPUs and memory of that node.
    type: bool
    default: true
  ready_deadline:
    description: Seconds from an engine's start to its first token.
    type: int
    default: 900
  lock_deadline:
    description: Seconds for which a start waits for other starts on its GPUs.
    type: int
    default: 3600
  stop_deadline:
    description: Seconds from the request to stop to the kill of all its processes.
    type: int
    default: 30
  allow_disruption:
    description: Whether serving instances may be restarted.
    type: bool
    default: false
  generations:
    description: The rendered instances. The action fills this in.
    type: list
    elements: dict
    default: []
"""

EXAMPLES = r"""
- name: Run what the plan says
  gpufleet.inference.vllm_instances:
    plan: "{{ gpufleet_plan }}"
"""

RETURN = r"""
instances:
  description: One entry per planned instance.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Name of the instance.
      type: str
    action:
      description: What was done, one of V(none), V(stage), V(start), V(restart), V(stop), V(remove).
      type: str
    changed:
      description: Whether anything of it changed.
      type: bool
    due:
      description: Whether a new generation waits for an upgrade.
      type: bool
    reason:
      description: Why.
      type: str
    state:
      description: State of the unit afterwards; V(active) means that it has returned a token.
      type: str
    generation:
      description: Digest of the generation that runs.
      type: str
    staged_generation:
      description: Digest of the generation that waits.
      type: str
    main_pid:
      description: Process of a start of this run.
      type: int
    profile:
      description: Figures that the engine logged at a start of this run, in bytes and tokens.
      type: dict
    deviation:
      description: Planned against logged bytes of a start of this run, per term.
      type: list
      elements: dict
findings:
  description: What a person should know, for example that an upgrade is due.
  returned: always
  type: list
  elements: dict
changes:
  description: The paths and units that differed.
  returned: always
  type: list
  elements: dict
"""

import time
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import serving
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import instances
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.systemd import Outcome, Systemd
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule, diff_entries

SPEC: dict[str, Any] = {
    "plan": {"type": "dict"},
    "absent": {"type": "list", "elements": "str"},
    "user": {"type": "str", "default": "vllm"},
    "group": {"type": "str", "default": "vllm"},
    "engine_root": {"type": "path", "default": "/opt/vllm"},
    "hardening": {"type": "dict", "default": {}},
    "numa": {"type": "bool", "default": True},
    "ready_deadline": {"type": "int", "default": 900},
    "lock_deadline": {"type": "int", "default": 3600},
    "stop_deadline": {"type": "int", "default": 30},
    "allow_disruption": {"type": "bool", "default": False},
    "generations": {"type": "list", "elements": "dict", "default": []},
}
# What systemd itself needs beyond the deadline of a stop.
_STOP_GRACE_S = 30


def converge(fleet: FleetModule) -> dict[str, Any]:
    """Prepare; outside check mode carry out."""
    root, systemd = Root("/"), Systemd(fleet.runner)
    wanted = [_generation(entry) for entry in fleet.params["generations"]]
    open_keys = instances.check_keys(root, wanted)
    work = instances.prepare(root, systemd, wanted, allow_disruption=fleet.params["allow_disruption"])
    unlisted = sorted(set(instances.known(root)) - {entry.name for entry in wanted})
    outcomes: dict[str, Outcome] = {}
    if not fleet.check_mode:
        begun = time.time()
        outcomes = instances.carry_out(
            root,
            systemd,
            work,
            deadline=fleet.params["ready_deadline"],
            stop_deadline=fleet.params["stop_deadline"] + _STOP_GRACE_S,
        )
        texts = instances.failures(systemd, outcomes, begun)
        if texts:
            raise FleetError(
                "instance_failed",
                f"{len(texts)} of {len(outcomes)} awaited instances returned no token. {' '.join(texts)}",
                hint="The rest of each journal: journalctl -u vllm-NAME.",
                instances=instances.report(work, outcomes),
            )
    states = instances.observe(root, systemd, unlisted)
    return {
        "changed": work.changed,
        "instances": instances.report(work, outcomes, instances.profiles(root, systemd, work, outcomes)),
        "findings": [
            *open_keys,
            *(serving.due_finding(step) for step in work.steps.values() if step.due),
            *(serving.unlisted_finding(name, states[name].active_state) for name in unlisted),
        ],
        "changes": [
            *({"path": change.wanted.path, "action": change.action} for change in work.changes),
            *({"path": f"vllm-{name}.service", "action": act} for name, act in work.acts.items()),
        ],
        "diff": diff_entries([change.as_diff() for change in work.changes]),
    }


def _generation(entry: dict[str, Any]) -> serving.Generation:
    return serving.Generation(
        name=entry["name"],
        state=entry["state"],
        digest=entry.get("digest") or "",
        unit=entry.get("unit") or "",
        record=entry.get("record") or "",
        start_after=tuple(entry.get("start_after") or ()),
        gpu=entry.get("gpu") or "",
        key_files=tuple(entry.get("key_files") or ()),
    )


def main() -> None:
    """Run the module."""
    FleetModule(argument_spec=SPEC, supports_check_mode=True).run(converge, lock=True)


if __name__ == "__main__":
    main()
