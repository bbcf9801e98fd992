# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host lock: one changing module at a time on a host (private to this collection).

The lock is a flock, which the kernel frees when its holder ends in whatever way; the file's content only says who
holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from types import TracebackType
from typing import Callable, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

LOCK_PATH = "/run/gpufleet/lock"
_POLL_S = 0.2


class HostLock:
    """Context manager around an exclusive flock. Waits up to deadline (seconds), then FleetError `host_locked`."""

    def __init__(
        self,
        *,
        label: str,
        run_id: str = "",
        deadline: float,
        path: str = LOCK_PATH,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._label = label
        self._run_id = run_id
        self._deadline = deadline
        self._path = path
        self._monotonic = monotonic
        self._wall = wall
        self._sleep = sleep
        self._fd: Optional[int] = None

    def __enter__(self) -> HostLock:
        try:
            os.makedirs(os.path.dirname(self._path), mode=0o755, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as exc:
            raise FleetError(
                "lock_unavailable",
                f"The host lock {self._path} cannot be opened: {exc.strerror}.",
                hint="Changes need root: set become: true for this task.",
            ) from exc
        limit = self._monotonic() + self._deadline
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if self._monotonic() >= limit:
                    holder = describe_holder(fd)
                    os.close(fd)
                    raise FleetError(
                        "host_locked",
                        f"Another run holds the host lock {self._path}: {holder}. Waited {self._deadline:g} s.",
                        hint="Wait until that run is over, or end it; the lock is free as soon as its process is gone.",
                    ) from None
                self._sleep(_POLL_S)
        content = {"pid": os.getpid(), "start": _stamp(self._wall()), "what": self._label, "run_id": self._run_id}
        os.ftruncate(fd, 0)
        os.pwrite(fd, (json.dumps(content) + "\n").encode(), 0)
        self._fd = fd
        return self

    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


def describe_holder(fd: int) -> str:
    """Who holds the lock, from the content of the lock file behind fd."""
    try:
        content = json.loads(os.pread(fd, 4096, 0).decode())
        run = content.get("run_id") or "not given"
        return f"process {content['pid']} ({content['what']}), since {content['start']}, run id {run}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that left no name"


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
