"""What lies on a host's disk, seen from this machine, so that two moments can be compared."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

Snapshot = dict[str, tuple[object, ...]]


def touched(root: Path, places: Sequence[str], without: Sequence[str] = ()) -> Snapshot:
    """Each path below the places with its inode and the time of its last change of any kind.

    Any write, even of the same bytes, makes another snapshot.
    """
    return {path: (info.st_ino, info.st_ctime_ns) for path, info in _walk(root, places, without)}


def content(root: Path, places: Sequence[str], without: Sequence[str] = ()) -> Snapshot:
    """Each path below the places with what it is, whose it is and what it holds."""
    result: Snapshot = {}
    for path, info in _walk(root, places, without):
        real = root / path.lstrip("/")
        held = ""
        if stat.S_ISLNK(info.st_mode):
            held = os.readlink(real)
        elif stat.S_ISREG(info.st_mode):
            held = hashlib.sha256(real.read_bytes()).hexdigest()
        result[path] = (info.st_mode, info.st_uid, info.st_gid, held)
    return result


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Paths that came, went or are not the same."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _walk(root: Path, places: Sequence[str], without: Sequence[str]) -> Iterator[tuple[str, os.stat_result]]:
    todo = [place for place in places if (root / place.lstrip("/")).exists()]
    while todo:
        path = todo.pop()
        if path in without:
            continue
        info = os.lstat(root / path.lstrip("/"))
        yield path, info
        if stat.S_ISDIR(info.st_mode):
            todo += [f"{path}/{name}" for name in os.listdir(root / path.lstrip("/"))]
