# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a later plan of a host leaves the error band of an earlier one. Private to gpufleet.inference.

The first plan of a run is made from what is known before anything is changed, the final one from what is there. What
an instance needs may then move inside the band that the first plan gave, and a GPU's size inside the planning margin.
The KV cache is what the rest leaves: it follows, and has no band of its own.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import gib

NEEDS = ("weights", "activation", "non_torch", "cuda_graphs")
_WORDS = {"non_torch": "runtime", "cuda_graphs": "CUDA graphs"}
REMEDY = "Compare the model's files with what was wanted; the next run plans from what is there now."


def departures(first: Mapping[str, Any], final: Mapping[str, Any]) -> List[Finding]:
    """Findings ``plan_left_band``, one for each instance of both plans that leaves the band; figures of both plans.

    first, final: plans as vllm_plan returns them. An instance that only one of them has is no departure.
    """
    margins = {str(gpu.get("pci_address")): (int(gpu["total"]), int(gpu["margin"])) for gpu in first.get("gpus") or []}
    before = {str(entry["name"]): entry for entry in first.get("instances") or []}
    addresses = {str(gpu["uuid"]): str(gpu.get("pci_address")) for gpu in final.get("gpus") or []}
    findings = []
    for entry in final.get("instances") or []:
        earlier = before.get(str(entry["name"]))
        if earlier is None:
            continue
        moved = [*_needs(earlier, entry), *_sizes(entry, margins, addresses)]
        if moved:
            findings.append(Finding("plan_left_band", "error", str(entry["name"]), "; ".join(moved), REMEDY))
    return findings


def _needs(first: Mapping[str, Any], final: Mapping[str, Any]) -> Iterator[str]:
    """Terms of the rank that moved farthest, where they lie outside the first plan's band."""
    for term in NEEDS:
        pairs: List[Tuple[Dict[str, Any], int]] = [
            (one[term], int(two[term]["bytes"])) for one, two in zip(first["budget"], final["budget"])
        ]
        outside = [pair for pair in pairs if not pair[0]["low"] <= pair[1] <= pair[0]["high"]]
        if outside:
            said, now = max(outside, key=lambda pair: abs(pair[1] - pair[0]["bytes"]))
            yield (
                f"{_WORDS.get(term, term)} {gib(now)} in the final plan, {gib(said['bytes'])} "
                f"({gib(said['low'])} to {gib(said['high'])}) in the first"
            )


def _sizes(
    entry: Mapping[str, Any], margins: Mapping[str, Tuple[int, int]], addresses: Mapping[str, str]
) -> Iterator[str]:
    """Devices whose memory is smaller than the first plan took it to be, by more than the margin."""
    for part in entry["budget"]:
        said, margin = margins.get(addresses.get(str(part["uuid"]), ""), (0, 0))
        now = int(part["total"]["bytes"])
        if now < said - margin:
            yield f"GPU {part['uuid']} has {gib(now)} in the final plan, {gib(said)} (less {gib(margin)}) in the first"
