"""The counting plugins count each remote operation once, for the right host and task."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests" / "plugins"))
import counting

INVENTORY = "a ansible_python_interpreter={python}\nb ansible_python_interpreter={python}\n"
PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - name: One command
      ansible.builtin.raw: echo four
      changed_when: false
    - name: Only on b
      ansible.builtin.raw: echo only
      changed_when: false
      when: inventory_hostname == 'b'
    - name: On the controller
      ansible.builtin.debug:
        msg: nothing remote
    - name: A module
      ansible.builtin.ping:
"""


def run(folder: Path, pipelining: bool) -> dict[str, Any]:
    (folder / "hosts").write_text(INVENTORY.format(python=sys.executable))
    (folder / "play.yml").write_text(PLAYBOOK)
    output = folder / "counts.json"
    env = {
        **os.environ,
        **counting.environment(output, transport="counting_local"),
        "ANSIBLE_PIPELINING": str(pipelining),
        "HOME": str(folder),
    }
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [str(program), "-i", "hosts", "play.yml"], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not Path(f"{output}.events").exists()
    return counting.read(output)


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("pipelined"), pipelining=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("copied"), pipelining=False)


def test_tasks_are_counted_in_all_and_per_host(pipelined: dict[str, Any]) -> None:
    assert pipelined["tasks"] == 4
    assert pipelined["hosts"]["a"]["tasks"] == 4


def test_a_pipelined_module_is_one_remote_operation(pipelined: dict[str, Any]) -> None:
    assert pipelined["hosts"]["a"]["by_task"] == {"One command": 1, "A module": 1}
    assert pipelined["hosts"]["a"]["remote"] == 2
    assert pipelined["hosts"]["a"]["puts"] == 0


def test_a_skipped_host_costs_nothing_and_the_other_is_counted(pipelined: dict[str, Any]) -> None:
    assert "Only on b" not in pipelined["hosts"]["a"]["by_task"]
    assert pipelined["hosts"]["b"]["by_task"]["Only on b"] == 1


def test_without_pipelining_the_copy_of_the_module_is_counted_with_its_size(
    pipelined: dict[str, Any], copied: dict[str, Any]
) -> None:
    assert copied["hosts"]["a"]["puts"] == 1
    assert copied["hosts"]["a"]["remote"] > pipelined["hosts"]["a"]["remote"]
    assert copied["hosts"]["a"]["bytes_sent"] > 50_000
    totals = copied["hosts"]["a"]
    assert totals["remote"] == totals["executions"] + totals["puts"] + totals["fetches"]
    assert totals["remote"] == sum(totals["by_task"].values())


def test_received_bytes_are_the_output_of_the_commands(pipelined: dict[str, Any]) -> None:
    a, b = (pipelined["hosts"][host]["bytes_received"] for host in ("a", "b"))
    assert b - a == len("only\n")
