"""Read a model folder and say what it would cost on a GPU: weights, KV bytes per token, activation."""

import hashlib
import json
import os
import struct

DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
OVERHEAD = int(0.25 * (1 << 30))


class Model:
    """A model folder: its config, and the bytes a rank of `tp` holds."""

    def __init__(self, path, load_format="auto"):
        if not os.path.isdir(path):
            raise OSError(
                f"Can't load the configuration of '{path}': no such folder, and HF_HUB_OFFLINE=1 forbids a download."
            )
        self.path = path
        with open(os.path.join(path, "config.json"), encoding="utf-8") as source:
            text = source.read()
        self.config = json.loads(text)
        self.seed = hashlib.sha256(text.encode()).hexdigest()
        if not self.config.get("architectures"):
            raise ValueError("No model architectures are specified")
        self.stored = None if load_format == "dummy" else self._stored_bytes()

    def _stored_bytes(self):
        names = sorted(name for name in os.listdir(self.path) if name.endswith(".safetensors"))
        if not names:
            raise RuntimeError(f"Cannot find any model weights with `{self.path}`")
        total = 0
        for name in names:
            with open(os.path.join(self.path, name), "rb") as source:
                (size,) = struct.unpack("<Q", source.read(8))
                header = json.loads(source.read(size))
                end = max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
                source.seek(0, os.SEEK_END)
                if source.tell() < 8 + size + end:
                    raise RuntimeError(
                        "SafetensorError: Error while deserializing header: "
                        f"incomplete metadata, file not fully covered ({name})"
                    )
            total += end
        return total

    def get(self, key, default=None):
        """A config value, also from `text_config`."""
        return self.config.get(key, self.config.get("text_config", {}).get(key, default))

    def weights(self, tp):
        """Bytes of weights on one rank."""
        if self.stored is not None:
            return self.stored // tp
        hidden, layers, inner = self.get("hidden_size"), self.get("num_hidden_layers"), self.get("intermediate_size", 0)
        heads, kv, head = self.get("num_attention_heads"), self.kv_heads(), self.head_dim()
        per_layer = hidden * head * (2 * heads + 2 * kv) + 3 * hidden * inner * (self.get("num_local_experts") or 1)
        return 2 * (layers * per_layer + 2 * self.get("vocab_size") * hidden) // tp

    def head_dim(self):
        return self.get("head_dim") or self.get("hidden_size") // self.get("num_attention_heads")

    def kv_heads(self):
        return self.get("num_key_value_heads") or self.get("num_attention_heads")

    def kv_bytes_per_token(self, tp, cache_dtype):
        """Bytes of KV cache one token takes on one rank."""
        size = 1 if "fp8" in cache_dtype or "int8" in cache_dtype else 2
        return 2 * size * self.head_dim() * max(1, self.kv_heads() // tp) * self.get("num_hidden_layers")

    def activation(self, tokens, sequences, tp):
        """Peak of one forward pass and the sampler, in bytes."""
        hidden, inner = self.get("hidden_size"), self.get("intermediate_size", 4 * self.get("hidden_size"))
        rows = min(sequences, tokens)
        forward = tokens * 2 * (3 * inner // tp + 4 * hidden)
        sampler = tokens * hidden * 2 + int((2 if tp == 1 else 2 * (1 + 1 / tp)) * rows * self.get("vocab_size"))
        return max(forward, sampler)

    def max_length(self):
        return self.get("max_position_embeddings", 2048)

    def pools(self):
        """Whether it gives vectors and no tokens: a Sentence Transformers folder, or no language head."""
        generates = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
        listed = os.path.exists(os.path.join(self.path, "modules.json"))
        return listed or not self.config["architectures"][0].endswith(generates)

    def switches(self):
        """Test switches beside the model: `gpufleet-stub.json`."""
        try:
            with open(os.path.join(self.path, "gpufleet-stub.json"), encoding="utf-8") as source:
                return json.load(source)
        except FileNotFoundError:
            return {}
