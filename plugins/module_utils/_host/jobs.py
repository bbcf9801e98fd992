# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Long commands as transient units: a lost controller leaves no half-run. Private to gpufleet.inference.

A later call with the same name attaches to a unit that still runs. What a job printed and its exit status lie in
`/var/lib/gpufleet/jobs/NAME`, readable by root only; its environment is handed over in a file there and so appears
in no command line.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from typing import Callable, Mapping, Optional, Sequence

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner

JOBS = "/var/lib/gpufleet/jobs"
POLL_S = 0.5
# Runs the command after the first argument and leaves its exit status in that file, under a temporary name first.
_RECORD = 'rc=0; "$@" || rc=$?; echo $rc > "$0.new" && mv "$0.new" "$0"; exit $rc'


class Jobs:
    """Starts, attaches to and waits for jobs of one host."""

    def __init__(
        self,
        root: Root,
        runner: Runner,
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._runner = runner
        self._sleep = sleep
        self._monotonic = monotonic

    def running(self, name: str) -> bool:
        """Whether the unit of this job is there and not over."""
        result = self._runner.run(["systemctl", "show", "--property=ActiveState", "--value", unit(name)], timeout=20)
        return result.out.strip() in ("active", "activating", "deactivating", "reloading")

    def run(
        self,
        name: str,
        argv: Sequence[str],
        *,
        deadline: float,
        what: str,
        environment: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Run to the end, or attach to the same job of an earlier call. `what` names it in messages.

        FleetError `job_failed` holds the last lines it printed; `job_running` after `deadline` seconds: it goes on.
        """
        if not self.running(name):
            self._start(name, argv, environment or {}, what)
        limit = self._monotonic() + deadline
        while self.running(name):
            if self._monotonic() >= limit:
                raise FleetError(
                    "job_running",
                    f"{what} is not over after {deadline:g} s; it goes on as {unit(name)}.",
                    f"Run again to wait for it, or look at {self.folder(name)}/log on the host.",
                )
            self._sleep(POLL_S)
        status = (self._root.read_text(f"{self.folder(name)}/rc") or "").strip()
        if status != "0":
            ending = f"exit status {status}" if status else "it was ended before it was over"
            raise FleetError(
                "job_failed",
                f"{what} failed ({ending}). Its last lines:\n{self.tail(name)}\n",
                f"The whole output is in {self.folder(name)}/log on the host.",
            )

    def folder(self, name: str) -> str:
        """Where the files of a job are."""
        return f"{JOBS}/{name}"

    def tail(self, name: str, lines: int = 12) -> str:
        """The last lines of what a job printed, without credentials."""
        text = self._root.read_text(f"{self.folder(name)}/log") or "(no output)"
        return hide_credentials("\n".join(text.strip().splitlines()[-lines:]))

    def _start(self, name: str, argv: Sequence[str], environment: Mapping[str, str], what: str) -> None:
        folder = self._root.path(self.folder(name))
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.dirname(folder), mode=0o755, exist_ok=True)
        os.mkdir(folder, mode=0o700)
        with open(f"{folder}/environment", "w", encoding="utf-8", opener=_private) as stream:
            stream.writelines(f"{key}={_quoted(value)}\n" for key, value in sorted(environment.items()))
        record = [f"{self.folder(name)}/rc", *argv]
        result = self._runner.run(
            [
                *("systemd-run", "--quiet", "--collect", "--no-ask-password", f"--unit={unit(name)}"),
                *("--service-type=exec", f"--description=gpufleet: {what}", "--property=UMask=0022"),
                f"--property=EnvironmentFile={self.folder(name)}/environment",
                f"--property=StandardOutput=file:{self.folder(name)}/log",
                f"--property=StandardError=append:{self.folder(name)}/log",
                *("/bin/sh", "-c", _RECORD, *record),
            ],
            timeout=60,
        )
        if result.rc != 0:
            raise FleetError(
                "job_not_started",
                f"{what} could not be started as {unit(name)}: {result.err.strip() or result.out.strip()}",
                "Jobs need root and a running systemd: set become: true, and check `systemctl is-system-running`.",
            )


def unit(name: str) -> str:
    """The unit of a job."""
    return f"gpufleet-{name}.service"


def hide_credentials(text: str) -> str:
    """User names and passwords in addresses replaced by stars."""
    return re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _quoted(value: str) -> str:
    if "\n" in value:
        raise FleetError("bad_environment", "A value of the environment holds a line break.")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
