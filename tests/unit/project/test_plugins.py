"""Every plugin is documented, licensed, grouped and tested."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from repository import DATA, ROOT, actions, load, modules, relative, tracked

MODULES = modules()
PLUGIN_FILES = [path for path in tracked("plugins/*.py") if path.name != "__init__.py"]
DATA_FILES = [path for path in tracked(f"{DATA.relative_to(ROOT)}/*") if path.name != "endpoints.yml"]
REFUSED_NAMES = {"_", "foo", "bar", "baz", "toto", "tutu", "tata"}
LICENCE = "# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)"


def test_the_action_group_lists_every_module_and_action() -> None:
    group = load(ROOT / "meta/runtime.yml")["action_groups"]["gpufleet"]
    assert sorted(group) == sorted({path.stem for path in [*MODULES, *actions()]})


def test_every_action_has_a_documented_module_beside_it() -> None:
    assert sorted({path.stem for path in actions()} - {path.stem for path in MODULES}) == []


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_a_module_has_a_unit_test_file_of_its_name(module: Path) -> None:
    assert list((ROOT / "tests/unit").rglob(f"test_{module.stem}.py")), (
        f"tests/unit/**/test_{module.stem}.py is missing"
    )


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_a_module_states_how_it_behaves_in_check_mode(module: Path) -> None:
    source = module.read_text(encoding="utf-8")
    assert "check_mode:" in source
    if module.stem not in {path.stem for path in actions()}:
        assert "supports_check_mode=True" in source


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=relative)
def test_a_plugin_file_carries_the_licence_and_a_description(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    head = source.splitlines()[:5]
    assert LICENCE in head
    assert "# SPDX-License-Identifier: GPL-3.0-or-later" in head
    tree = ast.parse(source)
    assert ast.get_docstring(tree) or "DOCUMENTATION" in source


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=relative)
def test_a_plugin_file_is_valid_on_the_oldest_python_of_a_host(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 9))
    assert "from __future__ import annotations" in source
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "dataclass":
            newer = {word.arg for word in node.keywords} & {"slots", "kw_only"}
            assert not newer, f"line {node.lineno}: dataclass({newer}) needs Python 3.10"
        elif isinstance(node, ast.Match):
            pytest.fail(f"line {node.lineno}: match needs Python 3.10")


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=relative)
def test_a_plugin_file_has_none_of_what_sanity_refuses_most_often(path: Path) -> None:
    """The quick part of `ansible-test sanity`, for `make check`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assert):
            found.append(f"line {node.lineno}: assert; raise an error instead")
        elif isinstance(node, ast.Name) and node.id in REFUSED_NAMES and isinstance(node.ctx, ast.Store):
            found.append(f"line {node.lineno}: the name {node.id}; say what it is, as in _rest")
        elif isinstance(node, ast.FunctionDef) and node.name in REFUSED_NAMES:
            found.append(f"line {node.lineno}: a function called {node.name}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"line {node.lineno}: print(); write to sys.stdout or return the text")
    assert found == []


def test_every_address_has_a_variable_that_replaces_it() -> None:
    for name, entry in load(DATA / "endpoints.yml").items():
        assert set(entry) == {"url", "variable", "used_for"}, name


@pytest.mark.parametrize("path", DATA_FILES, ids=relative)
def test_every_data_file_says_where_its_facts_are_from(path: Path) -> None:
    if path.suffix not in {".json", ".yml", ".yaml"}:
        pytest.fail(f"{path.name}: data files are JSON or YAML")
    data = load(path)
    if isinstance(data, dict) and (data.get("source") or data.get("sources")):
        return
    entries = list(data.values()) if isinstance(data, dict) else data
    assert entries, f"{path.name} is empty"
    bare = [
        entry for entry in entries if not isinstance(entry, dict) or not (entry.get("source") or entry.get("sources"))
    ]
    assert bare == [], "each fact names its source, or the file names one for all"
