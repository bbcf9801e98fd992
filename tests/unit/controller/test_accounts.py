"""Only accounts that the collection created go when it leaves a host. The plays run on this machine, on files."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
NEW, OLD = {"changed": True}, {"changed": False}
CHANGED_USER = {"changed": True, "append": True}
SKIPPED = {"changed": False, "skipped": True}


def play(tmp_path: Path, tasks: list[dict[str, Any]], variables: dict[str, Any]) -> None:
    book = tmp_path / "play.yml"
    given = {"ansible_python_interpreter": sys.executable, **variables}
    hosts = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": given, "tasks": tasks}
    book.write_text(yaml.safe_dump([hosts], sort_keys=False), encoding="utf-8")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(book)],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def marks(tmp_path: Path, cases: dict[str, Any]) -> dict[str, list[str]]:
    """The marks that the role writes for each (result of group, result of user)."""
    tasks = yaml.safe_load((ROOT / "roles/fleet_host/tasks/main.yml").read_text(encoding="utf-8"))
    wanted = tasks[-1]["vars"]["fleet_host_marks"]
    copies = [
        {
            "ansible.builtin.copy": {"dest": str(tmp_path / name), "content": "{{ wanted | to_json }}"},
            "vars": {"wanted": wanted, "fleet_host_made_group": group, "fleet_host_made_user": user},
        }
        for name, (group, user) in cases.items()
    ]
    play(tmp_path, copies, {"fleet_host_user": "deploy", "fleet_host_group": "models"})
    found = {name: json.loads((tmp_path / name).read_text(encoding="utf-8")) for name in cases}
    return {name: [Path(entry["path"]).name for entry in entries] for name, entries in found.items()}


def test_an_account_is_marked_in_the_run_that_creates_it_and_in_no_other(tmp_path):
    assert marks(
        tmp_path,
        {
            "bare host": (NEW, NEW),
            "second run": (OLD, {**OLD, "append": True}),
            "user was there": (NEW, CHANGED_USER),
            "group was there": (OLD, NEW),
            "not managed": (SKIPPED, SKIPPED),
        },
    ) == {
        "bare host": ["made-group-models", "made-user-deploy"],
        "second run": [],
        "user was there": ["made-group-models"],
        "group was there": ["made-user-deploy"],
        "not managed": [],
    }


TWO_NAMES = {"fleet_host_user": "deploy", "fleet_host_group": "models"}
CASES: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "ours": (["made-group-vllm", "made-user-vllm"], {}, ["user"]),
    "both of others": ([], {}, []),
    "group of others goes with the user": (["made-user-vllm"], {}, []),
    "ours by two names": (["made-group-models", "made-user-deploy"], TWO_NAMES, ["user", "group"]),
    "user of others": (["made-group-models"], TWO_NAMES, []),
    "group of others": (["made-user-deploy"], TWO_NAMES, ["user"]),
    "marks of other names": (["made-group-vllm", "made-user-vllm"], TWO_NAMES, []),
    "not managed": (["made-group-vllm", "made-user-vllm"], {"fleet_host_manage_user": False}, []),
}


def test_decommission_removes_marked_accounts_only(tmp_path):
    """The playbook's own block for each case, with a file made in place of an account removed."""
    book = yaml.safe_load((ROOT / "playbooks/decommission.yml").read_text(encoding="utf-8"))[1]
    (accounts,) = (task for task in book["tasks"] if "block" in task)
    tasks = []
    for number, (found, variables, _gone) in enumerate(CASES.values()):
        block = copy.deepcopy(accounts)
        block["vars"] |= {"accounts_found": {"files": [{"path": f"/var/lib/gpufleet/{name}"} for name in found]}}
        block["vars"] |= variables
        for task, kind in zip(block["block"], ("user", "group")):
            assert task.pop(f"ansible.builtin.{kind}")["state"] == "absent"
            task["ansible.builtin.copy"] = {"dest": str(tmp_path / f"{number}-{kind}"), "content": ""}
        tasks.append(block)
    play(tmp_path, tasks, {})
    kinds = ("user", "group")
    done = {
        name: [kind for kind in kinds if (tmp_path / f"{number}-{kind}").exists()] for number, name in enumerate(CASES)
    }
    assert done == {name: gone for name, (_found, _variables, gone) in CASES.items()}


def test_the_marks_outlive_the_accounts_so_that_a_broken_run_can_be_repeated():
    book = yaml.safe_load((ROOT / "playbooks/decommission.yml").read_text(encoding="utf-8"))[1]
    last = book["tasks"][-1]["gpufleet.inference.host_files"]["files"]
    assert {"path": "/var/lib/gpufleet", "state": "absent", "purge": True} in last
