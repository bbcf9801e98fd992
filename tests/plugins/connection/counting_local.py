"""Ansible's own local connection, counted; see counting.py."""

from __future__ import annotations

import sys
from pathlib import Path

from ansible.plugins.connection import local

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import counting

DOCUMENTATION = counting.documentation(local.DOCUMENTATION)


class Connection(counting.Counting, local.Connection):  # type: ignore[misc]
    """Counts, and otherwise is local."""
