# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's NVML bindings, ready to travel. Private to gpufleet.inference.

Most of pynvml is never asked for, and a host would compile all of it at each read: only the definitions that our reader
reaches travel, with the licence at their head.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from ansible_collections.gpufleet.inference.plugins.module_utils._host import gpu_state, nvml
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp

_WORDS = re.compile(r"\b(?:c_nvml|nvml|NVML)\w+")


@functools.lru_cache(maxsize=2)
def packed(setting: bool = False) -> str:
    """The trimmed source of pynvml as text, with the calls that set something or without.

    FleetError `controller_lacks_pynvml` when the controller has none.
    """
    readers = [nvml.__file__, gpu_state.__file__] if setting else [nvml.__file__]
    text = "".join(Path(str(reader)).read_text(encoding="utf-8") for reader in readers)
    return nvml.pack_bindings(trim(_zipapp.pynvml_source().decode("utf-8"), frozenset(_WORDS.findall(text))).encode())


def helper_digest_if(found: str) -> str:
    """The digest of this controller's host helper when a host was found to have the same one, else ""."""
    if not found:
        return ""
    return found if found == _zipapp.digest(_zipapp.build()) else ""


def trim(source: str, wanted: frozenset[str]) -> str:
    """The part of a module's source that its definitions of ``wanted`` need, in its order and its own words.

    A wanted name that ends in "_v" stands for all its versions. The error codes stay, because the module makes classes
    of all it finds; so does each statement that defines nothing. Names that are looked up by text are not seen.
    """
    lines = source.splitlines(keepends=True)
    defined: dict[str, list[int]] = {}
    statements = ast.parse(source).body
    keep: set[int] = set()
    for at, statement in enumerate(statements):
        names = _defines(statement)
        for name in names:
            defined.setdefault(name, []).append(at)
        if not names and not _is_text(statement):
            keep.add(at)
    versions = tuple(name for name in wanted if name.endswith("_v"))
    for name, places in defined.items():
        if name in wanted or name.startswith(("NVML_ERROR_", *versions)):
            keep.update(places)
    waiting = list(keep)
    while waiting:
        for node in ast.walk(statements[waiting.pop()]):
            if isinstance(node, ast.Name):
                new = set(defined.get(node.id, ())) - keep
                keep |= new
                waiting += new
    head = []
    for line in lines:
        if not line.startswith("#"):
            break
        head.append(line)
    return "".join(head) + "".join(_text(statements[at], lines) for at in sorted(keep))


def _defines(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if len(names) == len(targets) else []


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _text(statement: ast.stmt, lines: list[str]) -> str:
    """The statement's lines with its decorators; what shares a line with another statement is cut out."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    chosen = lines[first - 1 : statement.end_lineno]
    if first == statement.lineno and statement.lineno == statement.end_lineno:
        data = chosen[0].encode()[statement.col_offset : statement.end_col_offset]
        return data.decode() + "\n"
    return "".join(chosen)
