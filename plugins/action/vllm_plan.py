# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan the vLLM instances of a host on the controller; nothing is contacted."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.plan import plan
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import parse_size
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

ARGUMENTS: dict[str, dict[str, Any]] = {
    "gpu": {"type": "dict"},
    "host": {"type": "dict"},
    "models": {"type": "dict", "default": {}},
    "instances": {"type": "list", "elements": "raw", "default": []},
    "engine_version": {"type": "str"},
    "profiles": {"type": "list", "elements": "dict", "default": []},
    "reserve": {"type": "raw", "default": 0},
    "replan": {"type": "bool", "default": False},
    "placement": {"type": "str", "choices": ["pack", "spread"], "default": "pack"},
    "models_dir": {"type": "path", "default": "/var/lib/vllm/models"},
}


class ActionModule(ActionBase):
    """Gathers the arguments, asks the domain, returns plain data."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The plan of the host under ``plan``."""
        super().run(tmp, task_vars)
        facts = (task_vars or {}).get("ansible_facts") or {}
        _validated, given = self.validate_argument_spec(argument_spec=ARGUMENTS)
        try:
            request = to_native({key: value for key, value in given.items() if value is not None})
            request.setdefault("gpu", to_native(facts.get("gpufleet_gpu") or {}))
            request.setdefault("host", to_native(facts.get("gpufleet_host") or {}))
            request["reserve"] = _size(request.get("reserve"))
            request["data"] = planner_data()
            return {"changed": False, "plan": plan(request)}
        except FleetError as error:
            return {"failed": True, "changed": False, **error.as_result()}


def _size(value: Any) -> int:
    try:
        return parse_size(value or 0)
    except ValueError as error:
        raise FleetError("bad_reserve", f"reserve: {error}.", "Write bytes or a size like 2GiB.") from error
