"""Molecule's `prepare` turns every check round, so that a check that also passes on an unconfigured host is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def verdict(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the checks in `text`, run as Molecule runs those of a scenario."""
    (folder / "test_checks.py").write_text(text)
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "conftest", f"--rootdir={folder}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "molecule"), "GPUFLEET_FLEET": "stub"}
    command = [*argv, *arguments, str(folder)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_check_that_fails_on_the_unconfigured_host_is_a_good_one(tmp_path: Path) -> None:
    checks = "def test_service():\n    assert 'inactive' == 'active'\n"
    assert verdict(tmp_path, checks, "--unconfigured")[0] == 0
    assert verdict(tmp_path, checks)[0] == 1, "after converge the same check fails the scenario"


def test_a_check_that_passes_on_the_unconfigured_host_fails_the_scenario(tmp_path: Path) -> None:
    status, output = verdict(tmp_path, "def test_nothing():\n    assert 2 > 1\n", "--unconfigured")
    assert status == 1
    assert "test_nothing passes although nothing was configured: it checks nothing" in output


@pytest.mark.parametrize("checks", ["import does_not_exist\n", "def test_x(no_such_fixture):\n    assert False\n", ""])
def test_what_never_reaches_its_check_is_no_proof(tmp_path: Path, checks: str) -> None:
    assert verdict(tmp_path, checks, "--unconfigured")[0] != 0
