# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read from a hub what a model will be, before anything of it is fetched. Private to gpufleet.inference.

The configuration and the headers of the weights are small. They are laid out in a passing folder, with files of the
right length and without content behind the headers, and read as a model on the host is read: same facts, same digest.
"""

from __future__ import annotations

import os
import tempfile
import urllib.parse
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import safetensors
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import download, model_reader
from ansible_collections.gpufleet.inference.plugins.module_utils._host.model_store import File, Source, Store, reader
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

# Most headers of weights are shorter; a longer one is asked for again in its length.
FIRST_BYTES = 1 << 20
_READ = ("config.json", "generation_config.json")
_INDEX = ".safetensors.index.json"


def preview(store: Store, source: Source, path: str) -> dict[str, Any]:
    """Facts of a hub model as model_facts would give them after it was fetched to ``path``.

    FleetError as the fetch itself would raise it: no answer, no token, no weights.
    """
    commit, files = store.listing(source)
    base = f"{source.endpoint.rstrip('/')}/{urllib.parse.quote(source.repo)}/resolve/{commit}"
    headers = store.headers(source)
    with tempfile.TemporaryDirectory(prefix="gpufleet-model-") as folder:
        for file in files:
            _lay(store, f"{base}/{urllib.parse.quote(file.name)}", headers, os.path.join(folder, file.name), file)
        facts = model_reader.read_model(Root(), source.name, folder, reader("root"))
        said = f"{source.repo} at {commit[:12]}"
        findings = [
            {**finding, "text": finding["text"].replace(folder, said)}
            for finding in facts["findings"]
            if finding["code"] != "model_unreadable"
        ]
    return {**facts, "path": path, "readable_by": {"user": None, "first_unreadable": None}, "findings": findings}


def _lay(store: Store, url: str, headers: dict[str, str], target: str, file: File) -> None:
    """One file of the model: what is read of it, and its length."""
    content = b""
    if file.name.endswith(".safetensors"):
        content = _first(store, url, headers, FIRST_BYTES)
        length = 8 + safetensors.header_length(content[:8], file.size)
        if length > len(content):
            content = _first(store, url, headers, length)
        content = content[:length]
    elif file.name in _READ or file.name.endswith(_INDEX):
        limit = model_reader.INDEX_LIMIT if file.name.endswith(_INDEX) else model_reader.CONFIG_LIMIT
        content = _first(store, url, headers, limit)
    try:
        with open(target, "wb") as stream:
            stream.write(content)
            stream.truncate(max(file.size, len(content)))
    except OSError as error:
        raise FleetError(
            "no_preview", f"{file.name} of {file.size} bytes could not be laid out: {error.strerror}."
        ) from None


def _first(store: Store, url: str, headers: dict[str, str], count: int) -> bytes:
    """The first bytes of a file; a server that knows no ranges is not listened to any longer than that."""
    return download.get(url, {**headers, "Range": f"bytes=0-{count - 1}"}, store.opener, count)
