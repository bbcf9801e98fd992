from __future__ import annotations

from types import SimpleNamespace

import pytest

from ansible_collections.gpufleet.inference.plugins.action import gpu_state
from ansible_collections.gpufleet.inference.plugins.module_utils._host import nvml
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp


@pytest.fixture
def action(monkeypatch):
    """An action whose remote executions are recorded and answered from a list."""
    plugin = gpu_state.ActionModule.__new__(gpu_state.ActionModule)
    plugin._task = SimpleNamespace(args={"deadline": 5})
    plugin.calls, plugin.answers = [], []

    def execute(module_name, module_args, task_vars):
        plugin.calls.append(module_args)
        return plugin.answers.pop(0) if plugin.answers else {"changed": False}

    plugin._execute_module = execute
    monkeypatch.setattr(gpu_state.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    return plugin


def known(digest):
    return {"ansible_facts": {"gpufleet_gpu": {"helper": {"digest": digest}}}}


def test_a_host_not_seen_before_gets_the_bindings_in_one_execution(action):
    action.run(task_vars={})
    assert len(action.calls) == 1
    assert action.calls[0]["deadline"] == 5
    assert nvml.load_bindings(action.calls[0]["bindings"]).nvmlDeviceSetComputeMode


def test_a_host_with_this_controllers_helper_gets_no_bindings(action):
    digest = _zipapp.digest(_zipapp.build())
    action.run(task_vars=known(digest))
    assert action.calls == [{"deadline": 5, "instances": [], "helper_digest": digest}]


@pytest.mark.parametrize("digest", [None, "0" * 64])
def test_a_host_with_another_helper_or_none_gets_the_bindings(action, digest):
    action.run(task_vars=known(digest))
    assert len(action.calls) == 1
    assert "bindings" in action.calls[0]


def test_a_helper_that_went_away_costs_a_second_execution_only(action):
    action.answers = [{"failed": True, "error_code": "helper_changed"}, {"changed": False, "ok": 1}]
    assert action.run(task_vars=known(_zipapp.digest(_zipapp.build())))["ok"] == 1
    assert "bindings" in action.calls[1]


def test_a_controller_without_the_bindings_says_how_to_get_them(action, monkeypatch):
    monkeypatch.setattr(_zipapp.importlib.util, "find_spec", lambda name: None)
    gpu_state._bindings.packed.cache_clear()
    result = action.run(task_vars={})
    assert result["failed"]
    assert "pip install nvidia-ml-py" in result["msg"]
    assert action.calls == []


def test_what_a_user_writes_for_the_internal_options_is_not_passed_on(action):
    action._task.args = {"bindings": "import os", "helper_digest": "x"}
    action.run(task_vars={})
    assert action.calls[0]["bindings"] != "import os"
    assert "helper_digest" not in action.calls[0]


def test_the_instances_of_the_plan_are_passed_on_where_they_will_run(action):
    entries = [
        {"name": "chat", "state": "started", "devices": ["GPU-1", "GPU-2"]},
        {"name": "old", "state": "absent", "devices": ["GPU-1"]},
        {"name": "nowhere", "devices": []},
    ]
    action.run(task_vars={"ansible_facts": {"gpufleet_plan": {"instances": entries}}})
    assert action.calls[0]["instances"] == [{"name": "chat", "devices": ["GPU-1", "GPU-2"]}]
