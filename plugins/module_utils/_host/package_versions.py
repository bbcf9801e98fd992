# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which OS packages are installed, in which version, and which are held. Private to gpufleet.inference."""

from __future__ import annotations

import fnmatch
import re
from typing import Dict, List, Mapping, Optional, Sequence

from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner


def family(root: Root) -> str:
    """`debian` or `redhat`, by the package manager that is there; "" when there is none of the two."""
    if root.exists("/usr/bin/apt-get"):
        return "debian"
    return "redhat" if root.exists("/usr/bin/dnf") else ""


def versions(root: Root, runner: Runner, patterns: Sequence[str]) -> Optional[Dict[str, Dict[str, Optional[object]]]]:
    """Installed packages whose names match a pattern: {name: {version, held, candidate}}; None when nobody tells.

    Read from the package manager's own files; no repository is contacted. ``candidate`` is what the lists on the host
    offer, null with dnf. ``held`` is a hold of dpkg, or an entry of dnf's versionlock.
    """
    kind = family(root)
    if not kind or not patterns:
        return None if patterns else {}
    if kind == "debian":
        query = [
            "dpkg-query",
            "--show",
            "--showformat=${db:Status-Want}\\t${db:Status-Status}\\t${Package}\\t${Version}\\n",
        ]
        done = runner.run([*query, *patterns], timeout=60)
        rows = [line.split("\t") for line in done.out.splitlines()]
        found = {
            row[2]: {"version": row[3], "held": row[0] == "hold", "candidate": None}
            for row in rows
            if len(row) == 4 and row[1] == "installed"
        }
        # dpkg-query ends with 1 when a pattern matches nothing.
        if done.rc not in (0, 1):
            return None
        return _with_candidates(runner, found)
    done = runner.run(
        ["rpm", "--query", "--all", "--queryformat", "%{NAME}\\t%{VERSION}-%{RELEASE}\\n", *patterns], timeout=60
    )
    if done.rc != 0:
        return None
    locks = _versionlocks(root)
    return {
        name: {"version": version, "held": any(fnmatch.fnmatchcase(name, lock) for lock in locks), "candidate": None}
        for name, version in (line.split("\t") for line in done.out.splitlines() if line.count("\t") == 1)
    }


def _with_candidates(
    runner: Runner, found: Mapping[str, Mapping[str, object]]
) -> Dict[str, Dict[str, Optional[object]]]:
    result: Dict[str, Dict[str, Optional[object]]] = {name: dict(entry) for name, entry in found.items()}
    name = ""
    text = runner.run(["apt-cache", "policy", *found], timeout=60).out if found else ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name = line.rstrip(":")
        elif line.startswith("  Candidate: ") and name in result:
            offered = line.split(": ", 1)[1].strip()
            result[name]["candidate"] = None if offered == "(none)" else offered
    return result


def _versionlocks(root: Root) -> List[str]:
    """Names (or patterns) that dnf keeps at a version: the list of dnf 4 and the file of dnf 5."""
    old = root.read_text("/etc/dnf/plugins/versionlock.list") or ""
    lines = [line.strip() for line in old.splitlines()]
    names = [
        re.sub(r"^\d+:", "", re.sub(r"-(?:\d+:)?\d[^-]*-[^-]+$", "", line))
        for line in lines
        if line and line[0] not in "#!"
    ]
    new = root.read_text("/etc/dnf/versionlock.toml") or ""
    return names + re.findall(r"""^\s*name\s*=\s*["']([^"']+)["']""", new, re.MULTILINE)
