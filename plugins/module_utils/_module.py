# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The only file that knows AnsibleModule (private to this collection).

A module is a documentation block, an argument specification and one function::

    def converge(fleet: FleetModule) -> dict: ...

    def main() -> None:
        FleetModule(argument_spec=..., supports_check_mode=True).run(converge, lock=True)

The function returns the result; what it raises as FleetError becomes the one failure message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn, Optional

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host.lock import HostLock
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Result

# How long a module waits for another run on the same host before it says who holds the lock.
LOCK_DEADLINE_S = 120.0
# The playbooks hand down the id of the run in this environment variable, for the message of the host lock.
RUN_ID_VARIABLE = "GPUFLEET_RUN"


class ModuleRunner:
    """Runner over AnsibleModule.run_command: argument lists only, C.UTF-8 locale, a deadline per command."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module
        self._module.run_command_environ_update = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "LANGUAGE": "C"}

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: Optional[float] = None,
        data: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
    ) -> Result:
        """As Runner.run: 124 when the time ran out, 127 when there is no such command, nothing raised."""
        full = list(argv)
        if timeout is not None:
            full = ["timeout", "--kill-after=2", f"{timeout:g}", *full]
        try:
            rc, out, err = self._module.run_command(
                full,
                check_rc=False,
                data=data,
                binary_data=True,
                environ_update=dict(env) if env else None,
                errors="replace",
                handle_exceptions=False,
            )
        except OSError as exc:
            return Result(127, "", str(exc))
        return Result(124 if timeout is not None and rc == 137 else rc, out, err)


class FleetModule:
    """One Ansible module: parameters, runner, host lock, and the single place where errors become a failure."""

    def __init__(self, **spec: Any) -> None:
        self._module = AnsibleModule(**spec)
        self.params: dict[str, Any] = self._module.params
        self.check_mode: bool = self._module.check_mode
        self.runner = ModuleRunner(self._module)

    def warn(self, text: str) -> None:
        """Show a warning to the user."""
        self._module.warn(text)

    def run(self, work: Callable[[FleetModule], Mapping[str, Any]], *, lock: bool = False) -> NoReturn:
        """Do the work and exit. With lock=True the host lock is held, except in check mode, which changes nothing."""
        try:
            if lock and not self.check_mode:
                name = self._module._name
                with HostLock(label=name, run_id=os.environ.get(RUN_ID_VARIABLE, ""), deadline=LOCK_DEADLINE_S):
                    result = dict(work(self))
            else:
                result = dict(work(self))
        except FleetError as exc:
            self.fail(exc)
        result.setdefault("changed", False)
        self._module.exit_json(**result)
        raise AssertionError("exit_json came back")

    def fail(self, exc: FleetError) -> NoReturn:
        """Turn an error of the domain into the module's failure."""
        self._module.fail_json(**exc.as_result())
        raise AssertionError("fail_json came back")


def diff_entries(changes: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Ansible's diff shape from entries `{path, before, after}`."""
    return [
        {
            "before_header": entry["path"],
            "after_header": entry["path"],
            "before": entry["before"],
            "after": entry["after"],
        }
        for entry in changes
    ]
