#!/usr/bin/env python3
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Derive the planner's release table from the full facts that were read from the vLLM wheels.

Usage: make_release_table.py FACTS.json [OUTPUT.json]

FACTS.json holds everything that was read (a megabyte); the table keeps what the planner asks: per release the
platform it needs and its batch defaults, per flag and environment variable the releases that know it.  An open
end (`null`) means "still there in the newest release read".  Every section names its source.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "plugins" / "plugin_utils" / "_data" / "releases.json"

# What to do instead of a flag, variable or command that is gone or never was.  Facts from the same reading of the
# wheels: the successor exists in the release that dropped the name, or the name occurs in no release.
SUCCESSORS = {
    "--swap-space": "nothing: V1 does not swap; --kv-offloading-size and --cpu-offload-gb do other things",
    "--max-context-len-to-capture": "--max-seq-len-to-capture (0.6.4 to 0.10.2)",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size (0.11.1 and later)",
    "--worker-use-ray": "--distributed-executor-backend ray",
    "--engine-use-ray": "nothing",
    "--speculative-model": "`speculative:` of the instance (--speculative-config)",
    "--num-speculative-tokens": "`speculative:` of the instance (--speculative-config)",
    "--device": "nothing: the wheel decides",
    "--enable-reasoning": "--reasoning-parser alone",
    "--use-v2-block-manager": "nothing",
    "--num-scheduler-steps": "nothing: it belonged to the V0 engine",
    "--multi-step-stream-outputs": "nothing: it belonged to the V0 engine",
    "--preemption-mode": "nothing",
    "--scheduler-delay-factor": "nothing",
    "--disable-async-output-proc": "nothing",
    "--rope-scaling": "--hf-overrides",
    "--rope-theta": "--hf-overrides",
    "--guided-decoding-backend": "--structured-outputs-config (0.11.0 and later)",
    "--override-pooler-config": "--pooler-config",
    "--num-lookahead-slots": "nothing",
    "--num-redundant-experts": "--eplb-config",
    "--task": "--runner and --convert (0.10.1 and later)",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes (0.11.1 and later)",
    "--disable-mm-preprocessor-cache": "--mm-processor-cache-gb 0",
    "--enable-multimodal-encoder-data-parallel": "--mm-encoder-tp-mode data",
    "--disable-log-requests": "nothing: off by default since 0.10.1; --enable-log-requests turns it on",
    "--logits-processor-pattern": "nothing",
    "--disable-frontend-multiprocessing": "nothing",
    "--max-num-partial-prefills": "nothing",
    "--max-long-partial-prefills": "nothing",
    "--calculate-kv-scales": "nothing",
    "--override-attention-dtype": "nothing",
    "--kv-cache-memory": "`memory: {kv_cache_bytes: …}` of the instance (--kv-cache-memory-bytes)",
    "VLLM_USE_V1": "nothing: V1 is the only engine since 0.11.0",
    "VLLM_ATTENTION_BACKEND": "--attention-backend (0.13.0 and later)",
    "VLLM_FLASH_ATTN_VERSION": "--attention-config (0.13.0 and later)",
    "VLLM_USE_TRTLLM_ATTENTION": "--attention-config (0.13.0 and later)",
    "VLLM_TORCH_PROFILER_DIR": "--profiler-config (0.13.0 and later)",
    "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": "--profiler-config (0.13.0 and later)",
    "VLLM_ALL2ALL_BACKEND": "--all2all-backend (0.11.1 and later)",
    "VLLM_MXFP4_USE_MARLIN": "--moe-backend (0.17.0 and later)",
    "VLLM_NVFP4_GEMM_BACKEND": "--linear-backend (0.22.0 and later)",
    "VLLM_PROFILE_MEMORY": "--profiler-config (0.13.0 and later)",
    "VLLM_CRASH_HANDLER": "VLLM_LOGGING_LEVEL=DEBUG for more detail",
    "VLLM_GPU_MEMORY_UTILIZATION": "`memory: {fraction: …}` of the instance",
    "VLLM_MAX_MODEL_LEN": "`max_model_len:` of the instance",
    "VLLM_TENSOR_PARALLEL_SIZE": "`tensor_parallel_size:` of the instance",
    "VLLM_MODEL": "`model:` of the instance",
    "CUDA_DISABLE_DEPRECATED_PTX": "nothing",
    "vllm-engine": "`vllm serve`, the only server command of any release",
    "vllm-entrypoint": "`vllm serve`, the only server command of any release",
}
NOWHERE = (
    "VLLM_PROFILE_MEMORY",
    "VLLM_CRASH_HANDLER",
    "CUDA_DISABLE_DEPRECATED_PTX",
    "VLLM_GPU_MEMORY_UTILIZATION",
    "VLLM_MAX_MODEL_LEN",
    "VLLM_TENSOR_PARALLEL_SIZE",
    "VLLM_MODEL",
    "vllm-engine",
    "vllm-entrypoint",
    "--kv-cache-memory",
)
GIB_TIER = re.compile(r"device_memory >= (\d+) \* GiB_bytes")
NAME_IN = re.compile(r"'(\w+)' in device_name")
NAME_NOT_IN = re.compile(r"'(\w+)' not in device_name")
_FIELD = {"max_num_batched_tokens": "tokens", "max_num_seqs": "seqs"}


def main(arguments: list[str]) -> int:
    """Write the table; the exit status says whether it worked."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    facts = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    output = Path(arguments[1]) if len(arguments) == 2 else DEFAULT_OUTPUT
    text = json.dumps(table(facts), separators=(",", ":"), sort_keys=True, ensure_ascii=True)
    # One release, flag or variable a line: the file stays readable in a diff.
    text = re.sub(r'(,|\{)("(?:--[a-z]|[A-Z_0-9]+"|\d+\.\d+)[^"]*"?:)', r"\1\n\2", text)
    output.write_text(text + "\n", encoding="utf-8")
    print(f"{output}: {output.stat().st_size} bytes")
    return 0


def table(facts: dict[str, Any]) -> dict[str, Any]:
    """Everything the planner reads, from everything that was read."""
    order = list(facts["versions"])
    newest = order[-1]
    return {
        "generated": facts["meta"]["generated"],
        "newest": newest,
        "sources": {
            "wheels": (
                f"metadata, sources and ELF headers of the x86_64 wheels of all {len(order)} releases "
                f"{order[0]} to {newest} on PyPI, read {facts['meta']['generated']}"
            ),
            "parser": facts["meta"]["checked_against_the_real_parser"],
            "nvidia": "; ".join(facts["nvidia"]["sources"].values()),
        },
        "section_sources": {
            "versions": ["wheels", "nvidia"],
            "flags": ["wheels", "parser"],
            "env": ["wheels"],
            "nowhere": ["wheels"],
            "successors": ["wheels"],
        },
        "versions": {name: _version(facts["versions"][name]) for name in order},
        "flags": {name: _flag(flag, newest) for name, flag in facts["flags"].items()},
        "env": {
            **{name: _span(span, newest) for name, span in facts["env_read_outside_envs_py"].items()},
            **{name: _env(entry, newest) for name, entry in facts["env"].items()},
        },
        "nowhere": list(NOWHERE),
        "successors": SUCCESSORS,
    }


def _version(entry: dict[str, Any]) -> dict[str, Any]:
    driver = entry["min_driver_linux"]
    capability = entry["compute_capability"]
    return {
        "python": entry["requires_python"],
        "torch": entry["torch"],
        "cuda": entry["torch_cuda"],
        "driver_floor": driver["hard_floor"],
        "toolkit_driver": driver["toolkit_driver"],
        "capability": capability["effective_min"],
        "blackwell": [capability["blackwell_datacenter_10x"], capability["blackwell_consumer_12x"]],
        "glibc": entry["glibc_min_by_tags"],
        "transformers": entry["requires"].get("transformers"),
        "engine": "v1" if entry["engine"]["v1_default"] else "v0",
        "v0_below_cc8": entry["engine"]["v1_falls_back_below_cc8"],
        "utilization": entry["gpu_memory_utilization_default"],
        "quantization": {
            name: (entry["quantization_min_cc"] or {}).get(name) for name in entry["quantization_methods"]
        },
        "env_warns": entry["unknown_vllm_env_warns"],
        "batch": _batch(entry["batch_defaults"] or []),
    }


def _batch(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tiers `{gib, names, not_names, tokens, seqs}`, first match wins; the API server's values."""
    always = {_FIELD[rule["what"]]: _server(rule) for rule in rules if rule["when"] == "always"}
    tiers: dict[tuple[int, int], dict[str, Any]] = {}
    for rule in rules:
        size = GIB_TIER.search(rule["when"])
        names = NAME_IN.findall(rule["when"])
        excluded = NAME_NOT_IN.findall(rule["when"]) + (["gb10"] if "not is_gb10" in rule["when"] else [])
        if rule["when"] != "else" and not size and not names:
            continue
        tier = tiers.setdefault((int(size.group(1)) if size else 0, len(names)), dict(always))
        tier["gib"] = int(size.group(1)) if size else 0
        tier.update({key: value for key, value in (("names", names), ("not_names", excluded)) if value})
        tier[_FIELD[rule["what"]]] = _server(rule)
    # Releases before the V1 engine was the default size the batch by the model's length; this is their floor.
    return [tiers[key] for key in sorted(tiers, reverse=True)] or [{"gib": 0, "tokens": 2048, "seqs": 256}]


def _server(rule: dict[str, Any]) -> int:
    value = rule["value"]
    return int(value["OPENAI_API_SERVER"] if isinstance(value, dict) else value)


def _flag(flag: dict[str, Any], newest: str) -> dict[str, Any]:
    history = []
    for entry in flag["history"]:
        step = {
            key: value
            for key, value in entry.items()
            if key in ("since", "type", "choices", "negatable", "aliases", "deprecated") and value not in (None, False)
        }
        if entry.get("default") is not None and not isinstance(entry["default"], dict):
            step["default"] = entry["default"]
        if "deprecated" in step:
            step["deprecated"] = True
        history.append(step)
    return {"first": flag["first_seen"], "last": _last(flag, newest), "history": history}


def _env(entry: dict[str, Any], newest: str) -> list[Any]:
    types = [step["type"] for step in entry["history"] if step.get("type")]
    kind = (types[-1] if types else "str").replace(" | None", "")
    return [entry["first_seen"], _last(entry, newest), kind if kind in ("bool", "int", "float") else "str"]


def _span(span: list[str], newest: str) -> list[Any]:
    return [span[0], None if span[1] == newest else span[1], "str"]


def _last(entry: dict[str, Any], newest: str) -> str | None:
    return None if entry["last_seen"] == newest else entry["last_seen"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
