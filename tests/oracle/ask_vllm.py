"""Ask an installed vLLM (CPU build) what it makes of a config.json: parameters, cache layers, capacity.

Run by the interpreter of that vLLM: ``python ask_vllm.py QUESTIONS.json``. Reads a list of questions (``id``,
``config``, ``available``, ``max_model_len`` and batch sizes) and prints one JSON answer per line. Models are built on
the meta device: no weights are loaded, no engine is started.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Build the model's class on the meta device and run the engine's own capacity code."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(question["config"]))
        arguments = {
            "model": folder,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "max_model_len": question["max_model_len"],
            "max_num_batched_tokens": question["max_num_batched_tokens"],
            "max_num_seqs": question["max_num_seqs"],
            "block_size": question["block_size"],
            "enable_prefix_caching": False,
            "enforce_eager": True,
            "async_scheduling": False,
        }
        config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config):
        _groups_of_one()
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            model = initialize_model(config, model_config=config.model_config)
        torch.set_default_dtype(torch.float32)
        specs = get_kv_cache_spec(config)
        parameters = sum(p.numel() * p.element_size() for p in model.parameters())
        found: dict[str, Any] = {"id": question["id"], "class": type(model).__name__, "param_bytes": parameters}
        found["block_size"] = config.cache_config.block_size
        found["max_model_len"] = config.model_config.max_model_len
        if not specs:
            return found
        resolve_kv_cache_layout(config, [["LBNHC"]], specs.values())
        try:
            answers = kv_cache_utils.get_kv_cache_configs(config, [specs], [question["available"]])
        except ValueError as error:
            return {**found, "ok": False, "error": str(error)[:300]}
        groups = answers[0].kv_cache_groups
        capacity = kv_cache_utils.get_kv_cache_capacity(config, answers[0])
        found.update(
            ok=True,
            blocks=answers[0].num_blocks,
            groups=[
                {
                    "kind": type(group.kv_cache_spec).__name__,
                    "layers": len(group.layer_names),
                    "block": group.kv_cache_spec.block_size,
                    "page": group.kv_cache_spec.page_size_bytes,
                }
                for group in groups
            ],
            capacity=[float(value) for value in (capacity if isinstance(capacity, tuple) else (capacity,))],
        )
    return found


def _groups_of_one() -> None:
    """Process groups of one member, made anew for each model, so that parallel layers can be built."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
    else:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            parallel_state.init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)


def main() -> None:
    """Answer each question in a process of its own budget: one that fails is reported, not fatal."""
    from vllm.model_executor.models import registry

    # The registry looks at each model's class in a process of its own, which imports the engine anew every time.
    registry._run_in_subprocess = lambda work: work()
    for question in json.loads(Path(sys.argv[1]).read_text()):
        try:
            result = answer(question)
        except Exception as error:
            result = {"id": question["id"], "failed": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
