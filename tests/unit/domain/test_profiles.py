"""The figures that engines log, for every range of releases."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import profiles

GIB = 2**30

V0_LOG = """
INFO 10-01 model_runner.py:1067] Loading model weights took 14.9888 GB
INFO 10-01 gpu_executor.py:122] # GPU blocks: 27127, # CPU blocks: 2048
INFO 10-01 gpu_executor.py:126] Maximum concurrency for 8192 tokens per request: 52.98x
INFO 10-01 model_runner.py:1523] Graph capturing finished in 21 secs, took 0.33 GiB
"""
# Llama 3.1 8B on an L4, 0.6.x (public code index, file 14319663172; the same sentence for a T4 in file 55594152188).
V0_WORKER_LOG = """
INFO 03-25 21:32:47 model_runner.py:1116] Loading model weights took 14.9888 GB
INFO 03-25 21:32:48 worker.py:266] the current vLLM instance can use total_gpu_memory (22.07GiB) x \
gpu_memory_utilization (0.90) = 19.86GiB
INFO 03-25 21:32:48 worker.py:266] model weights take 14.99GiB; non_torch_memory takes 0.05GiB; PyTorch activation \
peak memory takes 0.22GiB; the rest of the memory reserved for KV Cache is 4.60GiB.
INFO 03-25 21:32:48 executor_base.py:108] # CUDA blocks: 2356, # CPU blocks: 2048
INFO 03-25 21:32:48 executor_base.py:113] Maximum concurrency for 131072 tokens per request: 0.29x
"""
# 0.10.x with VLLM_LOGGING_LEVEL=DEBUG (public code index, file 21240355802).
V1_DEBUG_LOG = """
DEBUG 08-06 10:17:28 [gpu_worker.py:272] Free memory after profiling: 41.43 GiB (total), 37.49 GiB (within requested)
DEBUG 08-06 10:17:28 [gpu_worker.py:278] Memory profiling takes 7.26 seconds. Total non KV cache memory: 2.78GiB; \
torch peak memory increase: 0.45GiB; non-torch forward increase memory: 0.02GiB; weights memory: 2.32GiB.
INFO 08-06 10:17:28 [gpu_worker.py:279] Available KV cache memory: 37.10 GiB
INFO 08-06 10:17:28 [kv_cache_utils.py:831] GPU KV cache size: 1,215,552 tokens
"""
# A later release on shared memory, where the difference of free memory is below zero (file 66080606939).
V1_NEGATIVE_LOG = """
(EngineCore_DP0 pid=9577) DEBUG 02-03 04:41:31 [v1/worker/gpu_worker.py:399] Memory profiling takes 24.71 seconds. \
Total non KV cache memory: 16.70GiB; torch peak memory increase: 1.40GiB; non-torch forward increase memory: \
-15.24GiB; weights memory: 15.27GiB.
"""
V1_LOG = """
(VllmWorker rank=0 pid=1) INFO gpu_model_runner.py:1338] Model loading took 7.5123 GiB and 3.1 seconds
(VllmWorker rank=1 pid=2) INFO gpu_model_runner.py:1338] Model loading took 7.5223 GiB and 3.2 seconds
(VllmWorker rank=0 pid=1) INFO gpu_worker.py:227] Available KV cache memory: 60.11 GiB
(VllmWorker rank=1 pid=2) INFO gpu_worker.py:227] Available KV cache memory: 60.02 GiB
INFO kv_cache_utils.py:634] GPU KV cache size: 983,424 tokens
INFO kv_cache_utils.py:637] Maximum concurrency for 8,192 tokens per request: 120.05x
(VllmWorker rank=0 pid=1) INFO gpu_model_runner.py:1933] Graph capturing finished in 19 secs, took 0.61 GiB
"""
NEW_LOG = """
INFO gpu_model_runner.py:4000] Model loading took 15.01 GiB memory and 2.100000 seconds
INFO gpu_model_runner.py:4100] Estimated CUDA graph memory: 0.84 GiB total
INFO gpu_worker.py:441] Available KV cache memory: 55.90 GiB
INFO kv_cache_utils.py:1316] CPU KV cache size: 458,000 tokens
INFO gpu_model_runner.py:5998] Graph capturing finished in 3 secs, took -0.02 GiB
"""


def test_v0_texts_are_read():
    assert profiles.parse_log(V0_LOG) == {
        "weights": int(14.9888 * GIB),
        "kv_cache_blocks": 27127,
        "cuda_graphs": int(0.33 * GIB),
        "max_model_len": 8192,
        "max_concurrency": 52.98,
    }


def test_the_later_v0_sentence_is_read():
    assert profiles.parse_log(V0_WORKER_LOG) == {
        "weights": int(14.9888 * GIB),
        "activation": int(0.22 * GIB),
        "non_torch": int(0.05 * GIB),
        "kv_cache": int(4.60 * GIB),
        "kv_cache_blocks": 2356,
        "max_model_len": 131072,
        "max_concurrency": 0.29,
    }


def test_the_breakdown_of_the_debug_level_is_read():
    assert profiles.parse_log(V1_DEBUG_LOG) == {
        "weights": int(2.32 * GIB),
        "activation": int(0.45 * GIB),
        "non_torch": int(0.02 * GIB),
        "kv_cache": int(37.10 * GIB),
        "kv_cache_tokens": 1_215_552,
    }
    assert profiles.parse_log(V1_NEGATIVE_LOG) == {"weights": int(15.27 * GIB), "activation": int(1.40 * GIB)}


def test_ranks_are_combined_as_the_engine_does():
    figures = profiles.parse_log(V1_LOG)
    assert figures["weights"] == int(7.5223 * GIB)
    assert figures["kv_cache"] == int(60.02 * GIB)
    assert figures["kv_cache_tokens"] == 983_424
    assert figures["max_model_len"] == 8192


def test_newest_texts_are_read_and_impossible_figures_are_left_out():
    figures = profiles.parse_log(NEW_LOG)
    assert figures["cuda_graphs_estimated"] == int(0.84 * GIB)
    assert figures["kv_cache_tokens"] == 458_000
    assert "cuda_graphs" not in figures


def test_early_gb_means_the_same_unit():
    assert profiles.parse_log("Model loading took 1.5 GB and 2 seconds")["weights"] == int(1.5 * GIB)


def test_other_text_gives_nothing():
    assert profiles.parse_log("Uvicorn running on http://127.0.0.1:8000") == {}
    assert profiles.parse_failure("Uvicorn running on http://127.0.0.1:8000") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Free memory on device (10.47/79.44 GiB) on startup is less than desired GPU memory utilization "
            "(0.96, 76.26 GiB).",
            {"code": "refused_free_memory", "free": int(10.47 * GIB), "gpu_memory_utilization": 0.96},
        ),
        (
            "Free memory on device cuda:1 (60.87/79.19 GiB) on startup is less than desired GPU memory utilization "
            "(0.95, 75.23 GiB). Decrease GPU memory utilization",
            {"code": "refused_free_memory", "total": int(79.19 * GIB), "requested": int(75.23 * GIB)},
        ),
        (
            "The model's max seq len (60000) is larger than the maximum number of tokens that can be stored in KV "
            "cache (58384). Try increasing",
            {"code": "refused_kv", "max_model_len": 60000, "kv_cache_tokens": 58384},
        ),
        (
            "To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed, which "
            "is larger than the available KV cache memory (4.89 GiB). Based on the available memory, the estimated "
            "maximum model length is 35600. Try",
            {"code": "refused_kv", "needed": int(5.62 * GIB), "estimated_max_model_len": 35600},
        ),
        (
            "To serve at least one request with the model's max seq len (1048320), 10.06 GiB KV cache is needed, which "
            "is larger than the available KV cache memory (9.6 GiB)",
            {"code": "refused_kv", "available": int(9.6 * GIB)},
        ),
        ("No available memory for the cache blocks. Try increasing", {"code": "refused_kv"}),
        ("Cannot auto-fit max_model_len: not enough GPU memory", {"code": "refused_kv"}),
        ("Error in memory profiling. Initial free memory 30.3 GiB, current", {"code": "neighbour_changed"}),
        ("CUDA out of memory occurred when warming up sampler with 1024 dummy requests.", {"code": "oom_risk"}),
    ],
)
def test_refusals_are_read_with_their_figures(text, expected):
    found = profiles.parse_failure(text)
    assert {key: found.get(key) for key in expected} == expected


def entry(**more):
    return {
        "model_digest": "d1",
        "engine_version": "0.19.1",
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "settings": {"tensor_parallel_size": 1, "dtype": "auto"},
        "kv_cache_memory_bytes": None,
        "budget": [
            {
                "requested": {"bytes": 70 * GIB},
                "weights": {"bytes": 15 * GIB, "low": 15 * GIB, "high": 15 * GIB},
                "kv_cache": {"bytes": 50 * GIB, "low": 49 * GIB, "high": 51 * GIB},
            }
        ],
        **more,
    }


def test_a_profile_is_found_for_the_same_start_only():
    made = profiles.make(entry(), "H100", {"weights": GIB})
    settings = made["settings"]
    assert profiles.find([made], "d1", "0.19.1", "H100", settings) == (made, made)
    assert profiles.find([made], "d1", "0.19.1+cpu", "H100", settings) == (made, made)
    assert profiles.find([made], "d2", "0.19.1", "H100", settings) == (None, None)


def test_weights_of_another_release_hold_here_too_but_not_for_another_split():
    made = profiles.make(entry(), "H100", {"weights": GIB})
    assert profiles.find([made], "d1", "0.32.0", "L40S", made["settings"]) == (None, made)
    assert profiles.find([made], "d1", "0.19.1", "H100", {**made["settings"], "tensor_parallel_size": 2}) == (
        None,
        None,
    )


def test_no_profile_without_a_digest_or_figures():
    assert profiles.make(entry(model_digest=None), "H100", {"weights": 1}) is None
    assert profiles.make(entry(), "H100", {}) is None


def test_deviation_says_whether_the_log_lies_in_the_plans_band():
    rows = profiles.deviation(entry(), {"weights": 15 * GIB + 5 * 2**20, "kv_cache": 52 * GIB})
    assert [(row["term"], row["inside"]) for row in rows] == [("weights", True), ("kv_cache", False)]
    assert rows[1]["difference"] == 2 * GIB
