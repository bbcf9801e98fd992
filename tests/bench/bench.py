#!/usr/bin/env python3
"""What reading and provisioning cost. Prints figures; exits 1 when one is above its aim.

    bench.py                                            all of the following on fresh hosts that go again
    bench.py facts  [--inventory FILE] [--pairs N]      gpu_facts against ansible.builtin.ping, paired in one run
    bench.py faults [--inventory FILE]                  gpu_facts over SSH while the driver hangs
    bench.py counts [--inventory FILE] [--playbook P]   tasks, remote operations and bytes: first, second and check run

Without --inventory the fleet of tests/bench/fleet.yml is brought up, for `counts` anew. Seconds depend on the machine,
so only their ratio in one run has an aim; counts do not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
TESTBED = REPOSITORY / "tests/testbed/testbed"
SIMULATOR = REPOSITORY / "tests/testbed/gpusim/gpusim.py"
BIN = REPOSITORY / ".venv/bin"
RATIO_AIM = 1.5
PING, FACTS = "ping", "gpu_facts"
# Remote operations per host: the budgets of a whole run of site.
BUDGETS = {"first": 60, "second": 25, "check": 25}

sys.path.insert(0, str(REPOSITORY / "tests/plugins"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "facts", "faults", "counts"], default="all")
    parser.add_argument("--inventory", type=Path)
    parser.add_argument("--playbook", default="gpufleet.inference.site")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--keep", action="store_true", help="leave the hosts up")
    given = parser.parse_args()
    if given.what in ("all", "counts") and not given.inventory:
        bench_fleet("down")
    inventory = given.inventory or bench_fleet("up")
    wrong = 0
    try:
        if given.what in ("all", "facts"):
            wrong |= facts(inventory, given.pairs)
        if given.what in ("all", "faults"):
            wrong |= faults(inventory)
        if given.what in ("all", "counts"):
            wrong |= counts(inventory, given.playbook)
    finally:
        if not given.inventory and not given.keep:
            bench_fleet("down")
    return wrong


def bench_fleet(verb: str) -> Path:
    """Bring the fleet up or down; returns the path of its inventory."""
    if verb == "up":
        subprocess.run([sys.executable, REPOSITORY / "tests/testbed/shelves.py"], check=True, stdout=subprocess.DEVNULL)
    command = [TESTBED, verb, "--fleet", HERE / "fleet.yml"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip() or os.devnull)


def environment(**more: str) -> dict[str, str]:
    """The caller's environment with this checkout as the collection."""
    return {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(REPOSITORY / ".build/collections"),
        "ANSIBLE_NOCOLOR": "1",
        **more,
    }


# -- gpu_facts against ping --------------------------------------------------------------------------------------------


def facts(inventory: Path, pairs: int) -> int:
    """Both modules in turn in one run, order swapped in every other pair; the median of the pairs' ratios counts."""
    tasks = []
    for number in range(pairs + 1):
        pair = [
            {"name": f"{PING} {number}", "ansible.builtin.ping": {}},
            {"name": f"{FACTS} {number}", "gpufleet.inference.gpu_facts": {}},
        ]
        tasks += pair if number % 2 else pair[::-1]
    play = [{"hosts": "all", "gather_facts": False, "become": True, "tasks": tasks}]
    with tempfile.TemporaryDirectory() as folder:
        playbook, log = Path(folder, "play.yml"), Path(folder, "durations")
        playbook.write_text(json.dumps(play))
        run = environment(
            ANSIBLE_CALLBACK_PLUGINS=str(HERE),
            ANSIBLE_CALLBACKS_ENABLED="durations",
            GPUFLEET_DURATIONS=str(log),
            ANSIBLE_FORKS="1",
        )
        command = [BIN / "ansible-playbook", "-i", inventory, playbook]
        done = subprocess.run(command, env=run, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stdout + done.stderr)
            return 1
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    worst = 0.0
    for host in sorted({line["host"] for line in lines}):
        seconds = {line["task"]: line["seconds"] for line in lines if line["host"] == host}
        # The first pair warms connections and caches.
        pings = [seconds[f"{PING} {number}"] for number in range(1, pairs + 1)]
        reads = [seconds[f"{FACTS} {number}"] for number in range(1, pairs + 1)]
        ratios = sorted(read / ping for read, ping in zip(reads, pings, strict=True))
        ratio = statistics.median(ratios)
        worst = max(worst, ratio)
        print(
            f"{host}: ping {statistics.median(pings):.3f} s, gpu_facts {statistics.median(reads):.3f} s, "
            f"ratio {ratio:.2f} (middle half {ratios[len(ratios) // 4]:.2f} to {ratios[-len(ratios) // 4]:.2f}, "
            f"{pairs} pairs)"
        )
    print(f"aim: ratio at most {RATIO_AIM}: {'met' if worst <= RATIO_AIM else 'MISSED'}")
    return int(worst > RATIO_AIM)


# -- faults over SSH ---------------------------------------------------------------------------------------------------


def faults(inventory: Path) -> int:
    """A driver that hangs must not keep the connection: each read ends at its deadline with reasons."""
    deadline = 3.0
    roots = inventory.parent / "hosts"
    host = sorted(path.name for path in roots.iterdir())[0]

    def simulate(*words: str) -> None:
        command = [sys.executable, SIMULATOR, "--root", roots / host / "root", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    wrong = 0
    healthy = 0.0  # seconds of a read of a healthy host, Ansible's own start included
    cases: dict[str, list[str]] = {
        "none": [],
        "lost GPU": ["--call", "*", "--device", "1", "--code", "15"],
        "hang in a call": ["--call", "nvmlDeviceGetMemoryInfo*", "--device", "1", "--hang"],
        "hang in nvmlInit": ["--call", "nvmlInit", "--hang"],
        "hang that ignores signals": ["--call", "nvmlInit", "--hang", "stubborn"],
        "hang that ignores SIGKILL": ["--call", "nvmlInit", "--hang", "unkillable"],
    }
    for name, fault in cases.items():
        simulate("fault", "clear")
        if fault:
            simulate("fault", "add", *fault)
        try:
            started = time.monotonic()
            answer = ad_hoc(inventory, host, deadline)
            seconds = time.monotonic() - started
        finally:
            simulate("fault", "clear")
            simulate("thaw")
        healthy = healthy or seconds
        gpu = answer["ansible_facts"]["gpufleet_gpu"]
        known = sum(device["memory"]["total"] is not None for device in gpu["devices"])
        total = len(gpu["pci"])
        expected = {"none": total, "lost GPU": total - 1, "hang in a call": total - 1}.get(name, 0)
        reason = next((gpu["unavailable"][path] for path in ("nvml", "devices.1") if path in gpu["unavailable"]), "-")
        fine = known == expected and seconds < 2 * healthy + deadline + 2 and (reason != "-" or not fault)
        wrong += not fine
        verdict = "as expected" if fine else "WRONG"
        print(f"{name}: {seconds:.1f} s, memory of {known} of {total} GPUs, {reason}: {verdict}")
    return int(wrong > 0)


def ad_hoc(inventory: Path, host: str, deadline: float) -> dict[str, Any]:
    command = [BIN / "ansible", "-i", inventory, host, "-b", "-m", "gpufleet.inference.gpu_facts"]
    done = subprocess.run(
        [*command, "-a", f"deadline={deadline}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    text = done.stdout
    answer: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return answer


# -- counts ------------------------------------------------------------------------------------------------------------


def counts(inventory: Path, playbook: str) -> int:
    """Three runs of a playbook and what each cost per host."""
    import counting

    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(("first", "second", "check")):
            output = Path(folder, f"{number}.json")
            command = [BIN / "ansible-playbook", "-i", inventory, "-e", f"@{HERE / 'vars.yml'}", playbook]
            if name == "check":
                command.append("--check")
            run = environment(**counting.environment(output))
            done = subprocess.run(command, env=run, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.stderr.write(done.stdout + done.stderr)
                return 1
            hosts = counting.read(output)["hosts"]
            if not hosts:
                sys.stderr.write(f"{playbook} found no host in {inventory}\n{done.stderr}")
                return 1
            for host, row in hosts.items():
                budget = BUDGETS[name] if playbook.endswith("site") else None
                over = budget is not None and row["remote"] > budget
                wrong += over
                limit = f" (budget {budget}{', EXCEEDED' if over else ''})" if budget else ""
                print(
                    f"{name} run, {host}: {row['tasks']} tasks, {row['remote']} remote operations{limit}, "
                    f"{row['bytes_sent'] / 1024:.0f} KiB sent, {row['bytes_received'] / 1024:.0f} KiB received"
                )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
