#!/usr/bin/env python3
"""Seconds that the planner takes for 10 to 10,000 hosts of 8 GPUs and 8 instances each, on one core.

Usage: plan_scale.py [--most HOSTS] [--limit SECONDS_PER_1000]

Ends with status 1 when 1,000 hosts take longer than the limit, or when the time grows faster than the number of hosts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "unit"))
import conftest  # noqa: F401

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.plan import plan
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

GIB = 2**30
SIZES = (10, 100, 1000, 10_000)
# The time per host may grow by this much from the smallest to the largest fleet before we call it worse than linear.
TOLERATED_GROWTH = 1.5


def _model(hidden: int, layers: int, heads: int, inner: int) -> dict[str, object]:
    return {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "intermediate_size": inner,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
        }
    }


def host(number: int) -> dict[str, object]:
    """One host's request; hosts differ in what others use of their GPUs, so that no answer can be reused."""
    devices = [
        {
            "index": index,
            "uuid": f"GPU-{number:08d}-{index}",
            "pci_address": f"0000:{index * 16 + 16:02x}:00.0",
            "name": "NVIDIA H100 80GB HBM3",
            "architecture": "hopper",
            "compute_capability": "9.0",
            "memory": {
                "total": 81559 * 2**20,
                "reserved": 475 * 2**20,
                "free": 81084 * 2**20 - (number % 97) * 2**23,
                "used": (number % 97) * 2**23,
            },
            "processes": [],
            "mig": {"mode": False, "devices": []},
            "numa_node": index // 4,
        }
        for index in range(8)
    ]
    matrix = [["X" if a == b else "NV18" for b in range(8)] for a in range(8)]
    instances = [
        {"name": "large", "model": "70b", "port": 8000, "gpus": 4, "max_model_len": 32768},
        {"name": "pair", "model": "8b", "port": 8001, "gpus": 2},
        *(
            {
                "name": f"small-{index}",
                "model": "8b",
                "port": 8002 + index,
                "isolation": "shared",
                "max_model_len": 8192,
            }
            for index in range(6)
        ),
    ]
    return {
        "gpu": {"devices": devices, "links": {"matrix": matrix}},
        "models": {"8b": _model(4096, 32, 32, 14336), "70b": _model(8192, 80, 64, 28672)},
        "engine_version": "0.19.1",
        "instances": instances,
        "data": planner_data(),
    }


def seconds(hosts: int) -> float:
    """Processor seconds for planning so many hosts; their facts are made outside the time taken."""
    requests = [host(number) for number in range(min(hosts, 1000))]
    taken = 0.0
    for start in range(0, hosts, 1000):
        for request in requests[: min(1000, hosts - start)]:
            begun = time.process_time()
            answer = plan(request)
            taken += time.process_time() - begun
            assert answer["fits"], [entry["reason"] for entry in answer["instances"]]
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=1000, help="largest fleet")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds allowed for 1,000 hosts")
    options = parser.parse_args()
    seconds(2)
    failed = False
    first = last = 0.0
    print(f"{'hosts':>8} {'instances':>10} {'seconds':>9} {'ms per host':>12}")
    for hosts in (size for size in SIZES if size <= options.most):
        taken = seconds(hosts)
        each = taken / hosts * 1000
        print(f"{hosts:>8} {hosts * 8:>10} {taken:>9.2f} {each:>12.2f}")
        first, last = first or each, each
        if hosts == 1000 and taken > options.limit:
            print(f"1,000 hosts took {taken:.2f} s, more than the {options.limit:g} s allowed")
            failed = True
    if last > first * TOLERATED_GROWTH:
        print(f"the time per host grew from {first:.2f} to {last:.2f} ms: worse than linear")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
