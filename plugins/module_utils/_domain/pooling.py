# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether an instance generates tokens or pools its input into vectors and scores. Private to gpufleet.inference.

An engine that pools has no completions, so it is asked for an embedding when it must show that it is ready. The rule
is the engine's own (its model configuration, runner "auto"): the pooling module of a Sentence Transformers checkpoint
first, then the kind of the model class, for which its name stands.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Mapping, Tuple

GENERATE, POOLING = "generate", "pooling"

# Class names of models without a language head: encoders, embedders, classifiers, reward, ranking and retrieval models.
_POOLING_CLASS = re.compile(
    r"(?:ForTextEncoding|Classification|RewardModeling|ForRanking|ForRetrieval|ForMaskedLM|ColBERT|Model)$"
)
# Names that end in "Model" and that the engine serves with a class that generates: read out of the registry of 0.32.0,
# class by class. Without the files of Sentence Transformers they make tokens.
_GENERATES_ALL_THE_SAME = re.compile(
    r"(?:ChatModel|LMHeadModel|^ChatGLMModel|^UltravoxModel|^LlamaModel|^MistralModel|^Qwen2Model|^Gemma2Model"
    r"|^DeepseekV3BidirectionalModel|^MossAudioModel|^MiDashengLMModel|^Qwen2_5OmniModel)$"
)
# The file in which Sentence Transformers lists its modules; read for this choice in the sources from 0.8 on.
_MODULES = "modules.json"
_MODULES_SINCE = (0, 8, 0)
# `--task` until 0.12, `--runner` from 0.10.1 on; everything else that they may name pools.
_GENERATES = ("generate", "transcription", "draft")


def task(
    architecture: str,
    files: Iterable[str],
    release: Tuple[int, ...],
    values: Mapping[str, Any],
    *,
    encoder_only: bool = False,
) -> str:
    """``generate`` or ``pooling``: what the release makes of the model.

    architecture: class name in config.json. files: names in the model's folder. values: flags among extra_args.
    """
    for flag in ("--runner", "--task"):
        wish = str(values.get(flag) or "auto")
        if wish != "auto":
            return GENERATE if wish in _GENERATES else POOLING
    if release >= _MODULES_SINCE and _MODULES in files:
        return POOLING
    if encoder_only:
        return POOLING
    pools = _POOLING_CLASS.search(architecture) and not _GENERATES_ALL_THE_SAME.search(architecture)
    return POOLING if pools else GENERATE
