"""Callback that writes how long each task took on each host, in the order of their ends, as JSON lines.

Enabled by bench.py through ANSIBLE_CALLBACK_PLUGINS; the file's path is in GPUFLEET_DURATIONS.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: durations
type: aggregate
short_description: Duration of each task on each host
description: Test tool of gpufleet.inference.
"""


class CallbackModule(CallbackBase):
    """Takes the time between the start and the end of a task on a host."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "durations"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._started: dict[tuple[str, str], float] = {}

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._started[(host.name, task._uuid)] = time.monotonic()

    def _ended(self, result: Any, state: str) -> None:
        host = result.host.name
        started = self._started.pop((host, result.task._uuid), None)
        if started is None:
            return
        line = {"host": host, "task": result.task.name, "seconds": time.monotonic() - started, "state": state}
        with open(os.environ["GPUFLEET_DURATIONS"], "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._ended(result, "ok")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._ended(result, "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._ended(result, "unreachable")
