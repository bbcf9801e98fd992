# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reports about a fleet from what its hosts told; runs on the controller and contacts nothing."""

from __future__ import annotations

import csv
import io
import json
import locale
import os
import tempfile
from pathlib import Path
from typing import Any, Mapping

from ansible.plugins.action import ActionBase
from ansible.utils import color
from ansible.utils.display import Display

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _render
from ansible_collections.gpufleet.inference.plugins.plugin_utils._junit import junit
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_native

VIEWS = {
    "facts": _render.facts_view,
    "plan": _render.plan_view,
    "site": _render.site_view,
    "baseline": _render.baseline_view,
}
VERDICTS = {"unreachable": "unknown", "unknown": "unknown", "failed": "error"}
"""The verdict of a host that was not compared."""
FILE_WIDTH = 120

display = Display()


class ActionModule(ActionBase):
    """One report for all hosts of the play, whichever of them are still in it."""

    TRANSFERS_FILES = False
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Print the report and write its files; changes nothing."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        _validated, given = self.validate_argument_spec(
            argument_spec={
                "kind": {"type": "str", "choices": sorted(VIEWS), "default": "facts"},
                "dir": {"type": "path"},
                "hosts": {"type": "list", "elements": "str"},
                "show": {"type": "bool", "default": True},
                "fail_on_unknown": {"type": "bool", "default": False},
            }
        )
        kind = given["kind"]
        try:
            names = to_native(given["hosts"] or task_vars.get("ansible_play_hosts_all") or [])
            alive = set(to_native(task_vars.get("ansible_play_hosts") or names))
            hosts = {name: entry(task_vars["hostvars"], name, name in alive) for name in names}
            if given["show"]:
                display.display(VIEWS[kind](hosts, screen_style()).rstrip("\n"))
            folder = Path(given["dir"] or Path.cwd() / "reports").absolute()
            files = write(folder, kind, hosts, fail_on_unknown=given["fail_on_unknown"])
        except FleetError as error:
            return {"failed": True, "changed": False, **error.as_result()}
        status = {name: host["status"] for name, host in hosts.items()}
        verdicts = {name: host["verdict"] for name, host in hosts.items()} if kind == "baseline" else {}
        return {"changed": False, "files": files, "status": status, "verdicts": verdicts}


def entry(hostvars: Any, name: str, alive: bool) -> dict[str, Any]:
    """What is known of a host, with its status: ok, unreachable, failed or unknown."""
    known = hostvars.get(name, {})
    facts = known.get("ansible_facts") or {}
    read = to_native(known.get("gpufleet_read") or {})
    gpu = to_native(facts.get("gpufleet_gpu") or known.get("gpufleet_gpu") or {})
    found = known.get("gpufleet_instance_findings") or (facts.get("gpufleet_preflight") or {}).get("findings")
    status, reason = "ok", ""
    if read.get("unreachable") or read.get("failed"):
        status = "unreachable" if read.get("unreachable") else "failed"
        reason = str(read.get("msg") or "").removeprefix("Task failed: ")
    elif not alive:
        status, reason = "failed", "left the run before its end, most likely it stopped answering: see its last message"
    elif not gpu:
        status, reason = "unknown", "no facts of this host: it was not read, or not reached"
    versions = to_native(facts.get("gpufleet_versions") or known.get("gpufleet_versions") or {})
    compared = versions.get("baseline") if status == "ok" else None
    return {
        "status": status,
        "reason": reason,
        "verdict": compared["verdict"] if compared else VERDICTS.get(status, "unknown"),
        "baseline": compared,
        "version_findings": (versions.get("findings") or []) if compared else [],
        "gpu": gpu,
        "host": to_native(facts.get("gpufleet_host") or known.get("gpufleet_host") or {}),
        "plan": to_native(known.get("gpufleet_plan") or None),
        "instances": to_native(known.get("gpufleet_instances") or []),
        "findings": to_native(found or []),
    }


def screen_style() -> _render.Style:
    """As Ansible's own output: its idea of colour (terminal, NO_COLOR, its settings) and of the width."""
    encoding = locale.getpreferredencoding(False).lower().replace("-", "")
    return _render.Style(
        width=max(60, min(display.columns, 160)), colour=bool(color.ANSIBLE_COLOR), unicode=encoding == "utf8"
    )


def write(
    folder: Path, kind: str, hosts: Mapping[str, Mapping[str, Any]], *, fail_on_unknown: bool = False
) -> list[str]:
    """Write the report as text and JSON, facts as CSV and a baseline as JUnit XML too. Returns the paths.

    Each file is whole at any moment. fail_on_unknown says what the XML makes of hosts that told nothing.
    """
    style = _render.Style(width=FILE_WIDTH)
    text = _render.baseline_view(hosts, style, whole=True) if kind == "baseline" else VIEWS[kind](hosts, style)
    data: dict[str, Any] = {"hosts": _for_file(kind, hosts)}
    if kind == "baseline":
        data["counts"] = _render.verdict_counts(hosts)
    contents = {f"{kind}.txt": text, f"{kind}.json": json.dumps(data, indent=1) + "\n"}
    if kind == "facts":
        contents["facts.csv"] = _csv(_render.facts_rows(hosts))
    if kind == "baseline":
        contents["baseline.xml"] = junit(hosts, fail_on_unknown)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            _replace(folder / name, content)
    except OSError as exc:
        raise FleetError(
            "report_not_written",
            f"The report could not be written to {folder}: {exc.strerror or exc}.",
            "Set fleet_report_dir to a folder that this user may write to.",
        ) from exc
    return [str(folder / name) for name in contents]


def _for_file(kind: str, hosts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    keys = {
        "facts": ("gpu", "host"),
        "plan": ("plan",),
        "site": ("instances", "findings"),
        "baseline": ("verdict", "baseline", "version_findings"),
    }[kind]
    return {name: {key: host[key] for key in ("status", "reason", *keys)} for name, host in hosts.items()}


def _csv(rows: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    if rows:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return stream.getvalue()


def _replace(path: Path, content: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
