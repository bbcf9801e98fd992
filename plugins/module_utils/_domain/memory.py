# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory budget of an instance on one kind of device, term by term, with its error. Private.

    budget(shape, facts, release, device, settings, *, measured=None) -> Budget

        shape     shape.parse_shape(config)
        facts     model facts (module model_facts) or None
        release   Release, or a version tuple
        device    Device(total as torch sees it, free now or None, name, capability, unified)
        settings  kvcache.Settings; max_num_seqs and max_num_batched_tokens default to the engine's own choice
        measured  bytes read back from earlier starts of the same engine: {"weights", "activation", "non_torch",
                  "cuda_graphs", "context"}; they replace the model's own figures
    Budget.ranks[i]           one RankBudget per pipeline rank: terms, requested, what is left for the KV cache
    Budget.layout             the KvLayout; Budget.capacity what the cache holds at settings.max_model_len
    Budget.verdict            fits | oom_risk | refused_kv | refused_free_memory; Budget.reason says it in numbers,
                              Budget.certain whether the band of the cache's memory allows no other answer
    RankBudget.footprint(kv_bytes)   what the process takes of the device, for a planner that chooses the cache itself

Every term is ``Term(bytes, source, low, high)`` with source exact, modelled, measured or expected. The equation is the
engine's: requested = share of the device; KV = requested - weights - activation - non-torch - graphs (where applied).
What lies outside ``requested`` (CUDA context, communication buffers from 0.11, graphs that are not applied) must fit
beside it. Constants below are named and carry their source; the recorded starts they were fitted on are scored by
scripts/score.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, weights
from ansible_collections.gpufleet.inference.plugins.module_utils._domain import release_rules as rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.kvcache import Capacity, KvLayout, Settings
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import DTYPE_BYTES, Shape
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import gib

GIB = 1 << 30
MIB = 1 << 20

# Bytes the sampler's dry run holds per logit. The old sampler sorts in float32 with int64 indices (rows of 0.7 on T4,
# 0.10 on 4090, 0.11 and 0.16 on H100 agree within 2 %); 0.17 dropped the sort's copies (25 H100 rows, 0.18 and 0.19).
SAMPLER_OLD = 38.3
SAMPLER_NEW = 14.44
SAMPLER_NEW_BASE = 64 * MIB
# The rewritten runner samples from bf16 logits; with tensor parallelism the gathered ones lie beside the own share.
SAMPLER_RUNNER2 = 2.0
# Growth outside torch's allocator while profiling, one device (H100: 8 rows of 0.11-0.17, 25 rows of 0.18-0.19;
# others: A100, 4090, T4 and 4070 rows of V0 between 0.01 and 0.35).
NON_TORCH_OLD = 0.13
NON_TORCH_NEW = 0.25
NON_TORCH_PIPELINE = 0.07
# The same with tensor parallelism: 0.55 on H100 with 0.11 and on H200 with 0.19 run eagerly (8 ranks). Compiled models
# on capability 9.0 and 10.x also hold the workspace of the fused all-reduce: 12 H100 rows of 0.19, 2.06-2.21 in all.
# Cards without NVLink use neither custom all-reduce nor symmetric memory (3090 x2, x4, 23.5 GiB x4: 0.1-0.4).
NON_TORCH_PARALLEL = 0.55
NON_TORCH_PARALLEL_CARDS = 0.3
FUSED_ALL_REDUCE = 1.5
# V0 and V1 before 0.11 hold NCCL and custom all-reduce buffers inside (4090 x2 0.25, 95 GiB x2 0.74, A100 x8 2.1).
NON_TORCH_NCCL_PER_RANK = 0.25
# CUDA graphs: a fixed part and a part per captured layer (31 H100 starts of 0.19 within -34 ... +13 %).
GRAPH_BASE = 0.37 * GIB
GRAPH_PER_LAYER = 0.155 * MIB
GRAPH_PER_MOE_LAYER = 0.02 * GIB
# The engine's own estimate over that: the old runner extrapolates two graphs (median of 31 H100 rows), the new one
# adds up nearly all of them (L4, 0.28: three rows whose printed 1.04 GiB hold it; one row of 0.27.1 took twice that).
GRAPH_ESTIMATE_RATIO = 0.88
GRAPH_ESTIMATE_RATIO_RUNNER2 = 1.05
GRAPH_V0_BASE = 0.17 * GIB
# Multimodal encoders: outputs for a full batch, and a working set (Gemma 3, Kimi-VL, Llama 4: 0.06-0.11 GiB).
ENCODER_BASE = 0.09 * GIB
# CUDA context and kernels per process, before anything is loaded (free at start of empty devices).
CONTEXT_NCCL = 1.02 * GIB  # with communication buffers, from 0.11 (H100 x2, x4: 1.02-1.04; MoE 1.5)
# The old engine profiled one image per sequence for cross-attention models (Llama 3.2 Vision, 128 sequences: 36.6 GiB).
CROSS_ATTENTION_IMAGE = 0.286 * GIB
# Widths per patch that a dynamic-resolution encoder holds at its peak (Qwen2.5-VL 4.9, Omni 5.5 GiB at 65,536
# patches); from 0.18 the batch bounds the patches and the kernels hold less (Qwen3.6-35B-A3B at most 0.9 GiB).
ENCODER_WIDTHS = 31
ENCODER_WIDTHS_NEW = 10
# What no profile sees: allocator fragments and kernels loaded late; workspaces of 4-bit experts (gpt-oss-20b ran out in
# the sampler's warm-up with 1.6-2.0 GiB to spare on H100; gpt-oss-120b and Kimi-K2.5 NVFP4 ran out while capturing).
UNPROFILED_MARGIN = 0.3 * GIB
UNPROFILED_EXPERTS = 1.5 * GIB
# Graphs that capture NCCL calls instead of custom all-reduce (0.5.4, 4090 x4, 60 layers: 2.41 GiB).
GRAPH_NCCL_PER_LAYER = 1.0 * MIB
# Head sizes that FlashAttention served before 0.12; others ran on a backend that builds masks over the whole cache.
FLASH_HEADS = (32, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class Term:
    """A part of the budget: bytes, where the figure comes from, and its band."""

    bytes: int
    source: str
    low: int
    high: int

    def plain(self) -> dict[str, Any]:
        """As the plan shows it."""
        return {"bytes": self.bytes, "source": self.source, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Device:
    """A device as torch sees it. ``total`` and ``free`` in bytes; ``unified``: memory shared with the host."""

    total: int
    free: Optional[int] = None
    name: str = ""
    capability: tuple[int, int] = (9, 0)
    unified: bool = False
    source: str = "exact"


@dataclass(frozen=True)
class RankBudget:
    """One pipeline rank (all its tensor-parallel ranks are alike)."""

    rank: int
    total: int
    requested: int
    context: Term
    weights: Term
    activation: Term
    non_torch: Term
    cuda_graphs: Term
    graphs_inside: bool
    graph_estimate: int  # what the engine itself takes off for graphs, where it does
    kv_available: Term

    @property
    def inside(self) -> int:
        """What ``requested`` covers besides the KV cache, as expected."""
        graphs = self.graph_estimate if self.graphs_inside else 0
        return self.weights.bytes + self.activation.bytes + self.non_torch.bytes + graphs

    @property
    def inside_high(self) -> int:
        graphs = self.cuda_graphs.high if self.graphs_inside else 0
        return self.weights.high + self.activation.high + self.non_torch.high + graphs

    def footprint(self, kv_bytes: int, worst: bool = True) -> int:
        """Bytes of the device the process takes with a cache of ``kv_bytes``: the upper ends, or what is expected."""
        if worst:
            parts = (self.context, self.weights, self.activation, self.non_torch, self.cuda_graphs)
            return sum(term.high for term in parts) + kv_bytes
        return self.context.bytes + self.inside + kv_bytes + (0 if self.graphs_inside else self.cuda_graphs.bytes)

    def plain(self) -> dict[str, Any]:
        """Plain data: bytes and terms."""
        return {
            "total": self.total,
            "requested": self.requested,
            "context": self.context.plain(),
            "weights": self.weights.plain(),
            "activation": self.activation.plain(),
            "non_torch": self.non_torch.plain(),
            "cuda_graphs": self.cuda_graphs.plain(),
            "graphs_inside": self.graphs_inside,
            "kv_available": self.kv_available.plain(),
        }


@dataclass(frozen=True)
class Budget:
    """The answer for one instance on one kind of device."""

    ranks: tuple[RankBudget, ...]
    layout: KvLayout
    capacity: Capacity
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    utilization: float
    verdict: str
    reason: str
    estimated: bool
    certain: bool  # the whole band of the cache's memory leads to the same verdict about the length

    @property
    def fits(self) -> bool:
        return self.verdict == "fits"


def budget(
    shape: Shape,
    facts: Optional[Mapping[str, Any]],
    release: Any,
    device: Device,
    settings: Settings,
    *,
    measured: Optional[Mapping[str, int]] = None,
) -> Budget:
    """Compute all terms, what the cache gets, and the verdict. Raises FleetError like ``kvcache.layout``."""
    case = _Case(shape, facts, release, device, settings, measured=measured)
    return case.solve()


class _Case:
    def __init__(
        self,
        shape: Shape,
        facts: Optional[Mapping[str, Any]],
        release: Any,
        device: Device,
        settings: Settings,
        *,
        measured: Optional[Mapping[str, int]],
    ) -> None:
        self.shape, self.facts, self.device = shape, facts, device
        self.version: tuple[int, ...] = release if isinstance(release, tuple) else release.key
        self.measured = measured or {}
        self.engine = rules.engine(self.version, device.capability, settings.engine)
        self.length = settings.max_model_len or shape.max_length
        tokens, seqs = rules.batch_defaults(
            self.version, self.engine, device.total, device=device.name, length=self.length
        )
        seqs = settings.max_num_seqs or seqs
        batched = settings.max_num_batched_tokens or tokens
        self.settings = replace(
            settings, capability=device.capability, max_num_seqs=seqs, max_num_batched_tokens=batched
        )
        self.seqs, self.batched = seqs, batched
        self.element = DTYPE_BYTES[kvcache.served_dtype(shape, self.settings)]
        self.tp, self.pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
        self.speculative = settings.speculative.method if settings.speculative else ""
        self.runner = rules.runner(
            self.version,
            self.engine,
            model_type=shape.model_type,
            moe=shape.experts > 0,
            hybrid=shape.is_hybrid,
            quantised=bool(shape.quantization.method or settings.quantization),
            speculative=self.speculative,
        )

    @property
    def linked(self) -> bool:
        """Whether devices of this kind are joined by NVLink: the data-centre parts (7.0, 8.0, 9.x, 10.x)."""
        return self.device.capability in ((7, 0), (8, 0)) or self.device.capability[0] in (9, 10)

    # -- terms -----------------------------------------------------------------------------------------------------

    def term(self, name: str, size: float, low: float, high: float, source: str = "modelled") -> Term:
        """A term, or what was measured in its place."""
        if name in self.measured:
            value = int(self.measured[name])
            slack = 16 * MIB
            return Term(value, "measured", max(0, value - slack), value + slack)
        return Term(int(size), source, int(max(0, min(low, size))), int(max(high, size)))

    def weights(self, rank: int) -> tuple[Term, bool]:
        estimate = weights.rank_weights(
            self.shape,
            self.facts,
            self.tp,
            self.pp,
            rank,
            version=self.version,
            capability=self.device.capability,
            dtype=kvcache.served_dtype(self.shape, self.settings),
            quantization=self.settings.quantization,
            expert_parallel=self.settings.enable_expert_parallel,
            speculative=self.speculative,
        )
        size = estimate.bytes + self.settings.lora_bytes + self._draft_weights(rank)
        size = max(0, size - self.settings.cpu_offload_bytes)
        low, high = estimate.low + size - estimate.bytes, estimate.high + size - estimate.bytes
        source = "modelled" if estimate.estimated or self.settings.cpu_offload_bytes else "exact"
        return self.term("weights", size, low, high, source), estimate.estimated

    def _draft_weights(self, rank: int) -> int:
        speculative = self.settings.speculative
        if speculative is None or speculative.draft is None or rank != self.pp - 1:
            return 0
        return weights.rank_weights(speculative.draft, None, self.tp, version=self.version).bytes

    def activation(self, rank: int) -> Term:
        """Peak of the dry run: the widest of a full batch through one layer, or sampling every sequence at once."""
        shape, element, batched = self.shape, self.element, self.batched
        hidden = shape.hidden
        gated = any(layer.mlp.gated for layer in shape.layers if layer.mlp is not None)
        widths = (3 if gated else 2) * shape.intermediate / self.tp + 4 * hidden
        passed = 2 * batched * hidden * element if self.pp > 1 else 0
        forward = batched * element * widths + passed
        rows = min(self.seqs, batched)
        sampler = 0.0
        if rank == self.pp - 1 and not shape.encoder_only:
            sampler = batched * hidden * element + self._sampler(rows) + passed
        workspace = self._expert_workspace()
        if self.version >= (0, 12, 0):
            size = max(forward, sampler) + workspace
        else:
            size = max(forward + workspace, sampler)
        outputs, working = self._encoder()
        state = self._state_outside() if self.engine == "v0" else 0
        size = max(working, size + outputs) + state
        low, high = size * 0.9 - 0.05 * GIB, size * 1.08 + 0.12 * GIB + 0.5 * working
        return self.term("activation", size, low, high)

    def _sampler(self, rows: int) -> float:
        vocab = -(-self.shape.vocab // weights.VOCAB_PADDING) * weights.VOCAB_PADDING
        if self.runner == rules.RUNNER2:
            share = 1 + (1 / self.tp if self.tp > 1 else 0) + (1 if self.shape.logit_softcap else 0)
            return SAMPLER_RUNNER2 * share * rows * vocab
        if self.version >= (0, 17, 0):
            return SAMPLER_NEW_BASE + SAMPLER_NEW * rows * vocab
        return SAMPLER_OLD * rows * vocab

    def _expert_workspace(self) -> float:
        """Buffers between the two halves of the experts: every token times the experts it visits."""
        best = 0.0
        for mlp in {layer.mlp for layer in self.shape.layers if layer.mlp is not None and layer.mlp.experts}:
            if self.shape.quantization.method == "mxfp4":
                continue
            inner = mlp.expert_intermediate
            if not self.settings.enable_expert_parallel:
                inner = -(-inner // self.tp)
            hidden = mlp.latent or self.shape.hidden
            width = max(inner, hidden) + max(2 * inner, hidden)
            best = max(best, self.batched * mlp.top_k * width * self.element)
        return best

    def _encoder(self) -> tuple[float, float]:
        """What profiling the largest images takes: (outputs that stay beside the batch, peak of the encoder itself)."""
        if not self.shape.multimodal or self.settings.images_per_prompt == 0:
            return 0.0, 0.0
        outputs = self.batched * self.shape.hidden * self.element
        vision = self.shape.vision
        if self.engine == "v0" and self.shape.model_type.startswith("mllama"):
            return 0.0, self.seqs * CROSS_ATTENTION_IMAGE
        if vision is not None and not vision.image and vision.merge > 1:
            # Dynamic resolution: one image may fill the encoder's budget; the old engine did not look at the length.
            tokens, widths = max(self.batched, min(16384, self.length)), ENCODER_WIDTHS
            if self.engine == "v0":
                tokens = 16384
            elif self.version >= (0, 18, 0):
                tokens, widths = self.batched, ENCODER_WIDTHS_NEW
            patches = tokens * vision.merge * vision.merge
            return outputs, patches * widths * vision.hidden * self.element
        return outputs + ENCODER_BASE, 0.0

    def _state_outside(self) -> int:
        """The old engine keeps constant state outside the blocks, for every sequence it may run."""
        states = self.shape.state_layers
        return sum(self.seqs * kvcache.state_bytes(state, self.element, self.tp, self.settings) for state in states)

    def non_torch(self) -> Term:
        """What grows outside torch's allocator while the model is loaded and profiled."""
        size = NON_TORCH_NEW if self.version >= (0, 18, 0) else NON_TORCH_OLD
        low, high = 0.0, size + 0.25
        if self.tp > 1:
            if self.version < (0, 11, 0):
                size = NON_TORCH_NCCL_PER_RANK * self.tp
                low, high = 0.2, size + 0.6
            elif not self.linked:
                size, low, high = NON_TORCH_PARALLEL_CARDS, 0.05, 0.9
            else:
                size, low, high = NON_TORCH_PARALLEL, 0.05, 0.9
                fused = self.device.capability >= (9, 0) and not self.settings.enforce_eager
                if self.version >= (0, 18, 0) and fused:
                    size += FUSED_ALL_REDUCE + 0.03 * (self.tp - 1)
                    high = size + 0.3
        elif self.pp > 1:
            size, low, high = NON_TORCH_PIPELINE, 0.0, 0.35
        elif self.device.total < 30 * GIB and self.engine == "v0":
            size, high = 0.05, 0.4
        return self.term("non_torch", size * GIB, low * GIB, high * GIB)

    def graphs(self, rank: int) -> Term:
        """Memory of captured CUDA graphs on this rank."""
        if self.settings.enforce_eager:
            return Term(0, "exact", 0, 0)
        counts = rules.pipeline_layers(self.version, len(self.shape.layers), self.pp)
        tall = self.shape.quantization.method == "mxfp4"
        tall = tall or (self.device.capability[0] == 10 and self.version >= (0, 20, 0))
        piecewise, full = rules.capture_sizes(self.version, self.engine, self.seqs, self.batched, tall)
        captured = GRAPH_PER_LAYER * counts[rank] * (piecewise + full)
        base = GRAPH_BASE if self.engine == "v1" else GRAPH_V0_BASE
        size = base + captured
        if self.engine == "v0" and self.tp > 1 and not self.linked:
            size += GRAPH_NCCL_PER_LAYER * counts[rank] * full
        if self.shape.experts >= 32:
            moe = sum(1 for layer in self.shape.layers if layer.mlp is not None and layer.mlp.experts)
            size += GRAPH_PER_MOE_LAYER * moe * counts[rank] / len(self.shape.layers)
        return self.term("cuda_graphs", size, size * 0.6, size * 1.35)

    def _estimate(self, graphs: Term) -> int:
        ratio = GRAPH_ESTIMATE_RATIO_RUNNER2 if self.runner == rules.RUNNER2 else GRAPH_ESTIMATE_RATIO
        return int(graphs.bytes * ratio)

    def context(self) -> Term:
        """CUDA context and kernels of the process, and from 0.11 its communication buffers."""
        size, low, high = context_gib(self.device)
        extra = 0.0
        if self.tp * self.pp > 1 and not rules.nccl_inside(self.version):
            extra = CONTEXT_NCCL / GIB + (0.5 if self.shape.experts else 0.0) + 0.25 * max(0, self.tp - 4)
            if not self.linked:
                extra = 0.3 + 0.25 * max(0, self.tp - 4)
        return self.term("context", (size + extra) * GIB, (low + 0.8 * extra) * GIB, (high + 1.2 * extra) * GIB)

    # -- verdict ---------------------------------------------------------------------------------------------------

    def solve(self) -> Budget:
        settings, total = self.settings, self.device.total
        utilization = settings.gpu_memory_utilization
        if utilization is None:
            utilization = rules.default_utilization(self.version)
        share = total * utilization
        requested = math.ceil(share) if rules.requested_is_rounded_up(self.version) else int(share)
        layout = kvcache.layout(self.shape, self.version, settings)
        applied = rules.graphs_applied(self.version, self.runner) and settings.kv_cache_memory_bytes is None
        context, non_torch = self.context(), self.non_torch()
        ranks: list[RankBudget] = []
        estimated = False
        for rank in range(self.pp):
            size, guessed = self.weights(rank)
            estimated = estimated or guessed
            activation, graphs = self.activation(rank), self.graphs(rank)
            ranks.append(
                RankBudget(
                    rank=rank,
                    total=total,
                    requested=requested,
                    context=context,
                    weights=size,
                    activation=activation,
                    non_torch=non_torch,
                    cuda_graphs=graphs,
                    graphs_inside=applied,
                    graph_estimate=self._estimate(graphs),
                    kv_available=self._kv(requested, size, activation, non_torch, graphs, applied=applied),
                )
            )
        capacity = layout.capacity([rank.kv_available.bytes for rank in ranks], self.length)
        verdict, reason = self._verdict(ranks, layout, capacity, requested)
        ends = [layout.longest([getattr(r.kv_available, end) for r in ranks], self.length) for end in ("low", "high")]
        certain = not layout.groups or (ends[0] >= self.length) == (ends[1] >= self.length)
        if not certain and verdict in ("fits", "refused_kv"):
            low, high = (min(getattr(r.kv_available, end) for r in ranks) for end in ("low", "high"))
            reason = f"{reason} Between {gib(low)} and {gib(high)} may be left: this is not certain.".strip()
        return Budget(
            ranks=tuple(ranks),
            layout=layout,
            capacity=capacity,
            max_model_len=self.length,
            max_num_batched_tokens=self.batched,
            max_num_seqs=self.seqs,
            utilization=utilization,
            verdict=verdict,
            reason=reason,
            estimated=estimated or layout.estimated,
            certain=certain,
        )

    def _kv(
        self, requested: int, size: Term, activation: Term, non_torch: Term, graphs: Term, *, applied: bool
    ) -> Term:
        wanted = self.settings.kv_cache_memory_bytes
        if wanted is not None:
            return Term(wanted, "exact", wanted, wanted)
        taken = self._estimate(graphs) if applied else 0
        middle = requested - size.bytes - activation.bytes - non_torch.bytes - taken
        slack = [(t.bytes - t.low, t.high - t.bytes) for t in (size, activation, non_torch)]
        if applied:
            slack.append((int(taken * 0.4), int(taken * 0.6)))
        # The terms err independently: their squares add up.
        up = math.sqrt(sum(low * low for low, _high in slack))
        down = math.sqrt(sum(high * high for _low, high in slack))
        sources = {t.source for t in (size, activation, non_torch)}
        source = "measured" if sources == {"measured"} else "modelled"
        if rules.counts_other_processes(self.version, self.engine) and self.device.free is not None:
            middle -= max(0, self.device.total - self.device.free)
        return Term(int(middle), source, int(middle - down), int(middle + up))

    def _verdict(
        self, ranks: list[RankBudget], layout: KvLayout, capacity: Capacity, requested: int
    ) -> tuple[str, str]:
        device = self.device
        free = device.free if device.free is not None else device.total
        context = ranks[0].context
        if rules.checks_free_memory(self.version, self.engine):
            left = free - (context.low if device.free is None else 0)
            if left < requested:
                return "refused_free_memory", (
                    f"{gib(left)} would be free of {gib(device.total)}, but the instance asks for {gib(requested)} "
                    f"before it loads anything. Lower gpu_memory_utilization or free the device."
                )
        if not layout.groups:
            worst = max(rank.footprint(0) for rank in ranks)
            if worst > free:
                return "oom_risk", f"It may take {gib(worst)}, {gib(free)} are free."
            return "fits", ""
        if not capacity.fits:
            if capacity.reason == "refused_no_memory":
                worst_rank = min(ranks, key=lambda rank: rank.kv_available.bytes)
                return "refused_kv", (
                    f"Nothing is left for the KV cache: {gib(requested)} requested, {gib(worst_rank.weights.bytes)} "
                    f"weights, {gib(worst_rank.activation.bytes)} activation, {gib(worst_rank.non_torch.bytes)} other."
                )
            return "refused_kv", (
                f"One request of {self.length} tokens needs {gib(max(capacity.needed))} of KV cache, "
                f"{gib(min(rank.kv_available.bytes for rank in ranks))} are left; up to {capacity.longest} tokens fit."
            )
        return self._risk(ranks, capacity, free)

    def _risk(self, ranks: list[RankBudget], capacity: Capacity, free: int) -> tuple[str, str]:
        """fits, or oom_risk when what a start takes in fact, or may take beside its profile, exceeds the device."""
        known = self.device.free is not None
        for rank in ranks:
            outside = 0 if known else rank.context.bytes
            peak = outside + rank.weights.bytes + rank.activation.bytes + rank.non_torch.bytes
            if peak > free:
                return "oom_risk", (
                    f"The profiling run alone takes {gib(peak)} (weights {gib(rank.weights.bytes)}, activation "
                    f"{gib(rank.activation.bytes)}), {gib(free)} are there. Lower max_num_batched_tokens."
                )
            graphs = rank.cuda_graphs
            taken = outside + rank.inside + capacity.allocated[rank.rank]
            taken += 0 if rank.graphs_inside else graphs.bytes
            spare = UNPROFILED_MARGIN + min(graphs.high - graphs.bytes, int(0.3 * graphs.bytes))
            if self.shape.experts and self.shape.quantization.method in ("mxfp4", "nvfp4"):
                spare += UNPROFILED_EXPERTS
            if taken + spare > free:
                where = "inside" if rank.graphs_inside else "outside"
                return "oom_risk", (
                    f"{gib(taken)} are taken (graphs {gib(graphs.bytes)}, {where} the requested share) of {gib(free)}: "
                    f"less than the {gib(spare)} that no profile sees are spare. Lower gpu_memory_utilization."
                )
        heads = {a.head_dim for a in self.shape.attention_layers if a.mla is None}
        if self.engine == "v1" and self.version < (0, 12, 0) and heads - set(FLASH_HEADS):
            return "oom_risk", (
                f"Heads of {min(heads - set(FLASH_HEADS))} run on a backend that builds masks over the whole cache of "
                f"{capacity.tokens} tokens when it decodes, which no profile sees. Use release 0.12 or later."
            )
        return "fits", ""


def context_gib(device: Device) -> tuple[float, float, float]:
    """(expected, low, high) GiB of a CUDA context on such a device: it grows with the number of processors.

    Free memory at start on empty devices: H100 0.51, H200 0.60, B300 0.61, RTX PRO 6000 0.56, 5090 0.50,
    3090 0.45-0.51, A100 0.49, A6000 0.34, A10G, L4 and 16 GB cards 0.23, T4 0.17.
    """
    major, gibs = device.capability[0], device.total / GIB
    if major >= 10:
        size = 0.61 if major == 10 or gibs > 120 else 0.56 if gibs > 60 else 0.5 if gibs > 28 else 0.3
    elif major == 9:
        size = 0.51 if gibs < 100 else 0.6
    elif device.capability == (8, 0):
        size = 0.49
    elif major == 8:
        small = any(word in device.name.upper() for word in ("L4", "A10", "A2")) and "L40" not in device.name.upper()
        size = 0.23 if small or gibs < 17 else 0.34 if gibs > 40 else 0.48
    else:
        size = 0.17 if gibs < 17 else 0.3
    if gibs < 12 and device.capability in ((8, 0), (9, 0)):
        size = 0.3  # a slice of a larger device
    return size, 0.8 * size, 1.3 * size + 0.05
