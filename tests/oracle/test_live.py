"""Our arithmetic against the code of an installed vLLM, architecture by architecture.

The engine builds each model's real class on the meta device and sizes its cache; nothing is loaded or started.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import kvcache, weights
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import parse_shape

VERSION = (0, 32, 0)
AVAILABLE = 8 << 30
BLOCK = 32  # the CPU's attention takes multiples of 32 where windows slide
BASE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOCAL = ["sliding_attention"] * 3 + ["full_attention"]
# What each family's config says beyond the base. The first three run in `make test`.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "sliding_window": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "Qwen2ForCausalLM": {"model_type": "qwen2", "use_sliding_window": False},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 128},
    "Qwen2MoeForCausalLM": {
        "model_type": "qwen2_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 2048,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "MiniMaxM2ForCausalLM": {
        "model_type": "minimax_m2",
        "intermediate_size": 512,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "use_qk_norm": True,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "Olmo3ForCausalLM": {"model_type": "olmo3", "sliding_window": 1024, "layer_types": LOCAL * 2},
    "Exaone4ForCausalLM": {"model_type": "exaone4", "sliding_window": 1024, "layer_types": LOCAL * 2},
    "StableLmForCausalLM": {
        "model_type": "stablelm",
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": False,
    },
    "SeedOssForCausalLM": {
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 64,
    },
    "OPTForCausalLM": {
        "model_type": "opt",
        "ffn_dim": 4096,
        "intermediate_size": None,
        "num_key_value_heads": None,
        "word_embed_proj_dim": 1024,
        "do_layer_norm_before": True,
        "activation_function": "relu",
    },
    "FalconH1ForCausalLM": {
        "model_type": "falcon_h1",
        "head_dim": 64,
        "mamba_d_conv": 4,
        "mamba_d_state": 64,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_ssm": 2048,
        "mamba_expand": 2,
        "mamba_rms_norm": False,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "attention_bias": False,
    },
    "Mamba2ForCausalLM": {
        "model_type": "mamba2",
        "intermediate_size": None,
        "num_heads": 32,
        "head_dim": 64,
        "state_size": 64,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "use_conv_bias": True,
        "use_bias": False,
        "rms_norm": True,
        "residual_in_fp32": True,
        "tie_word_embeddings": False,
    },
    "GPTNeoXForCausalLM": {
        "model_type": "gpt_neox",
        "num_key_value_heads": 16,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "hidden_act": "gelu",
        "attention_bias": True,
    },
    "NemotronForCausalLM": {"model_type": "nemotron", "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "OlmoeForCausalLM": {
        "model_type": "olmoe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "num_key_value_heads": 16,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    "ArceeForCausalLM": {"model_type": "arcee", "hidden_act": "relu2", "mlp_bias": False, "attention_bias": False},
    "SmolLM3ForCausalLM": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0] * 2, "use_sliding_window": False},
    "Ernie4_5ForCausalLM": {"model_type": "ernie4_5", "use_bias": False, "head_dim": 64},
    "Ernie4_5_MoeForCausalLM": {
        "model_type": "ernie4_5_moe",
        "use_bias": False,
        "moe_num_experts": 16,
        "moe_k": 4,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 512,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 7,
        "moe_layer_interval": 1,
        "moe_capacity": [64, 64, 64],
    },
    "HunYuanDenseV1ForCausalLM": {"model_type": "hunyuan_v1_dense", "use_qk_norm": True, "head_dim": 64},
    "GraniteMoeForCausalLM": {
        "model_type": "granitemoe",
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "attention_multiplier": 0.01,
        "embedding_multiplier": 12,
        "logits_scaling": 16,
        "residual_multiplier": 0.22,
    },
    "Lfm2MoeForCausalLM": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "num_dense_layers": 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "norm_eps": 1e-5,
        "conv_dim": 1024,
    },
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        "head_dim": 256,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 1024},
    "Phi3ForCausalLM": {"model_type": "phi3", "sliding_window": 1023},
    "PhiForCausalLM": {
        "model_type": "phi",
        "num_key_value_heads": 16,
        "partial_rotary_factor": 0.5,
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
    },
    "GemmaForCausalLM": {"model_type": "gemma", "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
    "GraniteForCausalLM": {
        "model_type": "granite",
        "tie_word_embeddings": True,
        "attention_multiplier": 0.01,
        "embedding_multiplier": 12,
        "logits_scaling": 16,
        "residual_multiplier": 0.22,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "Cohere2ForCausalLM": {
        "model_type": "cohere2",
        "sliding_window": 1024,
        "layer_types": LOCAL * 2,
        "logit_scale": 0.25,
    },
    "Olmo2ForCausalLM": {"model_type": "olmo2"},
    "Glm4ForCausalLM": {
        "model_type": "glm4",
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "head_dim": 64,
    },
    "Starcoder2ForCausalLM": {
        "model_type": "starcoder2",
        "sliding_window": 1024,
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "Lfm2ForCausalLM": {
        "model_type": "lfm2",
        "full_attn_idxs": [2, 5],
        "layer_types": ["conv", "conv", "full_attention"] * 2 + ["conv", "conv"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "conv_dim": 1024,
        "block_dim": 1024,
        "block_ff_dim": 2816,
        "tie_embedding": True,
    },
}
SHORT = list(FAMILIES)[:3]
# The CPU keeps constant states in float32 and pads them otherwise: only the parameters of these are compared.
STATES = ("FalconH1ForCausalLM", "Mamba2ForCausalLM")


def config(name: str) -> dict[str, Any]:
    merged = {**BASE, "architectures": [name], **FAMILIES[name]}
    return {key: value for key, value in merged.items() if value is not None}


def question(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "config": config(name),
        "available": AVAILABLE,
        "max_model_len": 4096,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "block_size": BLOCK,
    }


def ask(python: str, names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """All answers in one process: importing the engine takes longer than asking it."""
    questions = folder / "questions.json"
    questions.write_text(json.dumps([question(name) for name in names]))
    script = Path(__file__).with_name("ask_vllm.py")
    environment = {**os.environ, "PYTHONPATH": "", "HOME": str(folder)}
    done = subprocess.run(
        [python, str(script), str(questions)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=240 + 120 * len(names),
        env=environment,
        cwd=folder,
    )
    answers = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return {found["id"]: found for found in answers}


def differences(name: str, answer: dict[str, Any]) -> list[str]:
    """Where our figures leave the engine's; empty when all are equal."""
    if "failed" in answer:
        return [f"{name}: the engine could not build it: {answer['failed']}"]
    shape = parse_shape(config(name))
    estimate = weights.rank_weights(shape, None, version=VERSION)
    ours = estimate.bytes - sum(estimate.parts.get(part, 0) for part in ("rope", "absorbed", "rounding"))
    found = [] if ours == answer["param_bytes"] else [f"{name}: parameters {ours}, engine {answer['param_bytes']}"]
    if name in STATES:
        return found
    settings = kvcache.Settings(
        block_size=BLOCK,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
    )
    capacity = kvcache.layout(shape, VERSION, settings).capacity(AVAILABLE, 4096)
    mine = (capacity.blocks, capacity.tokens, round(capacity.concurrency, 6))
    theirs = (answer["blocks"], int(answer["capacity"][0]), round(answer["capacity"][1], 6))
    return found if mine == theirs else [*found, f"{name}: blocks, tokens, concurrency {mine}, engine {theirs}"]


def test_three_architectures_equal_the_installed_engine(vllm_python: str, tmp_path: Path) -> None:
    answers = ask(vllm_python, SHORT, tmp_path)
    assert [line for name in SHORT for line in differences(name, answers[name])] == []


@pytest.mark.long
def test_every_architecture_equals_the_installed_engine(vllm_python: str, tmp_path: Path) -> None:
    answers = ask(vllm_python, list(FAMILIES), tmp_path)
    assert len(answers) >= 12
    assert [line for name in FAMILIES for line in differences(name, answers[name])] == []
