# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reads of a host's files under a prefix, so that tests can lay out a host in a folder. Private to gpufleet.inference.

Readers answer ``None``, ``False`` or an empty list for what is missing or not readable: on a bare host most files are.
"""

from __future__ import annotations

import os
from typing import Optional


class Root:
    """A host's file system; ``prefix`` is "/" on a real one."""

    def __init__(self, prefix: str = "/") -> None:
        self.prefix = prefix.rstrip("/")

    def path(self, path: str) -> str:
        """The real path of a host path (absolute)."""
        return f"{self.prefix}{path}" if self.prefix else path

    def read_text(self, path: str, limit: int = -1) -> Optional[str]:
        """The text of a file (at most ``limit`` bytes; not UTF-8: replaced); None when it cannot be read."""
        data = self.read_bytes(path, limit)
        return None if data is None else data.decode("utf-8", "replace")

    def read_bytes(self, path: str, limit: int = -1) -> Optional[bytes]:
        """The bytes of a file (at most ``limit``); None when it cannot be read."""
        try:
            with open(self.path(path), "rb") as stream:
                return stream.read(limit)
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """True when the path exists; a link is followed."""
        return os.path.exists(self.path(path))

    def isdir(self, path: str) -> bool:
        """True when the path is a directory; a link is followed."""
        return os.path.isdir(self.path(path))

    def listdir(self, path: str) -> list[str]:
        """The sorted names in a directory; empty when it cannot be read."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def readlink(self, path: str) -> Optional[str]:
        """Where a link points, as written in it; None when it is no link."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return None

    def realpath(self, path: str) -> str:
        """The host path behind all links (links that leave the prefix are taken as they are)."""
        real = os.path.realpath(self.path(path))
        if self.prefix and real.startswith(self.prefix + "/"):
            return real[len(self.prefix) :]
        return real
