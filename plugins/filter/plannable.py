# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which instances can be planned with the models that are on a host."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

DOCUMENTATION = r"""
name: plannable
short_description: Which instances can be planned with the models that are on a host
version_added: 0.1.0
author: The gpufleet.inference authors (@gpufleet)
description:
  - Leaves out the instances whose model is still to be fetched and was not told of by its hub (an archive, or a hub
    that gives no answer now). A model that should be on the host at its path and is
    not, or is broken, stays in, so that the plan refuses it.
options:
  _input:
    description: The instances, as in C(vllm_instances_list).
    type: list
    elements: dict
    required: true
  models:
    description: The models and their sources, as in C(vllm_models_list).
    type: dict
    required: true
  facts:
    description: The model facts, as P(gpufleet.inference.model_facts#module) returns them.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Plan what can be planned
  gpufleet.inference.vllm_plan:
    models: "{{ read.models }}"
    instances: "{{ vllm_instances_list | gpufleet.inference.plannable(vllm_models_list, read.models) }}"
"""

RETURN = r"""
_value:
  description: The instances that stay.
  type: list
  elements: dict
"""


def plannable(instances: Any, models: Any, facts: Any) -> Any:
    """Instances without those whose model is still to be fetched and not known."""
    given, sources, read = to_native(instances or []), to_native(models or {}), to_native(facts or {})
    if not isinstance(given, list) or not isinstance(sources, dict):
        return given

    def fetched_later(model: Any) -> bool:
        source = sources.get(model)
        missing = any(
            finding.get("code") == "model_missing" for finding in (read.get(model) or {}).get("findings") or []
        )
        return isinstance(source, dict) and not source.get("path") and missing

    return [entry for entry in given if not (isinstance(entry, dict) and fetched_later(entry.get("model")))]


class FilterModule:
    """The filter."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"plannable": plannable}
