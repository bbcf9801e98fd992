"""The core decides from data alone: it imports nothing that reads a clock, a file, a network or Ansible."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import DOMAIN, relative

CORE = "ansible_collections.gpufleet.inference.plugins.module_utils._domain"
PURE = {
    *("__future__", "abc", "base64", "binascii", "bisect", "collections", "contextlib", "copy", "dataclasses"),
    *("decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "ipaddress", "itertools", "json"),
    *("math", "operator", "posixpath", "re", "shlex", "statistics", "string", "struct", "textwrap", "types"),
    *("typing", "unicodedata"),
}
"""Standard modules that compute from their arguments only."""

FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}


def impurities(source: str) -> Iterator[str]:
    """What a core file does that it must not, one text each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"line {node.lineno}: calls {node.func.id}()"
            continue
        else:
            continue
        for name in names:
            if name.partition(".")[0] not in PURE and not (name == CORE or name.startswith(CORE + ".")):
                yield f"line {node.lineno}: imports {name}"


CORE_FILES = sorted(DOMAIN.glob("*.py"))


@pytest.mark.parametrize("path", CORE_FILES, ids=relative)
def test_a_core_file_imports_and_calls_nothing_impure(path: Path) -> None:
    assert list(impurities(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "from time import time",
        "from ansible.module_utils.basic import AnsibleModule",
        "from .errors import FleetError",
        "from ansible_collections.gpufleet.inference.plugins.module_utils._host.files import read",
        "def f(p):\n    return open(p).read()",
    ],
)
def test_the_check_sees_an_impure_line(source: str) -> None:
    assert len(list(impurities(source))) == 1
