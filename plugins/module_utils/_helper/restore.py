# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verb `restore`: bring the GPUs to their recorded state at boot, without a controller (private to this collection).

Instances are ordered after it. Their `start` asks `refusal` and does not become an engine on a GPU that lacks its
state. They do not require this unit: a restart of it would then stop what serves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.gpu_state import (
    Plan,
    check_settings,
    compare,
)
from ansible_collections.gpufleet.inference.plugins.module_utils._host import gpu_state
from ansible_collections.gpufleet.inference.plugins.module_utils._host.lock import LOCK_PATH, HostLock
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Result

UNIT = "gpufleet-restore.service"


class _NoRunner:
    """No commands: at boot no instance runs yet, and processes tell the rest."""

    def run(self, argv: Sequence[str], **options: Any) -> Result:
        """As for a command that does not exist."""
        return Result(127, "", "")


def register(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser("restore", help="bring the GPUs to their recorded state")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for reading and for setting, each")
    parser.add_argument("--root", default="/", help=argparse.SUPPRESS)
    parser.set_defaults(work=run)


def run(arguments: argparse.Namespace) -> int:
    """Apply the record and read back. FleetError `restore_failed` names each GPU that lacks its state."""
    root = Root(arguments.root)
    with HostLock(label="restore", deadline=arguments.deadline, path=root.path(LOCK_PATH)):
        return _restore(root, arguments.deadline)


def _restore(root: Root, deadline: float) -> int:
    content = gpu_state.read_json(root, gpu_state.RECORD)
    if not content and not root.exists(gpu_state.RECORD):
        sys.stdout.write("gpufleet restore: no state is recorded\n")
        return 0
    try:
        wanted = {
            str(uuid): check_settings(settings, f"{gpu_state.RECORD}, {uuid}")
            for uuid, settings in content["gpus"].items()
        }
        import pynvml  # part of the helper's own file

        facts = gpu_state.read(root, _NoRunner(), pynvml, deadline)
        plan = compare(wanted, facts, gpu_state.locks(root))
        due = {finding.subject: finding.text for finding in plan.findings if finding.code == "gpu_state_due"}
        for device in facts["devices"]:
            text = due.get(f"GPU {device['index']} ({device['pci_address']})")
            if text:
                plan.refused.setdefault(str(device["uuid"]), []).append(text)
        changes = [change for change in plan.changes if change.uuid not in plan.refused]
        outcomes = gpu_state.apply(pynvml, changes, deadline)
    except Exception as exc:  # whatever it was: instances must learn of it
        text = exc.message if isinstance(exc, FleetError) else f"{type(exc).__name__}: {exc}"
        gpu_state.write_result(root, Plan(), [], [], failed=text)
        raise FleetError("restore_failed", f"The recorded state of the GPUs was not restored: {text}") from exc
    gpu_state.write_result(root, plan, outcomes, list(wanted))
    problems = [text for texts in plan.refused.values() for text in texts]
    problems += [f"{o.change.subject}: {o.change.setting}: {o.error}." for o in outcomes if o.error]
    if problems:
        raise FleetError("restore_failed", f"The recorded state of the GPUs was not restored: {' '.join(problems)}")
    sys.stdout.write(f"gpufleet restore: {len(outcomes)} setting(s) changed on {len(wanted)} GPU(s)\n")
    return 0


def refusal(root: Root, gpus: Sequence[str]) -> str:
    """Why an instance must not start on these GPUs now; empty when it may, and where no state is recorded."""
    if not root.exists(gpu_state.RECORD):
        return ""
    if not root.exists(gpu_state.RESULT):
        return f"the recorded state of the GPUs was not restored since the boot: {UNIT} did not run"
    result = gpu_state.read_json(root, gpu_state.RESULT)
    if result.get("failed"):
        return f"the recorded state of the GPUs was not restored: {result['failed']}"
    known = result.get("gpus") or {}
    return " ".join(known[uuid] for uuid in gpus if known.get(uuid))
