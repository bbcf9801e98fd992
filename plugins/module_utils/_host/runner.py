# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The seam through which adapters run commands. Private to gpufleet.inference.

Modules pass the implementation of ``_module.py``, the host helper its own, tests a scripted one.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional, Protocol, Sequence


class Result(NamedTuple):
    """What a command left: its exit status (124 when the time ran out) and its output as text."""

    rc: int
    out: str
    err: str


class Runner(Protocol):
    """Runs one command without a shell, in the C.UTF-8 locale.

    ``timeout`` in seconds ends the command (``rc`` 124), ``data`` goes to its standard input, ``env`` is added to the
    environment. A command that does not exist gives ``rc`` 127; nothing is raised.
    """

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: Optional[float] = None,
        data: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
    ) -> Result: ...
