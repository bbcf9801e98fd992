# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of gpu_facts: brings the NVML bindings along, so that the host needs nothing but its driver."""

from __future__ import annotations

import contextlib
from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _bindings

# The main process imports this file before its workers fork: what is packed here is packed once a run.
with contextlib.suppress(FleetError):
    _bindings.packed()


class ActionModule(ActionBase):
    """Runs the module once; a second time only when a helper that was known has changed or gone."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        arguments = {key: value for key, value in self._task.args.items() if key not in ("bindings", "helper_digest")}
        try:
            digest = _bindings.helper_digest_if(_known_helper(task_vars))
            if digest:
                result = self._read({**arguments, "helper_digest": digest}, task_vars)
                if result.get("error_code") != "helper_changed":
                    return result
            return self._read({**arguments, "bindings": _bindings.packed()}, task_vars)
        except FleetError as error:
            return {"failed": True, "changed": False, **error.as_result()}

    def _read(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name="gpufleet.inference.gpu_facts", module_args=arguments, task_vars=task_vars
        )
        return result


def _known_helper(task_vars: dict[str, Any]) -> str:
    """The digest of the helper that earlier facts of this host found there; "" when there is none."""
    facts = (task_vars.get("ansible_facts") or {}).get("gpufleet_gpu") or {}
    return str((facts.get("helper") or {}).get("digest") or "")
