"""Checkpoints made up for tests: tensors named as published ones are, and files that hold no data (holes)."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Spec = dict[str, tuple[str, tuple[int, ...]]]
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I32": 4, "F8_E4M3": 1}


def tensors(config: Mapping[str, Any], dtype: str = "BF16") -> Spec:
    """Names, types and shapes of a decoder of the Llama, Qwen, Mixtral or DeepSeek kind."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv, dim = config.get("num_key_value_heads", heads), config.get("head_dim", hidden // heads)
    found: Spec = {"model.embed_tokens.weight": (dtype, (vocab, hidden)), "model.norm.weight": (dtype, (hidden,))}
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (dtype, (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{start}{norm}.weight"] = (dtype, (hidden,))
        attention: dict[str, tuple[int, ...]] = {}
        if config.get("kv_lora_rank"):
            rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
            query = heads * (config["qk_nope_head_dim"] + rope)
            if config.get("q_lora_rank"):
                attention["q_a_proj"] = (config["q_lora_rank"], hidden)
                attention["q_a_layernorm"] = (config["q_lora_rank"],)
                attention["q_b_proj"] = (query, config["q_lora_rank"])
            else:
                attention["q_proj"] = (query, hidden)
            attention["kv_a_proj_with_mqa"] = (rank + rope, hidden)
            attention["kv_a_layernorm"] = (rank,)
            attention["kv_b_proj"] = (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), rank)
            attention["o_proj"] = (hidden, heads * config["v_head_dim"])
        else:
            attention = {
                "q_proj": (heads * dim, hidden),
                "k_proj": (kv * dim, hidden),
                "v_proj": (kv * dim, hidden),
                "o_proj": (hidden, heads * dim),
            }
            if config["model_type"] == "qwen2":
                for name in ("q_proj", "k_proj", "v_proj"):
                    found[f"{start}self_attn.{name}.bias"] = (dtype, attention[name][:1])
            if config["model_type"] == "qwen3":
                attention["q_norm"] = attention["k_norm"] = (dim,)
        for name, sizes in attention.items():
            found[f"{start}self_attn.{name}.weight"] = (dtype, sizes)
        _feed_forward(config, found, start, layer, dtype)
    return found


def _feed_forward(config: Mapping[str, Any], found: Spec, start: str, layer: int, dtype: str) -> None:
    hidden = config["hidden_size"]
    experts = config.get("num_local_experts") or config.get("n_routed_experts") or 0
    if experts and layer >= config.get("first_k_dense_replace", 0):
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        block = "block_sparse_moe" if config["model_type"] == "mixtral" else "mlp"
        found[f"{start}{block}.gate.weight"] = (dtype, (experts, hidden))
        for expert in range(experts):
            names = ("w1", "w3", "w2") if block != "mlp" else ("gate_proj", "up_proj", "down_proj")
            for name in names:
                sizes = (hidden, width) if name in ("w2", "down_proj") else (width, hidden)
                found[f"{start}{block}.experts.{expert}.{name}.weight"] = (dtype, sizes)
        shared = config.get("n_shared_experts", 0) * width
        if shared:
            for name in ("gate_proj", "up_proj", "down_proj"):
                sizes = (hidden, shared) if name == "down_proj" else (shared, hidden)
                found[f"{start}mlp.shared_experts.{name}.weight"] = (dtype, sizes)
        return
    width = config["intermediate_size"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        found[f"{start}mlp.{name}.weight"] = (dtype, (hidden, width) if name == "down_proj" else (width, hidden))


def header(spec: Spec) -> tuple[bytes, int]:
    """The header of a file with these tensors, and the bytes of data that follow it."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, sizes) in spec.items():
        size = BYTES[dtype]
        for value in sizes:
            size *= value
        table[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [position, position + size]}
        position += size
    return json.dumps(table).encode(), position


def write(path: Path, spec: Spec) -> int:
    """Write a file whose data is a hole; its size."""
    text, data = header(spec)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + data)
    return 8 + len(text) + data


def quantised(spec: Spec, method: str) -> Spec:
    """The same checkpoint with its linears stored as AWQ, GPTQ or block-wise FP8 does."""
    found: Spec = {}
    for name, (dtype, sizes) in spec.items():
        linear = name.endswith("_proj.weight") or ".experts." in name
        if not linear:
            found[name] = (dtype, sizes)
            continue
        out, inputs = sizes
        base = name[: -len("weight")]
        if method == "fp8":
            found[name] = ("F8_E4M3", sizes)
            found[f"{base}weight_scale_inv"] = ("F32", (-(-out // 128), -(-inputs // 128)))
            continue
        packed = (inputs, out // 8) if method == "awq" else (inputs // 8, out)
        found[f"{base}qweight"] = ("I32", packed)
        found[f"{base}qzeros"] = ("I32", (inputs // 128, out // 8))
        found[f"{base}scales"] = ("F16", (inputs // 128, out))
        if method == "gptq":
            found[f"{base}g_idx"] = ("I32", (inputs,))
    return found


def gpt_oss(config: Mapping[str, Any]) -> Spec:
    """gpt-oss as it is published: experts of a layer stacked, in 4-bit blocks with a scale per 32."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    plain = {key: value for key, value in config.items() if key != "num_local_experts"}
    found: Spec = {}
    for name, value in tensors({**plain, "intermediate_size": 1}).items():
        if ".mlp." not in name:
            found[name] = value
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            found[name.replace("weight", "bias")] = ("BF16", value[1][:1])
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        found[f"{start}self_attn.sinks"] = ("BF16", (config["num_attention_heads"],))
        found[f"{start}mlp.router.weight"] = ("BF16", (experts, hidden))
        found[f"{start}mlp.router.bias"] = ("BF16", (experts,))
        for name, out, width in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            found[f"{start}mlp.experts.{name}_blocks"] = ("U8", (experts, out, width // 32, 16))
            found[f"{start}mlp.experts.{name}_scales"] = ("U8", (experts, out, width // 32))
            found[f"{start}mlp.experts.{name}_bias"] = ("BF16", (experts, out))
    return found
