"""The documentation of vllm_plan describes the arguments of its action."""

from __future__ import annotations

import yaml

from ansible_collections.gpufleet.inference.plugins.action import vllm_plan as action
from ansible_collections.gpufleet.inference.plugins.modules import vllm_plan as module

OPTIONS = yaml.safe_load(module.DOCUMENTATION)["options"]


def test_every_argument_is_documented_with_its_type_and_choices():
    assert set(OPTIONS) == set(action.ARGUMENTS)
    for name, argument in action.ARGUMENTS.items():
        assert OPTIONS[name]["type"] == argument["type"], name
        assert OPTIONS[name].get("choices") == argument.get("choices"), name
        if "default" in argument:
            assert OPTIONS[name]["default"] == argument["default"], name


def test_examples_use_documented_arguments_only():
    for task in yaml.safe_load(module.EXAMPLES):
        assert set(task["gpufleet.inference.vllm_plan"]) <= set(OPTIONS)


def test_the_returned_plan_is_documented():
    described = yaml.safe_load(module.RETURN)["plan"]["contains"]
    assert set(described) == {"fits", "findings", "instances", "gpus"}
