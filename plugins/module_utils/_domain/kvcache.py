# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The KV cache: how many bytes a block takes, how many blocks a request needs, what fits. Private.

    layout(shape, release, settings) -> KvLayout           release: Release or a version tuple
    KvLayout.bytes_per_block                               one number per pipeline rank
    KvLayout.blocks_per_request(length) -> int
    KvLayout.bytes_for(length, concurrency) -> tuple[int, ...]     per pipeline rank, null block included
    KvLayout.capacity(available, max_model_len) -> Capacity        fits, blocks, tokens, concurrency, longest length
    KvLayout.longest(available, upper) -> int              0 when not even one token fits
    Settings(...)                                          the arguments that move memory; memory.budget takes it, too

All arithmetic is exact and follows vLLM's own (``v1/core/kv_cache_utils.py``, ``kv_cache_interface.py``); the cases of
tests/oracle hold the engine's answers for 0.32.0. Bytes, blocks and tokens are whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import release_rules as rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import (
    DTYPE_BYTES,
    Attention,
    Shape,
    State,
)

Version = tuple[int, ...]


@dataclass(frozen=True)
class Speculative:
    """Speculative decoding: ``method`` as the engine names it; ``draft`` the draft model's shape where there is one."""

    method: str
    tokens: int = 1
    draft: Optional[Shape] = None


@dataclass(frozen=True)
class Settings:
    """The arguments of an instance that move memory. ``None`` means: what the engine chooses."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "auto"
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    block_size: Optional[int] = None
    max_model_len: Optional[int] = None
    max_num_seqs: Optional[int] = None
    max_num_batched_tokens: Optional[int] = None
    gpu_memory_utilization: Optional[float] = None
    kv_cache_memory_bytes: Optional[int] = None
    num_gpu_blocks_override: Optional[int] = None
    enforce_eager: bool = False
    enable_prefix_caching: Optional[bool] = None
    hybrid_kv_cache_manager: Optional[bool] = None
    async_scheduling: Optional[bool] = None
    attention_backend: str = ""
    speculative: Optional[Speculative] = None
    engine: str = ""
    capability: tuple[int, int] = (9, 0)
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    lora_bytes: int = 0
    cpu_offload_bytes: int = 0
    images_per_prompt: Optional[int] = None


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps on one rank: ``page`` bytes per block of ``block`` tokens."""

    layer: int
    kind: str  # full, sliding, chunked, cross, state
    block: int
    page: int
    window: int = 0
    state_blocks: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Group:
    """Layers that share block tables; ``block`` tokens per block."""

    kind: str
    block: int
    window: int
    state_blocks: int
    layers: tuple[LayerCache, ...]


@dataclass(frozen=True)
class Capacity:
    """What fits into the memory given. ``reason``: "", refused_kv (length) or refused_no_memory."""

    fits: bool
    blocks: int
    tokens: int
    concurrency: float
    needed: tuple[int, ...]
    allocated: tuple[int, ...]
    longest: int
    reason: str = ""


@dataclass(frozen=True)
class KvLayout:
    """How a model's cache is laid out by a release under some settings. Block and page sizes in tokens and bytes."""

    block_size: int
    groups: tuple[Group, ...]
    bytes_per_block: tuple[int, ...]
    kv_dtype: str
    batched: int
    in_flight: int
    context_parallel: int = 1
    null_block: bool = True
    token_rule: str = "per_request"
    override: Optional[int] = None
    estimated: bool = False

    @property
    def min_block(self) -> int:
        """The smallest block of attention groups, in tokens."""
        sizes = [group.block for group in self.groups if group.kind != "state"]
        return min(sizes, default=self.block_size)

    def blocks_per_request(self, length: int) -> int:
        """Blocks that one request of ``length`` tokens may come to hold, over all groups."""
        return sum(self._group_blocks(group, length) for group in self.groups)

    def _group_blocks(self, group: Group, length: int) -> int:
        if group.kind == "state":
            return group.state_blocks
        room = self.in_flight * self.batched
        if group.kind == "cross":
            return _ceil(group.window, group.block)
        if group.kind == "sliding":
            return _ceil(min(group.window - 1 + room, length), group.block) + 1
        if group.kind == "chunked":
            return _ceil(min(group.window + room, length), group.block)
        return _ceil(_ceil(length, self.context_parallel), group.block)

    def needed(self, length: int) -> tuple[int, ...]:
        """Bytes per pipeline rank that one request of ``length`` tokens needs."""
        blocks = self.blocks_per_request(length)
        return tuple(blocks * size for size in self.bytes_per_block)

    def bytes_for(self, length: int, concurrency: float = 1.0) -> tuple[int, ...]:
        """Bytes per pipeline rank for ``concurrency`` requests of full length, whole blocks, null block included."""
        whole = self.blocks_per_request(length) * concurrency
        blocks = int(whole) + (1 if whole > int(whole) else 0) + 1
        return tuple(blocks * size for size in self.bytes_per_block)

    def _fits(self, available: Sequence[int], length: int) -> bool:
        blocks = self.blocks_per_request(length) + (1 if self.null_block else 0)
        return all(blocks * size <= room for size, room in zip(self.bytes_per_block, available))

    def longest(self, available: Union[int, Sequence[int]], upper: int) -> int:
        """The largest length up to ``upper`` whose need fits; the engine bisects in the same way."""
        rooms = self._rooms(available)
        if upper < 1 or not self._fits(rooms, 1):
            return 0
        low, high = 1, upper
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(rooms, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def capacity(self, available: Union[int, Sequence[int]], max_model_len: int) -> Capacity:
        """What ``available`` bytes (per pipeline rank, or the same for all) hold for requests of ``max_model_len``."""
        rooms = self._rooms(available)
        if not self.groups:
            return Capacity(True, 0, 0, 0.0, (0,) * len(rooms), (0,) * len(rooms), max_model_len)
        if self.override is not None:
            rooms = tuple(self.override * size for size in self.bytes_per_block)
        needed = self.needed(max_model_len)
        blocks = min((max(0, room // size) for size, room in zip(self.bytes_per_block, rooms) if size), default=0)
        longest = self.longest(rooms, max_model_len)
        fits = longest >= max_model_len
        if not fits:
            reason = "refused_no_memory" if min(rooms) <= 0 else "refused_kv"
            return Capacity(False, blocks, 0, 0.0, needed, (0,) * len(rooms), longest, reason)
        concurrency, tokens = self._tokens(blocks, max_model_len)
        allocated = tuple(blocks * size for size in self.bytes_per_block)
        return Capacity(True, blocks, tokens, concurrency, needed, allocated, longest)

    def _tokens(self, blocks: int, length: int) -> tuple[float, int]:
        if self.token_rule == "per_block":
            tokens = blocks * self.block_size
            return tokens / length, tokens
        concurrency = blocks / max(1, self.blocks_per_request(length))
        if self.token_rule == "per_group":
            return concurrency, blocks // len(self.groups) * self.min_block * self.context_parallel
        return concurrency, int(concurrency * length)

    def _rooms(self, available: Union[int, Sequence[int]]) -> tuple[int, ...]:
        if isinstance(available, int):
            return (available,) * len(self.bytes_per_block)
        return tuple(available)


def layout(shape: Shape, release: Any, settings: Settings) -> KvLayout:
    """Lay out the cache. FleetError ``unsupported_by_engine`` when heads do not divide, as the engine would refuse."""
    version: Version = release if isinstance(release, tuple) else release.key
    engine = rules.engine(version, settings.capability, settings.engine)
    method = settings.speculative.method if settings.speculative else ""
    runner = rules.runner(
        version,
        engine,
        model_type=shape.model_type,
        moe=shape.experts > 0,
        hybrid=shape.is_hybrid,
        quantised=bool(shape.quantization.method),
        speculative=method,
    )
    check_parallel(shape, settings)
    kv_dtype = cache_dtype(shape, version, settings)
    batched = settings.max_num_batched_tokens or 2048
    asynchronous = rules.async_scheduling(version, settings.async_scheduling, method, engine)
    in_flight = rules.batches_in_flight(version, runner, settings.pipeline_parallel_size, asynchronous)
    block = block_size(shape, version, settings, kv_dtype)
    caches = _layer_caches(shape, version, settings, kv_dtype=kv_dtype, block=block, engine=engine)
    groups = _groups(caches, version, settings, engine)
    scheduler_block = max((group.block for group in groups if group.kind != "state"), default=block)
    ranks = settings.pipeline_parallel_size
    sizes = tuple(
        max((sum(c.page for c in group.layers if c.rank == rank) for group in groups), default=0)
        for rank in range(ranks)
    )
    return KvLayout(
        block_size=scheduler_block,
        groups=groups,
        bytes_per_block=sizes,
        kv_dtype=kv_dtype,
        batched=batched,
        in_flight=in_flight,
        context_parallel=settings.decode_context_parallel_size,
        null_block=rules.needs_null_block(version),
        token_rule=rules.token_rule(version, engine),
        override=settings.num_gpu_blocks_override,
        estimated="kv" in shape.notes,
    )


def check_parallel(shape: Shape, settings: Settings) -> None:
    """Refuse what the engine refuses: heads, key-value heads and vocabulary must divide by the tensor parallel size."""
    size = settings.tensor_parallel_size
    if size < 1 or settings.pipeline_parallel_size < 1:
        raise FleetError("unsupported_by_engine", "Parallel sizes start at 1.", "Set them to 1 or more.")
    if settings.pipeline_parallel_size > len(shape.layers):
        raise FleetError(
            "unsupported_by_engine",
            f"{len(shape.layers)} layers cannot be spread over {settings.pipeline_parallel_size} pipeline ranks.",
            "Lower pipeline_parallel_size.",
        )
    for attention in set(shape.attention_layers):
        if attention.heads % size:
            raise FleetError(
                "unsupported_by_engine",
                f"{attention.heads} attention heads cannot be divided by tensor_parallel_size {size}.",
                f"Use a divisor of {attention.heads}.",
            )
        kv = attention.kv_heads
        if attention.mla is None and kv % size and size % kv:
            raise FleetError(
                "unsupported_by_engine",
                f"{kv} key-value heads and tensor_parallel_size {size}: neither divides the other.",
                f"Use a divisor or a multiple of {kv}.",
            )
    if (-(-shape.vocab // 64) * 64) % size:
        raise FleetError(
            "unsupported_by_engine",
            f"A vocabulary of {shape.vocab} (padded to 64) cannot be divided by tensor_parallel_size {size}.",
            "Use another tensor_parallel_size.",
        )


def cache_dtype(shape: Shape, version: Version, settings: Settings) -> str:
    """The type keys and values are stored in: ``auto`` means the model's own, or what the checkpoint's scheme says."""
    wanted = settings.kv_cache_dtype or "auto"
    if wanted == "auto" and shape.quantization.kv_cache_bits == 8 and rules.follows_checkpoint_kv_dtype(version):
        return "fp8"
    return wanted


def served_dtype(shape: Shape, settings: Settings) -> str:
    """bfloat16, float16 or float32: what activations and unquantised weights are kept in."""
    names = {"half": "float16", "float": "float32"}
    wanted = names.get(settings.dtype, settings.dtype)
    if wanted in DTYPE_BYTES:
        return wanted
    if shape.dtype == "float32":
        return "float16" if settings.capability < (8, 0) else "bfloat16"
    return shape.dtype


def block_size(shape: Shape, version: Version, settings: Settings, kv_dtype: str) -> int:
    """Tokens per block: the user's, or what the attention backend of this device wants."""
    if settings.block_size:
        return settings.block_size
    if kv_dtype.startswith("turboquant"):
        return 32
    engine = rules.engine(version, settings.capability, settings.engine)
    if engine == "v0":
        return 16
    major = settings.capability[0]
    if shape.uses_mla:
        if any(attention.indexer for attention in shape.attention_layers):
            return 64
        if major == 10:
            return 32 if version >= (0, 14, 0) else 128
        if major == 9 and (kv_dtype.startswith("fp8") or (0, 9, 0) <= version < (0, 11, 0)):
            return 64
        return 16
    if major == 10 and version >= (0, 29, 0) and any(a.head_dim == 256 for a in shape.attention_layers):
        return 128
    return 16


def attention_bytes(attention: Attention, kv_dtype: str, element: int, tensor: int, version: Version) -> int:
    """Bytes one token takes in one attention layer on one rank, keys and values together."""
    compressed = attention.mla is not None and attention.mla.compressed
    if attention.mla is not None and compressed and rules.has_mla_cache(version):
        width = attention.mla.kv_lora_rank + attention.mla.rope_dim
        if kv_dtype == "fp8_ds_mla":
            size = 656
        elif kv_dtype == "nvfp4_ds_mla":
            size = 352
        elif kv_dtype.startswith("fp8"):
            size = 656 if attention.indexer is not None else width
        else:
            size = width * element
        return size
    heads = max(1, attention.kv_heads // tensor)
    key, value = attention.head_dim, attention.v_head_dim
    if attention.mla is not None:
        # Values are padded to the width of the keys; DeepSeek's once to 256.
        width = 256 if compressed else attention.head_dim
        heads, key, value = max(1, attention.heads // tensor), width, width
    if kv_dtype in ("fp8_per_token_head", "int8_per_token_head"):
        return heads * (key + value + 8)
    if kv_dtype == "int4_per_token_head":
        return heads * ((key + value) // 2 + 8)
    if kv_dtype.startswith("nvfp4"):
        return heads * ((key + value) // 2 + (key + value) // 16)
    if kv_dtype.startswith(("turboquant", "ultraquant")):
        return heads * ((key + value) // 2 + 6)
    if kv_dtype.startswith("fp8"):
        return heads * (key + value)
    if kv_dtype in ("bfloat16", "float16"):
        element = 2
    return heads * (key + value) * element


def indexer_bytes(attention: Attention) -> int:
    """Bytes per token of the sparse attention's own key cache: fp8 keys and one scale per 128."""
    return attention.indexer.dim + 4 * -(-attention.indexer.dim // 128) if attention.indexer is not None else 0


def state_bytes(state: State, element: int, tensor: int, settings: Settings, speculative: int = 0) -> int:
    """Bytes of constant state one sequence keeps in one layer on one rank: convolution window and recurrent state."""
    conv_element = _state_element(settings.mamba_cache_dtype, element)
    state_element = 4 if state.float32_state else element
    if settings.mamba_ssm_cache_dtype != "auto":
        state_element = _state_element(settings.mamba_ssm_cache_dtype, element)
    elif state.kind in ("mamba1", "mamba2", "gdn") and settings.mamba_cache_dtype != "auto":
        state_element = conv_element
    window = state.kernel - 1 + speculative
    if state.kind in ("gdn", "kda"):
        width = (2 * state.key_heads * state.key_dim + state.heads * state.head_dim) // tensor
        recurrent = state.heads // tensor * state.head_dim * state.key_dim
        return window * width * conv_element + recurrent * state_element
    if state.kind == "mamba1":
        return window * (state.inner // tensor) * conv_element + state.inner // tensor * state.state_dim * state_element
    if state.kind == "mamba2":
        groups = state.groups if state.groups % tensor == 0 else state.groups + (-state.groups) % tensor
        width = (state.inner + 2 * groups * state.state_dim) // tensor
        return window * width * conv_element + state.heads // tensor * state.head_dim * state.state_dim * state_element
    if state.kind == "lightning":
        return state.heads // tensor * state.head_dim * state.head_dim * 4
    if state.kind == "short_conv":
        return (state.kernel - 1) * (state.inner // tensor) * conv_element
    return (state.kernel - 1) * (state.inner // tensor) * conv_element + state.inner // tensor * 4


def _state_element(name: str, default: int) -> int:
    return {"auto": default, "float32": 4, "float16": 2, "bfloat16": 2}.get(name, default)


def _layer_caches(
    shape: Shape, version: Version, settings: Settings, *, kv_dtype: str, block: int, engine: str
) -> list[LayerCache]:
    element = DTYPE_BYTES[served_dtype(shape, settings)]
    tensor = settings.tensor_parallel_size
    hybrid = rules.has_hybrid_groups(version, engine)
    if settings.hybrid_kv_cache_manager is not None:
        hybrid = hybrid and settings.hybrid_kv_cache_manager
    counts = rules.pipeline_layers(version, len(shape.layers), settings.pipeline_parallel_size)
    ranks = [rank for rank, count in enumerate(counts) for _each in range(count)]
    states_in_blocks = rules.caches_state_in_blocks(version, engine)
    mixed = shape.is_hybrid and states_in_blocks
    speculative = settings.speculative.tokens if settings.speculative else 0
    largest_state = max(
        (state_bytes(state, element, tensor, settings, speculative) for state in set(shape.state_layers)), default=0
    )
    if mixed:
        block = _hybrid_block(shape, version, settings, kv_dtype, block=block, state=largest_state)
    spans = {layer.attention.span for layer in shape.layers if layer.attention is not None and layer.attention.caches}
    prefix = rules.prefix_caching(
        version, engine, settings.enable_prefix_caching, not shape.attention_layers, shape.is_hybrid
    )
    result: list[LayerCache] = []
    for index, layer in enumerate(shape.layers):
        attention = layer.attention
        if attention is not None and attention.caches and attention.span != "encoder":
            kind, window = attention.span, attention.window
            dtype = "auto" if _skipped(kind, settings.kv_cache_dtype_skip_layers) else kv_dtype
            if kv_dtype.startswith("turboquant") and (index < 2 or index >= len(shape.layers) - 2):
                dtype = "auto"
            if kind == "sliding" and not (hybrid if len(spans) > 1 else rules.caches_window_only(version, engine)):
                kind = "full"
            if kind == "sliding" and settings.hybrid_kv_cache_manager is False and len(spans) > 1:
                kind = "full"
            if kind == "chunked" and not (hybrid and rules.caches_chunk_only(version, engine)):
                kind = "full"
            size = attention_bytes(attention, dtype, element, tensor, version)
            page = block * (size + indexer_bytes(attention))
            result.append(LayerCache(index, kind, block, page, window if kind != "full" else 0, rank=ranks[index]))
        if layer.state is not None and states_in_blocks:
            blocks = _state_blocks(layer.state, prefix, speculative)
            size = state_bytes(layer.state, element, tensor, settings, speculative)
            result.append(LayerCache(index, "state", block, size, 0, blocks, ranks[index]))
    result.extend(_draft_caches(shape, version, settings, kv_dtype=kv_dtype, block=block, element=element))
    return result


def _state_blocks(state: State, prefix: bool, speculative: int) -> int:
    if not prefix:
        return 1 + speculative
    return (3 if state.kind == "mamba2" else 2) + speculative


def _skipped(kind: str, names: Sequence[str]) -> bool:
    return (kind == "sliding" and "sliding_window" in names) or kind in names


def _hybrid_block(shape: Shape, version: Version, settings: Settings, kv_dtype: str, *, block: int, state: int) -> int:
    """Attention blocks grow until one holds a sequence's state: 16 tokens times what is needed."""
    element = DTYPE_BYTES[served_dtype(shape, settings)]
    tensor = settings.tensor_parallel_size
    per_token = max(attention_bytes(a, kv_dtype, element, tensor, version) for a in shape.attention_layers)
    align = max(16, block if not settings.block_size else 16)
    return max(align * _ceil(state, align * per_token), settings.block_size or 0)


def _draft_caches(
    shape: Shape, version: Version, settings: Settings, *, kv_dtype: str, block: int, element: int
) -> list[LayerCache]:
    """Layers a draft adds: its own for EAGLE and draft models, the model's extra layers for MTP."""
    if settings.speculative is None:
        return []
    method, draft = settings.speculative.method, settings.speculative.draft
    rank = settings.pipeline_parallel_size - 1
    templates: list[Attention] = []
    main = [a for a in shape.attention_layers if a.caches and a.span != "encoder"]
    if method in ("eagle", "eagle3", "dflash") and main:
        draft_layers = [a for a in draft.attention_layers if a.caches] if draft is not None else []
        templates = draft_layers or [next((a for a in reversed(main) if a.span == "full"), main[-1])]
    elif method.endswith("mtp") and main:
        count = max(1, shape.mtp_layers)
        templates = [next((a for a in reversed(main) if a.span == "full"), main[-1])] * count
    elif method == "draft_model" and draft is not None:
        templates = [a for a in draft.attention_layers if a.caches]
    result = []
    for offset, attention in enumerate(templates):
        tensor = settings.tensor_parallel_size
        size = attention_bytes(attention, kv_dtype, element, tensor, version) + indexer_bytes(attention)
        kind = "full" if attention.span not in ("sliding", "chunked") else attention.span
        window = attention.window if kind != "full" else 0
        result.append(LayerCache(len(shape.layers) + offset, kind, block, block * size, window, rank=rank))
    return result


def _groups(caches: list[LayerCache], version: Version, settings: Settings, engine: str) -> tuple[Group, ...]:
    """Deal layers into groups of equal page size, as the hybrid manager does."""
    kinds = {(c.kind, c.window) for c in caches}
    crossing = any(c.kind == "cross" for c in caches)  # had blocks of their own from the start
    if len(kinds) <= 1 or not (crossing or rules.has_hybrid_groups(version, engine)):
        return (_group(caches),) if caches else ()
    largest = max(c.page for c in caches if c.kind != "state") if any(c.kind != "state" for c in caches) else 0
    unified = [_unified(c, largest) for c in caches]
    by_spec: dict[tuple[str, int, int, int], list[LayerCache]] = {}
    for cache in unified:
        by_spec.setdefault((cache.kind, cache.window, cache.block, cache.state_blocks), []).append(cache)
    counts = [len(members) for members in by_spec.values()]
    smallest, most = min(counts), max(counts)
    size = most if most < rules.group_ratio(version) * smallest else smallest
    groups: list[Group] = []
    for members in by_spec.values():
        number = _ceil(len(members), size)
        groups.extend(_group(members[start::number]) for start in range(number))
    return tuple(groups)


def _unified(cache: LayerCache, page: int) -> LayerCache:
    """Give a layer the common page: attention by holding more tokens per block, state by padding."""
    if cache.page >= page:
        return cache
    if cache.kind == "state":
        return LayerCache(cache.layer, cache.kind, cache.block, page, cache.window, cache.state_blocks, cache.rank)
    ratio = page // cache.page
    block = cache.block * ratio
    return LayerCache(cache.layer, cache.kind, block, page, cache.window, cache.state_blocks, cache.rank)


def _group(members: Sequence[LayerCache]) -> Group:
    first = members[0]
    return Group(first.kind, first.block, first.window, first.state_blocks, tuple(members))


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
