# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings of GPUs, set and read back through NVML in children that may be abandoned. Private to gpufleet.inference.

Two files hold what outlives a run: the record says what is wanted of each GPU and is re-applied at boot, the result
(under /run, so that a boot forgets it) says which GPUs have it, and which locks of clocks were set.
"""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any, Callable, Mapping, Optional, Sequence

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.gpu_state import Change, Plan, words
from ansible_collections.gpufleet.inference.plugins.module_utils._host import children, gpu, nvml
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner

RECORD = "/var/lib/gpufleet/gpu_state.json"
RESULT = "/run/gpufleet/gpu_state.json"
_MODULE = "/sys/module/nvidia"
# nvml.h, nvmlComputeMode_t.
_COMPUTE_MODES = {"default": 0, "prohibited": 2, "exclusive_process": 3}


def read(root: Root, runner: Runner, bindings: Any, deadline: float) -> dict[str, Any]:
    """The facts of gpu_facts without the links between GPUs. FleetError `nvml_unavailable` when NVML is silent."""
    facts = gpu.gather(root, runner, bindings, deadline, read_nvml=functools.partial(nvml.read, links=False))
    reason = facts["unavailable"].get("nvml")
    if reason:
        raise FleetError("nvml_unavailable", f"NVML tells nothing, so no GPU can be set: {reason}.")
    return facts


class Outcome:
    """What became of one change: ``error`` is empty when it was set and read back as wanted."""

    def __init__(self, change: Change, error: str) -> None:
        self.change = change
        self.error = error

    def to_dict(self) -> dict[str, Any]:
        """Plain data for results."""
        return {**self.change.to_dict(), "error": self.error}


def apply(
    bindings: Any,
    changes: Sequence[Change],
    deadline: float,
    *,
    stall: Optional[float] = None,
    kill: Callable[[int, int], None] = os.kill,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Make the changes in their order and read each back; one outcome per change.

    After a failure the rest of that GPU is left; the other GPUs go on. ``stall`` is how long one call may take
    (default: a quarter of the deadline, at least one second); the initialisation may take the whole deadline.
    """
    errors: dict[int, str] = {}
    until = clock() + deadline
    stall = stall if stall is not None else max(1.0, deadline / 4)
    while len(errors) < len(changes):
        left = until - clock()
        session = _Session(errors, changes, until, stall, clock)
        text = f"not tried: the deadline of {deadline:g} s had passed"
        if left > 0:
            outcome = children.watch(_Work(bindings, changes, errors), session.receive, left, kill=kill, clock=clock)
            if outcome.done:
                break
            text = outcome.died or f"no answer within {session.allowed or left:.1f} s"
        if session.number is None:
            for number in range(len(changes)):
                errors.setdefault(number, f"{session.function}: {text}" if left > 0 else text)
        else:
            session.fail(session.number, f"{session.function}: {text}")
    return [Outcome(change, errors.get(number, "not tried")) for number, change in enumerate(changes)]


class _Session:
    """The parent's view of one child."""

    def __init__(
        self,
        errors: dict[int, str],
        changes: Sequence[Change],
        until: float,
        stall: float,
        clock: Callable[[], float],
    ) -> None:
        self._errors = errors
        self._changes = changes
        self._until = until
        self._stall = stall
        self._clock = clock
        self.number: Optional[int] = None
        self.function = "nvmlInit_v2"
        self.allowed = 0.0

    def receive(self, message: list[Any]) -> float:
        """Take one message of the child; returns the seconds that the next may take."""
        kind = message[0]
        if kind == "call":
            _kind, self.number, self.function = message
        elif kind == "done":
            _kind, number, error = message
            if error:
                self.fail(number, error)
            else:
                self._errors[number] = ""
        elif kind == "fatal":
            for number in range(len(self._changes)):
                self._errors.setdefault(number, message[1])
        left = self._until - self._clock()
        self.allowed = left if self.number is None else min(self._stall, left)
        return self.allowed

    def fail(self, number: int, error: str) -> None:
        """Note a failure; the rest of that GPU is not tried."""
        self._errors[number] = error
        for other in range(number + 1, len(self._changes)):
            if self._changes[other].uuid == self._changes[number].uuid:
                self._errors.setdefault(other, f"not tried after the failure of {self._changes[number].setting}")


class _Error(Exception):
    """One change failed; the text says why."""


class _Work:
    """The child's part. Runs after the fork only."""

    def __init__(self, bindings: Any, changes: Sequence[Change], done: Mapping[int, str]) -> None:
        self._nvml = bindings
        self._changes = changes
        self._done = dict(done)
        self._emit: Any = None
        self._number = 0

    def __call__(self, emit: children.Emit) -> None:
        self._emit = emit
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as exc:
            emit(["fatal", f"nvmlInit_v2: {_code(int(exc.value))}"], True)
            return
        failed = set()
        for number, change in enumerate(self._changes):
            if number in self._done or change.uuid in failed:
                continue
            self._number = number
            error = ""
            try:
                self._one(change)
            except _Error as exc:
                error = str(exc)
                failed.add(change.uuid)
            emit(["done", number, error], True)

    def _call(self, function: str, *args: Any) -> Any:
        self._emit(["call", self._number, function], True)
        try:
            return getattr(self._nvml, function)(*args)
        except self._nvml.NVMLError as exc:
            code = int(exc.value)
        except AttributeError:  # bindings older than the function
            code = nvml.FUNCTION_MISSING
        except Exception:
            code = nvml.UNREADABLE
        raise _Error(f"{function}: {_code(code)}")

    def _one(self, change: Change) -> None:
        handle = self._call("nvmlDeviceGetHandleByUUID", change.uuid)
        setting, value = change.setting, change.after
        if setting == "persistence_mode":
            self._call("nvmlDeviceSetPersistenceMode", handle, int(value))
            found: Any = bool(self._call("nvmlDeviceGetPersistenceMode", handle))
        elif setting == "compute_mode":
            self._call("nvmlDeviceSetComputeMode", handle, _COMPUTE_MODES[value])
            number = self._call("nvmlDeviceGetComputeMode", handle)
            found = nvml.COMPUTE_MODES.get(number, f"unknown-{number}")
        elif setting == "power_limit":
            self._call("nvmlDeviceSetPowerManagementLimit", handle, value)
            found = self._call("nvmlDeviceGetPowerManagementLimit", handle)
        elif setting == "ecc":
            self._call("nvmlDeviceSetEccMode", handle, int(value))
            found = bool(self._call("nvmlDeviceGetEccMode", handle)[1])
        elif setting == "accounting":
            self._call("nvmlDeviceSetAccountingMode", handle, int(value))
            found = bool(self._call("nvmlDeviceGetAccountingMode", handle))
        elif value == "reset":
            self._call("nvmlDeviceResetGpuLockedClocks", handle)
            return  # nothing in NVML tells whether a lock stands
        else:
            self._call("nvmlDeviceSetGpuLockedClocks", handle, *value)
            running = self._call("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM)
            if running > value[1]:  # an idle GPU may run slower than the lock, never faster
                raise _Error(f"set without an error, but the GPU runs at {running} MHz")
            return
        if found != value:
            raise _Error(f"set without an error, but read back as {words(setting, found)}")


def _code(code: int) -> str:
    return nvml.CODES.get(code, "unknown code") + (f" (NVML {code})" if code > 0 else "")


# -- what outlives a run -----------------------------------------------------------------------------------------------


def record_text(wanted: Mapping[str, Mapping[str, Any]]) -> str:
    """The record's content: the same for the same wishes."""
    return json.dumps({"version": 1, "gpus": wanted}, indent=2, sort_keys=True) + "\n"


def read_json(root: Root, path: str) -> dict[str, Any]:
    """A file's content; empty when it is missing or not readable as a mapping."""
    try:
        content = json.loads(root.read_text(path) or "")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def locks(root: Root) -> dict[str, Any]:
    """The locks of clocks that were set since the kernel module was loaded, by UUID."""
    result = read_json(root, RESULT)
    return dict(result.get("locks") or {}) if result.get("module") == _module(root) else {}


def write_result(root: Root, plan: Plan, outcomes: Sequence[Outcome], wanted: Sequence[str], failed: str = "") -> None:
    """Say which GPUs have what is wanted of them, and which locks stand. ``failed`` is said of all."""
    standing = _locks_after(root, outcomes)
    problems = {uuid: " ".join(texts) for uuid, texts in plan.refused.items()}
    for outcome in outcomes:
        change = outcome.change
        if outcome.error:
            problems.setdefault(change.uuid, f"{change.subject}: {change.setting}: {outcome.error}.")
    _write(root, {"failed": failed, "gpus": {uuid: problems.get(uuid, "") for uuid in wanted}, "locks": standing})


def remember_locks(root: Root, outcomes: Sequence[Outcome]) -> None:
    """After a run that failed in part: note the locks that were set, and change nothing else of the result."""
    if any(outcome.change.setting in ("locked_clocks", "persistence_mode") for outcome in outcomes):
        result = read_json(root, RESULT) or {"failed": "the last run of gpu_state failed in part"}
        _write(root, {**result, "locks": _locks_after(root, outcomes)})


def _locks_after(root: Root, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    standing = locks(root)
    for change in (outcome.change for outcome in outcomes if not outcome.error):
        if change.setting == "locked_clocks":
            standing[change.uuid] = change.after
        elif change.setting == "persistence_mode" and not change.after:
            standing.pop(change.uuid, None)
    return standing


def _write(root: Root, content: Mapping[str, Any]) -> None:
    """Under /run, in one step, and readable by the services' user."""
    content = {**content, "module": _module(root)}
    path = root.path(RESULT)
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    beside = f"{path}.new"
    with open(beside, "w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), 0o644)
        stream.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
    os.replace(beside, path)


def _module(root: Root) -> int:
    """A number that a new load of the kernel module changes; 0 when it is not loaded."""
    try:
        return os.stat(root.path(_MODULE)).st_ino
    except OSError:
        return 0
