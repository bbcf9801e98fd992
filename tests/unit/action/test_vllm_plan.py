"""The planner as a task: facts of the host by default, everything passed in on request, plain data out."""

from __future__ import annotations

import json
from unittest import mock

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from ansible_collections.gpufleet.inference.plugins.action import vllm_plan

GIB = 2**30
GPU = {
    "devices": [
        {
            "index": 0,
            "uuid": "GPU-0",
            "pci_address": "0000:18:00.0",
            "name": "NVIDIA L40S",
            "compute_capability": "8.9",
            "memory": {"total": 44 * GIB, "reserved": 0, "free": 44 * GIB},
        }
    ]
}
MODEL = {
    "config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
}
INSTANCE = {"name": "chat", "model": "m", "port": 8000}


def run(facts=None, **args):
    loader = DataLoader()
    action = vllm_plan.ActionModule(
        task=mock.Mock(args=args, async_val=0, check_mode=True, diff=False),
        connection=mock.Mock(),
        play_context=mock.Mock(),
        loader=loader,
        templar=Templar(loader=loader, variables={}),
        shared_loader_obj=None,
    )
    action._execute_module = mock.Mock(side_effect=AssertionError("nothing may be executed on the host"))
    return action.run(task_vars={"ansible_facts": facts or {}})


def test_the_facts_of_the_host_are_the_default():
    result = run({"gpufleet_gpu": GPU}, models={"m": MODEL}, instances=[INSTANCE], engine_version="0.19.1")
    assert not result["changed"] and result["plan"]["fits"]
    assert result["plan"]["instances"][0]["devices"] == ["GPU-0"]
    assert json.loads(json.dumps(result)) == result


def test_everything_can_be_passed_in():
    result = run(gpu=GPU, models={"m": MODEL}, instances=[INSTANCE], engine_version="0.32.0", reserve="2GiB")
    assert result["plan"]["gpus"][0]["free"] == 42 * GIB


def test_ports_come_from_the_facts_of_the_host():
    taken = {"ports": [{"address": "127.0.0.1", "port": 8000, "pid": 9, "process": "nginx", "unit": "nginx.service"}]}
    facts = {"gpufleet_gpu": GPU, "gpufleet_host": taken}
    result = run(facts, models={"m": MODEL}, instances=[INSTANCE], engine_version="0.19.1")
    assert not result.get("failed")
    assert result["plan"]["instances"][0]["reason"]["code"] == "port_conflict"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"instances": [{**INSTANCE, "prot": 1}], "engine_version": "0.19.1"}, "bad_instances"),
        ({"instances": [INSTANCE], "engine_version": "0.19.7"}, "unknown_release"),
        ({"instances": [{**INSTANCE, "model": "x"}], "engine_version": "0.19.1"}, "unknown_model"),
        ({"instances": [INSTANCE], "engine_version": "0.19.1", "gpu": {"devices": []}}, "no_gpu_facts"),
        ({"instances": [], "reserve": "much"}, "bad_reserve"),
    ],
)
def test_malformed_input_fails_the_task_with_a_code_and_the_next_step(args, code):
    result = run(**{"gpu": GPU, "models": {"m": MODEL}, **args})
    assert result["failed"] and result["error_code"] == code
    assert result["hint"] and result["hint"] in result["msg"]


def test_no_instances_is_an_empty_plan():
    assert run({"gpufleet_gpu": {}})["plan"] == {"fits": True, "findings": [], "instances": [], "gpus": []}
