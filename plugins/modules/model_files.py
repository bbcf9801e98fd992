#!/usr/bin/python
# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: Bring model files to a host and check that the service user can read them
version_added: 0.1.0
author:
  - The gpufleet.inference authors (@gpufleet)
description:
  - A model is a folder that is already there, a tar archive with its checksum, or a repository of a hub at a revision.
  - Everything that cannot work is refused at once before any download, with figures. Metadata of all models comes first
    and weights after that. A model appears under its name only when it is whole; an interrupted download is continued.
  - A complete model is never changed, because instances read from it; another content needs another name.
attributes:
  check_mode:
    support: full
    description: Asks a hub for its list of files, as a run does, and reports what would be fetched.
  diff_mode:
    support: full
    description: Shows the models before and after.
options:
  models:
    description:
      - Model names to their sources. A source has one of C(path) (on the host), C(archive) (address of a tar archive,
        with C(sha256)) and C(repo) (of a hub, with C(revision), C(token_file) and C(endpoint)).
    type: dict
    required: true
  dir:
    description: Folder of the models that are fetched.
    type: path
    default: /var/lib/vllm/models
  user:
    description: The user that must be able to read all files. When it does not exist yet, all users must be.
    type: str
    default: vllm
  endpoint:
    description: Address of the hub for sources that name none.
    type: str
    default: ''
  token_file:
    description: File on the host with the hub token for sources that name none. It is read there and never shown.
    type: path
notes:
  - Needs root.
"""

EXAMPLES = r"""
- name: Bring two models
  gpufleet.inference.model_files:
    models:
      llama-8b:
        path: /srv/models/Llama-3.1-8B-Instruct
      mistral-7b:
        archive: https://models.example.net/mistral-7b.tar
        sha256: 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
"""

RETURN = r"""
models:
  description: The models by name.
  returned: always
  type: dict
  contains:
    path:
      description: Folder of the model.
      type: str
    complete:
      description: Whether the model can be used.
      type: bool
    commit:
      description: The commit that a hub's revision stood for, empty otherwise.
      type: str
fetched:
  description: Names of the models that were, or in check mode would be, fetched.
  returned: always
  type: list
  elements: str
findings:
  description: What you should know.
  returned: always
  type: list
  elements: dict
"""

import os
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._host import model_store
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule, diff_entries


def converge(fleet: FleetModule) -> dict[str, Any]:
    """Plan, and outside check mode fetch and read back."""
    params = fleet.params
    os.umask(0o022)
    sources = model_store.parse(params["models"], endpoint=params["endpoint"], token_file=params["token_file"] or "")
    store = model_store.Store(Root(), params["dir"], model_store.reader(params["user"]))
    steps = store.plan(sources)
    todo = [step for step in steps if step.fetch]
    if todo and not fleet.check_mode:
        store.apply(steps)
    before = [f"{step.source.name} {step.path}\n" for step in steps if not step.fetch]
    after = sorted([*before, *(f"{step.source.name} {step.path}\n" for step in todo)])
    models = {}
    for step in steps:
        manifest = None if step.source.path else store.manifest(step.source)
        complete = bool(step.source.path) or manifest is not None
        commit = str((manifest or {}).get("commit") or step.commit)
        models[step.source.name] = {"path": step.path, "complete": complete, "commit": commit}
    return {
        "changed": bool(todo),
        "models": models,
        "fetched": [step.source.name for step in todo],
        "findings": [
            Finding("model_differs", "warning", step.source.name, step.note).to_dict() for step in steps if step.note
        ],
        "diff": diff_entries([{"path": params["dir"], "before": "".join(before), "after": "".join(after)}]),
    }


def main() -> None:
    """Run as a module."""
    FleetModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "dir": {"type": "path", "default": "/var/lib/vllm/models"},
            "user": {"type": "str", "default": "vllm"},
            "endpoint": {"type": "str", "default": ""},
            "token_file": {"type": "path", "no_log": False},
        },
        supports_check_mode=True,
    ).run(converge, lock=True)


if __name__ == "__main__":
    main()
