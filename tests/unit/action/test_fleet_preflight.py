"""The preflight as a task: a refusal fails the host with one message, and the findings become a fact."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from ansible_collections.gpufleet.inference.plugins.action.fleet_preflight import ActionModule

GPU = {
    "present": True,
    "driver": {"running": "550.1"},
    "devices": [{"index": 0, "compute_capability": "9.0", "processes": []}],
    "other_gpus": [],
}
HOST = {"systemd": 252, "python": [{"path": "/usr/bin/python3.11", "version": "3.11"}], "ports": []}
INSTANCE = {"name": "chat", "model": "tiny", "port": 8000}


@pytest.fixture
def act():
    def run(gpu: Any = None, host: Any = None, **args: Any) -> dict[str, Any]:
        loader = DataLoader()
        given = {"instances": [INSTANCE], "models": {"tiny": {}}, "engine_version": "0.32.0", **args}
        action = ActionModule(
            task=mock.Mock(args=given, async_val=0, check_mode=False, diff=False),
            connection=mock.Mock(),
            play_context=mock.Mock(),
            loader=loader,
            templar=Templar(loader=loader),
            shared_loader_obj=None,
        )
        facts = {"gpufleet_gpu": GPU if gpu is None else gpu, "gpufleet_host": HOST if host is None else host}
        result: dict[str, Any] = action.run(task_vars={"ansible_facts": facts})
        return result

    return run


def test_a_host_without_refusal_passes_unchanged(act):
    result = act()
    assert (result.get("failed", False), result["changed"]) == (False, False)
    assert result["ansible_facts"]["gpufleet_preflight"]["refused"] is False


def test_a_refusal_fails_the_host_and_says_that_nothing_was_changed(act):
    result = act(gpu={**GPU, "driver": {"running": None}})
    assert (result["failed"], result["error_code"]) == (True, "refused")
    assert result["msg"].startswith("Nothing was changed on this host. (1) host: ")
    assert result["ansible_facts"]["gpufleet_preflight"]["refused"] is True


def test_a_malformed_list_fails_with_its_own_message(act):
    result = act(instances=[{**INSTANCE, "prot": 1}])
    assert result["failed"] is True
    assert "prot" in result["msg"]


def test_a_host_of_another_vendor_is_skipped_not_failed(act):
    result = act(gpu={"present": False, "other_gpus": [{"vendor_id": "0x1002"}]})
    assert result.get("failed", False) is False
    assert result["ansible_facts"]["gpufleet_preflight"]["skipped"] is True
