"""A started engine as tests see it: its process, its port, its log and the processes it forked."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def get(self, path: str, body: object = None, key: str | None = None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait(self) -> Server:
        until(lambda: "Application startup complete" in self.log.read_text(encoding="utf-8"))
        return self

    def family(self) -> dict[str, int]:
        """Names and pids of the processes this start forked."""
        found, fresh = {}, [self.process.pid]
        while fresh:
            children = Path(f"/proc/{fresh[0]}/task/{fresh[0]}/children")
            fresh = fresh[1:] + [int(pid) for pid in children.read_text(encoding="utf-8").split()]
            if fresh:
                for pid in fresh:
                    found[Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()] = pid
        return found


def until(condition: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
