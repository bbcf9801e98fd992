# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verbs `version` and `digest`: which helper this is (private to this collection)."""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any


def register(verbs: Any) -> None:
    """Add the verbs to the command line."""
    verbs.add_parser("version", help="print the collection's version").set_defaults(work=version)
    verbs.add_parser("digest", help="print the SHA-256 of this file").set_defaults(work=digest)


def version(arguments: argparse.Namespace) -> int:
    """Print the version of the collection that built this helper."""
    from gpufleet_build import VERSION  # type: ignore[import-not-found]  # written by the builder of the zipapp

    sys.stdout.write(f"{VERSION}\n")
    return 0


def digest(arguments: argparse.Namespace) -> int:
    """Print the SHA-256 of the zipapp itself."""
    with open(sys.argv[0], "rb") as stream:
        sys.stdout.write(f"{hashlib.sha256(stream.read()).hexdigest()}\n")
    return 0
