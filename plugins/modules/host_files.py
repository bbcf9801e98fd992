#!/usr/bin/python
# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_files
short_description: Converge many files, directories and links of a host in one step
version_added: 0.1.0
author:
  - The gpufleet.inference authors (@gpufleet)
description:
  - Compares all paths with what is wanted, writes every new content beside its place, then moves all of them and reads
    them back. When writing beside fails, for example because the disk is full, the host stays as it was.
  - Templates and source files are read and rendered on the controller. One remote execution serves any number of paths.
  - A file or a directory in the place of a link, and a file in the place of a directory, are refused, not replaced.
attributes:
  check_mode:
    support: full
    description: Reports exactly what a run would change.
  diff_mode:
    support: full
    description: Shows the text before and after; the text of O(files[].secret) is never shown.
options:
  files:
    description:
      - The paths, in the order in which they are changed.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path on the host.
        type: path
        required: true
      state:
        description: What the path should be.
        type: str
        choices: [file, directory, link, absent]
        default: file
      content:
        description: The text of the file.
        type: str
      secret:
        description: The text of the file when nobody may see it in output.
        type: str
      src:
        description: A file on the controller, searched in C(files) of the role.
        type: str
      template:
        description: A Jinja template on the controller, searched in C(templates) of the role.
        type: str
      content_z:
        description: The content, compressed with zlib, in base64. The action fills this in for O(files[].src).
        type: str
      sha256:
        description: Digest of a content that the host is known to have; nothing is sent then.
        type: str
      target:
        description: Where a link points.
        type: str
      owner:
        description: User name or number.
        type: str
        default: root
      group:
        description: Group name or number.
        type: str
        default: root
      mode:
        description: Octal number in quotes. The default is V(0644) for files and V(0755) for directories.
        type: str
      purge:
        description: With O(files[].state=absent), remove a directory with everything in it.
        type: bool
        default: false
      only_empty:
        description:
          - With O(files[].state=absent), remove an empty directory only. One that holds anything stays, and so does a
            link or a file in its place.
        type: bool
        default: false
      besides:
        description:
          - With O(files[].only_empty), names in the directory that an earlier task removes. They do not count, so that
            check mode, in which they are still there, reports what a run does.
        type: list
        elements: str
        default: []
      replace:
        description: With O(files[].state=link), replace a regular file in its place.
        type: bool
        default: false
  helper:
    description:
      - Also build the host helper from this collection and put it at C(/usr/local/lib/gpufleet/gpufleet.pyz).
        It is sent only when the facts of P(gpufleet.inference.gpu_facts#module) show another digest.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Place the files of a service at once
  gpufleet.inference.host_files:
    files:
      - path: /etc/example
        state: directory
      - path: /etc/example/settings.conf
        template: settings.conf.j2
      - path: /etc/example/current
        state: link
        target: settings.conf
"""

RETURN = r"""
changes:
  description: What differed, in order.
  returned: always
  type: list
  elements: dict
  contains:
    path:
      description: The path.
      type: str
    action:
      description: One of V(create), V(update), V(attributes), V(remove).
      type: str
helper_digest:
  description: SHA-256 of the host helper that belongs to this collection.
  returned: when O(helper) is true
  type: str
"""

import base64
import zlib
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import files as host_files
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule, diff_entries

FILE_SPEC = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["file", "directory", "link", "absent"], "default": "file"},
    "content": {"type": "str"},
    "secret": {"type": "str", "no_log": True},
    "src": {"type": "str"},
    "template": {"type": "str"},
    "content_z": {"type": "str"},
    "sha256": {"type": "str"},
    "target": {"type": "str"},
    "owner": {"type": "str", "default": "root"},
    "group": {"type": "str", "default": "root"},
    "mode": {"type": "str"},
    "purge": {"type": "bool", "default": False},
    "only_empty": {"type": "bool", "default": False},
    "besides": {"type": "list", "elements": "str", "default": []},
    "replace": {"type": "bool", "default": False},
}
SPEC: dict[str, Any] = {
    "files": {"type": "list", "elements": "dict", "default": [], "options": FILE_SPEC},
    "helper": {"type": "bool", "default": False},
}


def content_of(entry: dict[str, Any]) -> bytes | None:
    """The bytes of one entry; FleetError `bad_file` when more than one source is given."""
    given = [key for key in ("content", "secret", "content_z") if entry.get(key) is not None]
    if len(given) > 1:
        raise FleetError("bad_file", f"{entry['path']}: {' and '.join(given)} exclude each other.")
    if not given:
        return None
    text = entry[given[0]]
    return zlib.decompress(base64.b64decode(text)) if given == ["content_z"] else text.encode("utf-8")


def converge(fleet: FleetModule) -> dict[str, Any]:
    """Plan, apply, read back."""
    wanted = [host_files.parse(entry, content_of(entry)) for entry in fleet.params["files"]]
    changes = host_files.converge(Root("/"), wanted, check_mode=fleet.check_mode)
    return {
        "changed": bool(changes),
        "changes": [{"path": change.wanted.path, "action": change.action} for change in changes],
        "diff": diff_entries([change.as_diff() for change in changes]),
    }


def main() -> None:
    """Run the module."""
    FleetModule(argument_spec=SPEC, supports_check_mode=True).run(converge, lock=True)


if __name__ == "__main__":
    main()
