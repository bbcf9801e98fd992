# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one list of public addresses (private to this collection)."""

from __future__ import annotations

from pathlib import Path

import yaml

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

FILE = Path(__file__).resolve().parent / "_data" / "endpoints.yml"


def endpoints() -> dict[str, dict[str, str]]:
    """All entries: name to url, the variable that overrides it, and what it is used for."""
    content: dict[str, dict[str, str]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return content


def url(name: str) -> str:
    """The address of one endpoint. FleetError `unknown_endpoint` lists the known ones."""
    known = endpoints()
    if name not in known:
        raise FleetError("unknown_endpoint", f"There is no endpoint `{name}`; known are {', '.join(sorted(known))}.")
    return known[name]["url"]
