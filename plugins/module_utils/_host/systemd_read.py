# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads of the state of systemd units, all in one call. Private to gpufleet.inference."""

from __future__ import annotations

from typing import Sequence

from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner

_DEADLINE_S = 10.0


def show_units(runner: Runner, units: Sequence[str], properties: Sequence[str]) -> dict[str, dict[str, str]]:
    """{unit: {property: value}} as ``systemctl show`` prints it; empty when systemd does not answer.

    A unit that does not exist has LoadState "not-found". The names are those asked for, not those of an alias.
    """
    if not units:
        return {}
    argv = ["systemctl", "show", "--no-pager", f"--property={','.join(properties)}", "--", *units]
    result = runner.run(argv, timeout=_DEADLINE_S)
    if result.rc != 0:
        return {}
    blocks = result.out.strip("\n").split("\n\n")
    if len(blocks) != len(units):
        return {}
    found = {}
    for unit, block in zip(units, blocks):
        pairs = (line.partition("=") for line in block.splitlines())
        found[unit] = {key: value for key, _equals, value in pairs}
    return found


def list_units(runner: Runner, pattern: str) -> dict[str, str]:
    """{unit: active state} of the loaded units whose names match a shell pattern."""
    argv = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "--full", "--", pattern]
    result = runner.run(argv, timeout=_DEADLINE_S)
    rows = (line.split() for line in result.out.splitlines()) if result.rc == 0 else ()
    return {row[0]: row[2] for row in rows if len(row) >= 4}
