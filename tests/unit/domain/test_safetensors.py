"""Headers of safetensors files: what they say, and what hostile ones cannot do."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import checkpoints
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import safetensors
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError


def parse(table: Any, data: int = 0) -> tuple[safetensors.Tensor, ...]:
    text = json.dumps(table).encode()
    return safetensors.parse_header(text, 8 + len(text) + data)


def tensor(begin: int, end: int, shape: list[int], dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_in_the_order_of_their_data() -> None:
    found = parse({"b": tensor(8, 12, [2]), "a": tensor(0, 8, [2, 2]), "__metadata__": {"format": "pt"}}, 12)
    assert [(item.name, item.bytes) for item in found] == [("a", 8), ("b", 4)]


@pytest.mark.parametrize(
    ("table", "data", "words"),
    [
        ({"a": tensor(0, 8, [2, 2])}, 4, "cut off"),
        ({"a": tensor(0, 8, [2, 2])}, 9, "1 bytes more"),
        ({"a": tensor(0, 8, [2, 2]), "b": tensor(4, 12, [2, 2])}, 12, "overlaps"),
        ({"a": tensor(0, 8, [2, 2]), "b": tensor(10, 18, [2, 2])}, 18, "belong to no tensor"),
        ({"a": tensor(0, 8, [2, 3])}, 8, "should take 12 bytes"),
        ({"a": tensor(0, 8, [2, 2], "BF17")}, 8, "does not know"),
        ({"a": tensor(0, 8, [-1, 4])}, 8, "no usable shape"),
        ({"a": tensor(8, 0, [2, 2])}, 8, "should take"),
        ({"a": {"dtype": "BF16", "shape": [1 << 40, 1 << 40, 4], "data_offsets": [0, 8]}}, 8, "larger than any"),
        ({"a": "text"}, 8, "not described"),
        (["a"], 8, "not an object"),
        ({"a" * 5000: tensor(0, 8, [2, 2])}, 8, "name of 5000"),
    ],
)
def test_broken_headers_are_refused_with_what_is_wrong(table: Any, data: int, words: str) -> None:
    with pytest.raises(FleetError) as error:
        parse(table, data)
    assert error.value.code == "bad_safetensors"
    assert words in error.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": {"dtype"', "not JSON"),
        (b"\xff\xfe{}", "UTF-8"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 100000, "not JSON"),
        (b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b"]}}", "not JSON"),
    ],
)
def test_headers_that_are_no_json_are_refused(text: bytes, words: str) -> None:
    with pytest.raises(FleetError) as error:
        safetensors.parse_header(text, 8 + len(text))
    assert words in error.value.message


@pytest.mark.parametrize(
    ("first", "size", "words"),
    [
        (b"", 0, "0 bytes"),
        (struct.pack("<Q", 1 << 62), 1 << 20, "allows 100000000"),
        (struct.pack("<Q", 4096), 100, "cut off"),
        (struct.pack("<Q", 0), 100, "too few"),
    ],
)
def test_impossible_header_lengths_are_refused_before_reading(first: bytes, size: int, words: str) -> None:
    with pytest.raises(FleetError) as error:
        safetensors.header_length(first, size)
    assert words in error.value.message


def test_an_index_names_the_files_of_its_folder_only() -> None:
    good = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}
    assert safetensors.parse_index(json.dumps(good).encode()) == ("model-1.safetensors", "model-2.safetensors")
    for value in ("../../etc/passwd", "/etc/passwd", "", 3, "a\x00b"):
        with pytest.raises(FleetError):
            safetensors.parse_index(json.dumps({"weight_map": {"a": value}}).encode())
    with pytest.raises(FleetError):
        safetensors.parse_index(b"{}")


@pytest.mark.parametrize(
    ("name", "role", "part", "layer"),
    [
        ("model.embed_tokens.weight", "embed", "weight", None),
        ("lm_head.weight", "lm_head", "weight", None),
        ("model.layers.3.self_attn.q_proj.weight", "q", "weight", 3),
        ("model.layers.3.self_attn.k_proj.bias", "k", "bias", 3),
        ("model.layers.31.self_attn.o_proj.weight_scale_inv", "o", "scale", 31),
        ("model.layers.0.self_attn.qkv_proj.weight", "qkv", "weight", 0),
        ("model.layers.0.self_attn.q_a_proj.weight", "replicated", "weight", 0),
        ("model.layers.0.self_attn.kv_b_proj.weight", "column", "weight", 0),
        ("model.layers.0.self_attn.kv_a_layernorm.weight", "norm", "weight", 0),
        ("model.layers.0.self_attn.sinks", "state", "state", 0),
        ("model.layers.0.mlp.down_proj.qweight", "down", "weight", 0),
        ("model.layers.0.mlp.down_proj.qzeros", "down", "scale", 0),
        ("model.layers.0.mlp.experts.17.up_proj.weight", "experts", "weight", 0),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", "experts", "weight", 0),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", "experts", "scale", 0),
        ("model.layers.0.mlp.experts.down_proj_bias", "experts", "bias", 0),
        ("model.layers.0.block_sparse_moe.experts.7.w2.weight", "experts", "weight", 0),
        ("model.layers.0.block_sparse_moe.gate.weight", "router", "weight", 0),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "router", "state", 0),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", "gate", "weight", 0),
        ("model.layers.0.input_layernorm.weight", "norm", "weight", 0),
        ("model.norm.weight", "norm", "weight", None),
        ("backbone.layers.4.mixer.A_log", "state", "state", 4),
        ("backbone.layers.4.mixer.in_proj.weight", "column", "weight", 4),
        ("backbone.layers.4.mixer.conv1d.weight", "column", "weight", 4),
        ("transformer.h.2.attn.c_proj.weight", "o", "weight", 2),
        ("transformer.h.2.mlp.c_proj.weight", "down", "weight", 2),
        ("vision_tower.vision_model.encoder.layers.3.self_attn.q_proj.weight", "vision", "weight", None),
        ("visual.blocks.1.attn.qkv.weight", "vision", "weight", None),
        ("multi_modal_projector.linear_1.weight", "vision", "weight", None),
        ("language_model.model.layers.1.self_attn.q_proj.weight", "q", "weight", 1),
        ("mtp.layers.0.self_attn.q_proj.weight", "mtp", "weight", 0),
        ("talker.model.layers.0.self_attn.q_proj.weight", "unused", "weight", None),
        ("token2wav.code2wav_dit_model.x.weight", "unused", "weight", None),
        ("thinker.model.layers.0.self_attn.q_proj.weight", "q", "weight", 0),
        ("model.layers.0.self_attn.qkv_proj.base_layer.weight", "qkv", "weight", 0),
        ("model.layers.0.self_attn.qkv_proj.lora_A.vision.weight", "unused", "weight", None),
        ("transformer.h.0.attn.bias", "unused", "weight", None),
        ("gpt_neox.layers.0.attention.masked_bias", "unused", "weight", None),
        ("gpt_neox.layers.0.attention.query_key_value.bias", "qkv", "bias", 0),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "unused", "weight", None),
        ("transformer.output_layer.weight", "lm_head", "weight", None),
        ("model.layers.0.block_sparse_moe.input_linear.weight", "gate", "weight", 0),
        ("model.layers.0.block_sparse_moe.output_linear.weight", "down", "weight", 0),
        ("model.transformer.blocks.2.ff_out.weight", "down", "weight", 2),
        ("model.transformer.ff_out.weight", "lm_head", "weight", None),
    ],
)
def test_names_tell_what_a_tensor_is(name: str, role: str, part: str, layer: int | None) -> None:
    assert safetensors.classify(name) == safetensors.Place(role, part, layer)


def test_equal_tensors_are_kept_as_one_entry_with_their_layers() -> None:
    spec: checkpoints.Spec = {}
    for layer in (0, 1, 2, 5):
        for expert in range(4):
            spec[f"model.layers.{layer}.mlp.experts.{expert}.w1.weight"] = ("BF16", (4, 4))
    text, data = checkpoints.header(spec)
    groups = safetensors.group(safetensors.parse_header(text, 8 + len(text) + data), 6)
    assert len(groups) == 1
    assert groups[0]["layers"] == [[0, 2], [5, 5]]
    assert groups[0]["per_layer"] == 4
    assert groups[0]["bytes"] == 16 * 32


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["BF16", "F8_E4M3", "F4", "U8", "nope"]) | VALUES,
        "shape": st.lists(st.integers(-1, 1 << 40), max_size=5) | VALUES,
        "data_offsets": st.lists(st.integers(-1, 1 << 50), min_size=2, max_size=2) | VALUES,
    }
)
HEADERS = st.binary(max_size=300) | st.dictionaries(st.text(max_size=30), ENTRIES | VALUES, max_size=6).map(
    lambda table: json.dumps(table).encode()
)


def _survives(data: bytes) -> None:
    """Any bytes end in tensors or in one clear error."""
    try:
        found = safetensors.parse_header(data, 8 + len(data) + 64)
    except FleetError as error:
        assert error.code == "bad_safetensors"
        assert error.message
        assert len(error.message) < 1000
        return
    assert sum(item.bytes for item in found) == 64
    safetensors.group(found, 4)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(HEADERS)
def test_hostile_headers_end_in_a_clear_error(data: bytes) -> None:
    _survives(data)


def _spoil(source: random.Random, data: bytes) -> bytes:
    """A real header with bytes changed, cut, doubled or put in."""
    spoiled = bytearray(data)
    for _change in range(source.randint(1, 4)):
        place = source.randrange(len(spoiled) + 1)
        kind = source.randrange(4)
        if kind == 0 and place < len(spoiled):
            spoiled[place] = source.choice(b'0123456789{}[]",:-eE.ntf\\ \x00\xff')
        elif kind == 1:
            del spoiled[place : place + source.randint(1, 40)]
        elif kind == 2:
            spoiled[place:place] = spoiled[place : place + source.randint(1, 200)]
        else:
            spoiled[place:place] = source.choice([b"9" * 400, b"[" * 2000, b'{"a":' * 500, b"-1", b"null", b'"F4"'])
    return bytes(spoiled)


@pytest.mark.long
def test_a_hundred_thousand_hostile_headers_end_in_a_clear_error() -> None:
    source = random.Random(20260101)
    spec: checkpoints.Spec = {f"model.layers.{n}.mlp.experts.0.w1.weight": ("BF16", (2, 2)) for n in range(8)}
    text = checkpoints.header(spec)[0]
    for _round in range(100_000):
        _survives(_spoil(source, text))
