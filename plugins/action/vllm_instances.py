# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of vllm_instances: renders every unit and record from the plan, then one remote execution."""

from __future__ import annotations

import dataclasses
from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import serving
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_bool, to_native

MODULE = "gpufleet.inference.vllm_instances"
_OPTIONS = ("user", "group", "engine_root", "ready_deadline", "lock_deadline", "stop_deadline")


class ActionModule(ActionBase):
    """Turn the plan into generations."""

    _requires_connection = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Render, send, return."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        try:
            args = to_native(self._task.args)
            facts = task_vars.get("ansible_facts") or {}
            plan = args.pop("plan", None) or to_native(facts.get("gpufleet_plan") or task_vars.get("gpufleet_plan"))
            absent = args.pop("absent", None)
            if absent is not None:
                plan = {"instances": [{"name": name, "state": "absent"} for name in absent]}
            if not plan:
                raise FleetError("no_plan", "There is no plan for this host.", hint="Run the role fleet_plan first.")
            generations = render(
                plan, args, to_native(facts.get("gpufleet_gpu") or {}), to_native(facts.get("gpufleet_host") or {})
            )
        except FleetError as exc:
            return {"failed": True, "changed": False, **exc.as_result()}
        result: dict[str, Any] = self._execute_module(
            module_name=MODULE, module_args={**args, "generations": generations}, task_vars=task_vars
        )
        return result


def render(
    plan: dict[str, Any], args: dict[str, Any], gpu: dict[str, Any], host: dict[str, Any]
) -> list[dict[str, Any]]:
    """The generations of a plan as plain data. FleetError when an option or an entry of the plan cannot be used."""
    given: dict[str, Any] = {name: args[name] for name in _OPTIONS if args.get(name) is not None}
    for name in ("ready_deadline", "lock_deadline", "stop_deadline"):
        if name in given:
            given[name] = int(given[name])
    options = serving.Options(
        **given,
        numa=to_bool(args.get("numa", True), "vllm_instances_numa"),
        hardening={
            name: to_bool(switch, f"vllm_instances_hardening.{name}")
            for name, switch in (args.get("hardening") or {}).items()
        },
    )
    return [dataclasses.asdict(serving.generation(entry, options, gpu, host)) for entry in plan.get("instances") or []]
