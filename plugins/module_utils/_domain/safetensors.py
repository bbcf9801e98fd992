# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the headers of safetensors files say, without reading a tensor. Private to gpufleet.inference.

    header_length(first_eight: bytes, file_size: int) -> int
    parse_header(header: bytes, file_size: int) -> tuple[Tensor, ...]
    parse_index(data: bytes) -> tuple[str, ...]            the files of a sharded checkpoint
    classify(name: str) -> Place                           role, part, layer
    group(tensors, layers: int) -> list[dict[str, Any]]    compact, for model facts

FleetError ``bad_safetensors`` names what is wrong: cut off, overlapping, double, of unknown type, beyond the limits.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

# The format's own limit of a header (safetensors: MAX_HEADER_SIZE), and ours for numbers of things.
MAX_HEADER = 100_000_000
MAX_TENSORS = 1_000_000
MAX_DIMENSIONS = 16
MAX_NAME = 1024
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
_HINT = "Fetch the file again; a whole file has the size its source states."


@dataclass(frozen=True)
class Tensor:
    """One tensor as the header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs: ``role`` decides how it is sharded, ``part`` is weight, bias, scale or state."""

    role: str
    part: str
    layer: Optional[int]


def bad(message: str) -> FleetError:
    return FleetError("bad_safetensors", message, _HINT)


def header_length(first_eight: bytes, file_size: int) -> int:
    """Bytes of the header that follows the first eight; raises when the file cannot hold it."""
    if len(first_eight) < 8:
        raise bad(f"The file has {len(first_eight)} bytes, less than the 8 every safetensors file starts with.")
    length = int(struct.unpack("<Q", first_eight[:8])[0])
    if length > MAX_HEADER:
        raise bad(f"The header claims {length} bytes; the format allows {MAX_HEADER}. This is no safetensors file.")
    if length < 2:
        raise bad(f"The header claims {length} bytes, too few for any description.")
    if length > file_size - 8:
        raise bad(f"The header claims {length} bytes, the file has {file_size}: it is cut off.")
    return length


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _value in pairs:
            if name in seen:
                raise bad(f'The header names "{name[:80]}" twice.')
            seen.add(name)
    return result


def _loads(data: bytes, what: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_doubles)
    except FleetError:
        raise
    except UnicodeDecodeError as error:
        raise bad(f"{what} is not UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise bad(f"{what} is not JSON ({str(error)[:80]}).") from error


def parse_header(header: bytes, file_size: int) -> tuple[Tensor, ...]:
    """The tensors of one file, in the order of their data. ``file_size`` tells whether all data is there."""
    table = _loads(header, "The header")
    if not isinstance(table, dict):
        raise bad("The header is not an object.")
    if len(table) > MAX_TENSORS:
        raise bad(f"The header describes {len(table)} tensors, more than the {MAX_TENSORS} this collection reads.")
    found: list[tuple[int, int, Tensor]] = []
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        found.append(_tensor(name, entry))
    found.sort(key=lambda item: (item[0], item[1]))
    position = 0
    for begin, end, tensor in found:
        if begin < position:
            raise bad(f'The data of "{tensor.name[:80]}" overlaps that of the tensor before it.')
        if begin > position:
            raise bad(f'{begin - position} bytes before "{tensor.name[:80]}" belong to no tensor.')
        position = end
    room = file_size - 8 - len(header)
    if position > room:
        raise bad(f"The tensors take {position} bytes, the file holds {max(room, 0)}: it is cut off.")
    if position < room:
        raise bad(f"The file holds {room - position} bytes more than its tensors.")
    return tuple(tensor for _begin, _end, tensor in found)


def _tensor(name: str, entry: Any) -> tuple[int, int, Tensor]:
    label = name[:80]
    if len(name) > MAX_NAME:
        raise bad(f'A tensor has a name of {len(name)} letters ("{label}").')
    if not isinstance(entry, dict):
        raise bad(f'"{label}" is not described by an object.')
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f'"{label}" has the type {str(dtype)[:40]}, which the format does not know.')
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_count(value) for value in shape):
        raise bad(f'"{label}" has no usable shape.')
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_count(value) for value in offsets):
        raise bad(f'"{label}" has no usable data_offsets.')
    begin, end = offsets
    size = DTYPE_BITS[dtype]
    for value in shape:
        size *= value
        if size > 1 << 62:
            raise bad(f'"{label}" is larger than any file.')
    if end < begin or (end - begin) * 8 != size:
        raise bad(f'"{label}" should take {size // 8} bytes by its shape, its data_offsets say {end - begin}.')
    return begin, end, Tensor(name, dtype, tuple(shape), end - begin)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def parse_index(data: bytes) -> tuple[str, ...]:
    """The file names of a ``*.safetensors.index.json``, sorted. Names that leave the folder are refused."""
    table = _loads(data, "The index")
    names = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(names, dict) or not names:
        raise bad("The index has no weight_map.")
    files = set()
    for value in names.values():
        if not isinstance(value, str) or not value or "/" in value or value in (".", "..") or "\x00" in value:
            raise bad(f"The index names {str(value)[:80]!r}, which is no file of this folder.")
        files.add(value)
    if len(files) > 100_000:
        raise bad(f"The index names {len(files)} files.")
    return tuple(sorted(files))


# --- what a tensor is ------------------------------------------------------------------------------------------------

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer|transformer_layers)\.(\d{1,5})\.")
_ENCODERS = re.compile(r"vision|visual|audio|multi_modal|mm_projector|image_newline|(?:^|\.)(?:vit|patch_)|speech")
# What the engine does not load: the speaking half of Omni models, masks and frequencies it computes itself, and
# adapters that lie beside the weights they change.
_UNUSED = re.compile(
    r"^(?:talker|token2wav|code2wav)\.|\.lora_[AB]\.|\.attn\.(?:masked_)?bias$|\.attention\.(?:masked_)?bias$"
    r"|rotary_emb\.inv_freq$"
)
_SCALES = frozenset(
    (
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "weight_global_scale",
        "input_global_scale",
        "input_scale",
        "scales",
        "qzeros",
        "g_idx",
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "k_scale",
        "v_scale",
    )
)
_STATE = frozenset(("A_log", "A", "D", "dt_bias", "dt_proj_bias", "e_score_correction_bias", "sinks"))
_PARTS = frozenset(("weight", "bias", "qweight", "weight_packed", "blocks", "packed"))
_ROLES = {
    "embed": ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embedding", "embeddings", "embed_in"),
    "positions": ("embed_positions", "wpe", "position_embeddings"),
    "lm_head": ("lm_head", "embed_out", "output", "output_layer"),
    "q": ("q_proj", "query", "wq", "g_proj"),
    "k": ("k_proj", "key", "wk"),
    "v": ("v_proj", "value", "wv"),
    "qkv": ("qkv_proj", "c_attn", "Wqkv", "wqkv", "query_key_value", "W_pack", "qkv", "att_proj"),
    "o": ("o_proj", "wo", "out_proj", "dense", "attention_output", "attn_out"),
    "gate": (
        *("gate_proj", "w1", "up_proj", "w3", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "wi", "linear_fc1"),
        *("input_linear", "ff_proj"),
    ),
    "down": ("down_proj", "w2", "fc2", "dense_4h_to_h", "linear_fc2", "output_linear", "ff_out"),
    "column": ("q_b_proj", "kv_b_proj", "in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z"),
    "replicated": ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "fused_qkv_a_proj_with_mqa", "x_proj_bc"),
    "router": ("router", "shared_expert_gate", "gate"),
    "indexer": ("indexer", "weights_proj", "wq_b"),
}
_BY_MODULE = {module: role for role, modules in _ROLES.items() for module in modules}
_STACKED = {"gate_up_proj": "gate", "down_proj": "down", "gate_proj": "gate", "up_proj": "gate"}


def classify(name: str) -> Place:
    """Say what a tensor is by its name. What is not known is ``other``: replicated and counted whole."""
    match = _LAYER.search(name)
    layer = int(match.group(1)) if match else None
    if _UNUSED.search(name):
        return Place("unused", "weight", None)
    name = name.replace(".base_layer.", ".")
    if name.startswith("mtp.") or ".mtp." in name or ".mtp_block." in name:
        return Place("mtp", "weight", layer)
    if _ENCODERS.search(name) and not name.startswith(("model.language_model.", "language_model.")):
        return Place("vision", "weight", None)
    pieces = name.split(".")
    leaf = pieces[-1]
    module = pieces[-2] if len(pieces) > 1 else leaf
    part = "weight"
    if leaf in _SCALES or leaf.endswith(("_scale", "_scale_inv", "_scales", "_zeros")):
        part = "scale"
    elif leaf in _STATE:
        part, module = "state", leaf
    elif leaf == "bias" or leaf.endswith("_bias"):
        part = "bias"
    if leaf not in _PARTS and leaf not in _SCALES and leaf not in _STATE:
        module = leaf
        for stacked in _STACKED:
            if leaf.startswith(stacked):
                module = stacked
    if ".experts." in name or module.startswith("experts"):
        return Place("experts", part, layer)
    if "norm" in module or module.startswith("ln_") or module in ("layernorm", "kv_a_layernorm"):
        return Place("norm", part, layer)
    if "indexer" in pieces:
        return Place("indexer", part, layer)
    if part == "state":
        return Place("router" if module == "e_score_correction_bias" else "state", part, layer)
    role = _BY_MODULE.get(module, "")
    if module in ("embed_tokens", "wte") and layer is not None:
        role = "other"
    if module == "ff_out" and layer is None:
        role = "lm_head"
    if module == "output" and layer is not None:
        role = "o"
    if module == "gate" and layer is None:
        role = "other"
    if module.startswith("conv1d") or module in ("x_proj", "dt_proj"):
        role = "column"
    if module == "c_proj":
        role = "o" if "attn" in name else "down"
    return Place(role or "other", part, layer)


def group(tensors: Iterable[Tensor], layers: int) -> list[dict[str, Any]]:
    """Tensors of equal role, type and shape in one entry: count, bytes and the ranges of layers they lie in."""
    table: dict[tuple[str, str, str, tuple[int, ...]], dict[Optional[int], list[int]]] = {}
    for tensor in tensors:
        place = classify(tensor.name)
        role, layer = place.role, place.layer
        if layer is not None and layer >= layers:
            role, layer = ("mtp", None) if role != "vision" else ("vision", None)
        if role in ("mtp", "vision", "embed", "lm_head"):
            layer = None
        entry = table.setdefault((role, place.part, tensor.dtype, tensor.shape), {})
        counted = entry.setdefault(layer, [0, 0])
        counted[0] += 1
        counted[1] += tensor.bytes
    result: list[dict[str, Any]] = []
    for (role, part, dtype, shape), places in table.items():
        by_count: dict[int, list[int]] = {}
        for layer, (count, size) in places.items():
            if layer is None:
                result.append(_entry(role, part, dtype, shape, count=count, size=size))
            else:
                by_count.setdefault(count, []).append(layer)
        for count, members in by_count.items():
            size = sum(places[layer][1] for layer in members)
            entry_data = _entry(role, part, dtype, shape, count=count * len(members), size=size)
            entry_data["layers"] = _ranges(members)
            entry_data["per_layer"] = count
            result.append(entry_data)
    result.sort(key=lambda item: (item["role"], item["part"], item["dtype"], item["shape"], item.get("per_layer", 0)))
    return result


def _entry(role: str, part: str, dtype: str, shape: tuple[int, ...], *, count: int, size: int) -> dict[str, Any]:
    return {"role": role, "part": part, "dtype": dtype, "shape": list(shape), "count": count, "bytes": size}


def _ranges(numbers: list[int]) -> list[list[int]]:
    result: list[list[int]] = []
    for number in sorted(numbers):
        if result and number == result[-1][1] + 1:
            result[-1][1] = number
        else:
            result.append([number, number])
    return result
