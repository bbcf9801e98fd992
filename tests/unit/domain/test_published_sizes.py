"""Parameters derived from configs of well-known models against the number their publishers state.

The configs were written from public knowledge, family by family; extra prediction layers are not counted.
"""

from __future__ import annotations

import json
from typing import Any

import oracle_cases as cases
import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, weights
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import parse_shape

MODELS: dict[str, Any] = json.loads((cases.DATA / "published.json").read_text())
BESIDE = ("rope", "rounding", "absorbed")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_derived_parameters_are_the_published_ones(name: str) -> None:
    model = MODELS[name]
    shape = parse_shape({"torch_dtype": "bfloat16", **model["config"]})
    parts = weights.rank_weights(shape, None).parts
    derived = sum(size for part, size in parts.items() if part not in BESIDE) / 2e9
    assert derived == pytest.approx(model["parameters_billion"], rel=0.021)


@pytest.mark.parametrize(
    ("name", "version", "per_token"),
    [
        # Full heads, although the projections are low-rank; one group of heads; two attentions per layer.
        ("minicpm3-4b", (0, 32, 0), 62 * 2 * 40 * 96 * 2),
        ("step3", (0, 32, 0), 61 * 2 * 256 * 2),
        ("longcat-flash", (0, 32, 0), 2 * 28 * 576 * 2),
        ("dbrx", (0, 8, 5), 40 * 2 * 8 * 128 * 2),
    ],
)
def test_a_token_takes_what_the_engines_layers_cache(name: str, version: tuple[int, ...], per_token: int) -> None:
    layout = kvcache.layout(parse_shape(MODELS[name]["config"]), version, kvcache.Settings())
    assert layout.bytes_per_block == (per_token * layout.block_size,)


def test_a_transcription_holds_its_own_tokens_and_those_of_the_sound() -> None:
    shape = parse_shape(MODELS["whisper-large-v3"]["config"])
    layout = kvcache.layout(shape, (0, 32, 0), kvcache.Settings())
    assert shape.max_length == 448
    assert layout.blocks_per_request(448) == 448 // 16 + -(-1500 // 16)
    assert layout.bytes_per_block == (32 * 16 * 2 * 20 * 64 * 2,)


def test_command_r_takes_the_length_it_was_made_for() -> None:
    assert parse_shape(MODELS["command-r"]["config"]).max_length == 131072
