"""What the playbooks say before they contact a host, and the page about them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from repository import tracked

ROOT = Path(__file__).resolve().parents[3]
CHECK = ROOT / "playbooks" / "check_inventory.yml"
PLAYBOOKS = [path for path in tracked("playbooks/*.yml") if path != CHECK]
WITHOUT_GROUP = "web: {hosts: {web1: }}\n"
WITH_GROUP = "gpu_hosts: {hosts: {gpu1: }}\n"


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.stem)
def test_every_playbook_begins_with_the_check_of_the_inventory(playbook):
    first = yaml.safe_load(playbook.read_text(encoding="utf-8"))[0]
    assert first.get("ansible.builtin.import_playbook") == CHECK.name, (
        f"begin {playbook.name} with import_playbook: {CHECK.name}"
    )


@pytest.mark.parametrize(
    ("inventory", "arguments", "refused"),
    [
        (None, [], True),
        (WITHOUT_GROUP, [], True),
        (WITHOUT_GROUP, ["--limit", "web1"], True),
        (WITHOUT_GROUP, ["-e", "site_hosts=web"], False),
        (WITH_GROUP, [], False),
    ],
    ids=["no inventory", "no group", "no group, one host", "other hosts named", "group"],
)
def test_a_run_that_would_reach_no_host_is_refused_in_one_message(tmp_path, inventory, arguments, refused):
    given = []
    if inventory:
        (tmp_path / "hosts.yml").write_text(inventory, encoding="utf-8")
        given = ["-i", "hosts.yml"]
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [str(program), *given, *arguments, str(CHECK)],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bool(done.returncode) == refused, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("fatal: ")]
    assert len(told) == refused
    assert all("has no hosts in the group gpu_hosts" in line for line in told)


def test_the_page_describes_every_variable_of_the_playbooks_and_no_other():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PLAYBOOKS)
    used = set(re.findall(r"(?<!\.)\b(?:site|facts|plan|fleet_report|decommission|baseline)_[a-z_]+\b", text))
    own = set(re.findall(r"^ +(\w+): >-$", text, re.MULTILINE))
    page = (ROOT / "docs/playbooks.md").read_text(encoding="utf-8")
    table = page.split("## Variables of the playbooks", 1)[1].split("## Results", 1)[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == used - own


def failures(folder: Path, play: dict, hosts: dict, *arguments: str) -> dict[str, str]:
    """The message of each host that a play of the collection fails, run against hosts that hold these variables."""
    (folder / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    (folder / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}), encoding="utf-8")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.yml", *arguments, "play.yml"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return dict(re.findall(r"^fatal: \[(\w+)\]: (.*)$", done.stdout, re.MULTILINE))


REFUSED = {"name": "big", "fits": False, "reason": {"code": "oom_risk", "text": "135 GiB"}, "alternatives": ["tp 2"]}
PLANNED = {
    "full": {"gpufleet_plan": {"fits": False, "instances": [REFUSED]}},
    "good": {"gpufleet_plan": {"fits": True, "instances": []}},
    "dead": {"gpufleet_read": {"failed": True, "msg": "no route"}},
}


@pytest.mark.parametrize(
    ("arguments", "failed"),
    [([], {"dead": "no route"}), (["-e", "plan_fail_on_refusal=true"], {"dead": "no route", "full": "135 GiB"})],
    ids=["by default", "when asked to"],
)
def test_a_plan_that_does_not_fit_fails_its_host_only_when_asked_to(tmp_path, arguments, failed):
    last = yaml.safe_load((ROOT / "playbooks/plan.yml").read_text(encoding="utf-8"))[-1]
    last["tasks"] = [task for task in last["tasks"] if "ansible.builtin.fail" in task]
    told = failures(tmp_path, last, PLANNED, *arguments)
    assert told.keys() == failed.keys()
    assert all(f"{host}: " in told[host] and text in told[host] for host, text in failed.items())


def test_the_facts_of_a_host_that_does_not_answer_end_with_a_next_step(tmp_path):
    last = yaml.safe_load((ROOT / "playbooks/facts.yml").read_text(encoding="utf-8"))[-1]
    last["tasks"] = [task for task in last["tasks"] if "ansible.builtin.fail" in task]
    hosts = {
        "dead": {"gpufleet_read": {"unreachable": True, "msg": "Task failed: no route."}},
        "sick": {"gpufleet_read": {"failed": True, "msg": "no sudo"}},
    }
    told = failures(tmp_path, last, hosts)
    assert "dead could not be read: no route. Check its address" in told["dead"]
    assert "sick could not be read: no sudo." in told["sick"]
    assert "Check its address" not in told["sick"]
