"""Make a tiny Llama model that real vLLM serves: `tiny_model.py DIRECTORY`.

Standard library only; the same call gives the same bytes. Random bf16 weights, a byte-level BPE tokenizer of 256 bytes,
a few merges and two special tokens. head_dim is 64 because vLLM's CPU attention refuses smaller heads.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
from pathlib import Path

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, LENGTH = 256, 4, 2, 64, 512, 2, 2048
MERGES = ["t h", "th e", "i n", "Ġ the", "a n", "an d", "Ġ and", "o f", "Ġ of"]
SPECIAL = ["<|begin|>", "<|end|>"]


def byte_letters() -> list[str]:
    """The letters that stand for bytes in a byte-level vocabulary: printable bytes as themselves, others moved up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = {byte: 256 + rank for rank, byte in enumerate(b for b in range(256) if b not in printable)}
    return [chr(moved.get(byte, byte)) for byte in range(256)]


def vocabulary() -> dict[str, int]:
    """Token text to id: bytes, merges, special tokens."""
    tokens = [*byte_letters(), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
    return {token: number for number, token in enumerate(tokens)}


def tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a LlamaForCausalLM checkpoint."""
    size = len(vocabulary())
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size, HIDDEN), "lm_head.weight": (size, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[prefix + "mlp.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[prefix + "mlp.up_proj.weight"] = (INNER, HIDDEN)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes


def values(shape: tuple[int, ...], source: random.Random) -> bytes:
    """bf16 bytes of one tensor: ones for a norm, else numbers of either sign between 2^-8 and 2^-5."""
    count = 1
    for length in shape:
        count *= length
    if len(shape) == 1:
        return b"\x80\x3f" * count
    high = bytes(0x3B | (0x80 if bit & 1 else 0) if bit & 2 else 0x3C | (0x80 if bit & 1 else 0) for bit in range(256))
    noise = source.randbytes(2 * count)
    data = bytearray(noise)
    data[1::2] = noise[1::2].translate(high)
    return bytes(data)


def safetensors(seed: int = 1) -> bytes:
    """The checkpoint: length of the header, JSON header, then the tensors end to end."""
    source, header, parts, offset = random.Random(seed), {}, [], 0
    for name, shape in tensors().items():
        data = values(shape, source)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def tokenizer() -> dict[str, object]:
    """tokenizer.json for the `tokenizers` library."""
    vocab = vocabulary()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [
        {"id": vocab[token], "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token in SPECIAL
    ]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    model |= {"vocab": {token: number for token, number in vocab.items() if token not in SPECIAL}, "merges": MERGES}
    whole: dict[str, object] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return whole | {
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": level,
        "decoder": level,
        "model": model,
    }


def write(directory: Path, seed: int = 1) -> Path:
    """Write the model folder."""
    vocab = vocabulary()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": vocab[SPECIAL[0]],
        "eos_token_id": vocab[SPECIAL[1]],
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "model_max_length": LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(safetensors(seed))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {"bos_token_id": vocab[SPECIAL[0]], "eos_token_id": vocab[SPECIAL[1]]}),
        ("tokenizer_config.json", settings),
        ("tokenizer.json", tokenizer()),
    ):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="another seed gives another model of the same shape")
    options = parser.parse_args()
    print(write(options.directory, options.seed))


if __name__ == "__main__":
    main()
