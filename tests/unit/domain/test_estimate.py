"""Terms sorted into what the utilisation counts and what lies beside it."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import estimate, releases
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.kvcache import Settings
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.memory import Term
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import Device
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

GIB = 2**30
TABLE = releases.table(planner_data()["releases"])
H100 = Device("GPU-1", 0, "0000:18:00.0", "NVIDIA H100 80GB HBM3", "hopper", (9, 0), 79 * GIB, 79 * GIB)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MODEL = estimate.Model.of("8b", {"config": CONFIG})
SETTINGS = Settings(max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048)


def estimated(version="0.19.1", profiles=estimate.NO_PROFILES, **settings):
    return estimate.estimate(MODEL, TABLE.release(version), H100, dataclasses.replace(SETTINGS, **settings), profiles)


@pytest.mark.parametrize("version", ["0.7.3", "0.10.1", "0.10.2", "0.20.0", "0.33.0"])
def test_every_term_is_counted_once(version):
    need = estimated(version).need(0)
    parts = (need.weights, need.activation, need.non_torch, need.graphs)
    assert need.middle == sum(term.bytes for term in parts)
    assert need.fixed == sum(term.high for term in parts)
    assert need.least == sum(term.low for term in parts)
    assert need.inside.bytes < need.middle


def test_ranks_of_pipeline_stages_have_their_own_needs():
    found = estimated(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert len(found.needs) == 2
    assert [found.need(rank) for rank in range(4)] == [found.needs[0], found.needs[0], found.needs[1], found.needs[1]]
    assert found.need(4) == found.needs[0]


def test_a_model_is_read_once_and_a_broken_one_never_kept():
    assert estimate.Model.of("again", {"config": dict(CONFIG)}) is MODEL
    broken = estimate.Model.of("x", {"config": {}})
    assert broken.shape is None and broken.problem
    told = {"severity": "error", "text": "It is cut off.", "remedy": "Fetch it again."}
    assert estimate.Model.of("y", {"config": CONFIG, "findings": [told]}).problem == "It is cut off. Fetch it again."


def test_adapter_slots_are_rank_times_inputs_and_outputs():
    inputs_and_outputs = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert estimate.lora_bytes(MODEL.shape, 1, 2, 16) == 2 * 16 * 32 * inputs_and_outputs * 2


def test_measured_activation_comes_from_what_the_profile_left():
    base = estimated("0.10.1").need(0)
    requested, cache, weights = 70 * GIB, 50 * GIB, 15 * GIB
    profile = {
        "key": "k",
        "figures": {"weights": weights, "kv_cache": cache, "cuda_graphs": GIB},
        "requested": requested,
    }
    need = estimated("0.10.1", (profile, profile)).need(0)
    growth = base.non_torch.bytes - base.context.bytes
    assert need.activation.bytes == requested - cache - weights - growth
    assert {need.weights.source, need.graphs.source, need.activation.source} == {"measured"}


def test_terms_add_up_with_their_bands():
    one, two = Term(10, "exact", 10, 10), Term(20, "measured", 15, 30)
    assert estimate.total(one, two) == Term(30, "modelled", 25, 40)
    assert estimate.total(one, one).source == "exact"
