#!/usr/bin/env python3
"""Score the memory model on recorded starts of vLLM, beside simple public rules.

    scripts/score.py OBSERVATIONS.jsonl MODELS.json [--details] [--half 0|1]

Every row is predicted from the shape of its model and its settings alone, as the planner would. ``--details`` prints
each row, ``--half`` scores only rows with an even (0) or odd (1) id: fit on one half, validate on the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30


def _importable() -> None:
    """Make the checkout importable as ansible_collections.gpufleet.inference."""
    path: Path | None
    for name, path in (
        ("ansible_collections", None),
        ("ansible_collections.gpufleet", None),
        ("ansible_collections.gpufleet.inference", ROOT),
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(path)] if path else []
        sys.modules.setdefault(name, module)


_importable()

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, memory, shape
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

Row = dict[str, Any]

# models.json leaves the family out for many models; the config.json that a host holds never does.
FAMILIES = (
    ("gemma-2", "gemma2"),
    ("gemma-3", "gemma3_text"),
    ("gemma-4", "gemma4_text"),
    ("gemma-7b", "gemma"),
    ("granite", "granite"),
    ("phi-2", "phi"),
    ("phi-4", "phi3"),
    ("opt", "opt"),
    ("qwen3-next", "qwen3_next"),
    ("qwen3", "qwen3"),
    ("qwen1.5-moe", "qwen2_moe"),
    ("qwen", "qwen2"),
    ("mixtral", "mixtral"),
    ("mistral", "mistral"),
    ("deepseek-v2", "deepseek_v2"),
    ("kimi-vl", "deepseek_v3"),
    ("exaone", "exaone4"),
    ("bamba", "bamba"),
    ("dots.ocr", "qwen2"),
)
# What the families' published configs say and models.json leaves out.
COMPLETION: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1},
    "deepseek_v3": {"qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1, "n_shared_experts": 2},
    "qwen2_moe": {"shared_expert_intermediate_size": 5632},
    "qwen3_next": {
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 512,
    },
}
GENERIC_VISION = {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "image_size": 896}
DYNAMIC_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "spatial_merge_size": 2}
DYNAMIC_VISION_3 = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "spatial_merge_size": 2}


def configuration(entry: Row, row: Row) -> dict[str, Any] | None:
    """A config.json for a row: the shape that models.json holds, completed by what its family's configs say."""
    config = {key: value for key, value in entry.items() if key not in ("observations", "source", "note") and value}
    if not config.get("num_hidden_layers") or not config.get("hidden_size"):
        return None
    key = str(entry.get("architecture_key") or "").lower()
    if not config.get("model_type"):
        config["model_type"] = next((family for start, family in FAMILIES if key.startswith(start)), "llama")
    for name, value in COMPLETION.get(config["model_type"], {}).items():
        config.setdefault(name, value)
    if config["model_type"] == "phi":
        config.setdefault("partial_rotary_factor", 0.4)
    if config["model_type"].startswith("llama4"):
        config.setdefault("intermediate_size_mlp", 16384)
        config.setdefault("attention_chunk_size", 8192)
    if config.pop("cross_attention_layers", None):
        config["model_type"] = "mllama_text_model"
    config.pop("layer_types", None)
    counts = config.pop("layer_types_count", None)
    if isinstance(counts, dict) and "full_attention_interval" not in config and "sliding_window" in config:
        every = config["num_hidden_layers"] // max(1, counts.get("full_attention", 1))
        config["sliding_window_pattern"] = every
    if key.startswith("exaone-4"):
        config["sliding_window_pattern"] = "LLLG"
    if config.pop("vision_tower", None) or config.pop("audio_tower", None):
        vision = GENERIC_VISION
        if key.startswith(("qwen", "dots")):
            vision = DYNAMIC_VISION_3 if key.startswith("qwen3") else DYNAMIC_VISION
        if not (row.get("flags") or {}).get("language_model_only"):
            config.setdefault("vision_config", dict(vision))
    if config["model_type"] == "gemma3_text" and config.get("max_position_embeddings", 0) > 32768:
        config.setdefault("rope_scaling", {"factor": 8.0, "rope_type": "linear"})
    config.setdefault("torch_dtype", config.get("dtype") or "bfloat16")
    stated = config.pop("quantization", None)
    quantization = _quantization(row, stated if isinstance(stated, dict) else None)
    if quantization:
        config["quantization_config"] = quantization
    return config


def _quantization(row: Row, stated: dict[str, Any] | None) -> dict[str, Any] | None:
    method = str(row.get("quantization") or "").lower()
    model = str(row.get("model") or "").lower()
    if "mxfp4" in method:
        return {"quant_method": "mxfp4"}
    if "w4a16" in method + model or "int4" in method or "4bit" in model or "auto_round" in method:
        return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    if "awq" in method or "awq" in model:
        return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    if "gptq" in method:
        return {"quant_method": "gptq", "bits": 4, "group_size": 128}
    if "bitsandbytes" in method or "bnb" in model:
        return {"quant_method": "bitsandbytes", "load_in_4bit": True}
    if "nvfp4" in method or "nvfp4" in model:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if "gguf" in method:
        return {"quant_method": "gguf", "bits": 8.5}
    if "fp8" in method or "fp8" in model or "w8a8" in model or "w8a16" in model or "int8" in model:
        if stated and stated.get("weight_block_size"):
            return stated
        if "fp8" in method and "fp8" not in model and "w8a8" not in model:
            return None  # quantised while loading
        return {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
                    "input_activations": {"num_bits": 8, "dynamic": True},
                }
            },
        }
    return stated


CAPABILITIES = (
    ("H100", (9, 0)),
    ("H200", (9, 0)),
    ("H20", (9, 0)),
    ("GH200", (9, 0)),
    ("B200", (10, 0)),
    ("GB10", (12, 1)),
    ("THOR", (11, 0)),
    ("ORIN", (8, 7)),
    ("5090", (12, 0)),
    ("5080", (12, 0)),
    ("BLACKWELL", (12, 0)),
    ("4090", (8, 9)),
    ("4070", (8, 9)),
    ("L40", (8, 9)),
    ("L4", (8, 9)),
    ("A100", (8, 0)),
    ("A10", (8, 6)),
    ("3090", (8, 6)),
    ("T4", (7, 5)),
    ("QUADRO RTX", (7, 5)),
    ("V100", (7, 0)),
)
TOTALS = {"H100 80GB": 79.19, "L4": 22.04, "RTX 3090": 23.58, "L40S": 44.4, "A100 40GB": 39.5, "H200": 139.8}
TOTALS |= {"RTX 5090": 31.36, "A100 80GB/unspecified": 79.25, "T4": 14.56, "A10G": 22.06, "RTX 4090": 23.55}
TOTALS |= {"RTX 5080": 15.47, "RTX PRO 6000 Blackwell": 94.97, "GH200 96GB": 94.5, "DGX Spark GB10": 121.69}
TOTALS |= {"H20": 95.0, "Quadro RTX 6000": 23.5}


# Releases in use at a date, for rows that do not state theirs.
USUAL = (
    ("2024-08", (0, 5, 3)),
    ("2024-10", (0, 5, 5)),
    ("2024-12", (0, 6, 3)),
    ("2025-03", (0, 7, 3)),
    ("2025-06", (0, 8, 5)),
    ("2025-08", (0, 9, 2)),
    ("2025-10", (0, 10, 2)),
    ("2025-12", (0, 11, 2)),
    ("2026-02", (0, 14, 1)),
    ("2026-05", (0, 19, 0)),
    ("2026-07", (0, 22, 1)),
    ("2026-09", (0, 27, 1)),
    ("9999", (0, 29, 0)),
)


def version(row: Row) -> tuple[int, ...]:
    """The release of a row; where it is not stated, a usual one of its engine."""
    text = str(row.get("vllm_version") or "").split(" ")[0]
    numbers: list[int] = []
    for part in text.split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int("".join(c for c in part.split("rc")[0] if c.isdigit()) or 0))
    if len(numbers) < 2:
        era = str(row.get("notes") or "").partition("-era")[0].rpartition(" ")[2]
        if era.count(".") == 1 and era.replace(".", "").isdigit():
            return (int(era.split(".")[0]), int(era.split(".")[1]), 0)
        date = str(row.get("date") or "")
        usual = next((release for until, release in USUAL if date and date < until), USUAL[-1][1])
        return min(usual, (0, 8, 5)) if row.get("engine") == "v0" else max(usual, (0, 8, 5))
    return tuple(numbers + [0] * (3 - len(numbers)))


def device(row: Row) -> memory.Device | None:
    """The device of a row: its stated total, or that of its class."""
    name = str(row.get("gpu_class") or row.get("gpu") or "")
    total = row.get("gpu_total_gib") or TOTALS.get(name)
    if not total:
        return None
    capability = next((value for key, value in CAPABILITIES if key in name.upper()), (8, 0))
    if not name:
        capability = (9, 0) if total > 79.1 and total < 80 else (8, 0)
    free = row.get("free_at_start_gib")
    unified = "GB10" in name or "Jetson" in name
    return memory.Device(int(total * GIB), int(free * GIB) if free else None, name, capability, unified)


def settings(row: Row) -> kvcache.Settings:
    """The arguments of a row."""
    flags = row.get("flags") or {}
    method = str(flags.get("speculative") or "").split(" ")[0]
    quantization = "fp8" if str(row.get("quantization") or "") == "fp8" else ""
    return kvcache.Settings(
        tensor_parallel_size=row.get("tensor_parallel") or (row.get("num_gpus") or 1),
        pipeline_parallel_size=row.get("pipeline_parallel") or 1,
        decode_context_parallel_size=flags.get("decode_context_parallel_size") or 1,
        enable_expert_parallel=bool(flags.get("enable_expert_parallel")),
        dtype=row.get("dtype") or "auto",
        quantization=quantization,
        kv_cache_dtype=row.get("kv_cache_dtype") or "auto",
        block_size=row.get("block_size"),
        max_model_len=row.get("max_model_len"),
        max_num_seqs=row.get("max_num_seqs"),
        max_num_batched_tokens=row.get("max_num_batched_tokens"),
        gpu_memory_utilization=row.get("gpu_memory_utilization"),
        enforce_eager=bool(row.get("enforce_eager")),
        enable_prefix_caching=flags.get("enable_prefix_caching"),
        speculative=kvcache.Speculative(method, 1) if method in ("mtp", "eagle", "eagle3") else None,
        cpu_offload_bytes=int((flags.get("cpu_offload_gb") or 0) * GIB),
        engine=str(row.get("engine") or ""),
    )


def predict(row: Row, models: dict[str, Row], known_weights: bool) -> memory.Budget | None:
    """The planner's budget for a row, or None when the row does not say enough to have one."""
    entry, where = models.get(str(row.get("model"))), device(row)
    if entry is None or where is None:
        return None
    config = configuration(entry, row)
    if config is None:
        return None
    measured = {"weights": int(row["weights_gib"] * GIB)} if known_weights and row.get("weights_gib") else None
    try:
        return memory.budget(shape.parse_shape(config), None, version(row), where, settings(row), measured=measured)
    except FleetError as error:
        print(f"  {row['id']}: {error.message}", file=sys.stderr)
        return None


def unstated(row: Row) -> str:
    """What a row leaves open that moves memory; "" when nothing is known to be missing."""
    flags = row.get("flags") or {}
    name = str(row.get("gpu_class") or "")
    found = []
    if not row.get("gpu_memory_utilization"):
        found.append("utilisation not stated, the engine's default assumed")
    if not row.get("gpu_total_gib"):
        found.append("memory of the device not stated, that of its class assumed")
    if not row.get("vllm_version"):
        found.append("release not stated, one of its date assumed")
    if not row.get("max_num_seqs") or not row.get("max_num_batched_tokens"):
        found.append("batch sizes not stated, the engine's defaults assumed")
    if row.get("engine") == "v0" and (row.get("tensor_parallel") or 1) > 1:
        found.append("one worker's figures; the driver's, which also samples, bound the blocks")
    if "GB10" in name or "Jetson" in name or "Thor" in name:
        found.append("unified memory: what the host holds counts, too")
    if str(flags.get("speculative") or "").startswith(("d", "eagle")):
        found.append("size of the draft model not stated")
    if flags.get("kv_transfer_config"):
        found.append("a KV connector takes its share")
    if flags.get("cpu_offload_gb"):
        found.append("part of the weights lies in host memory")
    if any(word in str(row.get("quantization") or "") for word in ("auto_round", "exl3", "gguf")):
        found.append("what this build left unquantised is not stated")
    if "V4" in str(row.get("model")):
        found.append("the compressed cache of this family is not modelled")
    return "; ".join(found)


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def line(name: str, errors: list[float]) -> str:
    """One line of a table; a group under ten has no target."""
    if not errors:
        return f"  {name:58s} n=0"
    note = "" if len(errors) >= 10 else "   (n < 10: no target)"
    middle, high, worst = statistics.median(errors), quantile(errors, 0.9), max(errors)
    return f"  {name:58s} n={len(errors):<3d} median {middle:7.2%}  p90 {high:7.2%}  worst {worst:7.2%}{note}"


PUBLIC_RULES: dict[str, Callable[[Row, int], float]] = {
    "rule: weights + 1.5 + 0.75 GiB + 5 %": lambda o, tp: (
        o["gpu_total_gib"] * (o["gpu_memory_utilization"] - 0.05) - o["weights_gib"] - 2.25
    ),
    "rule: weights + 5.5 GiB / tp + 0.13 / 0.55": lambda o, tp: (
        o["gpu_total_gib"] * o["gpu_memory_utilization"] - o["weights_gib"] - 5.5 / tp - (0.13 if tp == 1 else 0.55)
    ),
    "rule: weights x 1.2 + 2 GiB": lambda o, tp: (
        o["gpu_total_gib"] * o["gpu_memory_utilization"] - 1.2 * o["weights_gib"] - 2
    ),
    "rule: weights only": lambda o, tp: o["gpu_total_gib"] * o["gpu_memory_utilization"] - o["weights_gib"],
    "rule: weights + 1 GiB": lambda o, tp: o["gpu_total_gib"] * o["gpu_memory_utilization"] - o["weights_gib"] - 1.0,
}


def is_h100_group(row: Row) -> bool:
    """H100 with a release from 0.11."""
    return str(row.get("gpu_class") or "").startswith("H100") and version(row) >= (0, 11, 0)


def usable(rows: Iterable[Row]) -> list[Row]:
    """Starts of quality A and B whose KV memory was logged."""
    return [row for row in rows if row["quality"] in "AB" and (row.get("kv_available_gib") or 0) > 0.5]


def is_stated(row: Row) -> bool:
    """Whether the row tells what the public rules need: device memory, utilisation and weights; and it started."""
    known = row.get("gpu_total_gib") and row.get("gpu_memory_utilization") and row.get("weights_gib")
    return bool(known) and row["outcome"] == "ok"


def score(rows: list[Row], models: dict[str, Row], details: bool) -> None:
    """Print the tables."""
    starts = usable(rows)
    others = [row for row in starts if not is_h100_group(row)]
    groups = (
        ("H100, releases from 0.11", [row for row in starts if is_h100_group(row)]),
        ("all others, memory, utilisation, weights stated", [row for row in others if is_stated(row)]),
        ("all others, something not stated", [row for row in others if not is_stated(row)]),
    )
    for title, members in groups:
        print(f"KV bytes, {title}: {len(members)} starts logged them")
        for name, known in (("ours, weights from the files (as logged)", True), ("ours, config only", False)):
            errors, misses = [], []
            for row in members:
                plan = predict(row, models, known)
                if plan is None:
                    continue
                found = min(rank.kv_available.bytes for rank in plan.ranks) / GIB
                error = abs(found - row["kv_available_gib"]) / row["kv_available_gib"]
                errors.append(error)
                if error > 0.1 or details:
                    misses.append((row, found, error, plan))
            print(line(name, errors))
            if known or details:
                for row, found, error, plan in misses:
                    print(_detail(row, found, error, plan))
                    if error > 0.1:
                        print(f"      {unstated(row) or 'unknown'}")
        for name, rule in PUBLIC_RULES.items():
            errors = []
            for row in members:
                if row.get("gpu_total_gib") and row.get("gpu_memory_utilization") and row.get("weights_gib"):
                    found = rule(row, row.get("tensor_parallel") or 1)
                    errors.append(abs(found - row["kv_available_gib"]) / row["kv_available_gib"])
            print(line(name, errors))
    _weights(rows, models, details)
    _verdicts(rows, models)


def _detail(row: Row, found: float, error: float, plan: memory.Budget) -> str:
    rank = plan.ranks[-1]
    terms = (rank.weights, rank.activation, rank.non_torch, rank.cuda_graphs)
    ours = " ".join(f"{name} {term.bytes / GIB:.2f}" for name, term in zip("WANG", terms, strict=True))
    logged = [row.get(key) for key in ("weights_gib", "activation_gib", "non_torch_gib", "graph_gib")]
    theirs = " ".join(f"{name} {value}" for name, value in zip("WANG", logged, strict=True) if value is not None)
    where = f"{row['vllm_version']} {row['gpu_class']} tp{row.get('tensor_parallel')}"
    model = str(row["model"])[:36]
    start = f"    {row['id']} {error:7.1%} {found:6.2f} for {row['kv_available_gib']:6.2f}"
    return f"{start} | {where} {model} | {ours} | {theirs}"


def _weights(rows: list[Row], models: dict[str, Row], details: bool) -> None:
    errors, misses = [], []
    for row in rows:
        if row["quality"] not in "AB" or not row.get("weights_gib") or (row.get("flags") or {}).get("cpu_offload_gb"):
            continue
        plan = predict(row, models, False)
        if plan is None:
            continue
        found = max(rank.weights.bytes for rank in plan.ranks) / GIB
        error = abs(found - row["weights_gib"]) / row["weights_gib"]
        errors.append(error)
        if error > 0.03 or details:
            misses.append(f"    {row['id']} {error:7.1%} {found:6.2f} for {row['weights_gib']:6.2f} | {row['model']}")
    print("Weights per rank, from the shape alone (no files)")
    print(line("ours", errors))
    print("\n".join(misses))


def _verdicts(rows: list[Row], models: dict[str, Row]) -> None:
    print("Starts that were refused or ran out of memory, all qualities: our verdict")
    wrong, judged = 0, 0
    for row in rows:
        if row["outcome"] not in ("refused_kv", "refused_free_memory", "oom"):
            continue
        plan = predict(row, models, True)
        if plan is None:
            print(f"  {row['id']} {row['outcome']:20s} -> not enough is stated to plan it")
            continue
        judged += 1
        missed = row["outcome"] == "oom" and plan.verdict == "fits"
        wrong += missed
        print(
            f"  {row['id']} {row['outcome']:20s} -> {plan.verdict:20s} {'MISSED ' if missed else ''}{plan.reason[:130]}"
        )
    print(f"  judged {judged}; ran out of memory but called a fit: {wrong}")
    good = [row for row in rows if row["outcome"] == "ok"]
    plans = [(row, predict(row, models, True)) for row in good]
    # A start whose length, share or device is not stated cannot be called refused.
    needed = ("max_model_len", "gpu_memory_utilization")
    known = [(row, plan) for row, plan in plans if plan is not None and all(row.get(name) for name in needed)]
    refused = [(row, plan) for row, plan in known if plan.verdict.startswith("refused")]
    risky = [(row, plan) for row, plan in known if plan.verdict == "oom_risk"]
    for row, plan in refused:
        print(f"  {row['id']} started, but we say {plan.verdict}: {plan.reason[:150]}")
    for row, plan in risky:
        print(f"  {row['id']} started, but we say {plan.verdict}: {plan.reason[:150]}")
    share = len(refused) / max(1, len(known))
    print(f"  good starts refused: {len(refused)} of {len(known)} ({share:.1%}); called a risk: {len(risky)}")


def main() -> int:
    """Read the files and print the score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("observations", type=Path, nargs="?", default=ROOT / "tests/oracle/data/observations.jsonl")
    parser.add_argument("models", type=Path, nargs="?", default=ROOT / "tests/oracle/data/models.json")
    parser.add_argument("--details", action="store_true", help="print every row")
    parser.add_argument("--half", type=int, choices=(0, 1), help="score every second row only")
    options = parser.parse_args()
    rows = [json.loads(text) for text in options.observations.read_text().splitlines() if text.strip()]
    if options.half is not None:
        rows = [row for row in rows if int(row["id"].split("-")[1]) % 2 == options.half]
    score(rows, json.loads(options.models.read_text()), options.details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
