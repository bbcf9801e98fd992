# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The data files of planning and of baselines, read once per controller process. Private to gpufleet.inference."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import yaml

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.version_rules import Data

_DATA = Path(__file__).resolve().parent / "_data"


@functools.cache
def planner_data() -> dict[str, Any]:
    """``{releases, gpus}`` for the planner's request; must not be changed."""
    return {name: json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8")) for name in ("releases", "gpus")}


@functools.cache
def version_data() -> Data:
    """The version rules with the tables they refer to; must not be changed."""
    tables = planner_data()
    rules = json.loads((_DATA / "version_rules.json").read_text(encoding="utf-8"))
    return Data(rules=rules, releases=tables["releases"]["versions"], gpus=tables["gpus"])


@functools.cache
def shipped_baselines() -> list[dict[str, Any]]:
    """The version sets that come with the collection; must not be changed."""
    found: list[dict[str, Any]] = yaml.safe_load((_DATA / "baselines.yml").read_text(encoding="utf-8"))["baselines"]
    return found
