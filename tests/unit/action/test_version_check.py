"""version_check as a task: facts in, findings and verdicts out; nothing is contacted."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from version_hosts import gpu_facts, host_facts

from ansible_collections.gpufleet.inference.plugins.action.version_check import ActionModule


@pytest.fixture
def act():
    def run(gpu: Any = None, host: Any = None, **args: Any) -> dict[str, Any]:
        loader = DataLoader()
        connection = mock.Mock()
        action = ActionModule(
            task=mock.Mock(args=args, async_val=0, check_mode=True, diff=False),
            connection=connection,
            play_context=mock.Mock(),
            loader=loader,
            templar=Templar(loader=loader),
            shared_loader_obj=None,
        )
        facts = {
            "gpufleet_gpu": gpu_facts() if gpu is None else gpu,
            "gpufleet_host": host_facts() if host is None else host,
        }
        result: dict[str, Any] = action.run(task_vars={"ansible_facts": facts})
        assert not connection.exec_command.called
        return result

    return run


def test_with_a_number_the_host_is_compared(act):
    result = act(baseline=3)
    assert not result["changed"]
    versions = result["ansible_facts"]["gpufleet_versions"]
    assert (versions["baseline"]["number"], versions["baseline"]["verdict"]) == (3, "ok")


def test_without_a_number_only_the_rules_are_asked(act):
    result = act(gpu_facts(driver="535.261.03"), engine_versions=["0.32.0", "0.19.1"])
    versions = result["ansible_facts"]["gpufleet_versions"]
    assert versions["baseline"] is None
    codes = [item["code"] for item in versions["findings"]]
    assert codes.count("driver_too_old") == 1
    assert codes.count("branch_ended") == 1


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"required": True}, "unknown_baseline"),
        ({"baseline": 9, "sets": [{"number": 9, "driver": "550", "cuda": "13.0"}]}, "baseline_contradiction"),
    ],
)
def test_a_set_that_cannot_be_used_fails_the_host(act, args, code):
    result = act(**args)
    assert result["failed"]
    assert result["error_code"] == code


def test_a_host_without_facts_is_told_what_to_run(act):
    result = act(gpu="", host="")
    assert result["error_code"] == "no_facts"
    assert "gpu_facts" in result["msg"]
