"""The handed cases: answers of vLLM 0.32.0's own capacity code, and how to ask our code the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, shape

DATA = Path(__file__).resolve().parents[1] / "oracle/data"
VERSION = (0, 32, 0)
ORACLE: dict[str, Any] = json.loads((DATA / "kv_oracle.json").read_text())
KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "UniformTypeKVCacheSpecs": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MambaSpec": "state",
}


def asked(case: dict[str, Any]) -> dict[str, Any]:
    """What was asked of the engine, with the defaults filled in."""
    return {**ORACLE["defaults"], **case["input"]}


def capability(case: dict[str, Any]) -> tuple[int, int]:
    major, minor = asked(case)["capability"].split(".")
    return int(major), int(minor)


def model(case: dict[str, Any]) -> shape.Shape:
    return shape.parse_shape(ORACLE["configs"][asked(case)["model"]])


def settings(case: dict[str, Any]) -> kvcache.Settings:
    """The same question in our terms. Batch sizes are the engine's own, as it reported them."""
    question, answer = asked(case), case["vllm"]
    speculative = None
    if question["speculative"]:
        draft = ORACLE["configs"].get(question["speculative"].get("draft"))
        speculative = kvcache.Speculative(
            question["speculative"]["method"],
            question["speculative"]["num_speculative_tokens"],
            shape.parse_shape(draft) if draft else None,
        )
    disabled = question["disable_hybrid_kv_cache_manager"]
    return kvcache.Settings(
        tensor_parallel_size=question["tp"],
        pipeline_parallel_size=question["pp"],
        decode_context_parallel_size=question["dcp"],
        dtype=question["dtype"],
        kv_cache_dtype=question["kv_cache_dtype"],
        kv_cache_dtype_skip_layers=tuple(question["kv_cache_dtype_skip_layers"] or ()),
        block_size=question["block_size"],
        max_num_batched_tokens=answer["max_num_batched_tokens"],
        max_num_seqs=answer["max_num_seqs"],
        num_gpu_blocks_override=question["num_gpu_blocks_override"],
        enable_prefix_caching=question["enable_prefix_caching"],
        hybrid_kv_cache_manager=None if disabled is None else not disabled,
        capability=capability(case),
        speculative=speculative,
    )


def available(case: dict[str, Any]) -> list[int]:
    """Bytes per pipeline rank that the engine was told it has."""
    question = asked(case)
    value = question["available_bytes"]
    return list(value) if isinstance(value, list) else [value] * question["pp"]


def length(case: dict[str, Any], layout: kvcache.KvLayout) -> int:
    """The length the engine settles on: the one asked for, the derived one, or with -1 the largest that fits."""
    wanted = asked(case)["max_model_len"]
    derived = model(case).max_length
    if wanted == -1:
        return layout.longest(available(case), derived)
    return int(wanted or derived)
