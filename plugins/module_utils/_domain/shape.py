# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a model is, read from its ``config.json``. Private to gpufleet.inference.

    parse_shape(config: Mapping[str, Any]) -> Shape        raises FleetError("bad_config", ...)

A Shape holds no bytes and knows no release: layer by layer it says what caches keys and values, what keeps a constant
state and what the feed-forward part looks like. ``weights``, ``kvcache`` and ``memory`` turn that into bytes. Families
are recognised by the keys they use; ``model_type`` only fills in what a class of models leaves unsaid (biases, norms,
defaults of keys that are commonly left out). Every number is bounded, so a hostile file costs neither time nor memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

MAX_LAYERS = 1024
MAX_DIMENSION = 1 << 24
MAX_LENGTH = 1 << 31
MAX_EXPERTS = 1 << 14

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE_NAMES = {"float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


# --- what a model is made of ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: one compressed vector per token is cached, whatever the number of heads."""

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    compressed: bool = True  # False: the engine expands it and caches full heads (MiniCPM 3)


@dataclass(frozen=True)
class Indexer:
    """The sparse attention's own small key cache (DeepSeek sparse attention)."""

    heads: int
    dim: int


@dataclass(frozen=True)
class Attention:
    """One attention layer. ``span``: full, sliding, chunked (both with ``window``), cross or encoder (no cache)."""

    span: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int = 0
    mla: Optional[Mla] = None
    indexer: Optional[Indexer] = None
    caches: bool = True  # False: reads the cache of an earlier layer
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""  # "", head (one weight per head dimension) or full (one per projection output)
    gate: bool = False  # the query projection also yields an output gate
    sinks: bool = False
    k_eq_v: bool = False  # the value projection is the key projection


@dataclass(frozen=True)
class State:
    """A mixer that keeps a constant amount of memory per sequence: mamba1, mamba2, gdn, kda, lightning, short_conv."""

    kind: str
    kernel: int
    inner: int  # width of the inner stream
    heads: int = 1
    head_dim: int = 0
    state_dim: int = 0
    groups: int = 1
    key_heads: int = 0
    key_dim: int = 0
    dt_rank: int = 0
    conv_bias: bool = False
    proj_bias: bool = False
    float32_state: bool = False
    inner_norms: bool = False
    gated_norm: bool = True


@dataclass(frozen=True)
class Mlp:
    """A feed-forward part; ``experts`` > 0 makes it a mixture. ``gated``: two projections in, one out."""

    intermediate: int
    gated: bool = True
    bias: bool = False
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    latent: int = 0  # experts work in this smaller width


@dataclass(frozen=True)
class Layer:
    attention: Optional[Attention]
    state: Optional[State]
    mlp: Optional[Mlp]
    norms: int = 2
    parallel_mlp: Optional[Mlp] = None  # a dense part beside the mixture


@dataclass(frozen=True)
class Rope:
    """One table of rotary factors: ``dim`` values per position for ``positions`` positions.

    ``element``: bytes per value where it is not the model's own type.
    """

    dim: int
    positions: int
    element: int = 0


@dataclass(frozen=True)
class Quantization:
    """How linear weights are stored. ``method`` as the engine names it; "" means not quantised."""

    method: str = ""
    bits: float = 16.0
    group: int = 0  # weights per scale; 0: per output channel; -1: per tensor
    block: tuple[int, ...] = ()
    symmetric: bool = True
    activation_bits: int = 16
    static_activation: bool = False
    ignored: tuple[str, ...] = ()
    kv_cache_bits: int = 16
    format: str = ""
    desc_act: bool = False
    expert_bits: float = 0.0  # experts have another width (4.25: fp4 with a scale per 32)


@dataclass(frozen=True)
class Vision:
    """The encoder of a multimodal model, as far as its config tells."""

    layers: int
    hidden: int
    intermediate: int
    patch: int
    image: int
    channels: int = 3
    gated: bool = False
    merge: int = 1
    out_hidden: int = 0
    bridges: int = 1  # projections into the text's width
    extra: int = 0  # parameters beside the blocks and the usual projection


@dataclass(frozen=True)
class Audio:
    """The encoder of sound. ``parameters``: of its blocks, convolutions and projection."""

    layers: int
    hidden: int
    parameters: int


@dataclass(frozen=True)
class Shape:
    """A model, ready for arithmetic. Widths in elements, lengths in tokens."""

    model_type: str
    architecture: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool
    dtype: str
    max_length: int  # what the engine derives; the upper bound of max_model_len
    original_length: int  # before rope scaling (LongRoPE models derive this one)
    ropes: tuple[Rope, ...] = ()
    quantization: Quantization = field(default_factory=Quantization)
    norm_bias: bool = False
    final_norm: bool = True
    logit_softcap: bool = False
    positions: int = 0  # learned position embeddings
    embed_width: int = 0  # factorised embedding (OPT 350m); 0: hidden
    encoder_only: bool = False
    multimodal: bool = False
    vision: Optional[Vision] = None
    audio: bool = False
    audio_encoder: Optional[Audio] = None
    mtp_layers: int = 0
    mtp_layer: Optional[Layer] = None
    per_layer_embedding: int = 0  # width of a second embedding per layer (Gemma 3n)
    extra_per_layer: int = 0  # parameters of a layer beside attention, feed-forward part and norms
    extra_once: int = 0  # parameters before the first layer beside the embedding
    per_layer_vocab: int = 0
    notes: tuple[str, ...] = ()  # "kv": this family's cache is not modelled, the layout is an estimate

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def state_layers(self) -> tuple[State, ...]:
        return tuple(layer.state for layer in self.layers if layer.state is not None)

    @property
    def heads(self) -> int:
        """The number the tensor parallel size must divide."""
        return max((a.heads for a in self.attention_layers), default=0)

    @property
    def is_hybrid(self) -> bool:
        return bool(self.state_layers) and bool(self.attention_layers)

    @property
    def uses_mla(self) -> bool:
        return any(a.mla is not None and a.mla.compressed for a in self.attention_layers)

    @property
    def experts(self) -> int:
        return max((layer.mlp.experts for layer in self.layers if layer.mlp is not None), default=0)

    @property
    def intermediate(self) -> int:
        """Widest feed-forward part of one token on one device: dense width, or the experts it visits plus shared."""
        best = 0
        for layer in self.layers:
            for mlp in (layer.mlp, layer.parallel_mlp):
                if mlp is not None:
                    best = max(best, mlp.intermediate if not mlp.experts else mlp.shared_intermediate)
        return best


# --- reading --------------------------------------------------------------------------------------------------------


def bad(message: str, hint: str = "Check that config.json belongs to this model and is complete.") -> FleetError:
    return FleetError("bad_config", message, hint)


class _Reader:
    """Typed, bounded access to one mapping; the first of several names that holds a value wins."""

    def __init__(self, data: Mapping[str, Any], fallback: Mapping[str, Any], where: str = "config.json") -> None:
        self.data = data
        self.fallback = fallback
        self.where = where

    def raw(self, *names: str) -> Any:
        for source in (self.data, self.fallback):
            for name in names:
                value = source.get(name)
                if value is not None:
                    return value
        return None

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def integer(self, *names: str, default: Optional[int] = None, low: int = 0, high: int = MAX_DIMENSION) -> int:
        value = self.raw(*names)
        if value is None:
            if default is None:
                raise bad(f"{self.where} lacks {names[0]}, which the size of the model depends on.")
            return default
        return _integer(value, f"{self.where}: {names[0]}", low, high)

    def number(self, *names: str, default: float = 0.0) -> float:
        value = self.raw(*names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad(f"{self.where}: {names[0]} should be a number, found {_shown(value)}.")
        return _finite(value, f"{self.where}: {names[0]}")

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.raw(*names)
        return default if value is None else bool(value)

    def text(self, *names: str, default: str = "") -> str:
        value = self.raw(*names)
        return value[:200] if isinstance(value, str) else default

    def mapping(self, *names: str) -> dict[str, Any]:
        value = self.raw(*names)
        return dict(value) if isinstance(value, Mapping) else {}

    def items(self, *names: str, high: int = MAX_LAYERS) -> list[Any]:
        value = self.raw(*names)
        if value is None:
            return []
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise bad(f"{self.where}: {names[0]} should be a list, found {_shown(value)}.")
        if len(value) > high:
            raise bad(f"{self.where}: {names[0]} has {len(value)} entries, more than the {high} any model has.")
        return list(value)

    def integers(self, *names: str, high: int = MAX_DIMENSION) -> list[int]:
        return [_integer(item, f"{self.where}: an entry of {names[0]}", 0, high) for item in self.items(*names)]


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, bool)) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _finite(value: float, what: str) -> float:
    try:
        result = float(value)
    except OverflowError as error:
        raise bad(f"{what} is beyond any model's size.") from error
    if not math.isfinite(result) or abs(result) > 1e15:
        raise bad(f"{what} is not a finite number.")
    return result


def _integer(value: Any, what: str, low: int, high: int) -> int:
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(f"{what} should be a whole number, found {_shown(value)}.")
    if not low <= value <= high:
        found = str(value) if abs(value) < 1 << 60 else "a number beyond any use"
        raise bad(f"{what} should lie between {low} and {high}, found {found}.")
    return value


# --- what classes of models leave unsaid --------------------------------------------------------------------------

_HF_DEFAULTS: dict[str, dict[str, Any]] = {
    # Values that a model class assumes when the key is absent; nested text parts often rely on them.
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
    "gemma2": {"sliding_window": 4096, "head_dim": 256, "num_key_value_heads": 4},
    "gemma": {"head_dim": 256},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "gemma3": {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3n_text": {"vocab_size": 262400, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
    "qwen2": {"vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen2_moe": {"num_experts_per_tok": 4},
    "phi3": {"vocab_size": 32064},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "deepseek_v2": {"n_shared_experts": 0},
    "gpt2": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "bamba": {"mamba_d_state": 256, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1},
}
_HF_DEFAULTS["gemma4_text"] = {"head_dim": 256, "sliding_window": 512}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TIED = _words(
    "gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4_text cohere cohere2 opt gpt2 bloom mpt falcon starcoder2 bert "
    "roberta xlm-roberta gpt_bigcode recurrent_gemma t5 bart whisper lfm2 lfm2_moe mamba "
    "smollm3 ernie4_5 ernie4_5_moe phi3small"
)
_QKV_BIAS = _words(
    "qwen qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text qwen2_audio phi opt gpt2 "
    "bloom gpt_neox gpt_bigcode codegen starcoder2 bert roberta xlm-roberta mllama_vision gpt_oss dream "
    "mimo whisper"
)
_O_BIAS = _words("phi opt gpt2 bloom gpt_neox gpt_bigcode starcoder2 bert roberta xlm-roberta gpt_oss whisper")
_MLP_BIAS = _words("phi opt gpt2 bloom gpt_neox gpt_bigcode codegen gptj starcoder2 bert roberta xlm-roberta whisper")
_UNGATED = _words(
    "phi opt gpt2 bloom gpt_neox gpt_bigcode codegen gptj starcoder2 falcon mpt bert roberta xlm-roberta nemotron "
    "nemotron_h nemotron_h_puzzle persimmon apertus arcee whisper"
)
_NORM_BIAS = _words(
    "phi opt gpt2 bloom gpt_neox gpt_bigcode codegen gptj starcoder2 falcon bert roberta xlm-roberta nemotron "
    "stablelm persimmon whisper"
)
_FOUR_NORMS = _words("gemma2 gemma3 gemma3_text gemma3n_text gemma4_text glm4 openpangu")
_ONE_NORM = _words("cohere cohere2 phi gptj codegen falcon")
_QK_NORM_HEAD = _words(
    "qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text qwen3_vl qwen3_vl_moe qwen3_omni_moe_text qwen3_next qwen3_5_text "
    "qwen3_5_moe_text qwen3_5 qwen3_5_moe gemma3 gemma3_text gemma3n_text gemma4_text exaone4 hunyuan_v1_dense "
    "hunyuan_v1_moe lfm2 lfm2_moe apertus bailing_moe_v2"
)
_QK_NORM_FULL = _words("olmo2 olmo3 olmoe minimax_m2 flex_olmo")
_ENCODERS = ("BertModel", "BertFor", "Roberta", "XLMRoberta", "ModernBert", "NomicBert", "GteModel", "GteNewModel")
_NO_ROPE = _words(
    "opt gpt2 bloom mpt bert roberta xlm-roberta gpt_bigcode jamba nemotron_h nemotron_h_puzzle mamba mamba2 "
    "falcon_mamba whisper"
)
_NESTED_MLP = ("ffn_hidden_size", "moe_num_experts", "moe_top_k")
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "language_model_config")


# --- the parser -----------------------------------------------------------------------------------------------------


def parse_shape(config: Mapping[str, Any]) -> Shape:
    """Read a parsed ``config.json``. Raises ``FleetError("bad_config")`` with the key and what was found."""
    if not isinstance(config, Mapping):
        raise bad(f"config.json should hold an object, found {_shown(config)}.")
    if not config:
        raise bad("config.json is empty.")
    try:
        return _parse(config)
    except FleetError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, OverflowError, AttributeError) as error:
        raise bad(f"config.json is not a description of a model this collection can read ({error}).") from error


def _parse(config: Mapping[str, Any]) -> Shape:
    outer = config
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        outer = thinker
    text: Mapping[str, Any] = outer
    nested = False
    for name in _TEXT_PARTS:
        part = outer.get(name)
        if isinstance(part, Mapping) and part:
            text, nested = part, True
            break
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, Sequence) and architectures else ""
    architecture = architecture[:200] if isinstance(architecture, str) else ""
    model_type = text.get("model_type") or config.get("model_type") or ""
    model_type = model_type[:100] if isinstance(model_type, str) else ""
    # A key that is left out has the class's default; one that is null has none.
    fallback = {key: value for key, value in _HF_DEFAULTS.get(model_type, {}).items() if key not in text}
    if nested:
        for name in ("vocab_size", "tie_word_embeddings", "torch_dtype", "dtype", "num_nextn_predict_layers"):
            if outer.get(name) is not None and text.get(name) is None:
                fallback[name] = outer[name]
    part = text.get("ffn_config")
    if isinstance(part, Mapping):  # DBRX nests what others keep at the top
        fallback.update({key: part[key] for key in _NESTED_MLP if part.get(key) is not None})
    reader = _Reader(text, fallback, "config.json (text part)" if nested else "config.json")
    hidden = reader.integer("hidden_size", "d_model", "n_embd", "n_embed", "dim", low=1, high=1 << 20)
    vocab = reader.integer("vocab_size", "padded_vocab_size", low=1, high=1 << 24)
    count = _layer_count(reader)
    multimodal = _is_multimodal(outer) or bool(_encoder_part(outer, model_type, "vision"))
    encoder_only = any(architecture.startswith(name) or name in architecture for name in _ENCODERS) or model_type in (
        "bert",
        "roberta",
        "xlm-roberta",
        "modernbert",
        "nomic_bert",
        "new",
    )
    layers = _layers(reader, model_type, hidden, count, encoder_only)
    second = reader.integer("hidden_size_per_layer_input", default=0, high=1 << 16)
    streams = reader.integer("altup_num_inputs", default=1, low=1, high=64)
    max_length, original = _lengths(reader, model_type)
    mtp = reader.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", default=0, high=64)
    return Shape(
        model_type=model_type,
        architecture=architecture,
        hidden=hidden,
        vocab=vocab,
        layers=layers,
        tied=reader.flag("tie_word_embeddings", default=model_type in _TIED),
        dtype=_dtype(reader, config),
        max_length=max_length,
        original_length=original,
        ropes=_ropes(reader, model_type, layers, max_length, original),
        quantization=_quantization(config, text),
        norm_bias=model_type in _NORM_BIAS,
        logit_softcap=reader.number("final_logit_softcapping") > 0 or reader.flag("logits_soft_cap"),
        positions=_learned_positions(reader, model_type),
        encoder_only=encoder_only,
        multimodal=multimodal,
        vision=_vision(_encoder_part(outer, model_type, "vision"), outer),
        audio=isinstance(outer.get("audio_config"), Mapping) or isinstance(outer.get("speech_config"), Mapping),
        audio_encoder=_audio(_encoder_part(outer, model_type, "audio"), hidden),
        mtp_layers=mtp,
        mtp_layer=layers[-1] if mtp else None,
        per_layer_embedding=second,
        # Gemma 3n: a gate and a projection of the second embedding, a low-rank bypass, and streams of the hidden state.
        extra_per_layer=2 * hidden * (second + reader.integer("laurel_rank", default=0, high=1 << 16)),
        extra_once=hidden * second * count + 2 * (streams - 1) * hidden * hidden,
        notes=("kv",) if reader.raw("compress_ratios") is not None or model_type.startswith("deepseek_v4") else (),
        per_layer_vocab=reader.integer("vocab_size_per_layer_input", default=0, high=1 << 24),
    )


def _is_multimodal(outer: Mapping[str, Any]) -> bool:
    names = (
        "vision_config",
        "audio_config",
        "vision_tower",
        "mm_vision_tower",
        "speech_config",
        "visual",
        "vit_config",
    )
    return any(outer.get(name) for name in names)


def _encoder_part(outer: Mapping[str, Any], model_type: str, sense: str) -> Mapping[str, Any]:
    """What the config says of the encoder of images (``vision``) or sound (``audio``); empty where there is none."""
    names = ("vision_config",) if sense == "vision" else ("audio_config", "speech_config")
    for name in names:
        part = outer.get(name)
        if isinstance(part, Mapping):
            return part
    if sense == "audio":
        processor = outer.get("audio_processor")
        part = processor.get("config") if isinstance(processor, Mapping) else None
        return outer if model_type == "whisper" else part if isinstance(part, Mapping) else {}
    processor = outer.get("img_processor")
    if isinstance(processor, Mapping) and isinstance(processor.get("name"), str):  # Phi-3 Vision
        return {"model_type": processor["name"]}
    embedding = outer.get("embd_layer")
    if isinstance(embedding, Mapping) and embedding.get("image_embd_layer") is not None:  # Phi-4 Multimodal
        return {"model_type": "siglip_vision_model"}
    return {"model_type": "clip_vision_model"} if model_type == "molmo" else {}


def _layer_count(reader: _Reader) -> int:
    pattern = reader.raw("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern and reader.raw("num_hidden_layers") is None:
        return min(len(pattern), MAX_LAYERS)
    if reader.raw("decoder_layers") is not None:
        return reader.integer("decoder_layers", low=1, high=MAX_LAYERS)
    return reader.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers", low=1, high=MAX_LAYERS)


def _dtype(reader: _Reader, config: Mapping[str, Any]) -> str:
    for value in (reader.raw("torch_dtype", "dtype"), config.get("torch_dtype"), config.get("dtype")):
        if isinstance(value, str):
            name = value.replace("torch.", "")
            name = _DTYPE_NAMES.get(name, name)
            if name in DTYPE_BYTES:
                return name
    return "bfloat16" if reader.raw("model_type") is not None else "float16"


def _learned_positions(reader: _Reader, model_type: str) -> int:
    if model_type in ("opt", "gpt2", "gpt_bigcode", "bert", "roberta", "xlm-roberta", "whisper"):
        extra = 2 if model_type == "opt" else 0
        return (
            reader.integer(
                "max_position_embeddings", "n_positions", "max_target_positions", default=1024, high=MAX_LENGTH
            )
            + extra
        )
    return 0


# --- layers ---------------------------------------------------------------------------------------------------------


def _layers(reader: _Reader, model_type: str, hidden: int, count: int, encoder_only: bool) -> tuple[Layer, ...]:
    kinds = _layer_kinds(reader, model_type, count)
    heads = reader.integer("num_attention_heads", "n_head", "num_heads", "n_heads", default=0, high=1 << 14)
    heads = reader.integer("decoder_attention_heads", default=heads, high=1 << 14)
    shared = reader.integer("num_kv_shared_layers", default=0, high=MAX_LAYERS)
    per_layer_kv = reader.integers("num_key_value_heads_per_layer")
    blocks = reader.items("block_configs")
    cache: dict[Any, Any] = {}
    layers: list[Layer] = []
    for index in range(count):
        kind = kinds[index]
        kv_override = per_layer_kv[index] if index < len(per_layer_kv) else 0
        block = blocks[index] if index < len(blocks) and isinstance(blocks[index], Mapping) else None
        moe = _is_moe(reader, model_type, index, kind)
        key = (kind, kv_override, moe, index >= count - shared, index if block is not None else -1)
        if key not in cache:
            cache[key] = _layer(
                reader,
                model_type,
                hidden,
                heads,
                kind,
                kv_override=kv_override,
                moe=moe,
                encoder_only=encoder_only,
                block=block,
            )
            if shared and index >= count - shared and cache[key].attention is not None:
                cache[key] = _without_cache(cache[key])
        layers.append(cache[key])
    if model_type == "whisper":
        return _with_cross_attention(reader, layers)
    if model_type.startswith("longcat_flash"):
        # Two attentions and two dense parts in each layer, the experts beside the first.
        dense = _mlp(reader, model_type, hidden, False)
        pairs = {id(one): (replace(one, mlp=dense, parallel_mlp=one.mlp), replace(one, mlp=dense)) for one in layers}
        return tuple(half for one in layers for half in pairs[id(one)])
    return tuple(layers)


def _with_cross_attention(reader: _Reader, layers: list[Layer]) -> tuple[Layer, ...]:
    """Each layer of the decoder also attends to the encoder's output, whose keys and values are cached."""
    window = reader.integer("max_source_positions", default=1500, low=1, high=MAX_LENGTH)
    crossing = [
        Layer(replace(layer.attention, span="cross", window=window), None, None, norms=1)
        for layer in layers
        if layer.attention is not None
    ]
    return (*layers, *crossing)


def _without_cache(layer: Layer) -> Layer:
    if layer.attention is None:
        return layer
    return replace(layer, attention=replace(layer.attention, caches=False))


def _layer_kinds(reader: _Reader, model_type: str, count: int) -> list[str]:
    """One word per layer: the span of its attention or the kind of its state, or parallel, hybrid, mlp, moe."""
    window = reader.raw("sliding_window", "sliding_window_size")
    linear = _linear_kind(reader, model_type)
    names = {
        "full_attention": "full",
        "attention": "full",
        "full": "full",
        "global": "full",
        "sliding_attention": "sliding",
        "sliding": "sliding",
        "local": "sliding",
        "local_attention": "sliding",
        "chunked_attention": "chunked",
        "linear_attention": linear,
        "mamba": linear,
        "mamba2": "mamba2",
        "recurrent": "rglru",
        "conv": "short_conv",
        "mlp": "mlp",
        "moe": "moe",
        "hybrid": "hybrid",
        "compressed_sparse_attention": "full",
        "heavily_compressed_attention": "full",
    }
    kinds: Optional[list[str]] = None
    listed = reader.items("layer_types", "layers_block_type", "block_types")
    if listed and len(listed) >= 1:
        if not all(isinstance(item, str) for item in listed):
            raise bad(f"{reader.where}: layer_types should name one kind per layer.")
        repeated = [listed[i % len(listed)] for i in range(count)]
        unknown = sorted({item[:40] for item in repeated if item not in names})
        if unknown:
            raise bad(
                f"{reader.where}: layer_types names {', '.join(unknown)[:120]}, which this collection cannot size."
            )
        kinds = [names[item] for item in repeated]
    pattern = reader.raw("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        letters = {"M": "mamba2", "*": "full", "-": "mlp", "E": "moe"}
        if any(letter not in letters for letter in pattern):
            raise bad(f"{reader.where}: hybrid_override_pattern may hold M, *, - and E only.")
        return [letters[pattern[i % len(pattern)]] for i in range(count)]
    if kinds is None:
        kinds = _kinds_by_family(reader, model_type, count, linear)
    if kinds is None:
        kinds = ["full"] * count
        if window is not None and _uniform_window(reader, model_type):
            kinds = ["sliding"] * count
            if model_type.startswith("qwen2") or model_type.startswith("qwen3"):
                first = reader.integer("max_window_layers", default=0, high=MAX_LAYERS)
                kinds = ["full" if i < first else "sliding" for i in range(count)] if first < count else kinds
    if window is None and reader.raw("attention_chunk_size") is None:
        kinds = ["full" if kind in ("sliding", "chunked") else kind for kind in kinds]
    return kinds


def _uniform_window(reader: _Reader, model_type: str) -> bool:
    if reader.raw("use_sliding_window") is not None:
        return reader.flag("use_sliding_window")
    return not model_type.startswith(("qwen2", "qwen3"))


def _linear_kind(reader: _Reader, model_type: str) -> str:
    if reader.raw("linear_num_value_heads") is not None:
        return "gdn"
    if model_type.startswith("minimax"):
        return "lightning"
    if reader.raw("mamba_dt_rank", "time_step_rank") is not None or model_type in ("jamba", "mamba", "falcon_mamba"):
        return "mamba1"
    return "mamba2"


def _kinds_by_family(reader: _Reader, model_type: str, count: int, linear: str) -> Optional[list[str]]:
    if model_type in ("mamba", "falcon_mamba"):
        return ["mamba1"] * count
    if model_type == "mamba2":
        return ["mamba2"] * count
    if model_type == "falcon_h1":
        return ["parallel"] * count
    interval = reader.integer("full_attention_interval", default=0, high=MAX_LAYERS)
    if interval and linear == "gdn":
        return ["full" if (i + 1) % interval == 0 else "gdn" for i in range(count)]
    if reader.raw("attn_layer_period") is not None:
        period = reader.integer("attn_layer_period", low=1, high=MAX_LAYERS)
        offset = reader.integer("attn_layer_offset", default=0, high=MAX_LAYERS)
        return ["full" if i % period == offset else linear for i in range(count)]
    if reader.raw("attn_layer_indices") is not None:
        chosen = set(reader.integers("attn_layer_indices"))
        return ["full" if i in chosen else linear for i in range(count)]
    if reader.raw("full_attn_idxs") is not None:
        chosen = set(reader.integers("full_attn_idxs"))
        return ["full" if i in chosen else "short_conv" for i in range(count)]
    if reader.raw("hybrid_layer_ids") is not None and model_type.startswith("zamba"):
        chosen = set(reader.integers("hybrid_layer_ids"))
        return ["hybrid" if i in chosen else "mamba2" for i in range(count)]
    if reader.raw("attn_type_list") is not None:
        kinds = reader.integers("attn_type_list")
        return ["full" if i >= len(kinds) or kinds[i] else "lightning" for i in range(count)]
    linear_config = reader.mapping("linear_attn_config")
    if linear_config:
        inner = _Reader(linear_config, {}, reader.where + ": linear_attn_config")
        full = set(inner.integers("full_attn_layers"))
        return ["full" if i + 1 in full else "kda" for i in range(count)]
    if reader.raw("hybrid_layer_pattern") is not None:
        listed = reader.integers("hybrid_layer_pattern")
        return ["sliding" if i < len(listed) and listed[i] else "full" for i in range(count)]
    step = reader.raw("sliding_window_pattern")
    if isinstance(step, str) and step:
        return ["sliding" if step[i % len(step)] == "L" and i != count - 1 else "full" for i in range(count)]
    if step is None:
        step = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "gpt_oss": 2}.get(model_type)
        step = {"gemma3n_text": 5, "gemma4_text": 6}.get(model_type, step)
    else:
        step = _integer(step, f"{reader.where}: sliding_window_pattern", 1, MAX_LAYERS)
    if step is not None and model_type != "cohere":
        return ["full" if (i + 1) % step == 0 else "sliding" for i in range(count)]
    if model_type.startswith("llama4"):
        no_rope = reader.integers("no_rope_layers")
        if no_rope:
            return ["chunked" if i >= len(no_rope) or no_rope[i] else "full" for i in range(count)]
        return ["full" if (i + 1) % 4 == 0 else "chunked" for i in range(count)]
    if reader.raw("global_attn_every_n_layers") is not None:
        every = reader.integer("global_attn_every_n_layers", low=1, high=MAX_LAYERS)
        return ["full" if i % every == 0 else "sliding" for i in range(count)]
    return None


def _is_moe(reader: _Reader, model_type: str, index: int, kind: str) -> bool:
    if kind in ("mlp", "parallel"):
        return False
    if kind == "moe":
        return True
    experts = _experts(reader)
    if model_type == "nemotron_h" or experts <= 1:
        return False
    if index < reader.integer("first_k_dense_replace", "num_dense_layers", default=0, high=MAX_LAYERS):
        return False
    if index in reader.integers("mlp_only_layers"):
        return False
    listed = reader.items("moe_layers")
    if listed:
        return index in listed
    text_list = reader.raw("moe_layers_enum")
    if isinstance(text_list, str) and text_list:
        return str(index) in text_list[:8192].split(",")
    freq = reader.raw("moe_layer_freq")
    if isinstance(freq, Sequence) and not isinstance(freq, str):
        return index < len(freq) and bool(freq[index])
    step = reader.integer("decoder_sparse_step", "interleave_moe_layer_step", default=1, high=MAX_LAYERS)
    if step > 1:
        return (index + 1) % step == 0
    if reader.raw("expert_layer_period") is not None:
        period = reader.integer("expert_layer_period", low=1, high=MAX_LAYERS)
        return index % period == reader.integer("expert_layer_offset", default=0, high=MAX_LAYERS)
    if isinstance(freq, int) and not isinstance(freq, bool) and freq > 1:
        return index % freq == 0
    interval = reader.integer("moe_layer_interval", default=1, high=MAX_LAYERS)
    start = _first_integer(reader, "moe_layer_start_index")
    if index < start:
        return False
    return interval <= 1 or (index + 1) % interval == 0


def _layer(
    reader: _Reader,
    model_type: str,
    hidden: int,
    heads: int,
    kind: str,
    *,
    kv_override: int,
    moe: bool,
    encoder_only: bool,
    block: Optional[Mapping[str, Any]],
) -> Layer:
    norms = 4 if model_type in _FOUR_NORMS else 1 if model_type in _ONE_NORM else 2
    attention: Optional[Attention] = None
    state: Optional[State] = None
    if kind in ("full", "sliding", "chunked", "parallel", "hybrid"):
        attention = _attention(
            reader, model_type, hidden, heads, kind, kv_override=kv_override, encoder_only=encoder_only
        )
    if kind in ("mamba1", "mamba2", "gdn", "kda", "lightning", "short_conv", "rglru"):
        state = _state(reader, model_type, hidden, heads, kind)
    elif kind in ("parallel", "hybrid"):
        state = _state(reader, model_type, hidden, heads, "mamba2")
    mlp: Optional[Mlp] = None
    alone = model_type in ("mamba", "mamba2", "falcon_mamba") or model_type.startswith(("nemotron_h", "zamba"))
    if kind in ("mlp", "moe") or not alone:
        mlp = _mlp(reader, model_type, hidden, moe)
    if model_type in ("mamba", "mamba2", "falcon_mamba") or model_type.startswith("nemotron_h"):
        norms = 1
    parallel = None
    if moe and model_type == "gemma4_text":
        parallel = _mlp(reader, model_type, hidden, False)
    if block is not None:
        return _puzzle_layer(block, attention, mlp, heads=heads, hidden=hidden, norms=norms)
    return Layer(attention=attention, state=state, mlp=mlp, norms=norms, parallel_mlp=parallel)


def _puzzle_layer(
    block: Mapping[str, Any],
    attention: Optional[Attention],
    mlp: Optional[Mlp],
    *,
    heads: int,
    hidden: int,
    norms: int,
) -> Layer:
    """A layer of a pruned model (Nemotron NAS): parts may be left out, or have their own width."""
    from dataclasses import replace

    part = block.get("attention")
    if isinstance(part, Mapping) and attention is not None:
        group = part.get("n_heads_in_group")
        if part.get("no_op") or part.get("replace_with_linear"):
            attention, norms = None, norms - 1
        elif group is not None:
            group = _integer(group, "block_configs: n_heads_in_group", 1, 1 << 14)
            attention = replace(attention, kv_heads=max(1, heads // group))
    part = block.get("ffn")
    if isinstance(part, Mapping) and mlp is not None:
        multiple = part.get("ffn_mult")
        if part.get("no_op") or part.get("replace_with_linear"):
            mlp, norms = None, norms - 1
        elif multiple is not None:
            if isinstance(multiple, bool) or not isinstance(multiple, (int, float)):
                raise bad("block_configs: ffn_mult should be a number.")
            width = int(2 * _finite(multiple, "block_configs: ffn_mult") * hidden / 3)
            mlp = replace(mlp, intermediate=_integer((width + 255) // 256 * 256, "ffn_mult", 0, MAX_DIMENSION))
    return Layer(attention=attention, state=None, mlp=mlp, norms=max(norms, 0))


def _attention(
    reader: _Reader,
    model_type: str,
    hidden: int,
    heads: int,
    kind: str,
    *,
    kv_override: int,
    encoder_only: bool,
) -> Attention:
    if heads < 1:
        raise bad(f"{reader.where} lacks num_attention_heads, which attention layers need.")
    kv_heads = kv_override or _kv_heads(reader, model_type, heads)
    head_dim = reader.integer("attention_head_dim" if model_type == "zamba2" else "head_dim", default=0, high=1 << 14)
    head_dim = head_dim or reader.integer("kv_channels", "attention_head_dim", default=0, high=1 << 14)
    if not head_dim:
        head_dim = hidden // heads
        if head_dim < 1:
            raise bad(f"{reader.where}: {heads} attention heads do not fit a hidden size of {hidden}.")
    v_head_dim = reader.integer("v_head_dim", default=0, high=1 << 14) or head_dim  # DeepSeek-OCR writes 0 for none
    span = "encoder" if encoder_only else kind if kind in ("sliding", "chunked") else "full"
    window = 0
    if span == "sliding":
        window = reader.integer("sliding_window", "sliding_window_size", low=1, high=MAX_LENGTH)
    elif span == "chunked":
        window = reader.integer("attention_chunk_size", "sliding_window", default=8192, low=1, high=MAX_LENGTH)
    if model_type == "gemma4_text" and span == "full":
        head_dim = v_head_dim = reader.integer("global_head_dim", default=head_dim, low=1, high=1 << 14)
        kv_heads = reader.integer("num_global_key_value_heads", default=kv_heads, low=1, high=1 << 14)
    if span == "sliding" and reader.raw("swa_num_key_value_heads") is not None:
        kv_heads = reader.integer("swa_num_key_value_heads", low=1, high=1 << 14)
    if kv_heads > heads:
        raise bad(f"{reader.where}: {kv_heads} key-value heads for {heads} attention heads.")
    mla: Optional[Mla] = None
    indexer: Optional[Indexer] = None
    expanded = model_type == "minicpm3"
    if reader.raw("kv_lora_rank") is not None and reader.integer("kv_lora_rank", high=1 << 16):
        mla = Mla(
            q_lora_rank=reader.integer("q_lora_rank", default=0, high=1 << 16),
            kv_lora_rank=reader.integer("kv_lora_rank", low=1, high=1 << 16),
            nope_dim=reader.integer("qk_nope_head_dim", default=128, high=1 << 14),
            rope_dim=reader.integer("qk_rope_head_dim", default=64, high=1 << 14),
            v_dim=reader.integer("v_head_dim", default=head_dim if expanded else 128, low=1, high=1 << 14),
            compressed=not expanded,
        )
        head_dim, v_head_dim = mla.nope_dim + mla.rope_dim, mla.v_dim
    if reader.raw("index_topk") is not None and reader.raw("index_head_dim") is not None:
        indexer = Indexer(
            reader.integer("index_n_heads", default=1, low=1, high=1 << 14),
            reader.integer("index_head_dim", low=1, high=1 << 14),
        )
    elif mla is None:
        v_head_dim = v_head_dim if reader.has("v_head_dim") or span == "full" else head_dim
    bias_default = model_type in _QKV_BIAS
    qkv_bias = reader.flag("attention_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias", default=bias_default)
    if model_type in _QKV_BIAS and model_type not in ("gpt_oss",):
        qkv_bias = reader.flag("qkv_bias", "use_bias", default=True)
    o_bias_key = reader.flag("attention_bias") and model_type in ("llama", "gpt_oss", "granite", "mistral")
    o_bias_key = o_bias_key or reader.flag("attention_out_bias")
    if model_type == "falcon":
        qkv_bias = reader.flag("bias")
    qk_norm = "head" if model_type in _QK_NORM_HEAD else "full" if model_type in _QK_NORM_FULL else ""
    if model_type in ("cohere", "cohere2", "stablelm", "persimmon", "glm4_moe", "dots1"):
        qk_norm = "head" if reader.flag("use_qk_norm", "qk_layernorm", default=model_type == "dots1") else ""
    gated = model_type.startswith(("qwen3_next", "qwen3_5")) and reader.flag("attn_output_gate", default=True)
    return Attention(
        span=span,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        window=window,
        mla=mla,
        indexer=indexer,
        qkv_bias=qkv_bias,
        o_bias=o_bias_key or (model_type in _O_BIAS and reader.flag("use_bias", default=True)),
        qk_norm=qk_norm,
        gate=gated,
        sinks=model_type == "gpt_oss",
        k_eq_v=reader.flag("attention_k_eq_v") and span == "full",
    )


def _kv_heads(reader: _Reader, model_type: str, heads: int) -> int:
    one_head = reader.flag("multi_query") and model_type in ("gpt_bigcode", "falcon", "RefinedWebModel")
    if one_head and not reader.flag("new_decoder_architecture"):
        return 1
    if reader.flag("multi_query_attention"):
        return reader.integer("multi_query_group_num", default=1, low=1, high=1 << 14)
    attn_config = reader.raw("attn_config")
    if isinstance(attn_config, Mapping):
        inner = _Reader(attn_config, {}, reader.where + ": attn_config")
        return inner.integer("kv_n_heads", default=heads, low=1, high=1 << 14)
    return reader.integer(
        "num_key_value_heads", "n_head_kv", "num_kv_heads", "num_attention_groups", default=heads, low=1, high=1 << 14
    )


def _state(reader: _Reader, model_type: str, hidden: int, heads: int, kind: str) -> State:
    big = 1 << 20
    kernel = reader.integer("mamba_d_conv", "conv_kernel", "conv_L_cache", "d_conv", default=4, low=1, high=256)
    if kind == "gdn":
        value_heads = reader.integer("linear_num_value_heads", low=1, high=1 << 14)
        value_dim = reader.integer("linear_value_head_dim", low=1, high=1 << 14)
        return State(
            kind="gdn",
            kernel=reader.integer("linear_conv_kernel_dim", default=4, low=1, high=256),
            inner=value_heads * value_dim,
            heads=value_heads,
            head_dim=value_dim,
            key_heads=reader.integer("linear_num_key_heads", low=1, high=1 << 14),
            key_dim=reader.integer("linear_key_head_dim", low=1, high=1 << 14),
            float32_state=reader.text("mamba_ssm_dtype") == "float32",
        )
    if kind == "kda":
        inner = _Reader(reader.mapping("linear_attn_config"), {}, reader.where + ": linear_attn_config")
        count = inner.integer("num_heads", default=heads or 1, low=1, high=1 << 14)
        dim = inner.integer("head_dim", default=128, low=1, high=1 << 14)
        return State(
            kind="kda",
            kernel=inner.integer("short_conv_kernel_size", default=4, low=1, high=256),
            inner=count * dim,
            heads=count,
            head_dim=dim,
            key_heads=count,
            key_dim=dim,
            float32_state=True,
        )
    if kind == "lightning":
        dim = reader.integer("head_dim", default=hidden // max(heads, 1) or 1, low=1, high=1 << 14)
        return State(
            kind="lightning", kernel=1, inner=heads * dim, heads=max(heads, 1), head_dim=dim, float32_state=True
        )
    if kind == "short_conv":
        inner_width = reader.integer("conv_dim", default=hidden, low=1, high=big)
        return State(kind="short_conv", kernel=kernel, inner=inner_width, conv_bias=reader.flag("conv_bias"))
    if kind == "rglru":
        width = reader.integer("lru_width", default=hidden, low=1, high=big)
        return State(kind="rglru", kernel=reader.integer("conv1d_width", default=4, low=1, high=256), inner=width)
    conv_bias = reader.flag("mamba_conv_bias", "use_conv_bias", "use_mamba_conv_bias", default=True)
    proj_bias = reader.flag("mamba_proj_bias", "use_bias", "add_bias_linear", default=False)
    if kind == "mamba1":
        expand = reader.number("mamba_expand", "expand", default=2.0)
        width = reader.integer("intermediate_size", default=int(expand * hidden), low=1, high=big)
        if reader.raw("mamba_expand") is not None:
            width = int(expand * hidden)
        return State(
            kind="mamba1",
            kernel=kernel,
            inner=_integer(width, f"{reader.where}: inner width of mamba", 1, big),
            state_dim=reader.integer("mamba_d_state", "state_size", "d_state", default=16, low=1, high=1 << 14),
            dt_rank=_dt_rank(reader, hidden),
            conv_bias=conv_bias,
            proj_bias=proj_bias,
            inner_norms=model_type == "jamba",
        )
    count = reader.integer("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads", default=0, high=1 << 14)
    dim = reader.integer("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim", default=64, low=1, high=1 << 14)
    if model_type.startswith("zamba") or not count:
        expand = reader.number("mamba_expand", "expand", default=2.0)
        dim = reader.integer("mamba_headdim", "mamba_head_dim", "mamba_d_head", "head_dim", default=64, low=1)
        count = max(1, int(expand * hidden) // dim)
    return State(
        kind="mamba2",
        kernel=kernel,
        inner=_integer(count * dim, f"{reader.where}: inner width of mamba", 1, big),
        heads=count,
        head_dim=dim,
        state_dim=reader.integer("ssm_state_size", "mamba_d_state", "state_size", "d_state", default=128, low=1),
        groups=reader.integer("n_groups", "mamba_n_groups", "mamba_ngroups", default=1, low=1, high=1 << 14),
        conv_bias=conv_bias,
        proj_bias=proj_bias,
        float32_state=reader.text(
            "mamba_ssm_cache_dtype", default="float32" if model_type.startswith("nemotron_h") else ""
        )
        == "float32",
        gated_norm=reader.flag("mamba_rms_norm", "rms_norm", default=True),
    )


def _dt_rank(reader: _Reader, hidden: int) -> int:
    value = reader.raw("mamba_dt_rank", "time_step_rank")
    if value is None or value == "auto":
        return -(-hidden // 16)
    return _integer(value, f"{reader.where}: mamba_dt_rank", 1, MAX_DIMENSION)


def _mlp(reader: _Reader, model_type: str, hidden: int, moe: bool) -> Mlp:
    gated = model_type not in _UNGATED
    bias = reader.flag("mlp_bias", default=model_type in _MLP_BIAS)
    intermediate = _intermediate(reader, model_type, hidden)
    if not moe:
        if model_type.startswith("llama4"):
            intermediate = reader.integer("intermediate_size_mlp", default=intermediate)
        if model_type == "granitemoehybrid" and reader.raw("num_local_experts") in (None, 0):
            intermediate = reader.integer("shared_intermediate_size", default=intermediate)
        return Mlp(intermediate=intermediate, gated=gated, bias=bias)
    experts = _experts(reader)
    width = _first_integer(reader, "moe_intermediate_size", "expert_ffn_hidden_size")
    if isinstance(reader.raw("moe_num_experts"), Sequence):
        # Ernie VL: as many experts again for images, of a width of their own.
        width = sum(reader.integers("moe_intermediate_size"))
    width = width or intermediate
    shared = reader.integer(
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        "share_expert_dims",
        default=0,
    )
    count = _first_integer(
        reader, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"
    )
    if count and not shared:
        shared_width = _first_integer(reader, "moe_shared_expert_intermediate_size")
        shared = shared_width * count if shared_width else count * width
    if model_type.startswith("llama4"):
        shared = width
    if shared > MAX_DIMENSION:
        raise bad(f"{reader.where}: the shared experts are wider than {MAX_DIMENSION}.")
    return Mlp(
        intermediate=shared,
        gated=gated,
        experts=experts,
        top_k=min(
            experts,
            _first_integer(
                reader, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k"
            )
            or 2,
        ),
        expert_intermediate=width,
        shared_intermediate=shared,
        shared_gate=bool(shared) and model_type.startswith(("qwen2_moe", "qwen3_next", "qwen3_5_moe")),
        router_bias=model_type == "gpt_oss",
        expert_bias=model_type == "gpt_oss",
        latent=reader.integer("moe_latent_size", default=0),
    )


def _experts(reader: _Reader) -> int:
    """Experts of a layer, 0 for none."""
    count = _first_integer(reader, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return _integer(count, f"{reader.where}: number of experts", 0, MAX_EXPERTS)


def _first_integer(reader: _Reader, *names: str) -> int:
    """Like ``integer``, but accepts a list by taking its largest entry (some models say it per layer)."""
    value = reader.raw(*names)
    if value is None:
        return 0
    if isinstance(value, Sequence) and not isinstance(value, str):
        entries = reader.integers(*names)
        return max(entries, default=0)
    return _integer(value, f"{reader.where}: {names[0]}", 0, MAX_DIMENSION)


def _intermediate(reader: _Reader, model_type: str, hidden: int) -> int:
    value = reader.raw("decoder_ffn_dim", "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "d_ff")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return max(reader.integers("intermediate_size", "ffn_hidden_size"), default=0)
    if value is None:
        ratio = reader.number("expansion_ratio", default=4.0)
        return _integer(int(ratio * hidden), f"{reader.where}: intermediate_size", 0, MAX_DIMENSION)
    width = _integer(value, f"{reader.where}: intermediate_size", 0, MAX_DIMENSION)
    if model_type in ("qwen", "molmo"):  # both count the two halves of the gated projection
        return width // 2
    if model_type == "lfm2" and reader.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        width = int(reader.number("block_ffn_dim_multiplier", default=1.0) * width)
        multiple = reader.integer("block_multiple_of", default=256, low=1)
        width = multiple * -(-width // multiple)
    return width


# --- length, rope, quantisation, vision -------------------------------------------------------------------------------


def _lengths(reader: _Reader, model_type: str) -> tuple[int, int]:
    """The length the engine derives from the config, and the one before scaling.

    Follows vLLM ``config._get_and_verify_max_len``: the smallest of the known keys, times the rope factor except for
    types that already state the long length; YaRN counts from the original length.
    """
    names = (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_target_positions",
        "max_sequence_length",
        "max_seq_length",
        "seq_len",
    )
    found = [reader.integer(name, low=1, high=MAX_LENGTH) for name in names if reader.raw(name) is not None]
    length = min(found) if found else 2048
    if not found and model_type in ("mamba", "mamba2", "falcon_mamba"):
        length = 1 << 20
    stated = reader.raw("model_max_length")
    if stated:  # Command R states the length it was made for here, beside a shorter one
        length = reader.integer("model_max_length", low=1, high=MAX_LENGTH)
    original = length
    scaling = reader.mapping("rope_scaling", "rope_parameters")
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    best = length
    for part in nested or [scaling]:
        kind = part.get("rope_type", part.get("type"))
        inner = _Reader(part, {}, f"{reader.where}: rope_scaling")
        if not isinstance(kind, str) or kind in ("default", "mrope", "su", "longrope", "llama3", "proportional"):
            if kind in ("su", "longrope"):
                original = reader.integer(
                    "original_max_position_embeddings",
                    default=inner.integer("original_max_position_embeddings", default=length, high=MAX_LENGTH),
                    low=1,
                    high=MAX_LENGTH,
                )
            continue
        if model_type.startswith("gemma3"):
            continue
        factor = inner.number("factor", default=1.0)
        base = length
        if kind == "yarn":
            base = inner.integer("original_max_position_embeddings", default=length, low=1, high=MAX_LENGTH)
            original = base
        best = max(best, int(base * factor)) if kind != "yarn" else int(base * factor)
    return max(1, min(best, MAX_LENGTH)), original


def _ropes(reader: _Reader, model_type: str, layers: tuple[Layer, ...], length: int, original: int) -> tuple[Rope, ...]:
    """The rotary tables a rank keeps: one per distinct rope, ``positions x rotary dimensions`` values.

    Scaled ropes hold the scaled number of positions (linear scaling: factor times the stated length).
    """
    if model_type in _NO_ROPE or reader.text("position_embedding_type") in ("nope", "learned", "absolute", "alibi"):
        return ()
    attention = next((layer.attention for layer in layers if layer.attention is not None), None)
    if attention is None or attention.span == "encoder":
        return ()
    scaling = reader.mapping("rope_scaling", "rope_parameters")
    partial = reader.number("partial_rotary_factor", "rotary_pct", default=0.0)
    if not partial:
        value = scaling.get("partial_rotary_factor")
        partial = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 1.0
    dim = attention.mla.rope_dim if attention.mla is not None else int(attention.head_dim * min(max(partial, 0.0), 1.0))
    stated = reader.integer("max_position_embeddings", "n_positions", "seq_length", default=length, high=MAX_LENGTH)
    kind = scaling.get("rope_type", scaling.get("type"))
    positions = stated
    inner = _Reader(scaling, {}, f"{reader.where}: rope_scaling")
    if kind in ("linear", "dynamic"):
        positions = min(int(stated * inner.number("factor", default=1.0)), MAX_LENGTH)
    elif kind == "yarn":
        positions = length
    ropes = [Rope(dim, positions, 4 if model_type == "gpt_oss" else 0)]
    if model_type.startswith("gemma3"):
        ropes.append(Rope(dim, stated))
    return tuple(ropes)


def _quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> Quantization:
    """The checkpoint's own quantisation, from ``quantization_config`` or ``compression_config``."""
    raw = None
    for source in (config, text):
        for name in ("quantization_config", "compression_config"):
            value = source.get(name)
            if isinstance(value, Mapping) and value:
                raw = value
                break
        if raw is not None:
            break
    if raw is None:
        return Quantization()
    reader = _Reader(raw, {}, "config.json: quantization_config")
    method = reader.text("quant_method", default="").lower().replace("_", "-")
    algorithm = reader.text("quant_algo").upper()
    nested = reader.mapping("quantization")
    if nested and not algorithm:
        algorithm = _Reader(nested, {}, reader.where).text("quant_algo").upper()
    ignored = _left_alone(reader)
    inner = _Reader(nested, {}, reader.where)
    ignored = ignored or _left_alone(inner)
    kv_bits = _kv_bits(reader.raw("kv_cache_scheme"), reader.raw("kv_cache_quant_algo"))
    if kv_bits == 16:
        kv_bits = _kv_bits(None, inner.raw("kv_cache_quant_algo"))
    if algorithm or method in ("modelopt", "modelopt-fp4", "modelopt-mixed"):
        if "FP4" in algorithm or method == "modelopt-fp4":
            return Quantization("nvfp4", 4.0, 16, (), True, 4, True, ignored, kv_bits, algorithm)
        if "FP8" in algorithm:
            return Quantization("modelopt-fp8", 8.0, -1, (), True, 8, True, ignored, kv_bits, algorithm)
        return Quantization("modelopt", 8.0, -1, (), True, 8, True, ignored, kv_bits, algorithm or method)
    if method in ("compressed-tensors", "compressed-tensor") or reader.raw("config_groups") is not None:
        return _compressed_tensors(reader, ignored, kv_bits)
    if method in ("awq", "gptq", "auto-round", "awq-marlin", "gptq-marlin", "autoround", "intel/auto-round"):
        bits = reader.integer("bits", "w_bit", default=4, low=1, high=16)
        group = reader.raw("group_size", "q_group_size")
        size = 128 if group is None else _integer(group, f"{reader.where}: group_size", -1, MAX_DIMENSION)
        zero = reader.flag("zero_point") if method.startswith("awq") else True
        base = "awq" if method.startswith("awq") else "gptq"
        return Quantization(
            base, float(bits), max(size, 0), (), not zero, 16, False, ignored, kv_bits, method, reader.flag("desc_act")
        )
    if method in ("fp8", "fbgemm-fp8", "deepseek-v4-fp8", "fp8-block"):
        block = tuple(reader.integers("weight_block_size"))[:2]
        static = reader.text("activation_scheme") == "static"
        small = text.get("expert_dtype") == "fp4" or text.get("model_type") == "deepseek_v4"
        return Quantization(
            "fp8",
            8.0,
            0 if block else -1,
            block,
            True,
            8,
            static,
            ignored,
            kv_bits,
            method,
            expert_bits=4.25 if small else 0.0,
        )
    if method == "mxfp4":
        return Quantization("mxfp4", 4.0, 32, (), True, 16, False, ignored, kv_bits, method)
    if method in ("bitsandbytes", "bnb"):
        if reader.flag("load_in_8bit", "_load_in_8bit") and not reader.flag("load_in_4bit", "_load_in_4bit"):
            return Quantization("bitsandbytes", 8.0, 0, (), True, 8, False, ignored, kv_bits, "int8")
        return Quantization("bitsandbytes", 4.0, 64, (), True, 16, False, ignored, kv_bits, "nf4")
    bits_raw = reader.raw("bits", "nbits", "weight_bits")
    bits_value = 8.0
    if isinstance(bits_raw, (int, float)) and not isinstance(bits_raw, bool) and 1 <= bits_raw <= 16:
        bits_value = float(bits_raw)
    return Quantization(method or "unknown", bits_value, 128, (), True, 16, False, ignored, kv_bits, method)


def _left_alone(reader: _Reader) -> tuple[str, ...]:
    """Names or patterns of modules that stay as they are, in the words of each method."""
    names = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
    found = [item for item in reader.items(*names, high=1 << 16) if isinstance(item, str)]
    for name, change in reader.mapping("extra_config").items():  # AutoRound: other bits for some modules
        bits = change.get("bits") if isinstance(change, Mapping) else None
        if isinstance(bits, int) and bits >= 16:
            found.append(name)
    found.extend(name[2:] for name in reader.mapping("dynamic") if name.startswith("-:"))  # GPTQModel: left out
    return tuple(item[:200] for item in found[: 1 << 16])


def _kv_bits(scheme: Any, algorithm: Any) -> int:
    if isinstance(scheme, Mapping):
        bits = scheme.get("num_bits")
        if isinstance(bits, int) and not isinstance(bits, bool) and bits == 8:
            return 8
    if isinstance(algorithm, str) and "FP8" in algorithm.upper():
        return 8
    return 16


def _smaller_part(group: Mapping[str, Any]) -> bool:
    """Whether a group is for something else than the feed-forward part, which holds most of a model's weights."""
    targets = group.get("targets")
    names = [item for item in targets if isinstance(item, str)] if isinstance(targets, Sequence) else []
    return not any(word in name for name in names[:1000] for word in ("mlp", "expert", "ffn", "feed_forward"))


def _compressed_tensors(reader: _Reader, ignored: tuple[str, ...], kv_bits: int) -> Quantization:
    groups = reader.mapping("config_groups")
    form = reader.text("format")
    for group in sorted((one for one in groups.values() if isinstance(one, Mapping)), key=_smaller_part):
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            continue
        inner = _Reader(weights, {}, reader.where + ": weights")
        bits = inner.integer("num_bits", default=8, low=1, high=16)
        strategy = inner.text("strategy")
        kind = inner.text("type")
        activations = group.get("input_activations")
        activation_bits, static = 16, False
        if isinstance(activations, Mapping):
            activation_bits = _Reader(activations, {}, reader.where).integer("num_bits", default=16, low=1, high=16)
            static = activations.get("dynamic") is False
        if kind == "float" and bits == 4:
            return Quantization("nvfp4", 4.0, 16, (), True, activation_bits, static, ignored, kv_bits, form)
        size = inner.raw("group_size")
        per_group = _integer(size, f"{reader.where}: group_size", -1, MAX_DIMENSION) if size is not None else 0
        if strategy == "tensor":
            per_group = -1
        elif strategy == "channel" or per_group < 0:
            per_group = 0
        block = tuple(inner.integers("block_structure"))[:2] if strategy == "block" else ()
        symmetric = inner.flag("symmetric", default=True)
        return Quantization(
            "compressed-tensors",
            float(bits),
            per_group,
            block,
            symmetric,
            activation_bits,
            static,
            ignored,
            kv_bits,
            form,
        )
    return Quantization("compressed-tensors", 16.0, 0, (), True, 16, False, ignored, kv_bits, form)


def _vision(raw: Mapping[str, Any], outer: Mapping[str, Any]) -> Optional[Vision]:
    if not raw:
        return None
    # Sizes that a kind of encoder assumes when the config leaves them out.
    defaults = {
        "siglip_vision_model": (27, 1152, 4304, 14, 896),
        "clip_vision_model": (24, 1024, 4096, 14, 336),
        "pixtral": (24, 1024, 4096, 16, 1024),
    }
    kind = raw.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    if kind == "gemma3n_vision":  # a convolutional network of 294 million parameters that says nothing but its width
        return Vision(0, 2048, 0, 1, 0, extra=294_000_000)
    layers, width, inner, patch, image = defaults.get(kind, (0, 0, 0, 14, 0))
    reader = _Reader(raw, {}, "config.json: vision_config")
    try:
        layers = reader.integer(
            "num_hidden_layers", "depth", "layers", "vt_num_hidden_layers", default=layers, high=1024
        )
        layers += reader.integer("num_global_layers", default=0, high=1024)
        # Qwen2-VL calls the encoder's width embed_dim and the text's hidden_size.
        width = reader.integer("embed_dim", "hidden_size", "width", "vt_hidden_size", default=width, high=1 << 16)
        ratio = reader.number("mlp_ratio", default=4.0)
        inner = reader.integer(
            "intermediate_size", "vt_intermediate_size", default=inner or int(ratio * width), high=1 << 18
        )
        patch = reader.integer("patch_size", "spatial_patch_size", default=patch, low=1, high=1024)
        image = reader.integer("image_size", default=image, high=1 << 16)
        merge = reader.integer("spatial_merge_size", default=1, low=1, high=64)
        out = reader.integer("out_hidden_size", default=0, high=1 << 20)
        if kind == "qwen2_vl":
            out = out or reader.integer("hidden_size", default=0, high=1 << 20)
        tiles = reader.integer("max_num_tiles", default=0, high=1024)
        joined = reader.integer("vision_output_dim", default=0, high=1 << 20) if tiles else 0
        bridges = 1 + len(reader.items("deepstack_visual_indexes"))
    except FleetError:
        return None
    if not layers or not width:
        return None
    extra = 0
    if kind.startswith("glm4v") and out:
        # Blocks as wide as the text; the merger is a gated layer of intermediate_size on top of a convolution.
        inner, extra = out, out * out + 3 * out * inner - (width * merge * merge) ** 2
    elif tiles:
        # Llama 3.2: a position table per arrangement of tiles, and the outputs of several layers joined.
        extra = 9 * tiles * ((image // patch) ** 2 + 1) * width + max(0, joined - width) * (_text_width(outer) or width)
    return Vision(
        layers=layers,
        hidden=width,
        intermediate=inner,
        patch=patch,
        image=image,
        gated=kind in ("qwen2_5_vl", "pixtral") or kind.startswith("glm4v") or reader.text("hidden_act") == "silu",
        merge=merge,
        out_hidden=out,
        bridges=bridges,
        extra=extra,
    )


def _text_width(outer: Mapping[str, Any]) -> int:
    text = outer.get("text_config")
    return _Reader(text, {}).integer("hidden_size", default=0, high=1 << 20) if isinstance(text, Mapping) else 0


def _audio(raw: Mapping[str, Any], hidden: int) -> Optional[Audio]:
    """A Whisper-like encoder (transformer blocks behind two convolutions) or a conformer."""
    if not raw:
        return None
    reader = _Reader(raw, {}, "config.json: audio_config")
    try:
        layers = reader.integer(
            "encoder_layers",
            "num_hidden_layers",
            "conf_num_hidden_layers",
            "num_layers",
            "num_blocks",
            default=0,
            high=1024,
        )
        width = reader.integer("d_model", "hidden_size", "hidden_dim", "attention_dim", default=0, high=1 << 16)
        inner = reader.integer("encoder_ffn_dim", "intermediate_size", "linear_units", default=4 * width, high=1 << 18)
        mels = reader.integer("num_mel_bins", default=128, high=1 << 12)
    except FleetError:
        return None
    if not layers or not width:
        return None
    if reader.raw("conf_num_hidden_layers", "conv_kernel_size", "conf_conv_kernel_size", "num_blocks") is not None:
        # Two feed-forward halves, attention, and a convolution between two projections.
        block = 2 * 2 * width * inner + 4 * width * width + 3 * width * width
    else:
        block = 4 * width * width + 2 * width * inner
    stem = 3 * width * (mels + width) + 1500 * width
    return Audio(layers, width, layers * block + stem + width * hidden)
