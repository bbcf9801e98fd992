# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where models lie on a host."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

DOCUMENTATION = r"""
name: model_paths
short_description: Where models lie on a host
version_added: 0.1.0
author: The gpufleet.inference authors (@gpufleet)
description:
  - Gives the path of each model on the host, from the mapping of models and the directory of downloaded ones.
options:
  _input:
    description: The mapping of model names to sources, as in C(vllm_models_list).
    type: dict
    required: true
  directory:
    description: Directory of the models that do not name a path.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Show the paths
  ansible.builtin.debug:
    msg: "{{ vllm_models_list | gpufleet.inference.model_paths('/var/lib/vllm/models') }}"
"""

RETURN = r"""
_value:
  description: Model names to paths.
  type: dict
"""


def model_paths(models: Any, directory: str) -> dict[str, str]:
    """Names to absolute paths on the host."""
    found = to_native(models or {})
    if not isinstance(found, dict):
        raise AnsibleFilterError("vllm_models_list is not a mapping of model names to sources.")
    base = str(directory).rstrip("/")
    return {name: str((source or {}).get("path") or f"{base}/{name}") for name, source in sorted(found.items())}


class FilterModule:
    """The filter."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"model_paths": model_paths}
