"""Give a host what this machine has for reaching Python packages: indexes, local folders, certificates.

pip's own configuration is the source (`pip config list`). Folders of the machine appear in the host,
read-only, under a neutral path. pip reads /etc/pip.conf, uv reads /etc/uv/uv.toml.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from machine import run, write_atomic

MOUNT = "/srv/testbed/pip"
CA_BUNDLE = "/etc/testbed/ca-certificates.crt"
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")


@functools.cache
def _settings() -> dict[str, list[str]]:
    """index-url, extra-index-url, find-links, constraint as lists; environment wins over files."""
    found: dict[str, list[str]] = {}
    for line in run([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", "download", ":env:") and (section == ":env:" or key not in found):
            found[key] = shlex.split(shlex.split(value)[0])
    return found


def _local(item: str) -> str | None:
    path = item.removeprefix("file://")
    return path if path.startswith("/") and Path(path).is_dir() else None


@functools.cache
def _folders() -> dict[str, str]:
    """Machine folder → host folder. A local index is mounted with its parent: its pages link out of it."""
    found: dict[str, str] = {}
    for key in ("find-links", "index-url", "extra-index-url"):
        for item in _settings().get(key, []):
            path = _local(item)
            if path:
                folder = path if key == "find-links" else str(Path(path).parent)
                found.setdefault(folder, f"{MOUNT}/{len(found)}")
    return found


def _translated(key: str) -> list[str]:
    result = []
    for item in _settings().get(key, []):
        path = _local(item)
        if path and path in _folders():
            result.append(_folders()[path])
        elif path and str(Path(path).parent) in _folders():
            result.append(f"file://{_folders()[str(Path(path).parent)]}/{Path(path).name}")
        else:
            result.append(item)
    return result


def binds() -> dict[str, str]:
    """Host folder → machine folder, to be mounted read-only."""
    return {target: source for source, target in _folders().items()}


def write(root: Path) -> None:
    """Write the configuration into a host's root file system."""
    pip = {key: _translated(key) for key in ("index-url", "extra-index-url", "find-links", "trusted-host")}
    constraints = [Path(item).read_text() for item in _settings().get("constraint", []) if Path(item).is_file()]
    if constraints:
        write_atomic(root / "etc/testbed/constraints.txt", "\n".join(constraints))
        pip["constraint"] = ["/etc/testbed/constraints.txt"]
    lines = ["[global]", "disable-pip-version-check = true"]
    lines += [f"{key} = {' '.join(values)}" for key, values in pip.items() if values]
    write_atomic(root / "etc/pip.conf", "\n".join(lines) + "\n")
    # uv searches one index at a time; local folders are find-links for it, local index trees it does not need.
    uv = []
    if pip["index-url"]:
        uv.append(f"index-url = {json.dumps(pip['index-url'][0])}")
    remote = [item for item in pip["extra-index-url"] if not item.startswith("file:")]
    if remote:
        uv.append(f"extra-index-url = {json.dumps(remote)}")
    if pip["find-links"]:
        uv.append(f"find-links = {json.dumps(pip['find-links'])}")
    write_atomic(root / "etc/uv/uv.toml", "\n".join(uv) + "\n")
    _certificates(root)


def _certificates(root: Path) -> None:
    """The machine's bundle where programs look for it, and in the environment of units and logins."""
    source = next((os.environ[name] for name in CA_VARIABLES if os.environ.get(name)), None)
    source = source or "/etc/ssl/certs/ca-certificates.crt"
    if not Path(source).is_file():
        return
    for target in (root / CA_BUNDLE.lstrip("/"), root / "etc/ssl/certs/ca-certificates.crt"):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    # A unit sees no login environment, so systemd gets the same.
    pairs = [f"{name}={CA_BUNDLE}" for name in CA_VARIABLES]
    write_atomic(root / "etc/environment", "\n".join(pairs) + "\n")
    text = "[Manager]\nDefaultEnvironment=" + " ".join(pairs) + "\n"
    write_atomic(root / "etc/systemd/system.conf.d/testbed.conf", text)
