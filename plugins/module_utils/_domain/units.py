# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bytes for programs, GiB for people. Private to gpufleet.inference."""

from __future__ import annotations

import re
from typing import Union

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*$", re.IGNORECASE)
_FACTOR = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}


def gib(count: float) -> str:
    """Bytes as text for people: "74.51 GiB"."""
    return f"{to_gib(count):.2f} GiB"


def mib(count: float) -> str:
    """Bytes as text for people, for small amounts: "256 MiB"."""
    return f"{count / MIB:.0f} MiB"


def to_gib(count: float) -> float:
    """Bytes to GiB (2**30 bytes)."""
    return count / GIB


def parse_size(value: Union[int, float, str]) -> int:
    """Bytes of a size that a person wrote: 1024, "512M", "1.5 GiB", "2g".

    Prefixes are powers of 1024 with and without the "i". Raises ValueError for anything else and for negative numbers.
    """
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    if isinstance(value, (int, float)):
        if value < 0 or value != int(value):
            raise ValueError(f"{value!r} is not a whole number of bytes")
        return int(value)
    match = _SIZE.match(value)
    if not match:
        raise ValueError(
            f'"{value}" is not a size: write bytes, or a number with K, M, G or T (for example 512M, 2GiB)'
        )
    return int(float(match.group(1)) * _FACTOR[match.group(2).lower()])


def round_up(count: int, step: int) -> int:
    """The smallest multiple of step that is not below count."""
    return -(-count // step) * step


def round_down(count: int, step: int) -> int:
    """The largest multiple of step that is not above count."""
    return count // step * step
