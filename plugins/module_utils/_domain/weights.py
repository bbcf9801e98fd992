# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bytes of weights on one rank. Private to gpufleet.inference.

    rank_weights(shape, facts, tp, pp, rank, *, version, capability, dtype, quantization, expert_parallel, speculative)
        -> WeightsEstimate        ``facts``: model facts (see model_facts), or None / no files: from the config alone

What the engine calls "Model loading took": parameters on the rank plus the rotary tables. From safetensors headers the
figure is a sum over tensors by the rules below (what shards, what is replicated, how a vocabulary is padded); from a
config alone the parameters are derived layer by layer and the result is marked ``estimated``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import release_rules as rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import (
    DTYPE_BYTES,
    Attention,
    Layer,
    Mlp,
    Quantization,
    Shape,
    State,
)

VOCAB_PADDING = 64
MIB = 1 << 20
# Families whose embedding and head are built on every pipeline rank (their model files keep no placeholder layers).
_EVERYWHERE = ("qwen3_next", "gpt_oss")
# Families that keep the router in float32, and those with a float32 correction per expert.
_ROUTER_FLOAT32 = ("glm4_moe", "minimax_m2", "ernie4_5_moe")
_ROUTER_CORRECTION = (
    "deepseek_v3",
    "kimi",
    "glm4_moe",
    "glm_moe_dsa",
    "nemotron_h",
    "minimax_m2",
    "ernie4_5_moe",
    "lfm2_moe",
)
# Families that keep the final norm on every rank.
_NORM_EVERYWHERE = ("gpt_oss", "gemma3", "gemma3_text")
# Methods whose bytes per weight are known; others' are taken from the bits they state, or 8, with a wide band.
_SIZED: tuple[str, ...] = (
    *("fp8", "modelopt-fp8", "modelopt", "experts-int8", "int8", "mxfp8", "nvfp4", "mxfp4", "bitsandbytes", "gguf"),
    *("compressed-tensors", "gptq", "awq"),
)
# What names a kind of linear in a list of modules that stay unquantised.
_KINDS = {
    "attention": ("self_attn", "self_attention"),
    "state": ("linear_attn", "mamba", "mixer", "conv"),
    "shared": ("shared_expert",),
    "experts": ("experts.*", ".experts"),
    "mlp": (".mlp.*",),
}
# Small parts that are never quantised, so that their names say nothing of the layer; and other towers.
_SMALL = ("conv1d", "in_proj_ba", "in_proj_a", "in_proj_b", "gate", "router", "norm")
_TOWERS = ("vision", "visual", "audio", "encoder", "mtp")
_IN_LAYER = re.compile(r"layers\\?\.(\d{1,4})(?=[.*\\$]|$)(.{0,160})")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class WeightsEstimate:
    """Bytes of weights on a rank. ``low`` and ``high`` bound them; ``parts`` names the largest groups."""

    bytes: int
    low: int
    high: int
    estimated: bool
    largest_layer: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)


def rank_weights(
    shape: Shape,
    facts: Optional[Mapping[str, Any]],
    tp: int = 1,
    pp: int = 1,
    rank: int = 0,
    *,
    version: tuple[int, ...] = (0, 32, 0),
    capability: tuple[int, int] = (9, 0),
    dtype: str = "",
    quantization: str = "",
    expert_parallel: bool = False,
    speculative: str = "",
) -> WeightsEstimate:
    """Bytes of weights on pipeline rank ``rank`` (0 ... pp-1) of a ``tp`` x ``pp`` instance.

    ``dtype``: what unquantised weights are served in (default: the model's); ``quantization``: quantised at load.
    """
    element = DTYPE_BYTES.get(dtype or shape.dtype, 2)
    scheme = _scheme(shape.quantization, quantization)
    tensors = _tensor_groups(facts)
    counts = rules.pipeline_layers(version, len(shape.layers), pp)
    first = sum(counts[:rank])
    span = (first, first + counts[rank])
    case = _Case(shape, tp, pp, rank, span, element, scheme, capability, expert_parallel, speculative)
    if tensors:
        return case.from_tensors(tensors)
    return case.from_config()


def rope_bytes(shape: Shape, element: int) -> int:
    """Bytes of the rotary tables a rank keeps."""
    return sum(rope.dim * rope.positions * (rope.element or element) for rope in shape.ropes)


def _scheme(checkpoint: Quantization, wanted: str) -> Quantization:
    """The checkpoint's scheme, or the one applied while loading."""
    if checkpoint.method or not wanted or wanted in ("none", "auto"):
        return checkpoint
    name = wanted.lower().replace("_", "-")
    if name.startswith("fp8") or name in ("fbgemm-fp8", "ptpc-fp8"):
        return Quantization("fp8", 8.0, -1, activation_bits=8)
    if name == "bitsandbytes":
        return Quantization("bitsandbytes", 4.0, 64)
    if name in ("mxfp4", "nvfp4"):
        return Quantization(name, 4.0, 32 if name == "mxfp4" else 16)
    if name in ("experts-int8", "int8", "mxfp8"):
        return Quantization(name, 8.0, 0)
    return checkpoint


def allocator_slack(size: int) -> int:
    """Bytes torch's caching allocator adds to a tensor that stays: above 10 MiB it asks the driver for a multiple of
    2 MiB and gives the rest to others only when more than 1 MiB is left (c10/cuda/CUDACachingAllocator)."""
    if size < 10 * MIB:
        return 0
    rest = -size % (2 * MIB)
    return rest if rest <= MIB else 0


def left_alone(ignored: Sequence[str]) -> tuple[frozenset[str], dict[int, frozenset[str]]]:
    """Kinds of linears that a checkpoint's list leaves unquantised: in every layer, and in single ones."""
    everywhere: set[str] = set()
    single: dict[int, set[str]] = {}
    for item in ignored:
        if item.rstrip("*.$").endswith(_SMALL) or any(word in item for word in _TOWERS):
            continue
        place = _IN_LAYER.search(item)
        rest = place.group(2) if place is not None else item
        kinds = {kind for kind, words in _KINDS.items() if any(word in rest for word in words)}
        if place is None:
            everywhere |= kinds
            continue
        if rest in ("", "*", ".*", "$"):
            kinds = set(_KINDS)
        elif rest.startswith(".mlp") and "expert" not in rest:
            kinds.add("mlp")
        elif rest.startswith((".mixer.q_", ".mixer.k_", ".mixer.v_", ".mixer.o_")):  # Nemotron H
            kinds = {"attention"}
        single.setdefault(int(place.group(1)), set()).update(kinds)
    return frozenset(everywhere), {index: frozenset(kinds) for index, kinds in single.items()}


def linear_bytes(scheme: Quantization, inputs: int, outputs: int, element: int, parts: int = 1) -> int:
    """Bytes of one linear layer's weight as the engine keeps it; ``parts`` logical layers may be fused in it."""
    count = inputs * outputs
    method = scheme.method
    if not method or (method == "compressed-tensors" and scheme.bits >= 16):
        return count * element
    if method in ("fp8", "modelopt-fp8", "modelopt", "experts-int8", "int8"):
        size = count
        if len(scheme.block) == 2:
            size += 4 * -(-inputs // scheme.block[1]) * -(-outputs // scheme.block[0])
        else:
            size += 4 * (outputs if scheme.group == 0 else parts)
        return size + (4 * parts if scheme.static_activation else 0)
    if method == "nvfp4":
        return count // 2 + count // 16 + 8 * parts
    if method == "mxfp4":
        return count // 2 + count // 32
    if method == "bitsandbytes":
        return count // 2 + count // 16 if scheme.bits == 4 else count + 4 * outputs
    if method == "compressed-tensors" and scheme.bits == 8 and scheme.activation_bits == 8:
        if len(scheme.block) == 2:
            return count + 4 * -(-inputs // scheme.block[1]) * -(-outputs // scheme.block[0])
        scales = 4 * (outputs if scheme.group == 0 else parts)
        return count + scales + (4 * parts if scheme.static_activation else 0)
    groups = inputs // scheme.group if scheme.group > 0 else 1
    size = int(count * scheme.bits / 8) + 2 * outputs * groups
    if method == "gptq" or not scheme.symmetric:
        size += int(outputs * groups * scheme.bits / 8)
    return size + (4 * inputs if method == "gptq" else 0)


@dataclass
class _Sum:
    """Adds up bytes under names."""

    parts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: int) -> None:
        self.parts[name] = self.parts.get(name, 0) + size

    def tensor(self, name: str, size: int) -> None:
        """One tensor of its own: what the allocator adds is kept apart."""
        self.add(name, size)
        self.add("rounding", allocator_slack(size))

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Case:
    """One rank of one way to run a model."""

    shape: Shape
    tp: int
    pp: int
    rank: int
    span: tuple[int, int]
    element: int
    scheme: Quantization
    capability: tuple[int, int]
    expert_parallel: bool
    speculative: str
    skip: frozenset[str] = frozenset()  # kinds of linears that the checkpoint left unquantised in this layer

    @property
    def has_embedding(self) -> bool:
        tied_tail = self.shape.tied and self.rank == self.pp - 1
        return self.rank == 0 or tied_tail or self.shape.model_type in _EVERYWHERE

    @property
    def has_head(self) -> bool:
        last = self.rank == self.pp - 1 or self.shape.model_type in _EVERYWHERE
        return last and not self.shape.tied and not self.shape.encoder_only

    @property
    def padded_vocab(self) -> int:
        return -(-self.shape.vocab // VOCAB_PADDING) * VOCAB_PADDING

    # -- from the config -------------------------------------------------------------------------------------------

    def from_config(self) -> WeightsEstimate:
        """Parameters layer by layer. Exact for plain checkpoints of known families; the band says how sure."""
        shape, total = self.shape, _Sum()
        width = self.element
        if self.has_embedding:
            embedding = self.padded_vocab // self.tp * (shape.embed_width or shape.hidden) * width
            if self.scheme.method == "gguf":
                embedding = int(embedding / width * self.scheme.bits / 8)
            total.tensor("embed", embedding)
        if self.rank == 0 and shape.positions:
            total.add("embed", shape.positions * shape.hidden * width)
        if self.rank == 0 and shape.per_layer_embedding:
            vocab = shape.per_layer_vocab or shape.vocab
            total.add("embed", vocab // self.tp * shape.per_layer_embedding * len(shape.layers) * width)
        if self.rank == 0:
            total.add("embed", shape.extra_once * width)
        total.add("layers", shape.extra_per_layer * (self.span[1] - self.span[0]) * width)
        if self.has_head:
            total.tensor("lm_head", self.padded_vocab // self.tp * shape.hidden * width)
        if shape.final_norm and (self.rank == self.pp - 1 or shape.model_type in _NORM_EVERYWHERE):
            total.add("norm", shape.hidden * width * (2 if shape.norm_bias else 1))
        largest = 0
        sizes: dict[tuple[int, frozenset[str]], dict[str, int]] = {}
        everywhere, single = left_alone(self.scheme.ignored)
        for index in range(*self.span):
            layer, skip = shape.layers[index], everywhere | single.get(index, frozenset())
            if (id(layer), skip) not in sizes:
                part = _Sum()
                replace(self, skip=skip)._layer(layer, part)
                sizes[id(layer), skip] = part.parts
                largest = max(largest, part.total)
            for name, size in sizes[id(layer), skip].items():
                total.add(name, size)
        self._vision(total)
        self._draft(total)
        total.add("rope", rope_bytes(shape, self.element))
        error = 0.002 if not self.scheme.method else 0.015 if self.scheme.method in _SIZED else 0.3
        if shape.multimodal or shape.notes or shape.per_layer_embedding:
            error += 0.03
        size = total.total
        return WeightsEstimate(size, int(size * (1 - error)), int(size * (1 + error)), True, largest, total.parts)

    def _layer(self, layer: Layer, total: _Sum) -> None:
        hidden = self.shape.hidden
        total.add("norm", layer.norms * hidden * self.element * (2 if self.shape.norm_bias else 1))
        if layer.attention is not None:
            self._attention(layer.attention, total)
        if layer.state is not None:
            self._state(layer.state, total)
        for mlp in (layer.mlp, layer.parallel_mlp):
            if mlp is not None:
                self._mlp(mlp, total)

    def _linear(self, total: _Sum, name: str, inputs: int, outputs: int, parts: int = 1) -> None:
        scheme = Quantization() if self._ignored(name) else self.scheme
        size = linear_bytes(scheme, inputs, outputs, self.element, parts)
        total.add(name, size)
        bits = scheme.bits if scheme.method else 8 * self.element
        total.add("rounding", allocator_slack(int(inputs * outputs * bits / 8)))

    def _ignored(self, name: str) -> bool:
        """Whether linears of this kind stay unquantised: the method's own rule, or the checkpoint's list."""
        if self.scheme.method == "mxfp4" and name != "experts":
            return True
        if name in ("router", "indexer"):
            return True
        return name in self.skip or (self.scheme.method == "experts-int8" and name != "experts")

    def _attention(self, a: Attention, total: _Sum) -> None:
        hidden, element = self.shape.hidden, self.element
        heads = a.heads // self.tp
        if a.mla is not None:
            mla = a.mla
            query = heads * (mla.nope_dim + mla.rope_dim)
            if mla.q_lora_rank:
                self._linear(total, "attention", hidden, mla.q_lora_rank + mla.kv_lora_rank + mla.rope_dim, 2)
                self._linear(total, "attention", mla.q_lora_rank, query)
                total.add("norm", mla.q_lora_rank * element)
            else:
                self._linear(total, "attention", hidden, query)
                self._linear(total, "attention", hidden, mla.kv_lora_rank + mla.rope_dim)
            total.add("norm", mla.kv_lora_rank * element)
            self._linear(total, "attention", mla.kv_lora_rank, heads * (mla.nope_dim + mla.v_dim))
            self._linear(total, "attention", heads * mla.v_dim, hidden)
            if mla.compressed:
                total.add("absorbed", mla.kv_lora_rank * heads * (mla.nope_dim + mla.v_dim) * element)
            if a.indexer is not None:
                self._linear(total, "attention", mla.q_lora_rank or hidden, a.indexer.heads * a.indexer.dim)
                self._linear(total, "attention", hidden, a.indexer.dim)
                total.add("indexer", (hidden * a.indexer.heads + 2 * a.indexer.dim) * element)
            return
        kv = max(1, a.kv_heads // self.tp)
        query = heads * a.head_dim * (2 if a.gate else 1)
        values = 0 if a.k_eq_v else kv * a.v_head_dim
        if a.caches:
            self._linear(total, "attention", hidden, query + kv * a.head_dim + values, 3)
        else:
            self._linear(total, "attention", hidden, query)
        self._linear(total, "attention", heads * a.v_head_dim, hidden)
        if a.qkv_bias:
            total.add("attention", (query + kv * a.head_dim + values) * element)
        if a.o_bias:
            total.add("attention", hidden * element)
        if a.qk_norm == "head":
            total.add("norm", 2 * a.head_dim * element)
        elif a.qk_norm == "full":
            total.add("norm", (a.heads + a.kv_heads) * a.head_dim * element)
        if a.sinks:
            total.add("attention", heads * element)

    def _mlp(self, mlp: Mlp, total: _Sum) -> None:
        hidden, element = self.shape.hidden, self.element
        fused = 2 if mlp.gated else 1
        if mlp.experts:
            family = self.shape.model_type
            total.add("router", hidden * mlp.experts * (4 if family.startswith(_ROUTER_FLOAT32) else element))
            if mlp.router_bias:
                total.add("router", mlp.experts * element)
            if family.startswith(_ROUTER_CORRECTION):
                total.add("router", mlp.experts * 4)
            self._experts(mlp, total)
            if mlp.shared_gate:
                total.add("router", hidden * element)
        width = mlp.intermediate // self.tp
        if width:
            name = "shared" if mlp.experts else "mlp"
            self._linear(total, name, hidden, fused * width, fused)
            self._linear(total, name, width, hidden)
            if mlp.bias:
                total.add(name, (fused * width + hidden) * element)

    def _experts(self, mlp: Mlp, total: _Sum) -> None:
        inner, count = mlp.expert_intermediate, mlp.experts
        if self.expert_parallel:
            count = -(-count // self.tp)
        else:
            inner = -(-inner // self.tp)
        hidden = mlp.latent or self.shape.hidden
        if self.scheme.method == "mxfp4" and not self._ignored("experts"):
            hidden, inner = mxfp4_padding(hidden, inner, self.capability)
        fused = 2 if mlp.gated else 1
        scheme = Quantization() if self._ignored("experts") else self.scheme
        size = linear_bytes(scheme, hidden, fused * inner, self.element, fused)
        size += linear_bytes(scheme, inner, hidden, self.element)
        bits = scheme.bits if scheme.method else 8 * self.element
        if scheme.expert_bits:
            bits, size = scheme.expert_bits, int((fused + 1) * hidden * inner * scheme.expert_bits / 8)
        for outputs in (fused * inner, inner):
            total.add("rounding", allocator_slack(int(count * hidden * outputs * bits / 8)))
        if mlp.expert_bias:
            size += (fused * inner + hidden) * self.element
        total.add("experts", count * size)
        if mlp.latent:
            self._linear(total, "shared", self.shape.hidden, mlp.latent)
            self._linear(total, "shared", mlp.latent, self.shape.hidden)

    def _state(self, s: State, total: _Sum) -> None:
        hidden, element, tp = self.shape.hidden, self.element, self.tp
        inner = s.inner // tp
        if s.kind in ("gdn", "kda"):
            keys = s.key_heads * s.key_dim // tp
            heads = s.heads // tp
            if s.kind == "gdn":
                self._linear(total, "state", hidden, 2 * keys + 2 * inner, 2)
                total.add("state", hidden * 2 * heads * element)
            else:
                self._linear(total, "state", hidden, 2 * keys + inner, 3)
                total.add("state", hidden * (heads + 2 * s.head_dim) * element + 2 * s.head_dim * inner * element)
            total.add("state", (2 * keys + inner) * s.kernel * element + heads * (element + 4))
            total.add("norm", s.head_dim * element)
            self._linear(total, "state", inner, hidden)
        elif s.kind == "mamba1":
            self._linear(total, "state", hidden, 2 * inner, 2)
            total.add("state", inner * (s.kernel + s.conv_bias) * element)
            self._linear(total, "state", inner, s.dt_rank + 2 * s.state_dim)
            self._linear(total, "state", s.dt_rank, inner)
            total.add("state", inner * element + inner * (s.state_dim * 4 + element))
            self._linear(total, "state", inner, hidden)
            if s.inner_norms:
                total.add("norm", (s.dt_rank + 2 * s.state_dim) * element)
        elif s.kind == "mamba2":
            groups = s.groups if s.groups % tp == 0 else s.groups + (-s.groups) % tp
            mixed = inner + 2 * groups // tp * s.state_dim
            heads = s.heads // tp
            self._linear(total, "state", hidden, inner + mixed + heads, 4)
            total.add("state", mixed * (s.kernel + s.conv_bias) * element + heads * (4 + 2 * element))
            total.add("norm", inner * element if s.gated_norm else 0)
            self._linear(total, "state", inner, hidden)
        elif s.kind == "lightning":
            self._linear(total, "state", hidden, 4 * inner, 4)
            self._linear(total, "state", inner, hidden)
            total.add("norm", inner * element)
        elif s.kind == "short_conv":
            self._linear(total, "state", hidden, 3 * inner, 3)
            total.add("state", inner * s.kernel * element)
            self._linear(total, "state", inner, hidden)
        else:
            self._linear(total, "state", hidden, 2 * inner, 2)
            total.add("state", inner * (s.kernel + 3) * element)
            self._linear(total, "state", inner, hidden)

    def _vision(self, total: _Sum) -> None:
        audio, vision = self.shape.audio_encoder, self.shape.vision
        if self.rank:
            return
        if audio is not None:
            total.add("audio", audio.parameters // self.tp * self.element)
        if vision is None:
            return
        up = 3 if vision.gated else 2
        block = 4 * vision.hidden * vision.hidden + up * vision.hidden * vision.intermediate + 10 * vision.hidden
        patches = (vision.image // vision.patch) ** 2 if vision.image else 0
        stem = vision.hidden * (vision.channels * vision.patch * vision.patch + patches)
        merged = vision.hidden * vision.merge * vision.merge
        bridge = merged * merged + merged * self.shape.hidden if vision.merge > 1 else vision.hidden * self.shape.hidden
        split = vision.layers * block + vision.bridges * bridge + vision.extra
        total.add("vision", max(0, split // self.tp + stem) * self.element)

    def _draft(self, total: _Sum) -> None:
        if not self.speculative.endswith("mtp") or self.shape.mtp_layer is None or self.rank != self.pp - 1:
            return
        part = _Sum()
        self._layer(self.shape.mtp_layer, part)
        size = part.total + (2 * self.shape.hidden * self.shape.hidden + 3 * self.shape.hidden) * self.element
        # Each draft layer comes with a head; the embedding is there once.
        table = self.padded_vocab // self.tp * self.shape.hidden * self.element
        total.add("mtp", (size + table) * self.shape.mtp_layers + table)

    # -- from the files --------------------------------------------------------------------------------------------

    def from_tensors(self, groups: list[Mapping[str, Any]]) -> WeightsEstimate:
        """Sum over tensor groups of the safetensors headers, each by its own sharding rule."""
        total = _Sum()
        layers = max(1, self.span[1] - self.span[0])
        for group in groups:
            count = self._count(group)
            if not count:
                continue
            role, suffix = str(group.get("role", "other")), str(group.get("part", "weight"))
            elements = 1
            sizes = [int(value) for value in group.get("shape", [])]
            for value in sizes:
                elements *= value
            stored = int(group["bytes"]) // max(1, int(group["count"]))
            size = float(self._served(role, suffix, str(group.get("dtype", "")), elements, stored))
            size *= self._share(role, suffix, sizes)
            if role in ("embed", "lm_head") and suffix == "weight" and len(sizes) == 2 and sizes[0] < self.padded_vocab:
                size *= self.padded_vocab / sizes[0]
            total.add(role if role in ("embed", "lm_head", "experts", "vision", "mtp") else "layers", int(size) * count)
        if self.scheme.method == "mxfp4" and total.parts.get("experts"):
            mlp = next((layer.mlp for layer in self.shape.layers if layer.mlp and layer.mlp.experts), None)
            if mlp is not None:
                inner = -(-mlp.expert_intermediate // self.tp)
                hidden, padded = mxfp4_padding(self.shape.hidden, inner, self.capability)
                exact = total.parts["experts"] * hidden * padded // (self.shape.hidden * inner)
                total.parts["experts"] = exact
        derived = self.from_config().parts
        for name in ("rope", "rounding", "absorbed"):
            total.add(name, derived.get(name, 0))
        size = total.total
        error = 0.004 + (0.01 if self.shape.multimodal else 0) + (0.02 if self.scheme.method == "mxfp4" else 0)
        return WeightsEstimate(
            size, int(size * (1 - error)), int(size * (1 + error)), False, size // layers, dict(total.parts)
        )

    def _count(self, group: Mapping[str, Any]) -> int:
        """How many tensors of the group lie on this rank."""
        role = str(group.get("role", "other"))
        if role == "unused":
            return 0
        if role == "mtp":
            wanted = self.speculative.endswith("mtp") and self.rank == self.pp - 1
            return int(group["count"]) if wanted else 0
        if role == "embed":
            return int(group["count"]) if self.has_embedding else 0
        if role == "lm_head":
            return int(group["count"]) if self.has_head else 0
        if role == "vision":
            return int(group["count"])
        ranges = group.get("layers")
        if not ranges:
            return int(group["count"]) if self.rank == self.pp - 1 or role == "other" else 0
        per_layer = int(group.get("per_layer", 1))
        inside = 0
        for start, end in ranges:
            inside += max(0, min(int(end) + 1, self.span[1]) - max(int(start), self.span[0]))
        return inside * per_layer

    def _served(self, role: str, suffix: str, dtype: str, elements: int, stored: int) -> int:
        """Bytes of the whole tensor as served: plain floats in the served type, quantised data as on disk."""
        if dtype not in _FLOATS or suffix in ("scale", "state"):
            return stored
        quantised_at_load = self.scheme.method and not self.shape.quantization.method
        linear = role not in ("embed", "lm_head", "norm", "router", "vision", "other", "indexer")
        if quantised_at_load and suffix == "weight" and linear and role not in ("conv",):
            scheme = self.scheme
            return int(elements * scheme.bits / 8) + (elements // 16 if scheme.method == "bitsandbytes" else 0)
        return elements * self.element

    def _share(self, role: str, suffix: str, sizes: list[int]) -> float:
        """The part of a tensor that one tensor-parallel rank holds."""
        tp = self.tp
        if tp == 1:
            return 1.0
        if role in ("norm", "router", "replicated", "indexer", "other"):
            return 1.0
        if len(sizes) == 0 or sizes == [1]:
            return 1.0
        if role in ("o", "down", "out") and suffix == "bias":
            return 1.0
        if role in ("k", "v"):
            heads = next((a.kv_heads for a in self.shape.attention_layers), 1)
            return max(1, heads // tp) / heads if heads else 1.0 / tp
        if role == "qkv":
            attention = next(iter(self.shape.attention_layers), None)
            if attention is not None:
                kv = attention.kv_heads
                whole = attention.heads + 2 * kv
                return (attention.heads / tp + 2 * max(1, kv // tp)) / whole
        return 1.0 / tp


def mxfp4_padding(hidden: int, inner: int, capability: tuple[int, int]) -> tuple[int, int]:
    """(hidden, intermediate per rank) as the backend of this device pads them for 4-bit experts."""
    width = 128 if capability[0] == 9 else 256
    return -(-hidden // width) * width, -(-inner // 128) * 128


def _tensor_groups(facts: Optional[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not facts:
        return []
    weights = facts.get("weights")
    if not isinstance(weights, Mapping) or weights.get("format") != "safetensors":
        return []
    groups = weights.get("groups")
    return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, (list, tuple)) else []
