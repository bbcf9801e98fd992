"""What the project's tests of itself share: the tracked files, and the parts of the collection."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOMAIN = ROOT / "plugins/module_utils/_domain"
DATA = ROOT / "plugins/plugin_utils/_data"


def tracked(*patterns: str) -> list[Path]:
    """Tracked files that match git's patterns (all of them without one) and exist in the work tree."""
    done = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True)
    return [ROOT / name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str | None:
    """The file's text; None when it is binary."""
    content = path.read_bytes()
    return None if b"\0" in content[:8192] else content.decode("utf-8", "replace")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def modules() -> list[Path]:
    return sorted(path for path in (ROOT / "plugins/modules").glob("*.py") if not path.name.startswith("_"))


def actions() -> list[Path]:
    return sorted(path for path in (ROOT / "plugins/action").glob("*.py") if not path.name.startswith("_"))


def roles() -> list[Path]:
    """Folders under roles/ that hold a tracked file."""
    names = {path.relative_to(ROOT / "roles").parts[0] for path in tracked("roles/")}
    return [ROOT / "roles" / name for name in sorted(names)]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def task_files() -> list[Path]:
    """Tracked YAML files with tasks: of roles and playbooks."""
    return [
        path
        for path in tracked("roles/*.yml", "playbooks/*.yml")
        if path.parent.name in {"tasks", "handlers", "playbooks"}
    ]


def tasks_of(path: Path) -> list[dict[str, Any]]:
    """All tasks of a task file or playbook, those inside blocks included."""
    found: list[dict[str, Any]] = []

    def walk(node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                walk(one)
        elif isinstance(node, dict):
            found.append(node)
            for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers"):
                walk(node.get(key))

    walk(load(path))
    return found
