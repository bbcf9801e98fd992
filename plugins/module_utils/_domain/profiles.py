# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The figures an engine logs when it starts, and profiles made of them. Private to gpufleet.inference.

Texts of all releases 0.5.4 to 0.33.0 are read; bytes come from figures with two to four decimals of GiB, so a
difference below ``LOG_ROUNDING`` means nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB, MIB

LOG_ROUNDING = 10 * MIB

# Settings that decide what the figures are; a profile of other values says nothing about this start. The length is none
# of them: it counts through the batch where a prompt is one step, and otherwise not at all.
KEY_SETTINGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "lora",
    "speculative",
    "extra_args",
)
# Of those, the ones that the planner fills in where the user left them open.
PLANNED_SETTINGS = ("max_num_seqs", "max_num_batched_tokens")
# Of those, the ones that decide the bytes of the weights, whatever the release.
WEIGHT_SETTINGS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "dtype",
    "quantization",
    "speculative",
)

_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?)"
_SIZE = _NUMBER + r"\s*(GiB|GB|MiB|MB)"


def _bytes(number: str, unit: str) -> int:
    # Releases that print GB divide by 2**30 as well.
    return int(float(number.replace(",", "")) * (GIB if unit.startswith("G") else MIB))


def _count(number: str) -> int:
    return int(float(number.replace(",", "")))


# (name, pattern, how several ranks combine). Sizes in bytes, counts as they are. Each sentence was read in public logs
# or in the engine's own source; tests/unit/domain/test_profiles.py holds them and says where. The breakdown with
# "torch peak memory increase" is logged at level DEBUG only.
_SIZES: Tuple[Tuple[str, re.Pattern[str], Callable[[Sequence[int]], int]], ...] = (
    ("weights", re.compile(r"(?:Model loading|Loading model weights) took " + _SIZE), max),
    ("weights", re.compile(r"model weights take " + _SIZE), max),
    ("weights", re.compile(r"; weights memory: " + _SIZE), max),
    ("activation", re.compile(r"PyTorch activation peak memory takes " + _SIZE), max),
    ("activation", re.compile(r"torch peak memory increase: " + _SIZE), max),
    ("non_torch", re.compile(r"non_torch_memory takes " + _SIZE), max),
    ("non_torch", re.compile(r"non-torch forward increase memory: " + _SIZE), max),
    ("kv_cache", re.compile(r"Available KV cache memory: " + _SIZE), min),
    ("kv_cache", re.compile(r"the rest of the memory reserved for KV Cache is " + _SIZE), min),
    ("cuda_graphs", re.compile(r"Graph capturing finished in .{1,40}? took " + _SIZE), max),
    ("cuda_graphs_estimated", re.compile(r"Estimated CUDA graph memory: " + _SIZE), max),
)
_COUNTS: Tuple[Tuple[str, re.Pattern[str], Callable[[Sequence[int]], int]], ...] = (
    ("kv_cache_tokens", re.compile(r"\b[A-Z]+ KV cache size: " + _NUMBER + r" tokens"), min),
    ("kv_cache_blocks", re.compile(r"# (?:GPU|CUDA|cuda) blocks: " + _NUMBER), min),
)
_CONCURRENCY = re.compile(r"Maximum concurrency for " + _NUMBER + r" tokens per request: " + _NUMBER + "x")

# What a failed start says -> the plan's own code.
_FAILURES: Tuple[Tuple[str, re.Pattern[str]], ...] = (
    ("refused_free_memory", re.compile(r"Free memory on device .{0,60}on startup is less than")),
    ("refused_free_memory", re.compile(r"Externally held weights on device")),
    ("refused_kv", re.compile(r"No available memory for the cache blocks")),
    ("refused_kv", re.compile(r"Cannot auto-fit max_model_len")),
    ("refused_kv", re.compile(r"max seq len \(\d+\)")),
    ("neighbour_changed", re.compile(r"Error in memory profiling\.")),
    ("oom_risk", re.compile(r"CUDA out of memory|torch\.OutOfMemoryError|torch\.cuda\.OutOfMemoryError")),
)
_FREE = re.compile(r"\(" + _NUMBER + "/" + _NUMBER + r" GiB\).{0,90}?\(" + _NUMBER + ", " + _NUMBER + r" GiB\)")
_NEEDED = re.compile(
    r"max seq len \((\d+)\), \(?" + _SIZE + r" KV cache is needed, which is larger than the available KV cache memory"
    r" \(" + _SIZE + r"\)(?:.*?estimated maximum model length is (\d+))?",
    re.DOTALL,
)
_STORED = re.compile(r"max seq len \((\d+)\) is larger than the maximum number of tokens .{0,40}\((\d+)\)")


def parse_log(text: str) -> Dict[str, Any]:
    """The figures of one start: weights, activation, non_torch, kv_cache, cuda_graphs (bytes per device),
    kv_cache_tokens, kv_cache_blocks, max_model_len and max_concurrency; only what the text holds.

    Ranks are combined as the engine does: the largest weights, the smallest cache. ``cuda_graphs`` below zero (some
    releases log the difference of free memory) is left out.
    """
    figures: Dict[str, Any] = {}
    for name, pattern, combine in _SIZES:
        sizes = [_bytes(number, unit) for number, unit in pattern.findall(text)]
        if sizes and name not in figures:
            figures[name] = combine(sizes)
    for name, pattern, combine in _COUNTS:
        counts = [_count(number) for number in pattern.findall(text)]
        if counts:
            figures[name] = combine(counts)
    found = _CONCURRENCY.findall(text)
    if found:
        figures["max_model_len"] = _count(found[-1][0])
        figures["max_concurrency"] = float(found[-1][1].replace(",", ""))
    for name in ("cuda_graphs", "cuda_graphs_estimated", "non_torch"):
        if figures.get(name, 0) < 0:
            del figures[name]
    return figures


def parse_failure(text: str) -> Optional[Dict[str, Any]]:
    """Why a start failed: the plan's code and the figures (bytes, tokens); None for an unknown text."""
    code = next((code for code, pattern in _FAILURES if pattern.search(text)), None)
    if code is None:
        return None
    result: Dict[str, Any] = {"code": code}
    free = _FREE.search(text)
    if code == "refused_free_memory" and free:
        result.update(
            free=_bytes(free.group(1), "GiB"),
            total=_bytes(free.group(2), "GiB"),
            gpu_memory_utilization=float(free.group(3)),
            requested=_bytes(free.group(4), "GiB"),
        )
    needed = _NEEDED.search(text)
    if needed:
        result.update(
            max_model_len=int(needed.group(1)),
            needed=_bytes(needed.group(2), needed.group(3)),
            available=_bytes(needed.group(4), needed.group(5)),
        )
        if needed.group(6):
            result["estimated_max_model_len"] = int(needed.group(6))
    stored = _STORED.search(text)
    if stored:
        result.update(max_model_len=int(stored.group(1)), kv_cache_tokens=int(stored.group(2)))
    return result


def key(model_digest: str, release: str, gpu: str, settings: Mapping[str, Any]) -> str:
    """The name of a profile: a digest of what its figures depend on."""
    data = {
        "model": model_digest,
        "release": release.split("+", 1)[0],
        "gpu": gpu,
        "settings": {name: settings.get(name) for name in KEY_SETTINGS},
    }
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def make(entry: Mapping[str, Any], gpu_name: str, figures: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """The profile of a started instance, from its entry in the plan and the figures it logged.

    None when the model has no digest (it was planned from its config alone) or nothing was logged.
    """
    digest = entry.get("model_digest")
    if not digest or not figures:
        return None
    settings = profile_settings(entry)
    return {
        "key": key(str(digest), str(entry["engine_version"]), gpu_name, settings),
        "model_digest": digest,
        "release": str(entry["engine_version"]),
        "gpu": gpu_name,
        "settings": settings,
        "requested": _utilised(entry),
        "figures": dict(sorted(figures.items())),
    }


def profile_settings(entry: Mapping[str, Any]) -> Dict[str, Any]:
    """The settings of a plan entry that a profile depends on, with the planned figures where the user left a choice."""
    settings = {name: (entry.get("settings") or {}).get(name) for name in KEY_SETTINGS}
    settings.update({name: entry.get(name) for name in PLANNED_SETTINGS})
    return settings


def _utilised(entry: Mapping[str, Any]) -> Optional[int]:
    """Bytes the engine could size its cache in; None when the cache was given in bytes (nothing was measured then)."""
    if entry.get("kv_cache_memory_bytes") is not None or not entry.get("budget"):
        return None
    return int(entry["budget"][0]["requested"]["bytes"])


def find(
    profiles: Sequence[Mapping[str, Any]], digest: str, release: str, gpu: str, settings: Mapping[str, Any]
) -> Tuple[Optional[Mapping[str, Any]], Optional[Mapping[str, Any]]]:
    """(the profile of exactly this start, one whose weights hold here too): the second may be of another release."""
    wanted = key(digest, release, gpu, settings)
    same: Optional[Mapping[str, Any]] = None
    like: List[Mapping[str, Any]] = []
    for profile in profiles:
        if profile.get("key") == wanted:
            same = profile
        if profile.get("model_digest") == digest and all(
            (profile.get("settings") or {}).get(name) == settings.get(name) for name in WEIGHT_SETTINGS
        ):
            like.append(profile)
    like.sort(key=lambda profile: str(profile.get("key")))
    return same, same or (like[0] if like else None)


def deviation(entry: Mapping[str, Any], figures: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """Planned against logged, per term: ``{term, planned, logged, difference, inside}`` (inside the plan's band)."""
    rows = []
    for term in ("weights", "activation", "cuda_graphs", "kv_cache"):
        if term not in figures or not entry.get("budget"):
            continue
        planned = entry["budget"][0][term]
        logged = int(figures[term])
        rows.append(
            {
                "term": term,
                "planned": int(planned["bytes"]),
                "logged": logged,
                "difference": logged - int(planned["bytes"]),
                "inside": planned["low"] - LOG_ROUNDING <= logged <= planned["high"] + LOG_ROUNDING,
            }
        )
    return rows
