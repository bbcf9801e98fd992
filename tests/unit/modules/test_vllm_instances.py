"""vllm_instances against a fake service manager: what serves stays up, check mode is exact, readiness means a token."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gpufleet.inference.plugins.module_utils import _module
from ansible_collections.gpufleet.inference.plugins.module_utils._domain import serving
from ansible_collections.gpufleet.inference.plugins.module_utils._host.lock import HostLock
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Result
from ansible_collections.gpufleet.inference.plugins.modules import vllm_instances

A, B = "a" * 12, "b" * 12


class FakeSystemd:
    """Runner that keeps the state of units; a start gives a token unless the unit is told to fail."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.states: dict[str, dict[str, str]] = {}
        self.calls: list[list[str]] = []
        self.fails: set[str] = set()
        self.silent: set[str] = set()
        self.refused: set[str] = set()
        self.number = 0

    def run(self, argv: list[str], *, timeout: float | None = None, data: Any = None, env: Any = None) -> Result:
        self.calls.append(list(argv))
        if argv[0] == "journalctl":
            return Result(0, "torch.OutOfMemoryError: CUDA out of memory\n", "")
        words = [word for word in argv[1:] if not word.startswith("-")]
        if words[0] == "show":
            return Result(0, "\n\n".join(self._show(unit) for unit in words[1:]) + "\n", "")
        for unit in words[1:]:
            self._act(words[0], unit)
        return Result(0, "", "")

    def _show(self, unit: str) -> str:
        known = os.path.lexists(self.base / "etc/systemd/system" / unit)
        state = {"LoadState": "loaded" if known else "not-found", "ActiveState": "inactive", "MainPID": "0"}
        return "\n".join(f"{key}={value}" for key, value in {**state, **self.states.get(unit, {})}.items())

    def _act(self, verb: str, unit: str) -> None:
        if verb in ("start", "restart"):
            self.number += 1
            invocation = f"{self.number:032x}"
            if unit in self.refused:
                self.states[unit] = {"ActiveState": "inactive"}
                return
            if unit in self.fails:
                self.states[unit] = {"ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code"}
                return
            self.states[unit] = {"ActiveState": "active", "MainPID": "42", "InvocationID": invocation}
            if unit not in self.silent:
                note = self.base / "run" / unit.removesuffix(".service") / f"ready-{invocation}"
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()
        elif verb == "stop":
            self.states[unit] = {"ActiveState": "inactive"}

    def acts(self) -> list[str]:
        """What was done to the service manager, without the reads."""
        quiet = ("journalctl", "show", "reset-failed")
        return [
            " ".join(word for word in call[1:] if word not in ("--", "--no-block"))
            for call in self.calls
            if call[0] not in quiet and call[1] not in quiet
        ]


class Host:
    def __init__(self, base: Path, capsys: Any) -> None:
        self.base, self.systemd, self._capsys = base, FakeSystemd(base), capsys

    def run(self, *entries: dict[str, Any], check: bool = False, **options: Any) -> dict[str, Any]:
        self.systemd.calls.clear()
        args = {"generations": list(entries), "_ansible_check_mode": check, "_ansible_diff": True, **options}
        with patch_module_args(args), pytest.raises(SystemExit):
            vllm_instances.main()
        return json.loads(self._capsys.readouterr().out)

    def current(self, name: str = "chat") -> str:
        return os.readlink(self.base / "etc/vllm" / name / "current")

    def tree(self) -> list[str]:
        return sorted(str(path.relative_to(self.base)) for path in self.base.rglob("*") if "run" not in path.parts)


@pytest.fixture
def host(tmp_path, monkeypatch, capsys):
    base = tmp_path / "host"
    base.mkdir()
    made = Host(base, capsys)
    monkeypatch.setattr(vllm_instances, "Root", lambda prefix: Root(str(base)))
    monkeypatch.setattr(_module, "ModuleRunner", lambda module: made.systemd)
    monkeypatch.setattr(_module, "HostLock", lambda **options: HostLock(path=str(tmp_path / "lock"), **options))
    return made


def entry(name: str = "chat", digest: str = A, state: str = "started", after: tuple[str, ...] = ()) -> dict[str, Any]:
    text = {"digest": digest, "unit": f"# {digest}\n", "record": f'{{"digest": "{digest}"}}\n'}
    return {"name": name, "state": state, "start_after": list(after), **({} if state == "absent" else text)}


def test_a_new_instance_is_written_started_and_waited_for(host):
    result = host.run(entry())
    assert (result["changed"], result["instances"][0]["action"], result["instances"][0]["state"]) == (
        True,
        "start",
        "active",
    )
    assert host.systemd.acts() == ["daemon-reload", "start vllm-chat.service"]
    assert host.current() == A
    link = host.base / "etc/systemd/system/vllm-chat.service"
    assert os.readlink(link) == "/etc/vllm/chat/current/vllm-chat.service"
    assert os.path.lexists(host.base / "etc/systemd/system/multi-user.target.wants/vllm-chat.service")


def test_check_mode_tells_what_the_run_does_and_does_nothing(host):
    before = host.tree()
    predicted = host.run(entry(), check=True)
    assert host.tree() == before
    assert host.systemd.acts() == []
    done = host.run(entry())
    assert predicted["changes"] == done["changes"]
    assert predicted["diff"] == done["diff"]
    assert {"path": "vllm-chat.service", "action": "start"} in done["changes"]


def test_the_diff_of_a_new_generation_is_against_the_one_that_serves(host):
    host.run(entry())
    shown = {diff["after_header"]: (diff["before"], diff["after"]) for diff in host.run(entry(digest=B))["diff"]}
    assert shown[f"/etc/vllm/chat/{B}/vllm-chat.service"] == (f"# {A}\n", f"# {B}\n")
    assert shown[f"/etc/vllm/chat/{B}/instance.json"][0] == f'{{"digest": "{A}"}}\n'


def test_the_second_run_changes_nothing_and_touches_no_service(host):
    host.run(entry())
    result = host.run(entry())
    assert (result["changed"], result["changes"], host.systemd.acts()) == (False, [], [])


def test_a_serving_instance_is_not_restarted_its_new_generation_is_staged_once(host):
    host.run(entry())
    result = host.run(entry(digest=B))
    assert host.systemd.acts() == []
    assert host.current() == A
    assert result["instances"][0]["due"] is True
    assert (result["instances"][0]["generation"], result["instances"][0]["staged_generation"]) == (A, B)
    assert "due: run upgrade" in result["findings"][0]["text"]
    again = host.run(entry(digest=B))
    assert (again["changed"], again["instances"][0]["due"]) == (False, True)


def test_with_consent_the_serving_instance_is_restarted_with_the_new_generation(host):
    host.run(entry())
    host.run(entry(digest=B))
    result = host.run(entry(digest=B), allow_disruption=True)
    assert host.systemd.acts() == ["daemon-reload", "restart vllm-chat.service"]
    assert host.current() == B
    assert result["instances"][0]["due"] is False
    assert (host.base / "etc/vllm/chat" / A / "instance.json").exists(), "the way back is kept"


@pytest.mark.parametrize("state", ["failed", "inactive"])
def test_a_stopped_or_failed_instance_is_started_with_the_new_generation(host, state):
    host.run(entry())
    host.systemd.states["vllm-chat.service"] = {"ActiveState": state}
    host.run(entry(digest=B))
    assert host.current() == B
    assert host.systemd.acts() == ["daemon-reload", "start vllm-chat.service"]


def test_an_instance_that_fails_to_start_is_named_with_its_journal_and_the_others_are_started(host):
    host.systemd.fails = {"vllm-chat.service"}
    result = host.run(entry(), entry("other"))
    assert result["failed"] is True
    assert result["error_code"] == "instance_failed"
    for words in ("1 of 2", "chat", "exit-code", "CUDA out of memory"):
        assert words in result["msg"]
    states = {item["name"]: item["state"] for item in result["details"]["instances"]}
    assert states == {"chat": "failed", "other": "active"}


def test_active_without_a_token_is_a_failure(host):
    host.systemd.silent = {"vllm-chat.service"}
    result = host.run(entry())
    assert result["failed"] is True
    assert "no token was seen" in result["msg"]


def test_a_loading_instance_is_waited_for_although_systemd_had_to_try_again(host, monkeypatch):
    host.run(entry())
    unit = "vllm-chat.service"
    up = host.systemd.states[unit]
    shown = []

    def show(name: str) -> str:
        shown.append(name)
        state = {**up, "NRestarts": "1"} if len(shown) > 2 else {"ActiveState": "activating", "NRestarts": "1"}
        return "\n".join(f"{key}={value}" for key, value in {"MainPID": "0", **state}.items())

    monkeypatch.setattr(host.systemd, "_show", show)
    result = host.run(entry())
    assert (result["changed"], result["instances"][0]["state"], host.systemd.acts()) == (False, "active", [])


def test_stopped_stops_and_disables_and_the_second_run_is_quiet(host):
    host.run(entry())
    host.run(entry(state="stopped"))
    assert "stop vllm-chat.service" in host.systemd.acts()
    assert not os.path.lexists(host.base / "etc/systemd/system/multi-user.target.wants/vllm-chat.service")
    assert host.run(entry(state="stopped"))["changed"] is False


def test_absent_removes_the_instance_and_leaves_the_neighbour(host):
    host.run(entry(), entry("other"))
    predicted = host.run(entry(state="absent"), entry("other"), check=True)
    done = host.run(entry(state="absent"), entry("other"))
    assert predicted["changes"] == done["changes"]
    assert host.systemd.acts() == ["stop vllm-chat.service", "daemon-reload"]
    assert not any("chat" in path for path in host.tree())
    assert host.current("other") == A
    assert host.run(entry(state="absent"), entry("other"))["changed"] is False


def test_an_instance_that_left_the_list_is_reported_and_left_alone(host):
    host.run(entry(), entry("other"))
    result = host.run(entry())
    assert (result["changed"], host.systemd.acts()) == (False, [])
    assert [finding["code"] for finding in result["findings"]] == ["unlisted"]
    assert "state: absent" in result["findings"][0]["remedy"]


def test_a_unit_of_that_name_that_is_not_ours_is_refused_before_any_change(host):
    unit = host.base / "etc/systemd/system/vllm-chat.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/usr/bin/theirs\n")
    before = host.tree()
    result = host.run(entry())
    assert result["error_code"] == "path_taken"
    assert "vllm-chat.service" in result["msg"]
    assert (host.tree(), unit.read_text(), host.systemd.acts()) == (
        before,
        "[Service]\nExecStart=/usr/bin/theirs\n",
        [],
    )
    assert host.run(entry(state="absent"))["changed"] is False


def test_starts_are_queued_in_the_order_of_the_plan(host):
    host.run(entry("a", after=("b",)), entry("b"))
    assert "start vllm-b.service vllm-a.service" in host.systemd.acts()


def test_older_generations_go_when_a_new_one_is_started(host):
    for digest in (A, B, "c" * 12):
        host.run(entry(digest=digest), allow_disruption=True)
    kept = sorted(path.name for path in (host.base / "etc/vllm/chat").iterdir())
    assert kept == [B, "c" * 12, "current"]


def test_the_paths_of_the_host_layout_are_the_ones_written(host):
    host.run(entry())
    assert (host.base / serving.CONFIGURATION[1:] / "chat" / A / "vllm-chat.service").read_text() == f"# {A}\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("", "holds 0 lines"), ("first-secret\nsecond-secret\n", "holds 2 lines")],
)
def test_a_key_file_that_cannot_serve_is_refused_before_any_change_and_never_shown(host, content, words):
    if content is not None:
        (host.base / "key").write_text(content)
    before = host.tree()
    result = host.run({**entry(), "key_files": ["/key"]})
    assert result["error_code"] == "bad_key_file"
    assert words in result["msg"]
    assert "secret" not in json.dumps(result)
    assert (host.tree(), host.systemd.acts()) == (before, [])


def test_a_key_that_every_user_can_read_is_a_finding(host):
    (host.base / "key").write_text("planted-secret\n")
    (host.base / "key").chmod(0o644)
    result = host.run({**entry(), "key_files": ["/key"]})
    assert [finding["code"] for finding in result["findings"]] == ["open_key"]
    assert "planted-secret" not in json.dumps(result)
    (host.base / "key").chmod(0o600)
    assert host.run({**entry(), "key_files": ["/key"]})["findings"] == []


def test_a_start_that_systemd_refuses_is_a_failure_at_once(host):
    host.systemd.refused = {"vllm-chat.service"}
    result = host.run(entry())
    assert result["failed"] is True
    assert "systemd did not start it" in result["msg"]
