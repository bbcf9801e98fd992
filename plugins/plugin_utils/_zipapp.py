# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds the host helper `gpufleet.pyz` (private to this collection).

The same sources give the same bytes on every controller: names are sorted, times are fixed and nothing is compressed
(compressors differ between builds of zlib). It is compressed on its way to the host.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import json
import zipfile
from pathlib import Path

import yaml

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

HOST_PATH = "/usr/local/lib/gpufleet/gpufleet.pyz"
PACKAGE = "ansible_collections/gpufleet/inference/plugins/module_utils"
# What the helper's verbs import, directly or not; a test compares this with the imports themselves.
PARTS = (
    *(f"_domain/{name}.py" for name in ("errors", "findings", "gpu_findings", "gpu_state", "units")),
    *(f"_host/{name}.py" for name in ("children", "gpu", "gpu_state", "lock", "nvml")),
    *(f"_host/{name}.py" for name in ("procfs", "root", "runner", "systemd_read")),
    "_helper",
)
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAIN = f"""import sys

from {PACKAGE.replace("/", ".")}._helper.main import main

sys.exit(main(sys.argv[1:]))
"""


@functools.lru_cache(maxsize=1)
def build() -> bytes:
    """The zipapp. FleetError `controller_lacks_pynvml` when nvidia-ml-py is not installed on the controller."""
    return pack(_sources())


def digest(content: bytes) -> str:
    """SHA-256 of the zipapp, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def pack(sources: dict[str, bytes]) -> bytes:
    """A zipapp of sources (name in the archive to content) plus the package files they need."""
    entries = dict(sources)
    for name in sources:
        parents = name.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            entries.setdefault("/".join([*parents[:depth], "__init__.py"]), b"")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(entries):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o100644 << 16
            info.create_system = 3
            archive.writestr(info, entries[name])
    return buffer.getvalue()


def _sources() -> dict[str, bytes]:
    base = Path(__file__).resolve().parent.parent / "module_utils"
    sources = {"__main__.py": _MAIN.encode()}
    for part in PARTS:
        path = base / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            sources[f"{PACKAGE}/{file.relative_to(base).as_posix()}"] = file.read_bytes()
    sources["gpufleet_build.py"] = f'VERSION = "{_version(base.parent.parent)}"\n'.encode()
    sources["pynvml.py"] = pynvml_source()
    return sources


def _version(collection: Path) -> str:
    manifest = collection / "MANIFEST.json"
    if manifest.is_file():
        return str(json.loads(manifest.read_text(encoding="utf-8"))["collection_info"]["version"])
    return str(yaml.safe_load((collection / "galaxy.yml").read_text(encoding="utf-8"))["version"])


def pynvml_source() -> bytes:
    """The source of the NVML bindings that are installed on the controller."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise FleetError(
            "controller_lacks_pynvml",
            "GPUs are read through pynvml, and this controller does not have it.",
            hint="Install nvidia-ml-py into the Python of ansible: pip install nvidia-ml-py",
        )
    return Path(spec.origin).read_bytes()
