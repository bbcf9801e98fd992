"""`site` on real hosts, twice and under change: what is promised to whoever runs it on a serving fleet.

One bare Debian 13 host and one Debian 12 host behind sudo with a password; two stub engines share a GPU on the latter.
Runs as root in `make test`. The tests build on each other's hosts, not on each other's results.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPO / "tests" / "plugins")]
import counting
import hosts as bed
import shelves

SCENARIO = REPO / "molecule" / "default" / "inventory"
SECRET = "k3y-that-must-not-be-seen-4711"
FIRST_BUDGET, SECOND_BUDGET = 60, 25


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

    def __init__(self, fleet: bed.Fleet, inventory: Path, work: Path) -> None:
        self.fleet, self.inventory, self.work = fleet, inventory, work

    def play(self, book: str, *arguments: str, **variables: Any) -> Run:
        counts, reports = self.work / "counts.json", self.work / "reports"
        for old in (counts, reports / "site.json"):
            old.unlink(missing_ok=True)
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(self.inventory), "-i", str(SCENARIO)]
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


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    shelves.fill()
    work = tmp_path_factory.mktemp("site")
    data = yaml.safe_load((HERE / "fleets" / "stub.yml").read_text())
    (work / "fleet.yml").write_text(yaml.safe_dump({**data, "name": "site"}))
    loaded = bed.load(str(work / "fleet.yml"))
    try:
        yield Fleet(loaded, bed.up(loaded), work)
    finally:
        bed.down(loaded)


@pytest.fixture(scope="module")
def first(fleet: Fleet) -> Run:
    return fleet.play("site")


@pytest.fixture(scope="module")
def second(fleet: Fleet, first: Run) -> Run:
    """A second run: profiles are there by now, and a foreign process on the shared GPU has grown."""
    assert first.status == 0, first.output[-5000:]
    fleet.inside("ops12", "python3 /usr/local/lib/gpusim/gpusim.py set gpu.0.memory.foreign 100M")
    return fleet.play("site")


def forwarded(fleet: bed.Fleet) -> int:
    """Packets that left the fleet's bridge for anywhere but its own hosts and this machine."""
    listing = subprocess.run(
        ["iptables", "-w", "-nvx", "-L", "FORWARD"], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split() for line in listing.splitlines() if fleet.comment in line]
    (packets,) = [int(words[0]) for words in lines if words[5] == fleet.key]
    return packets


def test_first_run_serves_within_its_budget(fleet: Fleet, first: Run) -> None:
    assert first.status == 0, first.output[-5000:]
    for host in ("bare13", "ops12"):
        assert fleet.answers(host, "one", 8001)
        assert fleet.answers(host, "pair", 8002)
        print(f"{host}: {first.counts[host]['remote']} remote operations in the first run")
        assert first.counts[host]["remote"] <= FIRST_BUDGET, first.counts[host]["by_task"]


def test_second_run_changes_nothing_within_its_budget(fleet: Fleet, first: Run, second: Run) -> None:
    assert second.status == 0, second.output[-5000:]
    for host in ("bare13", "ops12"):
        assert second.recap(host)["changed"] == 0, second.output
        print(f"{host}: {second.counts[host]['remote']} remote operations in the second run")
        assert second.counts[host]["remote"] <= SECOND_BUDGET, second.counts[host]["by_task"]


def test_command_lines_stay_although_profiles_exist_and_foreign_use_grew(fleet: Fleet, second: Run) -> None:
    before = {(host, name): fleet.argv(host, name) for host in ("bare13", "ops12") for name in ("one", "pair")}
    assert fleet.inside("ops12", "ls /var/lib/gpufleet/profiles") != ""
    fleet.inside("ops12", "python3 /usr/local/lib/gpusim/gpusim.py set gpu.0.memory.foreign 200M")
    again = fleet.play("site")
    assert again.recap("ops12")["changed"] == 0
    assert {key: fleet.argv(*key) for key in before} == before
    staged = fleet.inside("ops12", "ls -d /etc/vllm/*/*/ | grep -v current | wc -l")
    assert staged == "2", "each instance has one generation and no other"


def test_check_mode_after_the_first_run_reports_no_change(fleet: Fleet, second: Run) -> None:
    checked = fleet.play("site", "--check", "--diff")
    assert checked.status == 0, checked.output[-5000:]
    assert [checked.recap(host)["changed"] for host in ("bare13", "ops12")] == [0, 0]


def test_nothing_leaves_the_hosts_while_they_are_provisioned_and_serve(fleet: Fleet, second: Run) -> None:
    assert forwarded(fleet.fleet) == 0


def test_changed_settings_wait_for_an_upgrade_and_serving_instances_stay(fleet: Fleet, second: Run) -> None:
    pids = {name: fleet.main_pid("bare13", name) for name in ("one", "pair")}
    lines = {name: fleet.argv("bare13", name) for name in ("one", "pair")}
    current = fleet.inside("bare13", "readlink /etc/vllm/one/current")
    changed = [
        {"name": "one", "model": "tiny", "port": 8001, "gpus": 1, "max_num_seqs": 16},
        {"name": "pair", "model": "tiny", "port": 8002, "gpus": 2},
    ]
    run = fleet.play("site", "--limit", "bare13", vllm_instances_list=changed)
    assert run.status == 0, run.output[-5000:]
    assert {name: fleet.main_pid("bare13", name) for name in pids} == pids
    assert {name: fleet.argv("bare13", name) for name in lines} == lines
    assert fleet.inside("bare13", "readlink /etc/vllm/one/current") == current
    assert fleet.inside("bare13", "ls -d /etc/vllm/one/*/ | grep -v current | wc -l") == "2", "the new one is staged"
    assert "run upgrade" in run.findings("bare13")
    # Back to the old settings, so that later tests find the hosts as they know them.
    assert fleet.play("site", "--limit", "bare13").status == 0


def test_engines_killed_together_restart_one_after_the_other(fleet: Fleet, second: Run) -> None:
    names = ("one", "pair")
    fleet.inside("ops12", "kill -9 $(systemctl show -P MainPID vllm-one) $(systemctl show -P MainPID vllm-pair)")
    time.sleep(1)
    fleet.wait_until_running("ops12", *names)
    assert fleet.answers("ops12", "one", 8001)
    assert fleet.answers("ops12", "pair", 8002)
    spans = []
    for name in names:
        properties = fleet.inside(
            "ops12", f"systemctl show -P ExecMainStartTimestampMonotonic -P ActiveEnterTimestampMonotonic vllm-{name}"
        )
        started, ready = (int(value) for value in properties.split())
        spans.append((started, ready))
    # Both units start at once and wait for the lock; what must not overlap is the time from lock to token.
    one, other = sorted(ready for _started, ready in spans)
    assert other - one > 300_000, f"both were ready within {(other - one) / 1e6:.2f} s: they loaded together"


def test_secret_of_a_key_file_is_seen_nowhere(fleet: Fleet, second: Run) -> None:
    fleet.inside("bare13", f"umask 077; mkdir -p /etc/keys; printf '%s' '{SECRET}' > /etc/keys/one")
    guarded = [
        {"name": "one", "model": "tiny", "port": 8001, "gpus": 1},
        {"name": "pair", "model": "tiny", "port": 8002, "gpus": 2},
        {"name": "keyed", "model": "tiny", "port": 8003, "gpus": 1, "api_key_file": "/etc/keys/one"},
    ]
    run = fleet.play("site", "--limit", "bare13", "-vvv", "--diff", vllm_instances_list=guarded)
    assert run.status == 0, run.output[-5000:]
    assert fleet.answers("bare13", "keyed", 8003, key=SECRET)
    refused = "import urllib.request as u; u.urlopen('http://127.0.0.1:8003/v1/models', timeout=9)"
    assert fleet.inside("bare13", f'python3 -c "{refused}" 2>&1 | grep -c "401"; true') == "1"
    assert SECRET not in run.output
    assert SECRET not in json.dumps(run.report)
    places = {
        "command lines": "cat /proc/[0-9]*/cmdline | tr '\\0' ' '",
        "the journal": "journalctl --no-pager -q",
        "files that everybody may read": f"find /etc /var /run /opt /tmp -xdev -type f -perm -004 -size -4M "
        f"-exec grep -l '{SECRET}' {{}} + 2>/dev/null; true",
    }
    for place, script in places.items():
        found = fleet.inside("bare13", script)
        assert SECRET not in found, place
        if place.startswith("files"):
            assert found == "", place
