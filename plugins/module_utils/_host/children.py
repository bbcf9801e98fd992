# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Work that may never return, done in a child that is abandoned and never waited for. Private to gpufleet.inference.

A call into a sick driver can sleep where not even SIGKILL reaches it, and everything that waits for such a process
sleeps with it. So the child has its own session, holds none of the parent's descriptors (else the connection that runs
the module would stay open with it), tells what it finds line by line, and is left alone when it falls silent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import Any, Callable, NamedTuple, Optional

Emit = Callable[[Any, bool], None]

_END = "\x04"
_LIFETIME = 600  # seconds: the child's own end, for when the parent died before it could send a signal
_REAP_TRIES = 20
_REAP_PAUSE = 0.01


class Outcome(NamedTuple):
    """How a child ended: ``done`` when its work was over, else ``silent`` when its time was, else ``died`` says how."""

    done: bool
    silent: bool
    died: str
    seconds: float


def watch(
    work: Callable[[Emit], None],
    receive: Callable[[Any], float],
    patience: float,
    *,
    kill: Callable[[int, int], None] = os.kill,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run ``work(emit)`` in a child and hand each message it emits to ``receive`` as it comes.

    ``emit(message, flush)`` takes JSON data; a message is on its way for certain only once one is flushed.
    ``patience`` is how many seconds the first message may take; ``receive`` returns the same for the next one.
    A child that is silent for longer is sent SIGKILL and left.
    """
    started = clock()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, writer)
    os.close(writer)
    try:
        state = _listen(reader, receive, patience, clock)
    finally:
        os.close(reader)
    died = ""
    if state == "silent":
        _quietly(kill, pid, signal.SIGKILL)
        _reap(pid, 1)
    else:
        status = _reap(pid, _REAP_TRIES)
        if state == "closed":
            died = _cause(status)
    return Outcome(state == "end", state == "silent", died, clock() - started)


def _listen(reader: int, receive: Callable[[Any], float], patience: float, clock: Callable[[], float]) -> str:
    """Deliver messages until the end mark ("end"), end of file ("closed") or silence ("silent")."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    pending = b""
    until = clock() + patience
    while True:
        left = until - clock()
        if left <= 0 or not poll.poll(left * 1000):
            return "silent"
        data = os.read(reader, 65536)
        if not data:
            return "closed"
        pending += data
        *lines, pending = pending.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message == _END:
                return "end"
            until = clock() + receive(message)


def _child(work: Callable[[Emit], None], writer: int) -> None:
    """Become independent of the parent, do the work, vanish without any of the parent's exit handlers."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        if writer != 3:
            os.dup2(writer, 3)
        os.closerange(4, _highest_descriptor() + 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.alarm(_LIFETIME)
        with os.fdopen(3, "w", encoding="utf-8") as stream:

            def emit(message: Any, flush: bool = True) -> None:
                stream.write(json.dumps(message) + "\n")
                if flush:
                    stream.flush()

            work(emit)
            emit(_END)
    except BaseException:
        os._exit(70)
    os._exit(0)


def _highest_descriptor() -> int:
    try:
        return max(int(name) for name in os.listdir("/proc/self/fd"))
    except (OSError, ValueError):
        return 1023


def _reap(pid: int, tries: int) -> Optional[int]:
    """The wait status of a child that is gone or about to go; None when it is not, without ever blocking."""
    for attempt in range(tries):
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if found:
            return status
        if attempt + 1 < tries:
            time.sleep(_REAP_PAUSE)
    return None


def _cause(status: Optional[int]) -> str:
    if status is None:
        return "the reading process closed its pipe without an answer"
    if os.WIFSIGNALED(status):
        return f"the reading process died of signal {os.WTERMSIG(status)}"
    return f"the reading process ended with status {os.WEXITSTATUS(status)}"


def _quietly(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        kill(pid, number)
