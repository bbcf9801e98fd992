"""Shapes from config.json: every family, and what hostile files cannot do."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import oracle_cases as cases
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, weights
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import Shape, parse_shape

CONFIGS: dict[str, Any] = cases.ORACLE["configs"]
BASE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}


def kinds(shape: Shape) -> Counter[str]:
    found: Counter[str] = Counter()
    for layer in shape.layers:
        words = [layer.attention.span if layer.attention else "", layer.state.kind if layer.state else ""]
        if layer.mlp is not None:
            words.append("moe" if layer.mlp.experts else "mlp")
        found["+".join(word for word in words if word)] += 1
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "num_hidden_layers": 4}, {"full+mlp": 4}),
        ({"model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 4096}, {"sliding+mlp": 4}),
        ({"model_type": "mistral", "num_hidden_layers": 4, "sliding_window": None}, {"full+mlp": 4}),
        ({"model_type": "mistral", "num_hidden_layers": 4}, {"sliding+mlp": 4}),
        (
            {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 4096, "use_sliding_window": False},
            {"full+mlp": 4},
        ),
        (
            {
                "model_type": "qwen2",
                "num_hidden_layers": 4,
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            {"full+mlp": 1, "sliding+mlp": 3},
        ),
        ({"model_type": "gemma2", "num_hidden_layers": 4}, {"sliding+mlp": 2, "full+mlp": 2}),
        ({"model_type": "gemma3_text", "num_hidden_layers": 12}, {"sliding+mlp": 10, "full+mlp": 2}),
        (
            {"model_type": "cohere2", "num_hidden_layers": 8, "sliding_window": 4096},
            {"sliding+mlp": 6, "full+mlp": 2},
        ),
        (
            {
                "model_type": "exaone4",
                "num_hidden_layers": 8,
                "sliding_window": 4096,
                "sliding_window_pattern": "LLLG",
            },
            {"sliding+mlp": 6, "full+mlp": 2},
        ),
        (
            {"model_type": "olmo3", "num_hidden_layers": 8, "sliding_window": 4096},
            {"sliding+mlp": 6, "full+mlp": 2},
        ),
        ({"model_type": "mixtral", "num_hidden_layers": 4}, {"full+moe": 4}),
        ({"model_type": "mixtral", "num_hidden_layers": 4, "num_local_experts": 8}, {"full+moe": 4}),
        (
            {
                "model_type": "deepseek_v3",
                "num_hidden_layers": 6,
                "n_routed_experts": 8,
                "first_k_dense_replace": 2,
                "kv_lora_rank": 512,
            },
            {"full+mlp": 2, "full+moe": 4},
        ),
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "mlp_only_layers": [0]},
            {"full+mlp": 1, "full+moe": 3},
        ),
        (
            {
                "model_type": "llama4_text",
                "num_hidden_layers": 8,
                "num_local_experts": 16,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 8192,
            },
            {"chunked+mlp": 4, "chunked+moe": 2, "full+moe": 2},
        ),
        (
            {
                "model_type": "jamba",
                "num_hidden_layers": 8,
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "num_experts": 4,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
            },
            {"mamba1+mlp": 3, "mamba1+moe": 4, "full+mlp": 1},
        ),
        (
            {"model_type": "bamba", "num_hidden_layers": 6, "attn_layer_indices": [2, 5]},
            {"mamba2+mlp": 4, "full+mlp": 2},
        ),
        (
            {
                "model_type": "nemotron_h",
                "num_hidden_layers": 6,
                "hybrid_override_pattern": "M-M*E-",
                "n_routed_experts": 8,
                "mamba_num_heads": 16,
            },
            {"mamba2": 2, "mlp": 2, "full": 1, "moe": 1},
        ),
        (
            {"model_type": "granitemoehybrid", "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
            {"mamba2+mlp": 2, "full+mlp": 2},
        ),
        ({"model_type": "falcon_h1", "num_hidden_layers": 4}, {"full+mamba2+mlp": 4}),
        (
            {
                "model_type": "qwen3_next",
                "num_hidden_layers": 8,
                "full_attention_interval": 4,
                "linear_num_value_heads": 8,
                "linear_num_key_heads": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
            },
            {"gdn+mlp": 6, "full+mlp": 2},
        ),
        (
            {"model_type": "minimax_m1", "num_hidden_layers": 4, "attn_type_list": [0, 0, 0, 1]},
            {"lightning+mlp": 3, "full+mlp": 1},
        ),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 4,
                "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 8},
            },
            {"kda+mlp": 3, "full+mlp": 1},
        ),
        (
            {"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [2]},
            {"short_conv+mlp": 3, "full+mlp": 1},
        ),
        (
            {"model_type": "zamba2", "num_hidden_layers": 4, "hybrid_layer_ids": [1]},
            {"mamba2": 3, "full+mamba2": 1},
        ),
        ({"model_type": "falcon_mamba", "num_hidden_layers": 4}, {"mamba1": 4}),
        ({"model_type": "mamba2", "num_hidden_layers": 4}, {"mamba2": 4}),
        (
            {"model_type": "bert", "num_hidden_layers": 4, "architectures": ["BertModel"]},
            {"encoder+mlp": 4},
        ),
        (
            {
                "model_type": "gpt_oss",
                "num_hidden_layers": 4,
                "num_local_experts": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            {"sliding+moe": 2, "full+moe": 2},
        ),
    ],
    ids=lambda value: value.get("model_type", "") if "model_type" in value else "",
)
def test_each_family_is_read_layer_by_layer(config: dict[str, Any], expected: dict[str, int]) -> None:
    shape = parse_shape({**BASE, **config})
    assert kinds(shape) == expected
    layout = kvcache.layout(shape, (0, 32, 0), kvcache.Settings())
    assert weights.rank_weights(shape, None).bytes > 0
    assert layout.groups or shape.encoder_only


def test_a_value_width_of_zero_is_that_of_the_keys() -> None:
    attention = parse_shape({**BASE, "model_type": "deepseek_v2", "num_hidden_layers": 1, "v_head_dim": 0}).layers[0]
    assert attention.attention is not None
    assert (attention.attention.head_dim, attention.attention.v_head_dim) == (64, 64)


def test_the_text_part_of_a_multimodal_model_counts() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27, "hidden_size": 1152},
        "torch_dtype": "bfloat16",
    }
    shape = parse_shape(config)
    assert shape.multimodal
    assert shape.tied
    assert shape.vision is not None
    assert (shape.vocab, shape.layers[0].attention.head_dim, shape.layers[0].attention.kv_heads) == (262208, 256, 4)  # type: ignore[union-attr]
    # OBS-012: "Model loading took 8.58 GiB".
    assert weights.rank_weights(shape, None).bytes / (1 << 30) == pytest.approx(8.58, rel=0.005)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 32768),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"type": "linear", "factor": 4.0}, 131072),
        ({"type": "dynamic", "factor": 2.0}, 65536),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, 32768),
    ],
)
def test_the_length_follows_the_engines_rule_for_scaled_ropes(scaling: Any, length: int) -> None:
    shape = parse_shape({**BASE, "model_type": "llama", "num_hidden_layers": 2, "rope_scaling": scaling})
    assert shape.max_length == length


@pytest.mark.parametrize(
    ("quantization", "method", "bits", "kv_bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4, 16),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq", 8, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8, 16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "nvfp4", 4, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", 4, 16),
        ({"quant_method": "mxfp4"}, "mxfp4", 4, 16),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "compressed-tensors",
            4,
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
                    "group_1": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "type": "float"}},
                },
            },
            "nvfp4",
            4,
            16,
        ),
    ],
)
def test_quantised_checkpoints_are_recognised(quantization: Any, method: str, bits: int, kv_bits: int) -> None:
    shape = parse_shape({**BASE, "model_type": "llama", "num_hidden_layers": 2, "quantization_config": quantization})
    found = shape.quantization
    assert (found.method, found.bits, found.kv_cache_bits) == (method, bits, kv_bits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, "between 1 and 1024"),
        ({"num_hidden_layers": -1}, "between 1 and 1024"),
        ({"num_hidden_layers": "32"}, "whole number"),
        ({"num_hidden_layers": None, "model_type": "other"}, "lacks num_hidden_layers"),
        ({"hidden_size": 10**400}, "beyond any use"),
        ({"hidden_size": True}, "whole number"),
        ({"num_attention_heads": 0}, "lacks num_attention_heads"),
        ({"num_attention_heads": 2}, "4 key-value heads for 2"),
        ({"vocab_size": float("inf")}, "whole number"),
        ({"layer_types": ["full_attention", "spiral_attention"]}, "spiral_attention"),
        ({"layer_types": ["full_attention"] * 5000}, "5000 entries"),
        ({"layer_types": "full_attention"}, "should be a list"),
        ({"layer_types": [1, 2]}, "one kind per layer"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "not a finite number"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 10**6}}, "between 1 and 16"),
    ],
)
def test_hostile_values_are_refused_with_key_and_figure(change: dict[str, Any], words: str) -> None:
    with pytest.raises(FleetError) as error:
        parse_shape({**BASE, "model_type": "llama", "num_hidden_layers": 4, **change})
    assert error.value.code == "bad_config"
    assert words in error.value.message


@pytest.mark.parametrize("value", [{}, [], None, "text", 3])
def test_what_is_no_description_is_refused(value: Any) -> None:
    with pytest.raises(FleetError) as error:
        parse_shape(value)
    assert error.value.code == "bad_config"


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.sampled_from([0, 1, 2, 3, 16, 128, 1024, 10**400, -1])
    | st.floats()
    | st.text(max_size=12)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
KEYS = sorted(
    {key for config in CONFIGS.values() for key in config} | {"text_config", "vision_config", "block_configs"}
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A real config with some keys replaced, removed or put one level deeper."""
    config = dict(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=4)):
        config[key] = draw(VALUES)
    for key in draw(st.lists(st.sampled_from(sorted(config)), max_size=2)):
        config.pop(key, None)
    if draw(st.booleans()):
        config = {"model_type": draw(st.text(max_size=8)), "text_config": config, "vision_config": draw(VALUES)}
    return config


def _survives(config: dict[str, Any]) -> None:
    """Any config ends in a shape that can be budgeted or in one clear error; nothing else is raised."""
    try:
        shape = parse_shape(config)
        weights.rank_weights(shape, None, 2, 1)
        kvcache.layout(shape, (0, 32, 0), kvcache.Settings(max_num_batched_tokens=2048)).capacity(1 << 34, 4096)
    except FleetError as error:
        assert error.code in ("bad_config", "unsupported_by_engine")
        assert 0 < len(error.message) < 1000
        return
    assert 1 <= len(shape.layers) <= 1024


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=2000)
@given(mutated())
def test_hostile_configs_end_in_a_clear_error(config: dict[str, Any]) -> None:
    _survives(config)


WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 16, 128, 1024, -1, 10**9, 10**400, 1 << 31, 0.0, -2.5, 4096.0, 1e300),
    *(float("nan"), float("inf"), "", "x", "32", "M-*E", "LLLG", [], [1], [0] * 40, ["full_attention"], [None], {}),
    *({"a": 1}, {"type": "yarn", "factor": 1e9}, {"rope_type": "linear", "factor": -4}, {"bits": 4}, [[1], {"a": []}]),
)


@pytest.mark.long
def test_a_hundred_thousand_hostile_configs_end_in_a_clear_error() -> None:
    source = random.Random(20260101)
    names = sorted(CONFIGS)
    for _round in range(100_000):
        config = dict(CONFIGS[source.choice(names)])
        for _change in range(source.randint(1, 4)):
            config[source.choice(KEYS)] = source.choice(WRONG)
        for _change in range(source.randint(0, 2)):
            config.pop(source.choice(sorted(config)), None)
        if source.random() < 0.2:
            config = {"text_config": config, "vision_config": source.choice(WRONG), "model_type": source.choice(WRONG)}
        _survives(config)


def test_deep_nesting_is_no_recursion() -> None:
    text = '{"a":' * 50000 + "1" + "}" * 50000
    with pytest.raises(RecursionError):
        json.loads(text)
    nested: Any = 1
    for _ in range(900):
        nested = {"rope_scaling": nested, "quantization_config": nested}
    assert len(parse_shape({"model_type": "llama", "text_config": nested}).layers) == 32
