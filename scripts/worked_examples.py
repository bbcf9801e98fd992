#!/usr/bin/env python3
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Write docs/planning.md: how the planner decides, with worked examples computed by the planner itself.

Usage: worked_examples.py [--check]

``--check`` writes nothing and ends with status 1 when the page is not what the planner says today.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "planning.md"
GIB = 2**30
RELEASE = "0.19.1"


def _importable() -> None:
    """Make the checkout importable as ansible_collections.gpufleet.inference."""
    for name, folder in (
        ("ansible_collections", None),
        ("ansible_collections.gpufleet", None),
        ("ansible_collections.gpufleet.inference", ROOT),
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)] if folder else []
        sys.modules.setdefault(name, module)


_importable()

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import catalogue
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.plan import plan
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

DATA = planner_data()
L4, L40S, H100, H200 = "27b8", "26b9", "2330", "2335"
CARDS = {"24 GB (L4)": L4, "48 GB (L40S)": L40S, "80 GB (H100)": H100, "141 GB (H200)": H200}
PARTS = ("weights", "activation", "non_torch", "cuda_graphs", "kv_cache", "headroom")


def llama(hidden: int, layers: int, heads: tuple[int, int], inner: int, text: tuple[int, int]) -> dict[str, Any]:
    """The config.json of a dense Llama-like model; heads: (attention, key-value); text: (vocabulary, length)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": inner,
        "vocab_size": text[0],
        "max_position_embeddings": text[1],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


SIZES = {
    "7B": llama(4096, 32, (32, 32), 11008, (32000, 4096)),
    "8B": llama(4096, 32, (32, 8), 14336, (128256, 131072)),
    "13B": llama(5120, 40, (40, 40), 13824, (32000, 4096)),
    "70B": llama(8192, 80, (64, 8), 28672, (128256, 131072)),
}
SCHEMES: dict[str, dict[str, Any]] = {
    "BF16": {},
    "FP8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "4-bit (nf4)": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def model(size: str, scheme: str = "BF16") -> dict[str, Any]:
    config = dict(SIZES[size])
    if SCHEMES[scheme]:
        config["quantization_config"] = SCHEMES[scheme]
    return {"config": config}


def cards(device_id: str, count: int) -> list[dict[str, Any]]:
    pci = [{"address": f"0000:{index + 16:02x}:00.0", "device_id": device_id} for index in range(count)]
    return catalogue.expected_devices(DATA["gpus"], pci)[0]


def name_of(size: str, scheme: str = "BF16") -> str:
    return f"llama-{size}-{scheme.split(maxsplit=1)[0]}".lower()


def answer(instances: list[dict[str, Any]], devices: list[dict[str, Any]], release: str = RELEASE) -> dict[str, Any]:
    models = {name_of(size, scheme): model(size, scheme) for size in SIZES for scheme in SCHEMES}
    listed = [
        {"name": f"i{number}", "port": 8000 + number, **instance} for number, instance in enumerate(instances, start=1)
    ]
    gpu = {"devices": devices}
    return plan({"data": DATA, "gpu": gpu, "models": models, "engine_version": release, "instances": listed})


def budget(entry: dict[str, Any], label: str) -> list[str]:
    part = entry["budget"][0]
    cells = [f"{part[name]['bytes'] / GIB:.2f}" for name in ("total", "requested", *PARTS)]
    row = [
        label,
        *cells,
        f"{entry['kv_cache_tokens']:,}",
        f"{entry['max_model_len']:,}",
        f"{entry['max_concurrency']:.2f}",
    ]
    return [f"| {' | '.join(row)} |"]


BUDGET_HEAD = [
    "| | total | requested | weights | activation | runtime | graphs | KV cache | headroom | tokens | length | × |",
    "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
]


def refusal(entry: dict[str, Any]) -> list[str]:
    lines = [f"Refused, `{entry['reason']['code']}`: {entry['reason']['text']}.", ""]
    if entry["alternatives"]:
        lines += ["What would fit:", ""]
        lines += [f"- {alternative['text']}" for alternative in entry["alternatives"]]
    else:
        lines.append("Nothing that the planner tries would fit.")
    return lines


def one(instance: dict[str, Any], device_id: str, count: int, label: str) -> list[str]:
    entry = answer([instance], cards(device_id, count))["instances"][0]
    return [*BUDGET_HEAD, *budget(entry, label)] if entry["fits"] else refusal(entry)


def single_card() -> list[str]:
    rows = list(BUDGET_HEAD)
    for label, wish in (
        ("as it is", {}),
        ("`kv_cache_dtype: fp8`", {"kv_cache_dtype": "fp8"}),
        ("`enforce_eager: true`", {"enforce_eager": True}),
        ("`memory: {concurrency: 4}`", {"memory": {"concurrency": 4}}),
        ("FP8 checkpoint", {"model": "llama-8b-fp8"}),
    ):
        entry = answer([{"model": "llama-8b-bf16", **wish}], cards(L4, 1))["instances"][0]
        rows += budget(entry, label)
    refused = answer([{"model": "llama-8b-bf16", "max_model_len": 131072}], cards(L4, 1))["instances"][0]
    return [*rows, "", "With `max_model_len: 131072`:", "", *refusal(refused)]


def several_cards() -> list[str]:
    rows = list(BUDGET_HEAD)
    for count in (4, 8):
        entry = answer([{"model": "llama-70b-bf16", "gpus": count}], cards(H100, count))["instances"][0]
        rows += budget(entry, f"{count} × 80 GB")
    half = answer([{"model": "llama-70b-bf16", "gpus": 2, "max_model_len": 131072}], cards(H100, 4))["instances"][0]
    return [*rows, "", "The same on two of four cards, with `max_model_len: 131072`:", "", *refusal(half)]


def shared_card() -> list[str]:
    both = [{"model": "llama-7b-bf16", "isolation": "shared"}, {"model": "llama-7b-bf16", "isolation": "shared"}]
    found = answer(both, cards(H100, 1))
    rows = list(BUDGET_HEAD)
    for entry in found["instances"]:
        rows += budget(entry, f"`{entry['name']}`, after {', '.join(entry['start_after']) or 'nothing'}")
    device = found["gpus"][0]
    planned = ", ".join(f"{part['name']} {part['bytes'] / GIB:.2f}" for part in device["instances"])
    words = " ".join(found["instances"][1]["arguments"])
    return [
        *rows,
        "",
        f"The proof, at the upper end of every term (GiB): {planned}; together {device['planned'] / GIB:.2f} of "
        f"{device['free'] / GIB:.2f} free, margin {device['margin'] / GIB:.2f}.",
        "",
        "The second one's command line:",
        "",
        "```text",
        f"vllm {words}",
        "```",
    ]


def matrix() -> list[str]:
    rows = [f"| model | {' | '.join(CARDS)} |", f"| --- |{' --- |' * len(CARDS)}"]
    for size in SIZES:
        for scheme in SCHEMES:
            cells = []
            for device_id in CARDS.values():
                entry = answer([{"model": name_of(size, scheme)}], cards(device_id, 1))["instances"][0]
                if entry["fits"]:
                    weights = entry["budget"][0]["weights"]["bytes"] / GIB
                    cells.append(
                        f"{weights:.1f} + {entry['kv_cache_tokens']:,} tok., length {entry['max_model_len']:,}"
                    )
                else:
                    cells.append(f"no: `{entry['reason']['code']}`")
            rows.append(f"| {size} {scheme} | {' | '.join(cells)} |")
    return rows


def mig_slice() -> list[str]:
    device = cards(H100, 1)[0]
    memory = {"total": int(9.75 * GIB), "free": int(9.75 * GIB)}
    part = {"uuid": "MIG-1", "profile": "1g.10gb", "gi": 7, "ci": 0, "memory": memory}
    device["mig"] = {"mode": True, "devices": [part]}
    lines = list(BUDGET_HEAD)
    refused: list[str] = []
    cases = (("7B", "BF16"), ("7B", "FP8"), ("7B", "AWQ"), ("8B", "BF16"), ("8B", "FP8"), ("8B", "AWQ"))
    for size, scheme in cases:
        name = f"{size} {scheme}"
        entry = answer([{"model": name_of(size, scheme), "gpus": {"mig": "1g.10gb"}}], [device])["instances"][0]
        if entry["fits"]:
            lines += budget(entry, name)
        else:
            refused.append(f"- {name}: `{entry['reason']['code']}`, {entry['reason']['text']}")
    return [*lines, "", "Refused:", "", *refused]


def utilisation() -> list[str]:
    rows = [
        "| utilisation | length | block 16 | block 32 | block 64 |",
        "| --: | --: | --- | --- | --- |",
    ]
    for fraction in (0.70, 0.85, 0.95):
        for length in (4096, 8192, 16384):
            cells = []
            for block in (16, 32, 64):
                wish = {"memory": {"fraction": fraction}, "max_model_len": length, "block_size": block}
                entry = answer([{"model": "llama-8b-bf16", **wish}], cards(L4, 1))["instances"][0]
                if entry["fits"]:
                    cells.append(f"{entry['kv_cache_blocks']:,} blocks, {entry['max_concurrency']:.2f} ×")
                else:
                    cells.append(f"no: `{entry['reason']['code']}`")
            rows.append(f"| {fraction:.2f} | {length:,} | {' | '.join(cells)} |")
    return rows


TEMPLATE = """\
# Planning

<!-- Written by scripts/worked_examples.py, every figure by the planner. Change the script, not this page. -->

Before anything is changed, `gpufleet.inference.vllm_plan` says for every instance which GPUs it gets, what every byte
of them is for, and its exact command line. It runs on the controller, from facts, and touches nothing.

## How it decides

1. **What runs stays.** A running instance whose wishes, model, release and devices are the same keeps its command line
   word for word. `vllm_instances_replan: true` plans it anew.
2. **What is free.** The memory torch sees (NVML's total less what the driver reserves), less what others use (rounded
   up to 256 MiB, so that a neighbour that grows a little changes nothing), less the reserve, less a margin of
   max(0.3 GiB, 2 %). Memory that our own instances hold is free for the plan; what one of them still holds until it is
   restarted is not free for the others.
3. **Placement.** Named devices first, then instances over several GPUs, then those that want a GPU alone, then by size.
   Among the devices where an instance fits: of one kind, nearest to each other (NVLink, then the PCI path), least left
   over; `spread` takes the emptiest instead.
4. **Proof.** Each term of the budget has a band. On every device the upper ends of all terms of all instances fit.
5. **Sharing out.** What is left goes in equal parts to the instances with `memory: auto`. `max_model_len: auto` becomes
   the longest context that serves the wanted concurrency.
6. **Start order.** Instances on one device start one after another (`start_after`): the engine measures free memory
   when it starts.

From 0.10.2 on the KV cache is given in bytes (`--kv-cache-memory-bytes`). The engine then sizes nothing itself, but
still refuses to start when less than `--gpu-memory-utilization` of the device is free; that is set to what the plan
needs, rounded down. Older releases size the cache by the utilisation, which is rounded up; 0.8.0 to 0.9.0 count all
used memory of the device, so there the n-th instance gets the sum.

An instance that does not fit is an answer with a code and figures, and with alternatives that were each planned in full
together with everything else on the host.

## Reading the tables

GiB on the first device; vLLM {release}; cards as the catalogue expects them, nothing else running; weights from the
configuration. *Runtime* is the CUDA context, communication buffers and what grows outside torch's allocator. *Headroom*
is what is likely to stay free. × is how many requests of full length fit at once.

## 8B on 24 GB

{single}

## 70B on 4 × 80 GB and 8 × 80 GB

{several}

## Two 7B on one 80 GB

{shared}

## Which precision on which card

One instance alone on one card: GiB of weights, tokens of KV cache, longest context.

{matrix}

A 7B or 13B of the older kind keeps every key-value head (0.5 and 0.78 MiB for each token); an 8B with grouped heads
needs a quarter of that, so it serves more tokens although it is larger.

## MIG slice 1g.10gb

{mig}

## Utilisation, length and block size

8B in BF16 on 24 GB with `memory: {{fraction: …}}`. The block size moves the number of blocks, not the bytes; lengths
only decide whether one request fits and how many at once.

{utilisation}
"""


def page() -> str:
    """The whole page."""
    return TEMPLATE.format(
        release=RELEASE,
        single="\n".join(single_card()),
        several="\n".join(several_cards()),
        shared="\n".join(shared_card()),
        matrix="\n".join(matrix()),
        mig="\n".join(mig_slice()),
        utilisation="\n".join(utilisation()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args()
    text = page()
    if options.check:
        if PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is not what the planner says today; run scripts/worked_examples.py")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
