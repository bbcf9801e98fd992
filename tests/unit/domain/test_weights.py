"""Weights of a rank: against the engine's own module trees, against headers, and against logged starts."""

from __future__ import annotations

from typing import Any

import checkpoints
import oracle_cases as cases
import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import safetensors, weights
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import parse_shape

GIB = 1 << 30
CONFIGS = cases.ORACLE["configs"]


def _ranks() -> list[Any]:
    found: dict[tuple[Any, ...], Any] = {}
    for case in cases.ORACLE["cases"]:
        asked = cases.asked(case)
        for rank in case["vllm"]["ranks"]:
            key = (asked["model"], asked["tp"], asked["pp"], rank["pp_rank"], cases.capability(case))
            found.setdefault(key, (case, rank))
    return [pytest.param(*value, id="-".join(map(str, key[:4]))) for key, value in found.items()]


@pytest.mark.parametrize(("case", "rank"), _ranks())
def test_parameters_equal_the_engines_module_tree(case: dict, rank: dict) -> None:
    asked, shape = cases.asked(case), cases.model(case)
    estimate = weights.rank_weights(
        shape,
        None,
        asked["tp"],
        asked["pp"],
        rank["pp_rank"],
        version=cases.VERSION,
        capability=cases.capability(case),
    )
    outside = sum(estimate.parts.get(name, 0) for name in ("rope", "absorbed", "rounding"))
    # Quantised checkpoints carry a few scales per layer that the config does not tell.
    allowed = 0 if not shape.quantization.method or shape.quantization.method == "mxfp4" else 18 * len(shape.layers)
    assert abs(estimate.bytes - outside - rank["param_bytes"]) <= allowed
    assert abs(estimate.parts.get("rope", 0) - rank["buffer_bytes"]) <= 2 << 20
    assert estimate.estimated
    assert estimate.low <= estimate.bytes <= estimate.high


def facts(spec: checkpoints.Spec, layers: int) -> dict[str, Any]:
    text, data = checkpoints.header(spec)
    found = safetensors.parse_header(text, 8 + len(text) + data)
    return {"weights": {"format": "safetensors", "groups": safetensors.group(found, layers)}}


@pytest.mark.parametrize(
    "name", ["llama-3-8b", "llama-3.2-1b", "qwen2-7b", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v2-lite"]
)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)])
def test_headers_and_config_give_the_same_bytes(name: str, tp: int, pp: int) -> None:
    shape = parse_shape(CONFIGS[name])
    files = facts(checkpoints.tensors(CONFIGS[name]), len(shape.layers))
    for rank in range(pp):
        exact = weights.rank_weights(shape, files, tp, pp, rank)
        derived = weights.rank_weights(shape, None, tp, pp, rank)
        assert not exact.estimated
        assert exact.bytes == pytest.approx(derived.bytes, rel=1e-6)


QUANTISED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.mark.parametrize("method", sorted(QUANTISED))
@pytest.mark.parametrize(("name", "tp"), [("llama-3-8b", 1), ("llama-3-8b", 4), ("mixtral-8x7b", 2)])
def test_headers_and_config_agree_on_quantised_checkpoints(method: str, name: str, tp: int) -> None:
    shape = parse_shape({**CONFIGS[name], "quantization_config": QUANTISED[method]})
    files = facts(checkpoints.quantised(checkpoints.tensors(CONFIGS[name]), method), 32)
    exact, derived = weights.rank_weights(shape, files, tp), weights.rank_weights(shape, None, tp)
    assert exact.bytes == pytest.approx(derived.bytes, rel=0.003)


@pytest.mark.parametrize(("tp", "capability"), [(1, (9, 0)), (2, (9, 0)), (1, (8, 0))])
def test_experts_in_four_bit_blocks_are_padded_as_the_backend_does(tp: int, capability: tuple[int, int]) -> None:
    shape = parse_shape(CONFIGS["gpt-oss-20b"])
    files = facts(checkpoints.gpt_oss(CONFIGS["gpt-oss-20b"]), 24)
    exact = weights.rank_weights(shape, files, tp, capability=capability)
    assert exact.bytes == pytest.approx(weights.rank_weights(shape, None, tp, capability=capability).bytes, rel=0.001)


def test_a_file_in_float32_is_halved_when_served_in_bfloat16() -> None:
    config = {**CONFIGS["llama-3.2-1b"], "torch_dtype": "float32"}
    shape = parse_shape(config)
    files = facts(checkpoints.tensors(config, "F32"), 16)
    whole = weights.rank_weights(shape, files, dtype="float32").bytes
    half = weights.rank_weights(shape, files, dtype="bfloat16").bytes
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_key_value_heads_are_replicated_beyond_their_number() -> None:
    shape = parse_shape(CONFIGS["llama-3-70b"])
    eight = weights.rank_weights(shape, None, 8)
    sixteen = weights.rank_weights(shape, None, 16)
    kv = 80 * 2 * 128 * 8192 * 2
    assert sixteen.bytes - kv < eight.bytes / 2 + kv
    assert sixteen.bytes * 2 > eight.bytes + kv * 0.9


def test_extra_prediction_layers_count_only_when_used() -> None:
    shape = parse_shape(CONFIGS["deepseek-v3"])
    without = weights.rank_weights(shape, None, 8)
    used = weights.rank_weights(shape, None, 8, speculative="mtp")
    # The engine's own draft of this checkpoint takes 2,124,387,488 bytes at this size.
    assert used.bytes - without.bytes == pytest.approx(2124387488, rel=0.003)
    spec = {"model.layers.61.eh_proj.weight": ("BF16", (7168, 14336)), "model.layers.0.x.weight": ("BF16", (8,))}
    groups = facts(spec, 61)["weights"]["groups"]
    assert {group["role"] for group in groups} == {"mtp", "other"}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4.15),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.16),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 8.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "mxfp4"}, 16.0),
    ],
)
def test_quantised_linears_take_their_bits_and_scales(quantization: dict, bits: float) -> None:
    shape = parse_shape({**CONFIGS["llama-3-8b"], "quantization_config": quantization})
    parts = weights.rank_weights(shape, None).parts
    linear = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert (parts["attention"] + parts["mlp"]) * 8 / linear == pytest.approx(bits, rel=0.01)
    assert parts["lm_head"] == 128256 * 4096 * 2


@pytest.mark.parametrize(
    ("name", "tp", "logged"),
    [
        # "Model loading took" of recorded starts: OBS-019, OBS-027, OBS-028, OBS-046, OBS-036, OBS-034.
        ("llama-3.1-8b", 1, 14.99),
        ("llama-3.1-8b", 2, 7.51),
        ("llama-3.1-8b", 4, 3.77),
        ("qwen2-7b", 1, 14.25),
        ("mixtral-8x7b", 2, 43.51),
    ],
)
def test_weights_are_what_the_engine_logged(name: str, tp: int, logged: float) -> None:
    assert weights.rank_weights(parse_shape(CONFIGS[name]), None, tp).bytes / GIB == pytest.approx(logged, abs=0.01)


def test_the_allocator_keeps_what_it_cannot_split() -> None:
    mib = 1 << 20
    assert weights.allocator_slack(9 * mib) == 0
    assert weights.allocator_slack(31 * mib + mib // 2) == mib // 2
    assert weights.allocator_slack(24 * mib + mib // 2) == 0


def test_expert_parallel_ranks_hold_whole_experts_of_the_same_bytes() -> None:
    shape = parse_shape(CONFIGS["mixtral-8x7b"])
    assert (
        weights.rank_weights(shape, None, 4, expert_parallel=True).parts["experts"]
        == (weights.rank_weights(shape, None, 4).parts["experts"])
    )


def _served(name: str, ignored: list[str], method: str = "fp8") -> dict[str, int]:
    quantization = {"quant_method": method, "modules_to_not_convert": ignored}
    return dict(weights.rank_weights(parse_shape({**CONFIGS[name], "quantization_config": quantization}), None).parts)


def test_a_layer_that_stays_unquantised_costs_only_itself() -> None:
    whole, three = _served("llama-3-8b", []), _served("llama-3-8b", [f"model.layers.{i}.self_attn" for i in range(3)])
    assert three["mlp"] == whole["mlp"]
    assert three["attention"] - whole["attention"] == pytest.approx(3 / 32 * whole["attention"], rel=0.001)
    one = _served("llama-3-8b", ["model.layers.31"])
    assert one["mlp"] - whole["mlp"] == pytest.approx(whole["mlp"] / 32, rel=0.001)
    every = _served("llama-3-8b", ["re:.*self_attn.*"])
    assert every["attention"] == pytest.approx(2 * whole["attention"], rel=0.001)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.mlp.gate",
        "model.layers.{}.mlp.shared_expert_gate",
        "model.layers.{}.linear_attn.conv1d",
        "model.layers.{}.linear_attn.in_proj_ba",
        "visual.layers.{}.self_attn.q_proj",
        "vision_tower.encoder.layers.{}.mlp.fc1",
    ],
)
def test_small_parts_and_other_towers_leave_the_layers_quantised(name: str) -> None:
    listed = [name.format(index) for index in range(48)]
    assert _served("qwen3-next-80b", listed) == _served("qwen3-next-80b", [])


@pytest.mark.parametrize(
    "words",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["model.layers.1.self_attn"]},
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "extra_config": {
                "model.layers.1.self_attn.q_proj": {"bits": 16},
                "model.layers.2.mlp.up_proj": {"bits": 8},
            },
        },
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:model\\.layers\\.1\\.self_attn.*": {}}},
        {"producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["model.layers.1.self_attn*"]}},
    ],
)
def test_each_methods_own_list_is_read(words: dict) -> None:
    shape = parse_shape({**CONFIGS["llama-3-8b"], "quantization_config": words})
    assert weights.left_alone(shape.quantization.ignored) == (frozenset(), {1: frozenset({"attention"})})


def test_an_unknown_method_has_a_wide_band() -> None:
    shape = parse_shape({**CONFIGS["llama-3-8b"], "quantization_config": {"quant_method": "squeezing"}})
    size = weights.rank_weights(shape, None)
    assert size.low < 0.75 * size.bytes and size.high > 1.25 * size.bytes


def test_what_the_engine_does_not_load_takes_no_memory() -> None:
    shape = parse_shape(CONFIGS["llama-3.2-1b"])
    linear = {"model.layers.0.self_attn.q_proj.weight": ("BF16", (2048, 2048))}
    beside = {
        "talker.model.layers.0.mlp.up_proj.weight": ("BF16", (4096, 4096)),
        "h.0.attn.bias": ("F32", (1024, 1024)),
    }
    assert (
        weights.rank_weights(shape, facts({**linear, **beside}, 16)).bytes
        == weights.rank_weights(shape, facts(linear, 16)).bytes
    )
