"""What the demo tells a person, and that it ends with a reason when a step fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import demo


def test_failed_step_ends_the_demo_with_its_reason_and_the_end_of_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        demo.run(tmp_path / "broken.log", ["sh", "-c", "echo the reason >&2; exit 3"])

    def never() -> None:
        raise AssertionError("no step runs after a failed one")

    monkeypatch.setattr(demo, "STEPS", (("Break", broken), ("Never", never)))
    assert demo.up() == 1
    shown = capsys.readouterr().out
    assert "[1/2] Break" in shown
    assert "sh ended with 3" in shown
    assert "the reason" in shown
    assert str(tmp_path / "broken.log") in shown


def test_steps_are_numbered_and_timed_and_plain_text_goes_into_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "STEPS", (("One", lambda: None), ("Two", lambda: None)))
    assert demo.up() == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:4] == ["[1/2] One", "      0 s", "[2/2] Two", "      0 s"]
    assert "\033" not in shown


def test_the_answers_are_shown_with_one_word_on_why_they_are_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instances = [{"name": "chat", "port": 8000}, {"name": "code", "port": 8001}]
    listing = {"_meta": {"hostvars": {"gpu1": {"vllm_instances_list": instances}}}}
    answer = {"choices": [{"text": "qx zv"}], "usage": {"completion_tokens": 16}}
    monkeypatch.setattr(demo, "run", lambda *_arguments: json.dumps(listing))
    monkeypatch.setattr(demo, "ask", lambda _host, _instance: answer)
    demo.answers()
    shown = capsys.readouterr().out
    assert shown.count("qx zv") == 2
    assert shown.count("random weights") == 1


def test_colour_needs_a_terminal_and_no_objection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert demo.style("1", "text") == "\033[1mtext\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert demo.style("1", "text") == "text"


def test_demo_has_three_instances_two_of_them_on_one_gpu_and_one_host_behind_sudo() -> None:
    folder = ROOT / "inventories" / "demo" / "host_vars"
    wanted = {path.stem: yaml.safe_load(path.read_text())["vllm_instances_list"] for path in folder.glob("*.yml")}
    assert sum(len(instances) for instances in wanted.values()) == 3
    assert [instance["gpus"] for instance in wanted["gpu1"]] == [[0], [0]]
    fleet = yaml.safe_load((ROOT / "tests/testbed/fleets/demo.yml").read_text())
    assert [host.get("sudo_password", False) for host in fleet["hosts"]] == [False, True]
    assert {host["name"] for host in fleet["hosts"]} == set(wanted)


def test_shelf_leads_to_what_was_built_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "WORK", tmp_path / "demo")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        demo.shelf("wheelhouse", tmp_path / name)
        demo.shelf("wheelhouse", tmp_path / name)
        assert (tmp_path / "demo/wheelhouse").resolve() == tmp_path / name
