# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compare the versions on a host with each other and with its baseline; nothing is contacted."""

from __future__ import annotations

import datetime
from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import baseline, version_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import shipped_baselines, version_data
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

ARGUMENTS: dict[str, dict[str, Any]] = {
    "baseline": {"type": "str"},
    "sets": {"type": "list", "elements": "dict", "default": []},
    "engine_versions": {"type": "list", "elements": "str", "default": []},
    "required": {"type": "bool", "default": False},
}


class ActionModule(ActionBase):
    """Facts in, findings and verdicts out."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The findings and the comparison as the fact `gpufleet_versions`."""
        super().run(tmp, task_vars)
        facts = (task_vars or {}).get("ansible_facts") or {}
        _validated, given = self.validate_argument_spec(argument_spec=ARGUMENTS)
        try:
            given = to_native(given)
            gpu, host = to_native(facts.get("gpufleet_gpu") or {}), to_native(facts.get("gpufleet_host") or {})
            if not gpu or not host:
                raise FleetError(
                    "no_facts",
                    "The facts of this host were not read.",
                    "Run gpufleet.inference.gpu_facts and gpufleet.inference.host_facts before.",
                )
            return {"changed": False, "ansible_facts": {"gpufleet_versions": versions(given, gpu, host)}}
        except FleetError as exc:
            return {"failed": True, "changed": False, **exc.as_result()}


def versions(given: dict[str, Any], gpu: dict[str, Any], host: dict[str, Any]) -> dict[str, Any]:
    """``{baseline, findings}``: the comparison, None without a number, and what the rules say, worst first."""
    data, today = version_data(), datetime.date.today().isoformat()
    if given["baseline"] or given["required"]:
        wanted = baseline.choose(data, shipped_baselines(), given["sets"], given["baseline"])
        result = baseline.compare(data, wanted, gpu, host, today)
        return {"findings": result.pop("findings"), "baseline": result}
    found: list[dict[str, str]] = []
    for version in given["engine_versions"] or [""]:
        items = version_rules.findings(data, gpu, host, {"vllm": version}, today)
        found += [item.to_dict() for item in items if item.to_dict() not in found]
    return {"findings": found, "baseline": None}
