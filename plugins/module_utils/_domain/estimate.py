# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one instance needs on its devices: the planner's view of the memory model. Private to gpufleet.inference.

``memory.budget`` knows the terms; here they are sorted into what the engine's utilisation counts and what lies beside
it, figures of earlier starts take the place of modelled ones, and equal questions are answered once per process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import memory, weights
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.kvcache import (
    Capacity,
    KvLayout,
    Settings,
    check_parallel,
)
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.memory import Term
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import Device, Refusal
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Release
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import Shape, parse_shape

Profiles = Tuple[Optional[Mapping[str, Any]], Optional[Mapping[str, Any]]]
NO_PROFILES: Profiles = (None, None)
# Answers kept per process, a fleet of many kinds of hosts included.
MODELS_KEPT = 256
ESTIMATES_KEPT = 4096
LORA_ELEMENT = 2  # adapters are kept in 16 bits


def exact(size: int) -> Term:
    """A term without error."""
    return Term(size, "exact", size, size)


ZERO = exact(0)


def total(*terms: Term) -> Term:
    """Several terms as one; the ends of the band are added, which is never too narrow."""
    sources = {term.source for term in terms if term.bytes} or {"exact"}
    return Term(
        sum(term.bytes for term in terms),
        sources.pop() if len(sources) == 1 else "modelled",
        sum(term.low for term in terms),
        sum(term.high for term in terms),
    )


@dataclass(frozen=True)
class Need:
    """What one rank needs without its KV cache, and the size of its blocks.

    ``inside`` is the part that the engine's utilisation counts, ``outside`` the rest: context and graphs (with a cache
    in bytes no release takes them off, and before that lever none did). ``non_torch`` holds the CUDA context,
    communication buffers and what grows outside torch's allocator.
    """

    weights: Term
    activation: Term
    non_torch: Term
    graphs: Term
    context: Term
    inside: Term
    outside: Term
    block_bytes: int

    @property
    def fixed(self) -> int:
        """Upper end."""
        return self.inside.high + self.outside.high

    @property
    def middle(self) -> int:
        """Most likely."""
        return self.inside.bytes + self.outside.bytes

    @property
    def least(self) -> int:
        """Lower end."""
        return self.inside.low + self.outside.low


@dataclass(frozen=True)
class Estimate:
    """The needs of an instance: one per pipeline stage, for all tensor ranks of the stage."""

    needs: Tuple[Need, ...]
    tensor: int
    layout: KvLayout
    estimated: bool = False
    notes: Tuple[str, ...] = ()

    def need(self, rank: int) -> Need:
        """The need of a rank; ranks count tensor parallel first, then pipeline, then data parallel."""
        return self.needs[rank // self.tensor % len(self.needs)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the rank where it is largest; 0 for a model without a KV cache."""
        return max(need.block_bytes for need in self.needs)

    def blocks(self, length: int) -> int:
        """Blocks that one request of this length takes."""
        return self.layout.blocks_per_request(length)

    def capacity(self, blocks: int, length: int) -> Capacity:
        """Tokens and concurrency that this many blocks give requests of this length, as the engine counts them."""
        return self.layout.capacity(tuple(blocks * need.block_bytes for need in self.needs), length)


@dataclass(frozen=True)
class Model:
    """A model, read once: its shape and its files. ``problem`` says why it could not be read."""

    name: str
    key: str
    facts: Mapping[str, Any]
    shape: Optional[Shape]
    problem: str = ""
    size: int = 0

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> Model:
        """From model facts; equal facts are read once per process."""
        problems = [
            f"{finding.get('text')} {finding.get('remedy') or ''}".strip()
            for finding in facts.get("findings") or []
            if finding.get("severity") == "error"
        ]
        if problems:
            return cls(name, "", facts, None, " ".join(problems))
        digest = facts.get("digest")
        key = str(digest) if digest else json.dumps([facts.get("config"), facts.get("weights")], sort_keys=True)
        found = _MODELS.get(key)
        if found is None:
            try:
                shape = parse_shape(facts.get("config") or {})
            except FleetError as error:
                return cls(name, "", facts, None, f"{error.message} {error.hint}".strip())
            found = cls(name, key, facts, shape, "", weights.rank_weights(shape, facts).bytes)
            if len(_MODELS) >= MODELS_KEPT:
                _MODELS.clear()
            _MODELS[key] = found
        return found

    @property
    def native_length(self) -> int:
        """The longest context the engine derives."""
        return self.shape.max_length if self.shape else 1

    @property
    def dtype(self) -> str:
        """The checkpoint's dtype."""
        return self.shape.dtype if self.shape else ""

    @property
    def quantization(self) -> str:
        """The quantisation method of the checkpoint, as its config names it to the engine; "" for none."""
        config = self.facts.get("config")
        for part in (config, config.get("text_config") if isinstance(config, Mapping) else None):
            for key in ("quantization_config", "compression_config"):
                found = part.get(key) if isinstance(part, Mapping) else None
                if isinstance(found, Mapping) and found.get("quant_method"):
                    return str(found["quant_method"])
        return ""

    @property
    def digest(self) -> Optional[str]:
        """The digest of the files; None without files."""
        digest = self.facts.get("digest")
        return str(digest) if digest else None

    @property
    def estimated(self) -> bool:
        """Whether the weights come from the config alone."""
        return bool(self.facts.get("estimated")) or not (self.facts.get("weights") or {}).get("total_bytes")

    def refusal(self, settings: Settings) -> Optional[Refusal]:
        """Why the model cannot be read, or not be split as wished."""
        if self.shape is None:
            return Refusal("bad_shape", self.problem)
        try:
            check_parallel(self.shape, settings)
        except FleetError as error:
            return Refusal("bad_shape", f"{error.message} {error.hint}".strip())
        return None


_MODELS: Dict[str, Model] = {}
_ESTIMATES: Dict[Any, Estimate] = {}


def estimate(
    model: Model, release: Release, device: Device, settings: Settings, profiles: Profiles = NO_PROFILES
) -> Estimate:
    """What the instance needs on such a device; the model's shape must have been readable.

    profiles: of exactly this start, and of one whose weights hold here too (see ``profiles.find``).
    """
    ids = tuple(str((profile or {}).get("key")) for profile in profiles)
    key = (model.key, release.key, device.kind, device.unified, settings, ids)
    found = _ESTIMATES.get(key)
    if found is None:
        if len(_ESTIMATES) >= ESTIMATES_KEPT:
            _ESTIMATES.clear()
        found = _ESTIMATES[key] = _estimate(model, release, device, settings, profiles)
    return found


def _estimate(model: Model, release: Release, device: Device, settings: Settings, profiles: Profiles) -> Estimate:
    if model.shape is None:
        raise LookupError(model.problem)
    place = memory.Device(device.total, None, device.name, device.capability, device.unified)
    if release.has_flag("--kv-cache-memory-bytes"):
        # The cache is given in bytes then; the figure itself does not matter here.
        settings = replace(settings, kv_cache_memory_bytes=0)
    budget = memory.budget(model.shape, model.facts, release, place, settings)
    measured = _measured(budget, settings, profiles)
    if measured:
        budget = memory.budget(model.shape, model.facts, release, place, settings, measured=measured)
    needs = tuple(
        _need(rank, size) for rank, size in zip(budget.ranks, budget.layout.bytes_per_block or (0,) * len(budget.ranks))
    )
    notes: List[str] = []
    if measured:
        notes.append(f"{', '.join(sorted(measured))} as measured at an earlier start")
    return Estimate(needs, settings.tensor_parallel_size, budget.layout, budget.estimated, tuple(notes))


def _need(rank: memory.RankBudget, block_bytes: int) -> Need:
    return Need(
        weights=rank.weights,
        activation=rank.activation,
        non_torch=total(rank.context, rank.non_torch),
        graphs=rank.cuda_graphs,
        context=rank.context,
        inside=total(rank.weights, rank.activation, rank.non_torch),
        outside=total(rank.context, rank.cuda_graphs),
        block_bytes=block_bytes,
    )


def _measured(budget: memory.Budget, settings: Settings, profiles: Profiles) -> Dict[str, int]:
    """What earlier starts logged, in the terms of the model; several pipeline stages cannot be told apart in a log."""
    same, alike = profiles
    if settings.pipeline_parallel_size > 1:
        return {}
    measured: Dict[str, int] = {}
    for profile in (alike, same):
        figures = (profile or {}).get("figures") or {}
        if figures.get("weights"):
            measured["weights"] = int(figures["weights"])
    figures = (same or {}).get("figures") or {}
    if figures.get("cuda_graphs") is not None:
        measured["cuda_graphs"] = int(figures["cuda_graphs"])
    requested = (same or {}).get("requested")
    if requested and figures.get("kv_cache") and "weights" in measured:
        rank = budget.ranks[0]
        taken = int(requested) - int(figures["kv_cache"]) - measured["weights"] - rank.non_torch.bytes
        if taken > 0:
            measured["activation"] = taken
    return measured


def lora_bytes(shape: Shape, tensor: int, adapters: int, rank: int) -> int:
    """Bytes of adapter slots on one rank: max_loras x rank x (inputs + outputs) of every adapted projection.

    The factor on the side that tensor parallel splits is divided by its size. Source: the memory facts, section 6.
    """
    width = 0
    for layer in shape.layers:
        attention = layer.attention
        if attention is not None:
            query, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
            width += 3 * shape.hidden + (query + 2 * keys) // tensor  # q, k, v
            width += query // tensor + shape.hidden  # o
        if layer.mlp is not None and layer.mlp.intermediate:
            width += 3 * (shape.hidden + layer.mlp.intermediate // tensor)
    return adapters * rank * width * LORA_ELEMENT
