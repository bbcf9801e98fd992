"""Callback that writes what a run cost; see counting.py for its use and its output."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import counting

DOCUMENTATION = """
name: counts
type: aggregate
short_description: Tasks, remote operations and bytes of a run, per host, as JSON
description: For tests only. Needs the environment variable GPUFLEET_COUNTS.
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "counts"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._host_tasks: Counter[str] = Counter()
        self._task_names: dict[str, str] = {}
        self._changed: dict[str, dict[str, list[str]]] = {}
        self._failed: dict[str, list[str]] = {}
        counting.events_file().unlink(missing_ok=True)

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self._task_names[task._uuid] = task.get_name()

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self._task_names[task._uuid] = task.get_name()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._host_tasks[host.get_name()] += 1

    def v2_runner_on_ok(self, result: Any) -> None:
        if result.result.get("changed"):
            diff = result.result.get("diff") or []
            entries = diff if isinstance(diff, list) else [diff]
            paths = sorted(str(entry.get("after_header") or entry.get("before_header") or "") for entry in entries)
            self._changed.setdefault(result.host.get_name(), {})[result.task.get_name()] = paths

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._failed.setdefault(result.host.get_name(), []).append(str(result.result.get("msg")))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        events = counting.events_file()
        output = events.with_name(events.name.removesuffix(".events"))
        data = counting.summary(self._host_tasks, self._task_names)
        for host, row in data["hosts"].items():
            row["changed"] = self._changed.get(host, {})
            row["failed"] = self._failed.get(host, [])
        output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        events.unlink(missing_ok=True)
