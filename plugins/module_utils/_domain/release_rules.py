# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How each vLLM release accounts for memory. Private to gpufleet.inference.

Pure functions keyed by the version tuple (``Release.key``, e.g. ``(0, 19, 1)``). They were read from the sources of 44
releases between 0.5.4 and 0.33.0; releases between two read ones are taken to behave like the older neighbour.
"""

from __future__ import annotations

from typing import Optional

Version = tuple[int, ...]
Capability = tuple[int, int]
GIB = 1 << 30

V0, RUNNER1, RUNNER2 = "v0", "runner1", "runner2"


def engine(version: Version, capability: Capability = (9, 0), wanted: str = "") -> str:
    """``v0`` or ``v1``. ``wanted`` is what the user set (VLLM_USE_V1); it counts while a release holds both."""
    if version >= (0, 11, 0):
        return "v1"
    if wanted in ("v0", "v1") and version >= (0, 6, 4):
        return wanted
    if version < (0, 8, 0):
        return "v0"
    return "v0" if capability < (8, 0) and version < (0, 10, 2) else "v1"


def runner(
    version: Version,
    engine_name: str,
    *,
    model_type: str = "",
    moe: bool = False,
    hybrid: bool = False,
    quantised: bool = False,
    speculative: str = "",
) -> str:
    """Which code profiles and runs the model: ``v0``, ``runner1`` or ``runner2`` (the rewritten one)."""
    if engine_name == "v0":
        return V0
    if version < (0, 22, 0) or speculative in ("suffix", "medusa", "mlp_speculator"):
        return RUNNER1
    if version >= (0, 29, 0):
        return RUNNER1 if version < (0, 30, 0) and speculative == "ngram" else RUNNER2
    if hybrid:
        return RUNNER1
    if version >= (0, 25, 0):
        return RUNNER1 if moe else RUNNER2
    families = ("qwen3",) if version < (0, 23, 0) else ("qwen3", "llama", "mistral")
    if model_type not in families or moe or (quantised and version < (0, 24, 0)):
        return RUNNER1
    return RUNNER2


def default_utilization(version: Version) -> float:
    """The share of the device an instance takes when it is not told."""
    return 0.92 if version >= (0, 20, 0) else 0.9


def has_kv_cache_memory_bytes(version: Version) -> bool:
    """Whether ``--kv-cache-memory-bytes`` exists. The start-up check of the free memory runs with it, too."""
    return version >= (0, 10, 2)


def has_auto_length(version: Version) -> bool:
    """Whether ``--max-model-len auto`` (or -1) exists."""
    return version >= (0, 14, 0)


def requested_is_rounded_up(version: Version) -> bool:
    """ceil(total * u); before it was the plain product."""
    return version >= (0, 14, 0)


def checks_free_memory(version: Version, engine_name: str) -> bool:
    """Whether a start is refused when less is free than requested."""
    return engine_name == "v1" and version >= (0, 9, 1)


def counts_other_processes(version: Version, engine_name: str) -> bool:
    """Whether memory of other processes counts against this instance's utilisation (it is cumulative then)."""
    if engine_name == "v0":
        return (0, 6, 4) <= version < (0, 6, 5)
    return (0, 6, 5) <= version < (0, 9, 1)


def counts_cache_of_allocator(version: Version, engine_name: str) -> bool:
    """Whether the profile counts what the allocator had reserved, not only what it had allocated."""
    return engine_name == "v0" and version < (0, 6, 4)


def nccl_inside(version: Version) -> bool:
    """Whether communication buffers are part of ``requested``; later they are allocated before the snapshot."""
    return version < (0, 11, 0)


def graphs_applied(version: Version, runner_name: str) -> bool:
    """Whether memory for CUDA graphs is taken out of ``requested`` before the KV cache is sized.

    The rewritten runner has a real estimate from 0.27 on: recorded starts of 0.27.1 and 0.28.0 lost it with graphs on
    and not with ``--enforce-eager``.
    """
    if runner_name == RUNNER2:
        return version >= (0, 27, 0)
    return runner_name == RUNNER1 and version >= (0, 20, 0)


def needs_null_block(version: Version) -> bool:
    """Whether one block more than the request needs must fit."""
    return version >= (0, 29, 0)


def has_hybrid_groups(version: Version, engine_name: str) -> bool:
    """Whether layers of different kinds are kept in groups; before, every layer was cached in full."""
    return engine_name == "v1" and version >= (0, 9, 1)


def caches_window_only(version: Version, engine_name: str) -> bool:
    """Whether a model whose layers all slide caches one window per request instead of the whole."""
    return engine_name == "v1" and version >= (0, 8, 0)


def caches_state_in_blocks(version: Version, engine_name: str) -> bool:
    """Whether constant state (mamba and the like) is cached in the same blocks as keys and values."""
    return engine_name == "v1" and version >= (0, 9, 2)


def caches_chunk_only(version: Version, engine_name: str) -> bool:
    """Whether chunked local attention has its own groups by default."""
    return engine_name == "v1" and version >= (0, 12, 0)


def group_ratio(version: Version) -> float:
    """Layers per group are the largest kind's count when it is less than this times the smallest; 0: never."""
    if version >= (0, 18, 0):
        return 1.5
    return 1.25 if version >= (0, 12, 0) else 0.0


def has_mla_cache(version: Version) -> bool:
    """Whether latent attention caches the compressed vector; before, full heads padded to 256 were cached."""
    return version >= (0, 7, 1)


def follows_checkpoint_kv_dtype(version: Version) -> bool:
    """Whether ``--kv-cache-dtype auto`` takes an 8-bit KV scheme of the checkpoint."""
    return version >= (0, 11, 1)


def token_rule(version: Version, engine_name: str) -> str:
    """How the printed number of tokens is counted: per_request, per_group or per_block."""
    if engine_name == "v0" or version < (0, 9, 1):
        return "per_block"
    return "per_request" if version >= (0, 24, 0) else "per_group"


def prefix_caching(
    version: Version, engine_name: str, wanted: Optional[bool], attention_free: bool, hybrid: bool
) -> bool:
    """Whether prefixes are cached; it multiplies the state blocks a request needs."""
    if attention_free:
        return False
    if wanted is not None:
        return wanted
    if engine_name == "v0":
        return False
    return not hybrid or version >= (0, 24, 0)


def async_scheduling(version: Version, wanted: Optional[bool], speculative: str, engine_name: str = "v1") -> bool:
    """Whether the next batch is scheduled while one runs."""
    if engine_name == "v0" or version < (0, 10, 0):
        return False
    if speculative in ("ngram", "suffix", "medusa", "mlp_speculator"):
        return False
    if wanted is not None:
        return wanted
    return version >= (0, 14, 0)


def batches_in_flight(version: Version, runner_name: str, pipeline: int, asynchronous: bool) -> int:
    """Batches whose tokens a window must hold besides itself."""
    if version < (0, 26, 0):
        return 1
    if not asynchronous:
        return pipeline
    if runner_name == RUNNER2:
        return pipeline + 1
    return 2 if pipeline == 1 else pipeline


def pipeline_layers(version: Version, layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers per pipeline rank; what does not divide goes to the second-last rank and backwards."""
    base, rest = divmod(layers, pipeline)
    counts = [base] * pipeline
    if version < (0, 8, 0):
        counts[-1] += rest
        return tuple(counts)
    for position in range(rest):
        counts[-2 - position if pipeline > 1 else -1] += 1
    return tuple(counts)


def batch_defaults(
    version: Version, engine_name: str, total: int, *, device: str = "", length: int = 0
) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) the API server takes when neither is set; ``total`` in bytes.

    The release table holds the same per release; this is for callers without it.
    """
    gib, name = total / GIB, device.upper()
    if engine_name == "v0":
        if length > 32768 and version >= (0, 5, 4):
            return (512 if version < (0, 6, 5) else 2048), 256
        return max(length, 2048), 256
    if version < (0, 8, 4):
        return (8192 if "H100" in name or "H200" in name else 2048), 1024
    if version < (0, 8, 5):
        large = "H100" in name or "H200" in name
    elif version < (0, 9, 0):
        large = gib >= 70
    else:
        large = gib >= 70 and "A100" not in name and not (version >= (0, 33, 0) and "GB10" in name)
    if version >= (0, 28, 0) and gib >= 160 and large:
        return 16384, 1024
    return (8192, 1024) if large else (2048, 256)


def capture_sizes(
    version: Version, engine_name: str, max_num_seqs: int, batched: int, tall: bool = False
) -> tuple[int, int]:
    """How many CUDA graphs are captured: (piecewise, full). ``tall``: sizes go to 1024 (capability 10, gpt-oss)."""
    if engine_name == "v0":
        sizes = [1, 2, 4, *range(8, 257, 8)]
        return 0, len([size for size in sizes if size <= max(max_num_seqs, 1)])
    if version < (0, 11, 1):
        top = 512 if version < (0, 10, 0) else min(2 * max_num_seqs, 512)
        sizes = [1, 2, 4, *range(8, 513, 8)]
    else:
        top = min(2 * max_num_seqs, 1024 if tall else 512)
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)]
    top = min(top, batched)
    piecewise = len([size for size in sizes if size <= top])
    if version < (0, 11, 0):
        return piecewise, 0
    return piecewise, len([size for size in sizes if size <= min(top, max_num_seqs)])
