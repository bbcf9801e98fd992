# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What one instance needs on its devices: the planner's view of the memory model. Private to gpufleet.inference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.kvcache import (
    Capacity,
    KvLayout,
    Settings,
    check_parallel,
    layout,
)
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import Device, Refusal
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Release
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import Shape, parse_shape
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB


@dataclass(frozen=True)
class Term:
    """A part of the budget: bytes, where the figure comes from, and its band."""

    bytes: int
    source: str
    low: int
    high: int

    def plain(self) -> Dict[str, Any]:
        """As the plan shows it."""
        return {"bytes": self.bytes, "source": self.source, "low": self.low, "high": self.high}

    def __add__(self, other: Term) -> Term:
        source = self.source if self.source == other.source else "modelled"
        return Term(self.bytes + other.bytes, source, self.low + other.low, self.high + other.high)


def exact(size: int) -> Term:
    """A term without error."""
    return Term(size, "exact", size, size)


def modelled(size: float, error: float) -> Term:
    """A term with a relative error on both sides."""
    return Term(int(size), "modelled", int(size * (1 - error)), int(size * (1 + error)))


ZERO = exact(0)


@dataclass(frozen=True)
class Need:
    """What one rank needs without its KV cache, and the size of its blocks.

    ``inside`` is the part that the engine's utilisation counts, ``outside`` the rest.
    """

    weights: Term
    activation: Term
    non_torch: Term
    graphs: Term
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
    notes: Tuple[str, ...] = ()

    def need(self, rank: int) -> Need:
        """The need of a rank; ranks count tensor parallel first, then pipeline, then data parallel."""
        return self.needs[rank // self.tensor % len(self.needs)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the rank where it is largest."""
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

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> Model:
        """From model facts; equal facts are read once per process."""
        digest = facts.get("digest")
        key = str(digest) if digest else json.dumps([facts.get("config"), facts.get("weights")], sort_keys=True)
        found = _MODELS.get(key)
        if found is None or found.facts.get("path") != facts.get("path"):
            try:
                found = cls(name, key, facts, parse_shape(facts.get("config") or {}))
            except FleetError as error:
                found = cls(name, key, facts, None, f"{error.message} {error.hint}".strip())
            if len(_MODELS) > MODELS_KEPT:
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
        """The quantisation method of the checkpoint; "" for none."""
        return self.shape.quantization.method if self.shape else ""

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


MODELS_KEPT = 256
_MODELS: Dict[str, Model] = {}


def estimate(
    model: Model,
    release: Release,
    device: Device,
    settings: Settings,
    profile: Tuple[Optional[Mapping[str, Any]], Optional[Mapping[str, Any]]] = (None, None),
) -> Estimate:
    """What the instance needs on such a device; the model's shape must have been readable."""
    assert model.shape is not None
    laid = layout(model.shape, release, settings)
    shape = model.shape
    tensor, pipeline = settings.tensor_parallel_size, settings.pipeline_parallel_size
    total = (model.facts.get("weights") or {}).get("total_bytes")
    hidden, inner, vocab = shape.hidden, shape.intermediate, shape.vocab
    if not total:
        total = 2 * (len(shape.layers) * (4 * hidden * hidden + 3 * hidden * inner) + 2 * hidden * vocab)
    steps, seqs = settings.max_num_batched_tokens or 2048, settings.max_num_seqs or 256
    activation = max(steps * 2 * (3 * inner // tensor + 4 * hidden), steps * hidden * 2 + 15 * min(seqs, steps) * vocab)
    weights = modelled(total / tensor / pipeline, 0.02)
    active = modelled(activation, 0.2)
    runtime = modelled(0.8 * GIB if tensor == 1 else 3.5 * GIB, 0.2)
    graphs = ZERO if settings.enforce_eager else modelled(0.9 * GIB, 0.3)
    inside = release.key >= (0, 20, 0)
    needs = tuple(
        Need(
            weights,
            active,
            runtime,
            graphs,
            weights + active + (graphs if inside else ZERO),
            runtime + (ZERO if inside else graphs),
            size,
        )
        for size in laid.bytes_per_block
    )
    return Estimate(needs, tensor, laid)
