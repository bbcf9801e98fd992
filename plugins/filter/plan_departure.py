# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a final plan leaves the error band of the first one, in one message."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.departure import departures
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

DOCUMENTATION = r"""
name: plan_departure
short_description: Where a final plan leaves the error band of the first one
version_added: 0.1.0
author: The gpufleet.inference authors (@gpufleet)
description:
  - Compares two plans of one host. Names every instance whose weights, activation, runtime or CUDA graphs lie outside
    the band that the first plan gave, or whose GPU is smaller than the first plan took it to be; with both figures.
options:
  _input:
    description: The final plan, as P(gpufleet.inference.vllm_plan#module) returns it.
    type: dict
    required: true
  first:
    description: The plan from the beginning of the run.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Stop where the first plan was wrong
  ansible.builtin.fail:
    msg: "{{ departure }}"
  vars:
    departure: "{{ gpufleet_plan | gpufleet.inference.plan_departure(gpufleet_plan_first) }}"
  when: departure | length > 0
"""

RETURN = r"""
_value:
  description: The message; empty while the final plan is inside the band.
  type: str
"""


def plan_departure(final: Any, first: Any) -> str:
    """One sentence per instance that left the band, and the next step."""
    found = departures(to_native(first), to_native(final))
    if not found:
        return ""
    return " ".join([*(f"{finding.subject}: {finding.text}." for finding in found), found[0].remedy])


class FilterModule:
    """The filter."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"plan_departure": plan_departure}
