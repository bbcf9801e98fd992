"""The documentation of vllm_plan describes the arguments of its action."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from jinja2.nativetypes import NativeEnvironment

from ansible_collections.gpufleet.inference.plugins.action import fleet_report
from ansible_collections.gpufleet.inference.plugins.action import vllm_plan as action
from ansible_collections.gpufleet.inference.plugins.modules import vllm_plan as module

ROOT = Path(__file__).resolve().parents[3]
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


def test_the_example_takes_the_gpus_out_of_the_report_that_the_facts_playbook_writes(tmp_path):
    gpu = {"present": True, "devices": [], "driver": {"running": None, "installed": None, "flavour": None}}
    host = {"status": "ok", "reason": "", "verdict": "ok", "gpu": gpu, "host": {}}
    fleet_report.write(tmp_path / "reports", "facts", {"gpu-01": host})
    (given,) = (
        task["gpufleet.inference.vllm_plan"]["gpu"]
        for task in yaml.safe_load(module.EXAMPLES)
        if "gpu" in task["gpufleet.inference.vllm_plan"]
    )
    native = NativeEnvironment()
    native.filters["from_json"] = json.loads
    native.globals["lookup"] = lambda _name, path: (tmp_path / path).read_text(encoding="utf-8")
    assert native.from_string(given).render() == gpu


def test_the_examples_name_the_release_that_the_role_installs():
    defaults = yaml.safe_load((ROOT / "roles/vllm_engine/defaults/main.yml").read_text(encoding="utf-8"))
    for task in yaml.safe_load(module.EXAMPLES):
        assert task["gpufleet.inference.vllm_plan"]["engine_version"] == defaults["vllm_engine_version"]


def test_the_returned_plan_is_documented():
    described = yaml.safe_load(module.RETURN)["plan"]["contains"]
    assert set(described) == {"fits", "findings", "instances", "gpus"}
