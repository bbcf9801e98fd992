# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The planner's data files, read once per controller process. Private to gpufleet.inference."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

_DATA = Path(__file__).resolve().parent / "_data"


@functools.cache
def planner_data() -> dict[str, Any]:
    """``{releases, gpus}`` for the planner's request; must not be changed."""
    return {name: json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8")) for name in ("releases", "gpus")}
