# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of gpu_state: brings the NVML bindings and the planned instances along."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _bindings
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

MODULE = "gpufleet.inference.gpu_state"
_OURS = ("bindings", "helper_digest")


class ActionModule(ActionBase):
    """Runs the module once; a second time only when a helper that was known has changed or gone."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        facts = task_vars.get("ansible_facts") or {}
        arguments = {key: value for key, value in to_native(self._task.args).items() if key not in _OURS}
        plan = to_native(facts.get("gpufleet_plan") or task_vars.get("gpufleet_plan") or {})
        arguments.setdefault("instances", planned(plan))
        known = str(((facts.get("gpufleet_gpu") or {}).get("helper") or {}).get("digest") or "")
        try:
            digest = _bindings.helper_digest_if(known)
            if digest:
                result = self._converge({**arguments, "helper_digest": digest}, task_vars)
                if result.get("error_code") != "helper_changed":
                    return result
            return self._converge({**arguments, "bindings": _bindings.packed(setting=True)}, task_vars)
        except FleetError as error:
            return {"failed": True, "changed": False, **error.as_result()}

    def _converge(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        return result


def planned(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Name and devices of the instances that a plan will run."""
    return [
        {"name": entry["name"], "devices": entry["devices"]}
        for entry in plan.get("instances") or []
        if entry.get("devices") and entry.get("state", "started") == "started"
    ]
