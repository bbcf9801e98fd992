# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Refuse a host early, from its facts and the wishes for it; nothing is contacted."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.preflight import preflight
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import table
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native


class ActionModule(ActionBase):
    """Facts and wishes in, findings out; a refusal fails the host."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The findings as the fact `gpufleet_preflight`."""
        super().run(tmp, task_vars)
        facts = (task_vars or {}).get("ansible_facts") or {}
        _validated, given = self.validate_argument_spec(
            argument_spec={
                "instances": {"type": "list", "elements": "raw", "default": []},
                "models": {"type": "dict", "default": {}},
                "engine_version": {"type": "str"},
                "paths": {"type": "list", "elements": "path", "default": []},
                "disk_needed": {"type": "dict", "default": {}},
                "driver_required": {"type": "bool", "default": True},
            }
        )
        try:
            request = to_native(given)
            request["gpu"] = to_native(facts.get("gpufleet_gpu") or {})
            request["host"] = to_native(facts.get("gpufleet_host") or {})
            result = preflight(request, table(planner_data()["releases"]))
        except FleetError as exc:
            return {"failed": True, "changed": False, **exc.as_result()}
        answer: dict[str, Any] = {"changed": False, "ansible_facts": {"gpufleet_preflight": result}}
        if result["refused"]:
            answer.update(
                failed=True, msg=f"Nothing was changed on this host. {result['message']}", error_code="refused"
            )
        return answer
