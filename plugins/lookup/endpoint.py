# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: endpoint
short_description: The public address of a vendor's service
version_added: 0.1.0
author: The gpufleet.inference authors (@gpufleet)
description:
  - Reads the collection's one list of public addresses. Role defaults use it; every such default is a variable that can
    point to a mirror.
options:
  _terms:
    description: Names of endpoints, such as V(huggingface_hub).
    required: true
"""

EXAMPLES = r"""
- name: Show where models come from by default
  ansible.builtin.debug:
    msg: "{{ lookup('gpufleet.inference.endpoint', 'huggingface_hub') }}"
"""

RETURN = r"""
_raw:
  description: The addresses, in the order of the names.
  type: list
  elements: str
"""

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils._endpoints import url


class LookupModule(LookupBase):
    """Names in, addresses out."""

    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[str]:
        """The addresses."""
        try:
            return [url(str(term)) for term in terms]
        except FleetError as exc:
            raise AnsibleLookupError(str(exc)) from exc
