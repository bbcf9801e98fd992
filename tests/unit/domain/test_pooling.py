"""Models that pool are told from models that generate, as the engine tells them."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.pooling import GENERATE, POOLING, task

NEW = (0, 19, 1)


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "GPT2LMHeadModel",
        "ChatGLMModel",
        "InternVLChatModel",
        "UltravoxModel",
        "LlamaModel",
        "Qwen2Model",
        "MistralModel",
        "MiniCPMV",
        "",
    ],
)
def test_models_with_a_language_head_generate(architecture):
    assert task(architecture, ["config.json"], NEW, {}) == GENERATE


@pytest.mark.parametrize(
    "architecture",
    [
        "BertModel",
        "XLMRobertaModel",
        "NomicBertModel",
        "RobertaForMaskedLM",
        "Qwen2ForSequenceClassification",
        "ModernBertForTokenClassification",
        "Qwen2ForRewardModel",
        "LlamaForRewardModeling",
        "Gemma3TextModel",
        "LlamaBidirectionalModel",
        "Qwen3Model",
        "ColPaliForRetrieval",
        "JinaVLForRanking",
        "HF_ColBERT",
    ],
)
def test_models_without_one_pool(architecture):
    assert task(architecture, ["config.json"], NEW, {}) == POOLING


def test_a_sentence_transformers_folder_pools_whatever_its_class_where_the_release_reads_it():
    files = ["config.json", "modules.json"]
    assert task("Qwen3ForCausalLM", files, NEW, {}) == POOLING
    assert task("Qwen3ForCausalLM", files, (0, 6, 3), {}) == GENERATE


@pytest.mark.parametrize(
    ("flag", "wish", "expected"),
    [
        ("--task", "embed", POOLING),
        ("--task", "classify", POOLING),
        ("--task", "transcription", GENERATE),
        ("--runner", "pooling", POOLING),
        ("--runner", "generate", GENERATE),
    ],
)
def test_the_users_word_decides(flag, wish, expected):
    other = "BertModel" if expected == GENERATE else "LlamaForCausalLM"
    assert task(other, [], NEW, {flag: wish}) == expected
    assert task(other, [], NEW, {flag: "auto"}) != expected


def test_an_encoder_pools_whatever_it_is_called():
    assert task("Unheard", [], NEW, {}, encoder_only=True) == POOLING
