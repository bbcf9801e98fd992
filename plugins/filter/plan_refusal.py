# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a plan does not fit, in one message."""

from __future__ import annotations

from typing import Any

from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native
from ansible_collections.gpufleet.inference.plugins.plugin_utils._render import NO_WAY_OUT, is_about_memory, ways_out

DOCUMENTATION = r"""
name: plan_refusal
short_description: Why a plan does not fit, in one message
version_added: 0.1.0
author: The gpufleet.inference authors (@gpufleet)
description:
  - Names every instance of a plan that does not fit, with the figures and the nearest things that work.
options:
  _input:
    description: The plan, as P(gpufleet.inference.vllm_plan#module) returns it.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Refuse
  ansible.builtin.fail:
    msg: "{{ gpufleet_plan | gpufleet.inference.plan_refusal }}"
  when: not gpufleet_plan.fits
"""

RETURN = r"""
_value:
  description: The message; empty when the plan fits.
  type: str
"""


def plan_refusal(plan: Any) -> str:
    """One sentence per instance that does not fit."""
    entries = [entry for entry in to_native(plan).get("instances", []) if not entry.get("fits")]
    return " ".join(_sentence(entry) for entry in entries)


def _sentence(entry: dict[str, Any]) -> str:
    reason = entry.get("reason") or {}
    text = (
        f"{entry.get('name')} does not fit ({reason.get('code', 'unknown')}): {reason.get('text', 'no reason given')}"
    )
    ways = ways_out(entry)
    if ways:
        text += f". What works: {'; or '.join(ways)}"
    elif is_about_memory(entry):
        text += f". {NO_WAY_OUT}"
    return f"{text.rstrip('.')}."


class FilterModule:
    """The filter."""

    def filters(self) -> dict[str, Any]:
        """Name to function."""
        return {"plan_refusal": plan_refusal}
