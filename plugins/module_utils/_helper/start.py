# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verb `start`: wait for the start lock of every GPU of an instance, then become the engine (private here).

Engines that share a GPU must not measure its memory while another one loads, so their starts do not overlap. The locks
are held by a small child in the unit's own control group until the probe (`ready`) has seen a token. Whatever ends the
unit, ends the child, and the kernel frees the locks: there is no stale lock.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._helper import restore, unit
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

LOCK_DIRECTORY = "/run/gpufleet/start"
# Credentials of the unit and the environment variable in which the engine looks for each.
CREDENTIALS = {"api_key": "VLLM_API_KEY", "hf_token": "HF_TOKEN"}
_POLL_S = 0.2


def register(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser("start", help="wait for the GPUs' start locks, then run the engine")
    parser.add_argument("--instance", required=True, help="name of the instance")
    parser.add_argument("--gpu", action="append", default=[], help="UUID of a GPU; may be repeated")
    parser.add_argument("--deadline", type=float, required=True, help="seconds to wait for the locks")
    parser.add_argument("--hold", type=float, default=3600.0, help="seconds after which the locks are let go anyway")
    parser.add_argument("--lock-directory", default=LOCK_DIRECTORY)
    parser.add_argument("--root", default="/", help=argparse.SUPPRESS)
    parser.add_argument("engine", nargs=argparse.REMAINDER, help="-- program and arguments of the engine")
    parser.set_defaults(work=run)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Take the locks and become the engine. FleetError `gpu_state_missing`, `start_lock_timeout`, …"""
    engine = arguments.engine[1:] if arguments.engine[:1] == ["--"] else arguments.engine
    if not engine:
        raise FleetError("engine_missing", "No program given after `--`.")
    reason = restore.refusal(Root(arguments.root), arguments.gpu)
    if reason:
        raise FleetError(
            "gpu_state_missing",
            f"{arguments.instance} is not started on a GPU in the wrong state: {reason}",
            hint=f"Find the cause (journalctl -u {restore.UNIT}), then: systemctl restart {restore.UNIT}",
        )
    begun = time.monotonic()
    descriptors = take(arguments.lock_directory, arguments.gpu, arguments.instance, arguments.deadline)
    waited = time.monotonic() - begun
    if descriptors:
        _leave_holder(descriptors, main_pid=os.getpid(), limit=time.monotonic() + arguments.hold)
    unit.note(unit.STARTED, f"{waited:.3f}\n")
    environment = dict(os.environ)
    add_credentials(environment, environment)
    count = len(descriptors)
    sys.stdout.write(f"gpufleet start: {arguments.instance} waited {waited:.1f} s for {count} start lock(s)\n")
    sys.stdout.flush()
    try:
        os.execve(engine[0], engine, environment)
    except OSError as exc:
        raise FleetError("engine_missing", f"{engine[0]} cannot be run: {exc.strerror}.") from exc


def take(directory: str, gpus: Sequence[str], instance: str, deadline: float) -> list[int]:
    """Descriptors of the exclusive locks of all gpus, taken in sorted order. FleetError `start_lock_timeout`."""
    limit = time.monotonic() + deadline
    descriptors = []
    for gpu in sorted(set(gpus)):
        path = os.path.join(directory, gpu.replace("/", "_"))
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o660)
        except OSError as exc:
            raise FleetError(
                "start_lock_unavailable",
                f"The start lock {path} cannot be opened: {exc.strerror}.",
                hint=f"{directory} is made by systemd-tmpfiles from /etc/tmpfiles.d/gpufleet.conf; run site again.",
            ) from exc
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, 0o660)
        while not _try(fd):
            if time.monotonic() >= limit:
                raise FleetError(
                    "start_lock_timeout",
                    f"{instance} waited {deadline:g} s for GPU {gpu}, which {_holder(fd)} is starting on.",
                )
            time.sleep(_POLL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"instance": instance, "pid": os.getpid()}).encode(), 0)
        descriptors.append(fd)
    return descriptors


def add_credentials(environment: MutableMapping[str, str], unit_environment: Mapping[str, str]) -> None:
    """Put the unit's credentials where the engine looks for them; they are on no command line and in no unit file."""
    directory = unit_environment.get("CREDENTIALS_DIRECTORY")
    if not directory:
        return
    for name, variable in CREDENTIALS.items():
        value = read_credential(directory, name)
        if value is not None:
            environment[variable] = value


def read_credential(directory: str, name: str) -> str | None:
    """One credential without the line end; None when the unit has none of that name. FleetError `bad_credential`."""
    try:
        with open(os.path.join(directory, name), encoding="utf-8") as stream:
            value = stream.read().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise FleetError("bad_credential", f"The credential {name} of this unit cannot be read: {exc}.") from exc
    if not value or "\n" in value:
        raise FleetError("bad_credential", f"The credential {name} of this unit should hold one line, and does not.")
    return value


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(fd: int) -> str:
    try:
        content = json.loads(os.pread(fd, 4096, 0).decode())
        return f"instance {content['instance']} (process {content['pid']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another instance"


def _leave_holder(descriptors: Sequence[int], *, main_pid: int, limit: float) -> None:
    """Fork twice; the grandchild keeps the locks until the engine answered, ended, or the limit is reached."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        if os.fork() == 0:
            while time.monotonic() < limit and not unit.noted(unit.READY) and unit.alive(main_pid):
                time.sleep(_POLL_S)
    finally:
        os._exit(0)
