# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What of a folder of vLLM releases goes when the collection leaves a host."""

from __future__ import annotations

import posixpath
from typing import Any

from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

DOCUMENTATION = r"""
name: engine_leftovers
short_description: What of a folder of vLLM releases goes
version_added: 0.1.0
author: The gpufleet.inference authors (@gpufleet)
description:
  - From the marks of installed and interrupted releases, the entries for M(gpufleet.inference.host_files) that remove
    these releases, what was made beside them, and their folder when nothing else is in it.
options:
  _input:
    description: Paths of the files C(.gpufleet.json) and C(.installing-*) below the folder.
    type: list
    elements: str
    required: true
  root:
    description: The folder of all releases.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Show what would go
  ansible.builtin.debug:
    msg: "{{ ['/opt/vllm/0.32.0/.gpufleet.json'] | gpufleet.inference.engine_leftovers('/opt/vllm') }}"
"""

RETURN = r"""
_value:
  description: Entries for O(gpufleet.inference.host_files#module:files).
  type: list
  elements: dict
"""

BESIDE = (".cache", ".python", ".requests", ".uv")
MANIFEST = ".gpufleet.json"
INSTALLING = ".installing-"


def engine_leftovers(marks: Any, root: str) -> list[dict[str, Any]]:
    """Only marked folders go: the one a manifest lies in, and the one an installation has begun."""
    base = str(root).rstrip("/")
    going = set()
    for path in to_native(marks):
        folder, name = posixpath.split(path)
        if name == MANIFEST and posixpath.dirname(folder) == base:
            going.add(folder)
        elif name.startswith(INSTALLING) and folder == base:
            going |= {path, f"{base}/{name[len(INSTALLING) :]}"}
    if going:
        going |= {f"{base}/{name}" for name in BESIDE}
    entries: list[dict[str, Any]] = [{"path": path, "state": "absent", "purge": True} for path in sorted(going)]
    return [*entries, {"path": base, "state": "absent", "only_empty": True}]


class FilterModule:
    """The filter."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"engine_leftovers": engine_leftovers}
