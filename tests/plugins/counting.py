"""Count what a playbook costs: tasks, remote operations and bytes, per host.

Counts do not depend on the machine's load, so tests can assert them as budgets. Use:

    from counting import environment, read          # with tests/plugins on sys.path
    subprocess.run(["ansible-playbook", ...], env={**os.environ, **environment(Path("counts.json"))})
    read(Path("counts.json"))["hosts"]["gpu1"]["remote"]

or by hand:

    GPUFLEET_COUNTS=counts.json ANSIBLE_CALLBACKS_ENABLED=counts ANSIBLE_TRANSPORT=counting_ssh \
    ANSIBLE_CALLBACK_PLUGINS=tests/plugins/callback ANSIBLE_CONNECTION_PLUGINS=tests/plugins/connection \
    ansible-playbook -i INVENTORY PLAYBOOK

The file holds `tasks` (tasks that began at all) and `hosts`; for each host: `tasks`, `executions` (commands run over
the connection), `puts` and `fetches` (files moved by a call of their own), `remote` (the sum of these three, the number
that budgets speak of), `bytes_sent`, `bytes_received` (payload, before SSH's own overhead), and `by_task`: the
remote operations of each task by its name. Work on the controller (connection `local`, delegation to localhost) is not
remote and is not counted, unless `ANSIBLE_TRANSPORT=counting_local` is chosen to try the counting itself. Besides,
`changed` maps each task that changed something to the paths in its diff, and `failed` lists the messages of tasks that
failed, rescued ones too.

Connections run in forked workers: each operation appends one line to GPUFLEET_COUNTS + ".events"; the callback adds
them up when the run ends.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
VARIABLE = "GPUFLEET_COUNTS"


def documentation(original: str) -> str:
    """A connection plugin's documentation, which declares its options, with the one that counting adds."""
    data = yaml.safe_load(original)
    data["options"]["host_for_counts"] = {
        "description": "Name under which the operations of this connection are counted.",
        "type": "string",
        "default": "unknown",
        "vars": [{"name": "inventory_hostname"}],
    }
    text: str = yaml.safe_dump(data)
    return text


def environment(output: Path, transport: str = "counting_ssh") -> dict[str, str]:
    """Variables that make any ansible program write its counts to `output`."""
    return {
        VARIABLE: str(output),
        "ANSIBLE_CALLBACK_PLUGINS": str(HERE / "callback"),
        "ANSIBLE_CONNECTION_PLUGINS": str(HERE / "connection"),
        "ANSIBLE_CALLBACKS_ENABLED": "counts",
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",  # for the ad-hoc `ansible`, too
        "ANSIBLE_TRANSPORT": transport,
    }


def read(output: Path) -> dict[str, Any]:
    """The counts of a finished run."""
    data: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return data


def events_file() -> Path:
    """Where the workers of this run append."""
    return Path(os.environ[VARIABLE] + ".events")


class Counting:
    """To be put before a connection class: counts its operations and changes nothing else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counted_task = str(kwargs.get("task_uuid"))

    def _count(self, kind: str, sent: int, received: int) -> None:
        host = self.get_option("host_for_counts")  # type: ignore[attr-defined]
        event = [str(host), self._counted_task, kind, sent, received]
        # One short write to a file opened for appending: lines of parallel workers do not mix.
        handle = os.open(events_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(handle, (json.dumps(event) + "\n").encode())
        os.close(handle)

    def exec_command(self, cmd: Any, in_data: bytes | None = None, sudoable: bool = True) -> Any:
        rc, out, err = super().exec_command(cmd, in_data=in_data, sudoable=sudoable)  # type: ignore[misc]
        text = cmd if isinstance(cmd, (str, bytes)) else " ".join(map(str, cmd))
        self._count("executions", len(text) + len(in_data or b""), len(out) + len(err))
        return rc, out, err

    def put_file(self, in_path: Any, out_path: Any) -> Any:
        result = super().put_file(in_path, out_path)  # type: ignore[misc]
        self._count("puts", os.path.getsize(in_path), 0)
        return result

    def fetch_file(self, in_path: Any, out_path: Any) -> Any:
        result = super().fetch_file(in_path, out_path)  # type: ignore[misc]
        self._count("fetches", 0, os.path.getsize(out_path))
        return result


def summary(host_tasks: Counter[str], task_names: dict[str, str]) -> dict[str, Any]:
    """Add up the events of this run."""
    hosts: dict[str, dict[str, Any]] = {}

    def row(host: str) -> dict[str, Any]:
        names = ("tasks", "executions", "puts", "fetches", "remote", "bytes_sent", "bytes_received")
        return hosts.setdefault(host, {**dict.fromkeys(names, 0), "by_task": {}})

    for host, number in host_tasks.items():
        row(host)["tasks"] = number
    events = events_file()
    for line in events.read_text(encoding="utf-8").splitlines() if events.exists() else []:
        host, task, kind, sent, received = json.loads(line)
        counts = row(host)
        counts[kind] += 1
        counts["remote"] += 1
        counts["bytes_sent"] += sent
        counts["bytes_received"] += received
        name = task_names.get(task, "(no task)")
        counts["by_task"][name] = counts["by_task"].get(name, 0) + 1
    return {"tasks": len(task_names), "hosts": hosts}
