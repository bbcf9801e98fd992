# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of vllm_release: looks the releases up and compares them with the host's GPUs first."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import engine_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

MODULE = "gpufleet.inference.vllm_release"
KEYS = ("python", "glibc", "cuda", "torch")


class ActionModule(ActionBase):
    """Refuse what cannot run here, hand the module the table entries it needs."""

    _requires_connection = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Check, send, return."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = to_native(self._task.args)
        args["releases"] = [named(entry) for entry in args.get("releases") or []]
        gpu = to_native((task_vars.get("ansible_facts") or {}).get("gpufleet_gpu") or {})
        try:
            table, findings = check(args, gpu, planner_data()["releases"]["versions"])
        except FleetError as exc:
            return {"failed": True, **exc.as_result()}
        result: dict[str, Any] = self._execute_module(
            module_name=MODULE, module_args={**args, "table": table}, task_vars=task_vars
        )
        if not result.get("failed"):
            result["findings"] = [*findings, *result.get("findings", [])]
        return result


def named(entry: Any) -> Any:
    """A plain version as a mapping."""
    return entry if isinstance(entry, dict) else {"version": str(entry)}


def check(
    args: dict[str, Any], gpu: dict[str, Any], versions: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """(table entries of the wanted releases, findings); FleetError for a release that cannot run on these GPUs."""
    driver = str(args.get("driver_version") or (gpu.get("driver") or {}).get("running") or "")
    capabilities = {
        str(device.get("name") or f"GPU {device.get('index')}"): str(device["compute_capability"])
        for device in gpu.get("devices") or []
        if device.get("compute_capability")
    }
    table, findings = {}, []
    for entry in args.get("releases") or []:
        version = str(entry.get("version"))
        for problem in engine_rules.check_gpu(versions, version, driver, capabilities):
            text = f"vLLM {version}: {problem['text']}."
            findings.append(Finding(problem["code"], problem["severity"], f"vllm {version}", text).to_dict())
        table[version] = {key: versions[version.split("+", maxsplit=1)[0]][key] for key in KEYS}
    return table, findings
