"""The KV cache against the engine's own answers, and what must hold for any model and memory."""

from __future__ import annotations

from dataclasses import replace

import oracle_cases as cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, release_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Release
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import parse_shape

GIB = 1 << 30
ALL = cases.ORACLE["cases"]
LLAMA = cases.ORACLE["configs"]["llama-3-8b"]
GEMMA = cases.ORACLE["configs"]["gemma-3-27b-text"]


def test_all_handed_cases_are_there() -> None:
    assert len(ALL) == 69
    assert sum(not case["vllm"]["ok"] for case in ALL) >= 4


@pytest.mark.parametrize("case", ALL, ids=lambda case: case["id"])
def test_layout_and_capacity_equal_the_engines_answer(case: dict) -> None:
    answer = case["vllm"]
    layout = kvcache.layout(cases.model(case), cases.VERSION, cases.settings(case))
    length = cases.length(case, layout)
    capacity = layout.capacity(cases.available(case), length)

    assert list(layout.bytes_per_block) == answer["bytes_per_block"]
    assert layout.block_size == answer["block_size"]
    assert layout.in_flight * layout.batched == answer["max_in_flight_tokens"]
    assert capacity.fits is answer["ok"]
    if cases.asked(case)["max_model_len"] != -1:
        assert list(capacity.needed) == answer["needed_bytes_at_max_model_len"]
        assert capacity.longest == answer["estimated_max_model_len"]
    if not answer["ok"]:
        refused = "refused_no_memory" if "No available memory" in answer["error"] else "refused_kv"
        assert capacity.reason == refused
        return
    assert length == answer["max_model_len"]
    assert capacity.blocks == answer["num_gpu_blocks"]
    assert capacity.tokens == answer["kv_cache_size_tokens"]
    assert capacity.concurrency == answer["max_concurrency"]
    assert list(capacity.allocated) == answer["kv_bytes_allocated"]
    groups = sorted((cases.KINDS[group["kind"]], group["block_size"]) for group in answer["groups"])
    ours = sorted((group.kind, group.block) for group in layout.groups)
    assert [kind for kind, _ in ours] == [kind for kind, _ in groups]
    attention = [block for kind, block in groups if kind != "state"]
    assert [block for kind, block in ours if kind != "state"] == attention


@pytest.mark.parametrize(
    "start",
    [
        # Recorded starts: OBS-011, OBS-032 (0.19), OBS-318 (0.21), OBS-153 (V0 0.7.2).
        ("0.19.0", "gemma-3-27b-text", 8192, 19.53, 15997, 36560),
        ("0.21.0", "qwen2.5-14b", 4096, 41.43, 14140, 226240),
        ("0.7.2", "qwen2.5-1.5b", 32768, 2.36, 5519, 88304),
    ],
)
def test_older_releases_count_tokens_in_their_own_way(start: tuple[str, str, int, float, int, int]) -> None:
    release, model, length, kv_gib, blocks, tokens = start
    extra = {
        "qwen2.5-14b": {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8},
        "qwen2.5-1.5b": {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2},
    }
    base = cases.ORACLE["configs"].get(model) or {**cases.ORACLE["configs"]["qwen2-7b"], **extra[model]}
    if model == "qwen2.5-14b":
        base = {**base, "num_hidden_layers": 48}
    capability = (7, 5) if release == "0.7.2" else (9, 0)
    settings = kvcache.Settings(max_num_batched_tokens=8192, max_num_seqs=256, capability=capability)
    layout = kvcache.layout(parse_shape(base), Release(release), settings)
    capacity = layout.capacity(int(kv_gib * GIB), length)
    assert capacity.blocks == pytest.approx(blocks, rel=0.003)
    exact = replace(layout, override=blocks).capacity(GIB, length)
    assert exact.tokens == tokens


def test_sliding_layers_cost_like_full_ones_without_the_hybrid_manager() -> None:
    on = kvcache.layout(parse_shape(GEMMA), (0, 19, 0), kvcache.Settings(max_num_batched_tokens=2048))
    off = kvcache.layout(
        parse_shape(GEMMA), (0, 19, 0), kvcache.Settings(max_num_batched_tokens=2048, hybrid_kv_cache_manager=False)
    )
    before = kvcache.layout(parse_shape(GEMMA), (0, 8, 5), kvcache.Settings(max_num_batched_tokens=2048))
    length = 131072
    assert off.needed(length) == before.needed(length)
    assert off.needed(length)[0] > 4 * on.needed(length)[0]


def test_the_null_block_is_needed_from_release_0_29() -> None:
    shape = parse_shape(LLAMA)
    need = kvcache.layout(shape, (0, 28, 0), kvcache.Settings()).needed(8192)[0]
    assert kvcache.layout(shape, (0, 28, 0), kvcache.Settings()).capacity(need, 8192).fits
    newer = kvcache.layout(shape, (0, 29, 0), kvcache.Settings()).capacity(need, 8192)
    assert not newer.fits
    assert newer.longest == 8192 - 16


def test_latent_attention_cached_full_heads_before_0_7_1() -> None:
    shape = parse_shape(cases.ORACLE["configs"]["deepseek-v2-lite"])
    old = kvcache.layout(shape, (0, 6, 3), kvcache.Settings()).bytes_per_block[0]
    new = kvcache.layout(shape, (0, 7, 3), kvcache.Settings()).bytes_per_block[0]
    assert old == 27 * 16 * 2 * 16 * 256 * 2
    assert new == 27 * 16 * 576 * 2


def test_block_override_replaces_the_memory_in_the_check() -> None:
    layout = kvcache.layout(parse_shape(LLAMA), (0, 32, 0), kvcache.Settings(num_gpu_blocks_override=1024))
    capacity = layout.capacity(0, 8192)
    assert capacity.fits
    assert capacity.blocks == 1024


def test_context_parallel_ranks_share_the_tokens() -> None:
    shape = parse_shape(cases.ORACLE["configs"]["deepseek-v3"])
    one = kvcache.layout(shape, (0, 32, 0), kvcache.Settings(tensor_parallel_size=8))
    four = kvcache.layout(shape, (0, 32, 0), kvcache.Settings(tensor_parallel_size=8, decode_context_parallel_size=4))
    assert four.blocks_per_request(65536) * 4 == one.blocks_per_request(65536)


def test_encoders_cache_nothing_and_always_fit() -> None:
    bert = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }
    layout = kvcache.layout(parse_shape(bert), (0, 32, 0), kvcache.Settings())
    assert layout.groups == ()
    assert layout.capacity(0, 512).fits


@pytest.mark.parametrize(
    ("model", "tensor", "words"),
    [("qwen2-7b", 8, "28 attention heads"), ("llama-3-8b", 3, "32 attention heads"), ("qwen2.5-0.5b", 4, "14")],
)
def test_sizes_that_do_not_divide_are_refused_with_figures(model: str, tensor: int, words: str) -> None:
    shape = parse_shape(cases.ORACLE["configs"][model])
    with pytest.raises(FleetError) as error:
        kvcache.layout(shape, (0, 32, 0), kvcache.Settings(tensor_parallel_size=tensor))
    assert error.value.code == "unsupported_by_engine"
    assert words in error.value.message


def test_pipeline_ranks_get_the_layers_the_engine_gives_them() -> None:
    assert release_rules.pipeline_layers((0, 32, 0), 80, 3) == (27, 27, 26)
    assert release_rules.pipeline_layers((0, 32, 0), 61, 2) == (31, 30)
    assert sum(release_rules.pipeline_layers((0, 7, 3), 61, 4)) == 61


MODELS = sorted(name for name in cases.ORACLE["configs"])
RELEASES = [(0, 6, 3), (0, 7, 3), (0, 8, 5), (0, 9, 2), (0, 11, 2), (0, 19, 1), (0, 26, 0), (0, 33, 0)]
layouts = st.builds(
    lambda name, release, batched: kvcache.layout(
        parse_shape(cases.ORACLE["configs"][name]), release, kvcache.Settings(max_num_batched_tokens=batched)
    ),
    st.sampled_from(MODELS),
    st.sampled_from(RELEASES),
    st.integers(256, 32768),
)


@given(layouts, st.integers(0, 80 * GIB), st.integers(0, 80 * GIB), st.integers(1, 131072))
def test_more_memory_never_turns_fit_into_unfit(layout: kvcache.KvLayout, room: int, more: int, length: int) -> None:
    small, large = layout.capacity(room, length), layout.capacity(room + more, length)
    assert large.fits or not small.fits
    assert large.blocks >= small.blocks
    assert large.longest >= small.longest


@given(layouts, st.integers(1, 131072), st.integers(1, 131072))
def test_a_longer_request_never_needs_less(layout: kvcache.KvLayout, length: int, more: int) -> None:
    assert layout.blocks_per_request(length + more) >= layout.blocks_per_request(length)


@given(layouts, st.integers(1, 65536), st.floats(1, 64))
def test_the_bytes_for_a_concurrency_hold_it(layout: kvcache.KvLayout, length: int, wanted: float) -> None:
    capacity = layout.capacity(layout.bytes_for(length, wanted), length)
    assert capacity.fits
    assert capacity.blocks >= layout.blocks_per_request(length) * wanted


@given(layouts, st.integers(0, 80 * GIB), st.integers(1, 131072))
def test_the_longest_length_fits_and_one_more_does_not(layout: kvcache.KvLayout, room: int, upper: int) -> None:
    longest = layout.longest(room, upper)
    if longest:
        assert layout.capacity(room, longest).fits
    if longest < upper:
        assert not layout.capacity(room, longest + 1).fits
    assert sum(layout.capacity(room, max(longest, 1)).allocated) <= room * len(layout.bytes_per_block)
