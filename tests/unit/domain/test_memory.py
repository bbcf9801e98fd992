"""The budget: against recorded starts, and what must hold for any model, device and setting."""

from __future__ import annotations

import importlib.util
import statistics
import types
from dataclasses import replace
from typing import Any

import oracle_cases as cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, memory
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Release
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import parse_shape

GIB = 1 << 30
CONFIGS = cases.ORACLE["configs"]
LLAMA = parse_shape(CONFIGS["llama-3.1-8b"])
H100 = memory.Device(int(79.19 * GIB), int(78.68 * GIB), "NVIDIA H100 80GB HBM3", (9, 0))
L4 = memory.Device(int(22.04 * GIB), None, "NVIDIA L4", (8, 9))


def _score() -> types.ModuleType:
    path = cases.DATA.parents[2] / "scripts/score.py"
    spec = importlib.util.spec_from_file_location("score", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCORE = _score()
ROWS: list[dict[str, Any]] = [
    SCORE.json.loads(text) for text in (cases.DATA / "observations.jsonl").read_text().splitlines()
]
MODELS: dict[str, Any] = SCORE.json.loads((cases.DATA / "models.json").read_text())


def errors(rows: list[dict[str, Any]], known_weights: bool) -> list[float]:
    """Relative errors of the KV bytes of recorded starts."""
    found = []
    for row in rows:
        plan = SCORE.predict(row, MODELS, known_weights)
        if plan is not None:
            ours = min(rank.kv_available.bytes for rank in plan.ranks) / GIB
            found.append(abs(ours - row["kv_available_gib"]) / row["kv_available_gib"])
    return found


@pytest.mark.parametrize("known_weights", [True, False], ids=["weights-logged", "config-only"])
def test_kv_bytes_on_h100_from_0_11_hit_their_target(known_weights: bool) -> None:
    rows = [row for row in SCORE.usable(ROWS) if SCORE.is_h100_group(row)]
    found = errors(rows, known_weights)
    assert len(found) >= 40
    assert statistics.median(found) <= 0.015
    assert SCORE.quantile(found, 0.9) <= 0.06


def test_kv_bytes_elsewhere_hit_their_target() -> None:
    rows = [row for row in SCORE.usable(ROWS) if not SCORE.is_h100_group(row) and SCORE.is_stated(row)]
    found = errors(rows, True)
    assert len(found) >= 10
    assert statistics.median(found) <= 0.05


def test_weights_from_the_shape_alone_hit_their_target() -> None:
    found = []
    for row in ROWS:
        if row["quality"] in "AB" and row.get("weights_gib") and not row["flags"].get("cpu_offload_gb"):
            plan = SCORE.predict(row, MODELS, False)
            if plan is not None:
                ours = max(rank.weights.bytes for rank in plan.ranks) / GIB
                found.append(abs(ours - row["weights_gib"]) / row["weights_gib"])
    assert len(found) >= 60
    assert statistics.median(found) <= 0.01


def test_no_start_that_ran_out_of_memory_is_called_a_fit() -> None:
    verdicts = {}
    for row in ROWS:
        if row["outcome"] == "oom":
            plan = SCORE.predict(row, MODELS, True)
            if plan is not None:
                verdicts[row["id"]] = plan.verdict
    assert len(verdicts) >= 5
    assert "fits" not in verdicts.values()


def test_few_good_starts_are_refused() -> None:
    rows = [r for r in ROWS if r["outcome"] == "ok" and r.get("max_model_len") and r.get("gpu_memory_utilization")]
    plans = [plan for plan in (SCORE.predict(row, MODELS, True) for row in rows) if plan is not None]
    assert len(plans) >= 50
    assert sum(plan.verdict.startswith("refused") for plan in plans) <= 0.03 * len(plans)


def budget(device: memory.Device = H100, release: str = "0.19.0", **arguments: Any) -> memory.Budget:
    settings = kvcache.Settings(**{"max_model_len": 8192, "gpu_memory_utilization": 0.9, **arguments})
    return memory.budget(LLAMA, None, Release(release), device, settings)


def test_terms_carry_their_source_and_a_band() -> None:
    rank = budget().ranks[0]
    for term in (rank.weights, rank.activation, rank.non_torch, rank.cuda_graphs, rank.context):
        assert term.source in ("exact", "modelled", "measured")
        assert 0 <= term.low <= term.bytes <= term.high
    assert rank.kv_available.low < rank.kv_available.bytes < rank.kv_available.high
    assert rank.requested == rank.inside + rank.kv_available.bytes


def test_what_was_measured_replaces_the_model() -> None:
    figures = {"weights": 15 * GIB, "activation": GIB, "non_torch": GIB // 4}
    settings = kvcache.Settings(max_model_len=8192, gpu_memory_utilization=0.9)
    found = memory.budget(LLAMA, None, (0, 19, 0), H100, settings, measured=figures).ranks[0]
    assert found.weights.source == found.activation.source == found.kv_available.source == "measured"
    assert found.kv_available.bytes == found.requested - sum(figures.values())


def test_free_memory_is_checked_from_0_9_1_only() -> None:
    busy = replace(H100, free=60 * GIB)
    assert budget(busy, "0.9.1").verdict == "refused_free_memory"
    assert "71.27 GiB" in budget(busy, "0.9.1").reason
    assert budget(busy, "0.7.3", engine="v0").verdict != "refused_free_memory"


def test_memory_of_others_counts_against_the_share_before_0_9_1() -> None:
    busy = replace(H100, free=int(58.68 * GIB))
    alone, crowded = budget(H100, "0.8.5"), budget(busy, "0.8.5")
    taken = alone.ranks[0].kv_available.bytes - crowded.ranks[0].kv_available.bytes
    assert taken == pytest.approx(20 * GIB, rel=0.001)


def test_graphs_are_taken_off_from_0_20() -> None:
    before, after = budget(release="0.19.1"), budget(release="0.20.2")
    assert not before.ranks[0].graphs_inside
    assert after.ranks[0].graphs_inside
    assert after.ranks[0].kv_available.bytes < before.ranks[0].kv_available.bytes
    assert budget(release="0.20.2", enforce_eager=True).ranks[0].cuda_graphs.bytes == 0


def test_the_default_share_grew_at_0_20() -> None:
    assert budget(release="0.19.1", gpu_memory_utilization=None).utilization == 0.9
    assert budget(release="0.20.0", gpu_memory_utilization=None).utilization == 0.92


def test_kv_cache_bytes_are_taken_as_given() -> None:
    found = budget(release="0.19.1", kv_cache_memory_bytes=4 * GIB)
    assert found.ranks[0].kv_available.source == "exact"
    assert found.capacity.blocks == 4 * GIB // (2 << 20)
    assert budget(replace(H100, free=60 * GIB), "0.19.1", kv_cache_memory_bytes=GIB).verdict == "refused_free_memory"


def test_a_length_that_does_not_fit_is_refused_with_the_length_that_does() -> None:
    found = budget(L4, "0.19.0", max_model_len=131072, max_num_seqs=256, max_num_batched_tokens=2048)
    assert found.verdict == "refused_kv"
    assert "131072 tokens needs 16.0" in found.reason
    assert str(found.capacity.longest) in found.reason
    assert 8192 < found.capacity.longest < 131072


def test_the_band_says_when_a_verdict_is_not_certain() -> None:
    room = budget().ranks[0].kv_available
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    middle = budget(L4, "0.19.0", **settings).ranks[0].kv_available
    near = middle.bytes // (2 << 20) * 16
    assert room.low < room.bytes
    for length, verdict in ((near - 64, "fits"), (near + 64, "refused_kv")):
        found = budget(L4, "0.19.0", max_model_len=length, **settings)
        assert found.verdict == verdict
        assert not found.certain
        assert "not certain" in found.reason
    assert budget(L4, "0.19.0", max_model_len=near // 4, **settings).certain
    assert budget(L4, "0.19.0", max_model_len=near * 4, **settings).certain


def test_weights_beyond_the_share_leave_nothing() -> None:
    shape = parse_shape(CONFIGS["llama-3-70b"])
    settings = kvcache.Settings(max_model_len=8192, gpu_memory_utilization=0.9)
    found = memory.budget(shape, None, (0, 19, 0), H100, settings)
    assert found.verdict == "refused_kv"
    assert "Nothing is left" in found.reason


def test_a_share_that_leaves_no_room_for_graphs_is_a_risk() -> None:
    assert budget(gpu_memory_utilization=0.9).verdict == "fits"
    found = budget(gpu_memory_utilization=0.99)
    assert found.verdict == "oom_risk"
    assert "graphs" in found.reason


def test_pipeline_ranks_have_budgets_of_their_own() -> None:
    found = budget(pipeline_parallel_size=4)
    assert len(found.ranks) == 4
    # OBS-026: the last rank, with the head, holds 4.26 GiB of weights and the sampler's peak of 2.01 GiB.
    assert found.ranks[3].weights.bytes / GIB == pytest.approx(4.26, abs=0.02)
    assert found.ranks[3].activation.bytes / GIB == pytest.approx(2.01, abs=0.05)
    assert found.ranks[1].weights.bytes < found.ranks[3].weights.bytes


GOOD = [name for name in sorted(CONFIGS) if not CONFIGS[name].get("quantization_config")]
situations = st.tuples(
    st.sampled_from(GOOD),
    st.sampled_from([(0, 6, 3), (0, 7, 3), (0, 8, 5), (0, 10, 2), (0, 19, 1), (0, 22, 0), (0, 29, 0), (0, 33, 0)]),
    st.builds(
        kvcache.Settings,
        max_model_len=st.integers(128, 32768),
        max_num_seqs=st.integers(1, 1024),
        max_num_batched_tokens=st.integers(1024, 16384),
        gpu_memory_utilization=st.floats(0.2, 0.98),
        enforce_eager=st.booleans(),
    ),
)
RANKS = {"fits": 2, "oom_risk": 1}


@given(situations, st.integers(8, 180), st.integers(0, 180), st.integers(0, 100))
def test_more_free_memory_never_turns_fit_into_unfit(
    situation: tuple[str, tuple[int, ...], kvcache.Settings], total: int, free: int, more: int
) -> None:
    name, release, settings = situation
    shape = parse_shape(CONFIGS[name])
    small = memory.Device(total * GIB, min(total, free) * GIB, "", (9, 0))
    large = replace(small, free=min(total, free + more) * GIB)
    before = memory.budget(shape, None, release, small, settings)
    after = memory.budget(shape, None, release, large, settings)
    assert RANKS.get(after.verdict, 0) >= RANKS.get(before.verdict, 0)


@given(situations, st.integers(8, 180), st.integers(1, 100))
def test_a_larger_device_never_turns_fit_into_unfit(
    situation: tuple[str, tuple[int, ...], kvcache.Settings], total: int, more: int
) -> None:
    name, release, settings = situation
    shape = parse_shape(CONFIGS[name])
    context = {"context": GIB // 2}
    before = memory.budget(shape, None, release, memory.Device(total * GIB), settings, measured=context)
    after = memory.budget(shape, None, release, memory.Device((total + more) * GIB), settings, measured=context)
    assert RANKS.get(after.verdict, 0) >= RANKS.get(before.verdict, 0)
    assert after.ranks[0].kv_available.bytes >= before.ranks[0].kv_available.bytes


@given(situations, st.integers(16, 180))
def test_a_fit_never_overcommits_the_device(
    situation: tuple[str, tuple[int, ...], kvcache.Settings], total: int
) -> None:
    name, release, settings = situation
    device = memory.Device(total * GIB)
    found = memory.budget(parse_shape(CONFIGS[name]), None, release, device, settings)
    if found.verdict == "fits":
        for rank in found.ranks:
            kv = found.capacity.allocated[rank.rank]
            assert rank.footprint(kv, worst=False) <= device.total
            assert kv <= max(0, rank.kv_available.bytes)


def test_budgets_are_cheap() -> None:
    import time

    start = time.process_time()
    for _ in range(200):
        budget()
    assert (time.process_time() - start) / 200 < 0.02
