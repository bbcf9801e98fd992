# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The border between Ansible's values and plain Python. Private to gpufleet.inference.

Since ansible-core 2.19 actions and filters receive tagged subclasses of str, int, dict and list;
the domain wants plain ones.
"""

from __future__ import annotations

import json
from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

_TRUE = frozenset({"true", "yes", "on", "1", "y", "t"})
_FALSE = frozenset({"false", "no", "off", "0", "n", "f", ""})


def to_native(value: Any) -> Any:
    """A copy of value made of plain dict, list, str, int, float, bool and None only.

    Raises FleetError("bad_input") for what JSON cannot hold.
    """
    try:
        return json.loads(json.dumps(value, default=_plain))
    except (TypeError, ValueError, RecursionError) as exc:
        raise FleetError("bad_input", f"The value cannot be written as plain data: {exc}.") from exc


def _plain(value: Any) -> Any:
    """What json does not know: mappings and sequences that are no dict or list."""
    if hasattr(value, "keys"):
        return {str(key): value[key] for key in value}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (bytes, bytearray)):
        raise TypeError("bytes are not text")
    return list(value)


def to_bool(value: Any, name: str) -> bool:
    """A flag that may have come as text from ``-e name=value``; raises FleetError("bad_input") naming the variable."""
    if isinstance(value, bool):
        return bool(value)
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE or value is None:
        return False
    raise FleetError(
        "bad_input", f"{name} must be true or false, found {value!r}.", f"Set {name}: true or {name}: false."
    )
