"""`site` on real hosts, twice and under change: what is promised to whoever runs it on a serving fleet.

One bare Debian 13 host and one Debian 12 host behind sudo with a password; two stub engines share a GPU on the latter.
Runs as root in `make test`. The tests build on each other's hosts, not on each other's results.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path.insert(0, str(HERE))
import hosts as bed
import shelves
from controller import Fleet, Run

SCENARIO = REPO / "molecule" / "default" / "inventory"
SECRET = "k3y-that-must-not-be-seen-4711"
FIRST_BUDGET, SECOND_BUDGET = 60, 25


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    shelves.fill()
    work = tmp_path_factory.mktemp("site")
    data = yaml.safe_load((HERE / "fleets" / "stub.yml").read_text())
    (work / "fleet.yml").write_text(yaml.safe_dump({**data, "name": "site"}))
    loaded = bed.load(str(work / "fleet.yml"))
    try:
        yield Fleet(loaded, [bed.up(loaded), SCENARIO], work)
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


@pytest.mark.parametrize("host", ["bare13", "ops12"])
def test_units_are_confined_and_can_still_reach_their_gpus(fleet: Fleet, first: Run, host: str) -> None:
    """Exposure as systemd itself rates it, and none of what breaks CUDA, compilation, NCCL or NUMA binding."""
    for name in ("one", "pair"):
        rating = fleet.inside(host, f"systemd-analyze security --no-pager vllm-{name}.service | tail -1")
        exposure = re.search(r"exposure level for .*: ([0-9.]+)", rating)
        assert exposure, rating
        print(f"{host} {name}: exposure {exposure[1]}")
        assert float(exposure[1]) <= 2.0
        wanted = "ProcSubset,MemoryDenyWriteExecute,PrivateDevices,RemoveIPC,RestrictAddressFamilies,SystemCallFilter"
        shown = fleet.inside(host, f"systemctl show -p {wanted} vllm-{name}")
        found = dict(line.split("=", 1) for line in shown.splitlines())
        calls, families = found.pop("SystemCallFilter").split(), found.pop("RestrictAddressFamilies").split()
        assert found == {"ProcSubset": "all", "MemoryDenyWriteExecute": "no", "PrivateDevices": "no", "RemoveIPC": "no"}
        assert {"mbind", "set_mempolicy", "sched_setaffinity", "setrlimit"} <= set(calls), "group @resources is allowed"
        assert "AF_NETLINK" in families
        text = fleet.inside(host, f"systemctl cat vllm-{name}")
        assert not re.search(r"^(ProcSubset|MemoryDenyWriteExecute|PrivateDevices|RemoveIPC|PrivateUsers)=", text, re.M)


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
