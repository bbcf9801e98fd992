#!/usr/bin/python
# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_release
short_description: Install vLLM releases side by side, each in its own environment
version_added: 0.1.0
author:
  - The gpufleet.inference authors (@gpufleet)
description:
  - Installs every release into C(<root>/<version>) with uv. A release counts as installed only when its manifest
    C(.gpufleet.json) is there, which is written last; a half-finished one is made anew from the cached downloads.
  - Before anything is downloaded, the driver, the GPUs, the processor, the C library and the Python of the host are
    compared with what the wheels of the release need.
  - An installation runs as a transient systemd unit C(gpufleet-engine-<version>). When the controller is lost it goes
    on, and the next run waits for it.
  - A complete release is never changed, because instances may run from it.
attributes:
  check_mode:
    support: full
    description: Reports the packages and releases that a run would install. Whether the wheels can be had is not tried.
  diff_mode:
    support: full
    description: Shows the packages and releases before and after.
options:
  releases:
    description: The releases. In a task a plain version may stand for V({version}).
    type: list
    elements: dict
    required: true
    suboptions:
      version:
        description: A version of the release table, for example V(0.32.0).
        type: str
        required: true
      constraints:
        description: Constraints for this release beside O(constraints).
        type: list
        elements: str
        default: []
      requirements:
        description: The text of a requirements file with the whole environment, with hashes where you require them.
        type: str
        default: ''
      extra:
        description: Requirements to install beside vLLM and O(extra).
        type: list
        elements: str
        default: []
  constraints:
    description: Constraints on other packages for all releases, one requirement each, for example V(transformers<5).
    type: list
    elements: str
    default: []
  requirements:
    description: Texts of requirements files by version, for releases that do not bring their own.
    type: dict
    default: {}
  extra:
    description: Requirements to install beside vLLM in all releases.
    type: list
    elements: str
    default: []
  root:
    description: Folder of all releases.
    type: path
    default: /opt/vllm
  python:
    description:
      - Where the interpreter comes from. Without any of these keys the newest one on the host that the release accepts.
    type: dict
    default: {}
    suboptions:
      path:
        description: An interpreter on the host.
        type: path
      package:
        description: An OS package that brings C(/usr/bin/<package>), for example V(python3.12).
        type: str
      archive:
        description: Address of a tar archive that holds an installed Python.
        type: str
      sha256:
        description: Checksum of the archive.
        type: str
  index_url:
    description:
      - Package index. When it is empty only O(find_links) is used; when that is empty too, the index that pip of the
        host is set up with.
      - It may hold credentials, which appear in no command line and no message.
    type: str
    default: ''
  extra_index_urls:
    description: Further package indexes.
    type: list
    elements: str
    default: []
  find_links:
    description: Folders on the host or addresses of pages with wheels.
    type: list
    elements: str
    default: []
  require_hashes:
    description: Install only wheels whose hashes are in O(releases[].requirements).
    type: bool
    default: false
  uv_version:
    description: Version of uv, whose wheel comes from the same places.
    type: str
    required: true
  uv_sha256:
    description: Checksum of the wheel of uv for this host's processor. Empty means that it is not checked.
    type: str
    default: ''
  packages:
    description:
      - OS packages that engines need at run time, by family of distributions (C(debian), C(redhat)). V({python}) in a
        name stands for an interpreter in C(/usr/bin), as in V({python}-dev).
    type: dict
    default: {}
  environment:
    description: Variables for the installation, for example proxies. Proxies of the task's environment are passed on.
    type: dict
    default: {}
  min_free_gib:
    description: Space that must be free below O(root) for each release to be installed.
    type: float
    default: 0
  driver_version:
    description: The driver that will run. When it is empty the running one of the GPU facts counts.
    type: str
    default: ''
  deadline:
    description: How long to wait for one installation, in seconds. After that it goes on and the task fails.
    type: int
    default: 3600
  table:
    description: Entries of the release table. The action fills this in.
    type: dict
    default: {}
notes:
  - Needs root.
"""

EXAMPLES = r"""
- name: Install two releases from a folder of wheels
  gpufleet.inference.vllm_release:
    releases:
      - version: 0.32.0
      - version: 0.31.0
    find_links: [/srv/wheels]
    uv_version: 0.13.9
    packages:
      debian: [g++, libnuma1, "{python}-dev"]
"""

RETURN = r"""
releases:
  description: The releases by version.
  returned: always
  type: dict
  contains:
    path:
      description: Folder of the environment.
      type: str
    complete:
      description: Whether the release can be used.
      type: bool
    manifest:
      description: What the release says about itself; C(wheels) maps distributions to versions.
      type: dict
packages:
  description: OS packages that were missing.
  returned: always
  type: list
  elements: str
installed:
  description: Versions that were, or in check mode would be, installed.
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
import platform
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB
from ansible_collections.gpufleet.inference.plugins.module_utils._host import packages
from ansible_collections.gpufleet.inference.plugins.module_utils._host.engine import Engines, Python, Release, Sources
from ansible_collections.gpufleet.inference.plugins.module_utils._host.jobs import Jobs
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule, diff_entries


def wanted_releases(params: Mapping[str, Any]) -> list[Release]:
    """The releases of the parameters; FleetError for one that is not in the table or given twice."""
    releases: dict[str, Release] = {}
    for entry in params["releases"]:
        version = entry["version"]
        facts = params["table"].get(version)
        if facts is None:
            raise FleetError("unknown_release", f"vLLM {version} is not in the release table.", "Correct the version.")
        if version in releases:
            raise FleetError("bad_releases", f"vLLM {version} is given twice.", "Name each release once.")
        releases[version] = Release(
            version,
            facts,
            constraints=(*params["constraints"], *entry["constraints"]),
            requirements=entry["requirements"] or str(params["requirements"].get(version) or ""),
            extra=(*params["extra"], *entry["extra"]),
        )
    return list(releases.values())


def wanted_python(python: Mapping[str, Any]) -> Python:
    """The way to an interpreter; FleetError when the keys do not go together."""
    given = [key for key in ("path", "package", "archive") if python.get(key)]
    if len(given) > 1:
        raise FleetError(
            "bad_python", f"python has {' and '.join(given)}; one of them is wanted.", "Remove the others."
        )
    if bool(python.get("archive")) != bool(python.get("sha256")):
        raise FleetError("bad_python", "python needs `archive` and `sha256` together.", "Give both.")
    return Python(**{key: python.get(key) or "" for key in ("path", "package", "archive", "sha256")})


def converge(fleet: FleetModule, root: Root | None = None, jobs: Jobs | None = None) -> dict[str, Any]:
    """Plan, and outside check mode apply and read back."""
    params = fleet.params
    root = root or Root()
    engines = Engines(root, fleet.runner, jobs or Jobs(root, fleet.runner), params["root"], platform.machine())
    releases, python = wanted_releases(params), wanted_python(params["python"])
    sources = Sources(
        index_url=params["index_url"],
        extra_index_urls=tuple(params["extra_index_urls"]),
        find_links=tuple(params["find_links"]),
        require_hashes=params["require_hashes"],
        uv_version=params["uv_version"],
        uv_sha256=params["uv_sha256"],
        environment={key: str(value) for key, value in params["environment"].items()},
    )
    plan = engines.plan(
        releases,
        python,
        sources,
        list(params["packages"].get(packages.family(root)) or []),
        min_free=int(params["min_free_gib"] * GIB),
        glibc=(os.confstr("CS_GNU_LIBC_VERSION") or "").replace("glibc", "").strip(),
    )
    if plan.changed and not fleet.check_mode:
        engines.apply(plan, python, sources, deadline=params["deadline"])
    manifests = {release.version: engines.manifest(release.version) for release in releases}
    before = [f"vllm {version}\n" for version in plan.kept]
    after = [*before, *(f"package {name}\n" for name in plan.packages), *(f"vllm {r.version}\n" for r in plan.install)]
    return {
        "changed": plan.changed,
        "releases": {
            version: {"path": engines.path(version), "complete": manifest is not None, "manifest": manifest or {}}
            for version, manifest in manifests.items()
        },
        "packages": list(plan.packages),
        "installed": [release.version for release in plan.install],
        "findings": [Finding("engine_differs", "warning", params["root"], note).to_dict() for note in plan.notes],
        "diff": diff_entries([{"path": params["root"], "before": "".join(before), "after": "".join(after)}]),
    }


def main() -> None:
    """Run as a module."""
    text = {"type": "str", "default": ""}
    texts = {"type": "list", "elements": "str", "default": []}
    release = {"version": {"type": "str", "required": True}, "constraints": texts, "requirements": text, "extra": texts}
    python = {"path": {"type": "path"}, **{key: {"type": "str"} for key in ("package", "archive", "sha256")}}
    FleetModule(
        argument_spec={
            "releases": {"type": "list", "elements": "dict", "required": True, "options": release},
            "root": {"type": "path", "default": "/opt/vllm"},
            "python": {"type": "dict", "default": {}, "options": python},
            "index_url": text,
            "extra_index_urls": texts,
            "find_links": texts,
            "require_hashes": {"type": "bool", "default": False},
            "uv_version": {"type": "str", "required": True},
            "uv_sha256": text,
            "packages": {"type": "dict", "default": {}},
            "constraints": texts,
            "requirements": {"type": "dict", "default": {}},
            "extra": texts,
            "environment": {"type": "dict", "default": {}},
            "min_free_gib": {"type": "float", "default": 0},
            "driver_version": text,
            "deadline": {"type": "int", "default": 3600},
            "table": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    ).run(converge, lock=True)


if __name__ == "__main__":
    main()
