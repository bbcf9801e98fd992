# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what a model's folder says about the model: config, headers of its weights, who may read it. Private.

Never reads tensors, follows no pipe or device, and turns whatever is broken into a finding of that model.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import safetensors
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import parse_shape
from ansible_collections.gpufleet.inference.plugins.module_utils._host.model_store import Reader
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

CONFIG_LIMIT = 4 * 1024 * 1024
INDEX_LIMIT = 64 * 1024 * 1024
MAX_FILES = 100_000


@dataclass
class _Folder:
    """One model on its way through the reader."""

    root: Root
    name: str
    path: str
    findings: list[dict[str, str]] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)

    def note(self, code: str, text: str, remedy: str, severity: str = "error") -> None:
        self.findings.append(Finding(code, severity, self.name, text, remedy).to_dict())

    def at(self, name: str) -> str:
        """The path of a file of the folder, for people."""
        return os.path.join(self.path, name)

    def stat(self, name: str) -> Optional[os.stat_result]:
        try:
            return os.stat(self.root.path(self.at(name)))
        except OSError:
            return None

    def read(self, name: str, limit: int) -> Optional[bytes]:
        """A plain file of at most ``limit`` bytes; what is neither is noted."""
        info = self.stat(name)
        if info is None or not stat.S_ISREG(info.st_mode):
            return None
        if info.st_size > limit:
            text = f"{self.at(name)} has {info.st_size} bytes, more than the {limit} allowed."
            self.note("model_broken", text, "Replace it.")
            return None
        return self.root.read_bytes(self.at(name), limit)


def read_models(root: Root, models: Mapping[str, str], user: Reader) -> dict[str, dict[str, Any]]:
    """Facts of all models, by name; ``models`` maps names to folders on the host."""
    return {name: read_model(root, name, path, user) for name, path in sorted(models.items())}


def read_model(root: Root, name: str, path: str, user: Reader) -> dict[str, Any]:
    """Facts of one model. Never raises for what the folder holds."""
    folder = _Folder(root, name, path)
    facts: dict[str, Any] = {
        "path": path,
        "config": None,
        "generation_config": None,
        "files": [],
        "weights": {"format": "none", "total_bytes": 0, "by_dtype": {}, "groups": []},
        "digest": None,
        "readable_by": {"user": None, "first_unreadable": None},
        "estimated": True,
        "findings": folder.findings,
    }
    if not root.isdir(path):
        what = "is a file" if root.exists(path) else "does not exist"
        folder.note("model_missing", f"{path} {what}.", "Bring the model (role vllm_models) or correct its path.")
        return facts
    names = root.listdir(path)[:MAX_FILES]
    facts["files"] = _files(folder, names)
    facts["readable_by"] = _readable(folder, facts["files"], user)
    facts["config"] = _json_file(folder, "config.json", required=not any(n.endswith(".gguf") for n in names))
    facts["generation_config"] = _json_file(folder, "generation_config.json", required=False)
    layers = 0
    if facts["config"] is not None:
        try:
            layers = len(parse_shape(facts["config"]).layers)
        except FleetError as error:
            folder.note(error.code, error.message, error.hint)
    facts["weights"] = _weights(folder, facts["files"], layers)
    facts["estimated"] = facts["weights"]["format"] != "safetensors"
    facts["digest"] = folder.digest.hexdigest()
    return facts


def _files(folder: _Folder, names: list[str]) -> list[dict[str, Any]]:
    result = []
    for name in names:
        info = folder.stat(name)
        if info is not None and stat.S_ISREG(info.st_mode):
            result.append({"name": name, "bytes": info.st_size})
    return result


def _json_file(folder: _Folder, name: str, *, required: bool) -> Optional[dict[str, Any]]:
    info = folder.stat(name)
    if info is None:
        if required:
            folder.note("model_broken", f"{folder.path} has no {name}.", "Fetch the model again.")
        return None
    data = folder.read(name, CONFIG_LIMIT)
    if data is None:
        if info.st_size <= CONFIG_LIMIT:
            folder.note("model_broken", f"{folder.at(name)} is not a file that can be read.", "Replace it.")
        return None
    folder.digest.update(name.encode() + b"\0" + data + b"\0")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=lambda _constant: None)
    except UnicodeDecodeError:
        folder.note("model_broken", f"{folder.at(name)} is not UTF-8 text.", "Fetch the file again.")
        return None
    except (ValueError, RecursionError) as error:
        folder.note("model_broken", f"{folder.at(name)} is not JSON ({str(error)[:100]}).", "Fetch the file again.")
        return None
    if not isinstance(value, dict):
        folder.note("model_broken", f"{folder.at(name)} holds no object.", "Fetch the file again.")
        return None
    return value


def _readable(folder: _Folder, files: list[dict[str, Any]], user: Reader) -> dict[str, Any]:
    """Whether the service user may read every file: enter all folders above, read each file."""
    first: Optional[str] = None
    real = folder.root.realpath(folder.path)
    steps = [real]
    while os.path.dirname(real) != real:
        real = os.path.dirname(real)
        steps.append(real)
    for step in reversed(steps):
        try:
            info = os.stat(folder.root.path(step))
        except OSError:
            first = first or step
            continue
        if first is None and not user.may(info, 5 if step == steps[0] else 1):
            first = step
    for entry in files:
        info_or_none = folder.stat(entry["name"])
        if first is None and (info_or_none is None or not user.may(info_or_none, 4)):
            first = folder.at(entry["name"])
    if first is not None:
        folder.note(
            "model_unreadable",
            f"The user {user.name} may not read {first}.",
            f"Give {user.name} read access to the folder and its files.",
        )
    return {"user": first is None, "first_unreadable": first}


def _weights(folder: _Folder, files: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    sizes = {entry["name"]: int(entry["bytes"]) for entry in files}
    wanted = _weight_files(folder, sizes)
    result: dict[str, Any] = {"format": "none", "total_bytes": 0, "by_dtype": {}, "groups": []}
    if not wanted:
        for ending, kind in ((".gguf", "gguf"), (".bin", "bin"), (".pt", "bin"), (".pth", "bin")):
            total = sum(size for name, size in sizes.items() if name.endswith(ending) and "training" not in name)
            if total:
                result.update(format=kind, total_bytes=total)
                return result
        folder.note("model_without_weights", f"{folder.path} holds no weights.", "Fetch the model again.", "warning")
        return result
    tensors: list[safetensors.Tensor] = []
    whole = True
    seen: set[str] = set()
    for name in wanted:
        try:
            found = _header(folder, name, sizes)
        except FleetError as error:
            folder.note(error.code, f"{folder.at(name)}: {error.message}", error.hint)
            whole = False
            continue
        for tensor in found:
            if tensor.name in seen:
                text = f"{folder.at(name)} holds {tensor.name[:80]} again."
                folder.note("bad_safetensors", text, "Remove the stray file.")
                whole = False
                break
            seen.add(tensor.name)
        tensors.extend(found)
    by_dtype: dict[str, int] = {}
    for tensor in tensors:
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.bytes
    result["total_bytes"] = sum(by_dtype.values())
    result["by_dtype"] = by_dtype
    if whole:
        result["format"] = "safetensors"
        result["groups"] = safetensors.group(tensors, layers or 1 << 20)
    else:
        result["format"] = "broken"
    return result


def _weight_files(folder: _Folder, sizes: Mapping[str, int]) -> list[str]:
    """The safetensors files the engine would load: those of the index, or all but second copies."""
    index = next((name for name in sorted(sizes) if name.endswith(".safetensors.index.json")), None)
    if "model.safetensors.index.json" in sizes:
        index = "model.safetensors.index.json"
    if index is not None:
        data = folder.read(index, INDEX_LIMIT)
        if data is not None:
            try:
                return list(safetensors.parse_index(data))
            except FleetError as error:
                folder.note(error.code, f"{folder.at(index)}: {error.message}", error.hint)
    found = [name for name in sorted(sizes) if name.endswith(".safetensors")]
    plain = [name for name in found if not name.startswith("consolidated")]
    if "model.safetensors" in plain:  # beside it model.fp32-00001-of-00002.safetensors and the like: the same again
        plain = [name for name in plain if name == "model.safetensors" or not name.startswith("model.")]
    return plain or found


def _header(folder: _Folder, name: str, sizes: Mapping[str, int]) -> tuple[safetensors.Tensor, ...]:
    if name not in sizes:
        raise FleetError("bad_safetensors", "The index names this file, but it is not there.", "Fetch it.")
    size = sizes[name]
    try:
        with open(folder.root.path(folder.at(name)), "rb") as stream:
            length = safetensors.header_length(stream.read(8), size)
            header = stream.read(length)
    except OSError as error:
        raise FleetError("bad_safetensors", f"It cannot be read ({error.strerror}).", "Check its mode.") from error
    if len(header) < length:
        raise FleetError(
            "bad_safetensors", f"The header ends after {len(header)} of {length} bytes.", "Fetch it again."
        )
    folder.digest.update(name.encode() + b"\0" + str(size).encode() + b"\0" + header + b"\0")
    return safetensors.parse_header(header, size)
