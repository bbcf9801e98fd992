# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's NVML bindings, ready to travel. Private to gpufleet.inference."""

from __future__ import annotations

import functools

from ansible_collections.gpufleet.inference.plugins.module_utils._host.nvml import pack_bindings
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp


@functools.lru_cache(maxsize=1)
def packed() -> str:
    """The source of pynvml as text; FleetError("controller_lacks_pynvml") when the controller has none."""
    return pack_bindings(_zipapp.pynvml_source())


def helper_digest_if(found: str) -> str:
    """The digest of this controller's host helper when a host was found to have the same one, else ""."""
    if not found:
        return ""
    return found if found == _zipapp.digest(_zipapp.build()) else ""
