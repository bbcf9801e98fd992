#!/usr/bin/python
# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_facts
short_description: Read what the files of models say about them
version_added: 0.1.0
author:
  - The gpufleet.inference authors (@gpufleet)
description:
  - Reads C(config.json) and the headers of the weights of all models of a host in one call. Tensors are never read.
  - A model that is still to be fetched from a hub is read there, its configuration and the headers of its weights only.
  - What is missing or broken is a finding of that model, never a failure, so that one bad model hides no other.
attributes:
  check_mode:
    support: full
    description: Changes nothing.
  diff_mode:
    support: none
    description: Changes nothing.
options:
  models:
    description: Model names to the folders they lie in on the host.
    type: dict
    required: true
  sources:
    description:
      - Model names to their sources, as in C(vllm_models_list). Models with a C(repo) whose folder is not on the host
        yet are read from the hub.
    type: dict
    default: {}
  endpoint:
    description: Address of the hub for sources that name none.
    type: str
    default: ''
  token_file:
    description: File on the host with the hub token for sources that name none. It is read there and never shown.
    type: path
  user:
    description: The user that must be able to read all files. When it does not exist yet, all users must be.
    type: str
    default: vllm
"""

EXAMPLES = r"""
- name: Read two models
  gpufleet.inference.model_facts:
    models:
      llama-8b: /srv/models/Llama-3.1-8B-Instruct
      mistral-7b: /var/lib/vllm/models/mistral-7b
  register: models
"""

RETURN = r"""
models:
  description: Facts of the models by name.
  returned: always
  type: dict
  contains:
    path:
      description: Folder of the model.
      type: str
    config:
      description: Content of C(config.json); null when it is missing or broken.
      type: dict
    generation_config:
      description: Content of C(generation_config.json); null when there is none.
      type: dict
    files:
      description: Names and sizes in bytes.
      type: list
      elements: dict
    weights:
      description:
        - C(format) (C(safetensors), C(gguf), C(bin), C(broken) or C(none)), C(total_bytes), C(by_dtype), and C(groups)
          of tensors with equal role, type and shape.
      type: dict
    digest:
      description: SHA-256 over the configuration, the headers and the sizes.
      type: str
    readable_by:
      description: Whether the user may read all files, and the first that it may not.
      type: dict
    estimated:
      description: Whether the size of the weights must be derived from the configuration.
      type: bool
    findings:
      description: What is wrong with the model.
      type: list
      elements: dict
findings:
  description: The findings of all models.
  returned: always
  type: list
  elements: dict
"""

from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._host import model_preview, model_reader, model_store
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule


def converge(fleet: FleetModule) -> dict[str, Any]:
    """Read all models."""
    paths = {}
    for name, path in fleet.params["models"].items():
        if not isinstance(path, str) or not path.startswith("/"):
            raise FleetError(
                "bad_model", f"Model {name} needs the absolute path of its folder, found {path!r}.", "Correct it."
            )
        paths[str(name)] = path
    models = model_reader.read_models(Root(), paths, model_store.reader(fleet.params["user"]))
    params, root = fleet.params, Root()
    sources = {name: entry for name, entry in params["sources"].items() if (entry or {}).get("repo")}
    store = model_store.Store(root, "/", model_store.reader(params["user"]))
    for source in model_store.parse(sources, endpoint=params["endpoint"], token_file=params["token_file"] or ""):
        path = paths.get(source.name, "")
        if not path or root.exists(path):
            continue
        try:
            models[source.name] = model_preview.preview(store, source, path)
        except FleetError as error:  # the fetch says so when it comes to that; until then nothing is known
            unknown = Finding("model_unknown", "warning", source.name, error.message, error.hint)
            models[source.name]["findings"].append(unknown.to_dict())
    findings = [finding for facts in models.values() for finding in facts["findings"]]
    return {"changed": False, "models": models, "findings": findings}


def main() -> None:
    """Run as a module."""
    FleetModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "sources": {"type": "dict", "default": {}},
            "endpoint": {"type": "str", "default": ""},
            "token_file": {"type": "path", "no_log": False},
            "user": {"type": "str", "default": "vllm"},
        },
        supports_check_mode=True,
    ).run(converge)


if __name__ == "__main__":
    main()
