"""The suite runner counts what ran, ends what hangs, and never calls an empty run a success."""

from __future__ import annotations

import sys
import tarfile
import time
from pathlib import Path

import pytest
import suite


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(suite, "ROOT", tmp_path)


def test_a_step_counts_one_when_it_holds_no_tests() -> None:
    row = suite.run_step("fine", lambda ctx: None, time.monotonic() + 60)
    assert (row.passed, row.failed, row.verdict) == (1, 0, "ok")


def test_a_command_that_fails_makes_its_step_fail_and_shows_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    def step(ctx: suite.Context) -> None:
        ctx.run(sys.executable, "-c", "print('the reason'); raise SystemExit(3)", cwd=Path("/"))

    row = suite.run_step("bad", step, time.monotonic() + 60)
    assert (row.passed, row.failed, row.verdict) == (0, 1, "FAILED")
    assert "the reason" in capsys.readouterr().out


def test_a_command_that_outlives_the_deadline_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    script = f"(while :; do date > {mark}; sleep 0.2; done) & wait"

    def step(ctx: suite.Context) -> None:
        ctx.run("bash", "-c", script, cwd=Path("/"))

    row = suite.run_step("slow", step, time.monotonic())
    assert row.verdict == "out of time"
    before = mark.read_text() if mark.exists() else ""
    time.sleep(1.2)
    assert (mark.read_text() if mark.exists() else "") == before


def test_counts_of_pytest_are_the_counts_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a():\n    pass\ndef test_b():\n    assert 0\n", encoding="utf-8")

    def step(ctx: suite.Context) -> None:
        ctx.pytest("-p", "no:cacheprovider", tmp_path / "test_two.py")

    row = suite.run_step("tests", step, time.monotonic() + 60)
    assert (row.passed, row.failed) == (1, 1)


def test_a_pytest_run_that_collects_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "test_none.py").write_text("", encoding="utf-8")

    def step(ctx: suite.Context) -> None:
        ctx.pytest("-p", "no:cacheprovider", tmp_path / "test_none.py")

    assert suite.run_step("none", step, time.monotonic() + 60).failed == 1


def test_the_closing_line_says_passed_and_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.close([suite.Row("a", 1.0, 3, 0, "ok"), suite.Row("b", 2.0, 0, 1, "FAILED")], 0.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 passed, 1 failed"


def test_a_run_of_nothing_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.close([], 0.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 0 failed"


def test_a_file_no_user_needs_is_found_in_the_tarball(tmp_path: Path) -> None:
    tarball = tmp_path / "c.tar.gz"
    with tarfile.open(tarball, "w:gz") as archive:
        for name in ("README.md", "roles/a/tasks/main.yml", "tests/unit/x.py", ".ci/run"):
            archive.addfile(tarfile.TarInfo(name))
    assert sorted(suite.unwanted(tarball)) == [".ci/run", "tests/unit/x.py"]


def test_a_long_run_adds_a_row_to_the_tested_page(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/tested.md").write_text("| head |\n", encoding="utf-8")
    suite.append_tested("domain/test_fuzz", "abc123", 2.04, "passed")
    row = (tmp_path / "docs/tested.md").read_text(encoding="utf-8").splitlines()[1]
    assert row.startswith("| domain/test_fuzz | abc123 | 2") and row.endswith("| 2.0 | passed |")
