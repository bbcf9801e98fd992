# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of host_files: reads sources, renders templates, then one remote execution."""

from __future__ import annotations

import base64
import zlib
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp
from ansible_collections.gpufleet.inference.plugins.plugin_utils._native import to_bool, to_native

MODULE = "gpufleet.inference.host_files"


class ActionModule(ActionBase):
    """Turn src and template of every file into content."""

    _requires_connection = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Render, send, return."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        args = to_native(self._task.args)
        helper = b""
        try:
            files = [self._with_content(entry, task_vars) for entry in args.get("files") or []]
            if to_bool(args.get("helper", False), "helper"):
                helper = _zipapp.build()
                files[:0] = _helper_files(helper, send=_host_digest(task_vars) != _zipapp.digest(helper))
        except FleetError as exc:
            return {"failed": True, **exc.as_result()}
        result: dict[str, Any] = self._execute(files, task_vars)
        if helper and result.get("error_code") == "content_missing":
            files[:2] = _helper_files(helper, send=True)
            result = self._execute(files, task_vars)
        if helper and not result.get("failed"):
            result["helper_digest"] = _zipapp.digest(helper)
        return result

    def _execute(self, files: list[dict[str, Any]], task_vars: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name=MODULE, module_args={"files": files}, task_vars=task_vars
        )
        return result

    def _with_content(self, entry: Any, task_vars: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(entry, dict):
            raise FleetError("bad_file", f"files holds {entry!r}, which is not a mapping with `path`.")
        result = dict(entry)
        src, template = result.pop("src", None), result.pop("template", None)
        if src and template:
            raise FleetError("bad_file", f"{entry.get('path')}: src and template exclude each other.")
        if src:
            with open(self._find(("files", src)), "rb") as stream:
                result["content_z"] = pack(stream.read())
        if template:
            result["content"] = self._render(self._find(("templates", template)), task_vars)
        return result

    def _find(self, needle: tuple[str, str]) -> str:
        try:
            found: str = self._find_needle(*needle)
        except Exception as exc:
            raise AnsibleActionFail(f"{needle[1]} was not found: {exc}") from exc
        return found

    def _render(self, path: str, task_vars: dict[str, Any]) -> str:
        with open(path, encoding="utf-8") as stream:
            text = trust_as_template(stream.read())
        templar = self._templar.copy_with_new_env(available_variables=task_vars)
        overrides = {"trim_blocks": True, "lstrip_blocks": True}
        return str(templar.template(text, escape_backslashes=False, overrides=overrides))


def pack(content: bytes) -> str:
    """Bytes as the option content_z carries them."""
    return base64.b64encode(zlib.compress(content, 9)).decode("ascii")


def _helper_files(helper: bytes, *, send: bool) -> list[dict[str, Any]]:
    what = {"content_z": pack(helper)} if send else {"sha256": _zipapp.digest(helper)}
    directory = _zipapp.HOST_PATH.rpartition("/")[0]
    return [{"path": directory, "state": "directory"}, {"path": _zipapp.HOST_PATH, **what}]


def _host_digest(task_vars: dict[str, Any]) -> str:
    facts = task_vars.get("ansible_facts") or {}
    gpu = facts.get("gpufleet_gpu") or {}
    return str((gpu.get("helper") or {}).get("digest") or "")
