"""The worked examples of docs/planning.md are the planner's answers of today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_the_page_is_what_the_planner_says():
    command = [sys.executable, str(ROOT / "scripts" / "worked_examples.py"), "--check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
