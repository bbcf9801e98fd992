"""The controller of a fleet under test: runs the collection's playbooks as a person would, and looks into the hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPO / "tests" / "plugins")]
import counting
import hosts as bed


@dataclass
class Run:
    """One run of a playbook: its recap per host, what it cost and what it reported."""

    status: int
    output: str
    counts: dict[str, dict[str, Any]]
    report: dict[str, Any]

    def recap(self, host: str) -> dict[str, int]:
        line = re.search(rf"^{host} +: (.*)$", self.output, re.M)
        assert line, self.output[-3000:]
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line.group(1))}

    def findings(self, host: str) -> str:
        return json.dumps(self.report[host])


class Fleet:
    """The fleet under test, and what a person at its controller can do."""

    def __init__(self, fleet: bed.Fleet, inventories: Sequence[Path], work: Path) -> None:
        self.fleet, self.inventories, self.work = fleet, inventories, work

    def play(self, book: str, *arguments: str, **variables: Any) -> Run:
        counts, reports = self.work / "counts.json", self.work / "reports"
        for old in (counts, reports / "site.json"):
            old.unlink(missing_ok=True)
        argv = [str(Path(sys.executable).with_name("ansible-playbook"))]
        for inventory in self.inventories:
            argv += ["-i", str(inventory)]
        argv += ["-e", json.dumps({**variables, "fleet_report_dir": str(reports)}), *arguments]
        argv.append(f"gpufleet.inference.{book}")
        env = {**os.environ, **counting.environment(counts), "ANSIBLE_NOCOLOR": "1"}
        env["ANSIBLE_COLLECTIONS_PATH"] = str(REPO / ".build" / "collections")
        done = subprocess.run(argv, env=env, cwd=self.work, capture_output=True, text=True, timeout=600, check=False)
        written = reports / "site.json"
        report = json.loads(written.read_text())["hosts"] if written.exists() else {}
        return Run(done.returncode, done.stdout + done.stderr, counting.read(counts)["hosts"], report)

    def inside(self, host: str, script: str) -> str:
        argv = [*bed.inside(self.fleet, self.fleet.host(host)), "sh", "-c", script]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{host}: {script}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def main_pid(self, host: str, name: str) -> str:
        return self.inside(host, f"systemctl show -P MainPID vllm-{name}")

    def argv(self, host: str, name: str) -> str:
        return self.inside(host, f"tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID vllm-{name})/cmdline")

    def answers(self, host: str, name: str, port: int, key: str = "") -> bool:
        body = json.dumps({"model": name, "prompt": "Hello", "max_tokens": 2})
        program = (
            "import sys, urllib.request as u; q = u.Request(sys.argv[1], sys.argv[2].encode(), "
            "{'Content-Type': 'application/json', 'Authorization': 'Bearer ' + sys.argv[3]}); "
            "print(u.urlopen(q, timeout=20).read().decode())"
        )
        script = f"python3 -c \"{program}\" http://127.0.0.1:{port}/v1/completions '{body}' '{key}'"
        tokens: int = json.loads(self.inside(host, script))["usage"]["completion_tokens"]
        return tokens > 0

    def wait_until_running(self, host: str, *names: str) -> None:
        every = " && ".join(f"systemctl -q is-active vllm-{name}" for name in names)
        self.inside(host, f"for i in $(seq 600); do {every} && exit 0; sleep 0.1; done; exit 1")
