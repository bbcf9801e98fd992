# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Changes of systemd units, each read back (private to this collection)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Result, Runner
from ansible_collections.gpufleet.inference.plugins.module_utils._host.systemd_read import show_units

PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "NRestarts",
    "InvocationID",
    "Job",
)
_CALL_S = 60.0
_POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a start ended: `state` is active, failed or timeout; text says what systemd knows."""

    unit: str
    state: str
    text: str
    main_pid: int = 0
    invocation: str = ""


class Systemd:
    """The service manager of one host."""

    def __init__(
        self,
        runner: Runner,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runner = runner
        self._monotonic = monotonic
        self._sleep = sleep

    def show(self, units: Sequence[str]) -> dict[str, dict[str, str]]:
        """Properties of all units in one call. FleetError `systemd_silent` when systemd does not answer."""
        found = show_units(self._runner, units, PROPERTIES)
        if units and not found:
            raise FleetError("systemd_silent", f"systemctl show gave no answer for {', '.join(units)}.")
        return found

    def reload(self) -> None:
        """Make systemd read all unit files again."""
        self._call(["systemctl", "daemon-reload"])

    def start(self, units: Sequence[str], *, restart: bool = False) -> None:
        """Queue the starts, in one transaction, and return; units that failed before get a clean slate."""
        self._runner.run(["systemctl", "reset-failed", "--", *units], timeout=_CALL_S)
        self._call(["systemctl", "--no-block", "restart" if restart else "start", "--", *units])

    def stop(self, units: Sequence[str], deadline: float) -> None:
        """Stop and wait. FleetError `stop_failed` names the units that still run."""
        self._runner.run(["systemctl", "stop", "--", *units], timeout=deadline)
        self._runner.run(["systemctl", "reset-failed", "--", *units], timeout=_CALL_S)
        left = [unit for unit, state in self.show(units).items() if int(state.get("MainPID") or 0)]
        if left:
            raise FleetError("stop_failed", f"{', '.join(left)} still runs {deadline:g} s after it was told to stop.")

    def wait(self, units: Sequence[str], deadline: float, patient: Sequence[str] = ()) -> dict[str, Outcome]:
        """The outcome of every start; deadline in seconds for all of them together.

        A unit that systemd had to start again has failed, unless it is a patient one, whose start is not ours.
        """
        limit = self._monotonic() + deadline
        outcomes: dict[str, Outcome] = {}
        while len(outcomes) < len(units):
            waiting = [unit for unit in units if unit not in outcomes]
            late = self._monotonic() >= limit
            for unit, state in self.show(waiting).items():
                outcome = judge(unit, state, deadline if late else None, patient=unit in patient)
                if outcome:
                    outcomes[unit] = outcome
            if len(outcomes) < len(units):
                self._sleep(_POLL_S)
        return outcomes

    def journal(self, unit: str, since: float, lines: int) -> list[str]:
        """The last lines of a unit's journal since a time (seconds of the epoch)."""
        argv = ["journalctl", "--no-pager", "--quiet", "--output=cat", f"--lines={lines}", f"--since=@{int(since)}"]
        result = self._runner.run([*argv, f"--unit={unit}"], timeout=_CALL_S)
        return result.out.splitlines() if result.rc == 0 else []

    def log_of(self, invocation: str) -> list[str]:
        """Everything that one start of a unit wrote."""
        argv = ["journalctl", "--no-pager", "--quiet", "--output=cat", f"_SYSTEMD_INVOCATION_ID={invocation}"]
        result = self._runner.run(argv, timeout=_CALL_S)
        return result.out.splitlines() if result.rc == 0 else []

    def _call(self, argv: Sequence[str]) -> Result:
        result = self._runner.run(argv, timeout=_CALL_S)
        if result.rc != 0:
            said = result.err.strip() or result.out.strip() or f"exit code {result.rc}"
            raise FleetError("systemd_failed", f"`{' '.join(argv)}` failed: {said[-500:]}.")
        return result


def judge(unit: str, state: Mapping[str, str], overdue: Optional[float], *, patient: bool) -> Optional[Outcome]:
    """The outcome that the properties of a unit tell; None while it still starts.

    overdue: the deadline, in seconds, when it is over. patient: an earlier failure is no outcome.
    """
    active, sub = state.get("ActiveState", ""), state.get("SubState", "")
    pid, invocation = int(state.get("MainPID") or 0), state.get("InvocationID", "")
    if active == "active":
        return Outcome(unit, "active", "", pid, invocation)
    tried_again = sub == "auto-restart" or int(state.get("NRestarts") or 0) > 0
    if active == "failed" or (tried_again and not patient):
        why = state.get("Result", "")
        again = "; systemd tries again" if active != "failed" else ""
        return Outcome(unit, "failed", f"its start ended with `{why}`{again}", pid, invocation)
    if active == "inactive" and not int(state.get("Job") or 0):
        return Outcome(unit, "failed", "systemd did not start it (a condition or assertion of the unit does not hold)")
    if overdue is not None:
        return Outcome(unit, "timeout", f"it is still {active} ({sub}) after {overdue:g} s", pid, invocation)
    return None
