"""A role's variables are the same in its defaults, its specification and its page, and its tasks stay policy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import make_docs
import pytest
from repository import ROOT, load, relative, roles, task_files, tasks_of

ROLES = roles()
FREE_COMMANDS = {"ansible.builtin.shell", "ansible.builtin.raw", "ansible.builtin.script", "shell", "raw", "script"}


def options_of(role: Path) -> dict[str, Any]:
    """Options of all entry points together."""
    found: dict[str, Any] = {}
    for spec in load(role / "meta/argument_specs.yml")["argument_specs"].values():
        found.update(spec.get("options") or {})
    return found


def defaults_of(role: Path) -> dict[str, Any]:
    path = role / "defaults/main.yml"
    return (load(path) or {}) if path.exists() else {}


@pytest.mark.parametrize("role", ROLES, ids=relative)
def test_every_default_is_specified(role: Path) -> None:
    assert sorted(set(defaults_of(role)) - set(options_of(role))) == []


@pytest.mark.parametrize("role", ROLES, ids=relative)
def test_every_optional_option_has_a_default(role: Path) -> None:
    optional = {name for name, option in options_of(role).items() if not option.get("required")}
    assert sorted(optional - set(defaults_of(role))) == []


@pytest.mark.parametrize("role", ROLES, ids=relative)
def test_a_default_that_the_specification_names_is_the_real_one(role: Path) -> None:
    defaults = defaults_of(role)
    stated = {name: option["default"] for name, option in options_of(role).items() if "default" in option}
    assert stated == {name: defaults.get(name) for name in stated}


@pytest.mark.parametrize("role", ROLES, ids=relative)
def test_every_option_says_what_it_is(role: Path) -> None:
    vague = [name for name, option in options_of(role).items() if not option.get("type") or not option["description"]]
    assert vague == []


@pytest.mark.parametrize("role", ROLES, ids=relative)
def test_the_page_of_a_role_is_that_of_its_specification(role: Path) -> None:
    page = role / "README.md"
    assert page.exists(), f"{relative(page)} is missing: run `make docs`"
    assert page.read_text(encoding="utf-8") == make_docs.role_page(role), "run `make docs`"


@pytest.mark.parametrize("path", task_files(), ids=relative)
def test_tasks_use_modules_with_read_back_instead_of_shells(path: Path) -> None:
    for task in tasks_of(path):
        assert not FREE_COMMANDS & set(task), f"{task.get('name')}: a shell has no check mode and no read-back"
        if {"ansible.builtin.command", "command"} & set(task):
            assert "changed_when" in task, f"{task.get('name')}: a command must say what a change is"


@pytest.mark.parametrize("path", task_files(), ids=relative)
def test_plays_gather_nothing_by_themselves(path: Path) -> None:
    plays = [task for task in tasks_of(path) if "hosts" in task]
    assert [play.get("name") for play in plays if play.get("gather_facts") is not False] == []


def test_role_names_in_playbooks_exist() -> None:
    known = {role.name for role in ROLES}
    used = {
        name
        for path in task_files()
        for name in re.findall(r"gpufleet\.inference\.(\w+)\b", path.read_text(encoding="utf-8"))
    }
    modules = {path.stem for folder in ("modules", "action", "filter", "lookup") for path in plugins(folder)}
    playbooks = {path.stem for path in (ROOT / "playbooks").glob("*.yml")}
    assert sorted(used - known - modules - playbooks - {"endpoint"}) == []


def plugins(folder: str) -> list[Path]:
    return [path for path in (ROOT / "plugins" / folder).glob("*.py") if not path.name.startswith("_")]
