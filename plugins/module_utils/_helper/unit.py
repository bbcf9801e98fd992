# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a process of a unit knows about its unit (private to this collection).

Notes are files in the unit's run directory whose name ends in the unit's invocation id, so that a later start of the
same unit never reads the notes of an earlier one. systemd removes the directory when the unit stops.
"""

from __future__ import annotations

import os

STARTED = "started"
READY = "ready"


def note(name: str, text: str) -> None:
    """Leave a note for the other processes of this start."""
    path = _path(name)
    if path:
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)


def noted(name: str) -> bool:
    """True when a process of this start left the note."""
    path = _path(name)
    return bool(path) and os.path.exists(path)


def has_notes() -> bool:
    """True when this process runs in a unit with a run directory."""
    return bool(_path(STARTED))


def alive(pid: int) -> bool:
    """True while the process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def cgroup_of(pid: int | str) -> str:
    """The control group of a process in the hierarchy that systemd manages; empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as stream:
            lines = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        return ""
    paths = {name: path for number, name, path in lines if name == "name=systemd" or number == "0"}
    path = paths.get("name=systemd") or paths.get("") or ""
    return path[: -len("/.control")] if path.endswith("/.control") else path


def pids_beside(pid: int | str) -> list[int]:
    """All processes in the control group of a process, itself included."""
    mine = cgroup_of(pid)
    if not mine:
        return []
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and cgroup_of(entry) == mine]


def _path(name: str) -> str:
    directory = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    invocation = os.environ.get("INVOCATION_ID", "")
    return os.path.join(directory, f"{name}-{invocation}") if directory and invocation else ""
