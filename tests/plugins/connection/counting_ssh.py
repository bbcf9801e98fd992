"""Ansible's own ssh connection, counted; see counting.py."""

from __future__ import annotations

import sys
from pathlib import Path

from ansible.plugins.connection import ssh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import counting

DOCUMENTATION = counting.documentation(ssh.DOCUMENTATION)


class Connection(counting.Counting, ssh.Connection):  # type: ignore[misc]
    """Counts, and otherwise is ssh."""
