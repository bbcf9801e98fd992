"""Write the pages that follow from specifications: roles/<role>/README.md and docs/reference.md.

Roles are read from meta/argument_specs.yml and defaults/main.yml, plugins from `ansible-doc`. Nothing in these
pages is written by hand; `--check` writes nothing and names the pages that are out of date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COLLECTION = "gpufleet.inference"
NOTICE = "<!-- Made by `make docs` from the specifications; edit those. -->"
PLUGIN_KINDS = ("module", "filter", "lookup")
MARKUP = re.compile(r"\b(?P<kind>[OVCEPMIBRULH]|RV)\((?P<text>(?:\\.|[^()\\]|\([^()]*\))*)\)")

Spec = dict[str, Any]


def markdown(text: object) -> str:
    """Ansible's documentation markup as Markdown, on one line."""

    def replace(match: re.Match[str]) -> str:
        kind, inner = match["kind"], match["text"].replace("\\,", ",").replace("\\)", ")")
        if kind in {"I", "B"}:
            return f"*{inner}*"
        if kind in {"U", "L", "R"}:
            name, _, target = inner.partition(",")
            return f"[{name.strip()}]({target.strip() or name.strip()})"
        if kind in {"M", "P"}:
            inner = inner.partition("#")[0]
        return f"`{inner}`"

    line = " ".join(str(text).split())
    return MARKUP.sub(replace, line).replace("HORIZONTALLINE", "")


def sentences(value: object) -> str:
    parts = value if isinstance(value, list) else [value or ""]
    return " ".join(markdown(part) for part in parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(value: object) -> str:
    """A default as people write it in YAML."""
    if value is None:
        return "–"
    if isinstance(value, str):
        # A folded default shows as one line; long ones are cut, the file beside the page has them whole.
        text = json.dumps(" ".join(value.split()), ensure_ascii=False)
        text = text if len(text) <= 70 else "see defaults/main.yml"
        return f"`{text}`" if text.startswith('"') else text
    text = json.dumps(value, ensure_ascii=False)
    return f"`{text}`" if len(text) <= 70 else "see defaults/main.yml"


def option_rows(options: Spec, defaults: Spec | None, path: str = "") -> Iterator[str]:
    """Table rows of options, each followed by its suboptions."""
    for name, option in options.items():
        kind = option.get("type", "str")
        if kind == "list" and option.get("elements"):
            kind = f"list of {option['elements']}"
        default = option.get("default")
        if defaults is not None and not path:
            default = defaults.get(name, default)
        shown = "**required**" if option.get("required") else code(default)
        about = sentences(option.get("description"))
        choices = option.get("choices")
        if choices:
            about += " One of " + ", ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in choices) + "."
        label = f"{path}{name}"
        yield f"| `{label}` | {kind} | {cell(shown)} | {cell(about)} |"
        nested = option.get("options") or option.get("suboptions")
        if nested:
            yield from option_rows(nested, None, f"{label}.")


def option_table(options: Spec, defaults: Spec | None, first: str) -> list[str]:
    rows = list(option_rows(options, defaults))
    if not rows:
        return ["None.", ""]
    return [f"| {first} | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]


def load(path: Path) -> Spec:
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}


def role_page(role: Path) -> str:
    """README of one role: what it does, its variables, how to use it."""
    specs: Spec = load(role / "meta/argument_specs.yml").get("argument_specs", {})
    defaults = load(role / "defaults/main.yml")
    main: Spec = specs.get("main", {})
    lines = [NOTICE, "", f"# {COLLECTION}.{role.name}", "", markdown(main.get("short_description", "")) + ".", ""]
    about = main.get("description", [])
    for paragraph in about if isinstance(about, list) else [about]:
        lines += [markdown(paragraph), ""]
    lines += ["## Variables", "", *option_table(main.get("options", {}), defaults, "variable")]
    for entry, spec in specs.items():
        if entry != "main":
            lines += [f"## Entry point `{entry}`", "", sentences(spec.get("short_description", "")) + ".", ""]
            lines += option_table(spec.get("options", {}), defaults, "variable")
    lines += ["## Use", "", "```yaml", "- hosts: gpu_hosts", "  gather_facts: false", "  roles:"]
    lines += [f"    - role: {COLLECTION}.{role.name}", "```", ""]
    if f"{COLLECTION}.{role.name}" in (ROOT / "playbooks/site.yml").read_text(encoding="utf-8"):
        lines += ["The playbook `gpufleet.inference.site` runs the roles in their order.", ""]
    return "\n".join(lines).replace("..\n", ".\n")


def plugin_docs(kind: str) -> Spec:
    names = [f"{COLLECTION}.{path.stem}" for path in sorted((ROOT / f"plugins/{_folder(kind)}").glob("[!_]*.py"))]
    if not names:
        return {}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-doc")), "--json", "-t", kind, *names],
        cwd="/",
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".build/collections")},
    )
    if done.returncode:
        raise SystemExit(f"make_docs: ansible-doc of {kind}s failed: {done.stderr.strip()}")
    found: Spec = json.loads(done.stdout)
    missing = [name for name in names if name not in found]
    if missing:
        raise SystemExit(f"make_docs: ansible-doc does not know {', '.join(missing)}; is the documentation valid YAML?")
    return found


def _folder(kind: str) -> str:
    return "modules" if kind == "module" else kind


def return_rows(returned: Spec, path: str = "") -> Iterator[str]:
    for name, value in returned.items():
        kind = value.get("type", "")
        yield f"| `{path}{name}` | {kind} | {cell(sentences(value.get('description')))} |"
        nested = value.get("contains")
        if nested:
            yield from return_rows(nested, f"{path}{name}.")


def reference_page(roles: list[Path]) -> str:
    """docs/reference.md: the roles with links, and every module and filter with options and results."""
    lines = [NOTICE, "", "# Reference", "", "## Roles", "", "| role | what it does |", "| --- | --- |"]
    for role in roles:
        short = (
            load(role / "meta/argument_specs.yml").get("argument_specs", {}).get("main", {}).get("short_description")
        )
        lines.append(f"| [{role.name}](../roles/{role.name}/README.md) | {cell(markdown(short or ''))} |")
    lines.append("")
    for kind in PLUGIN_KINDS:
        for name, entry in sorted(plugin_docs(kind).items()):
            doc: Spec = entry["doc"]
            lines += [f"## {kind} `{name}`", "", markdown(doc["short_description"]).rstrip(".") + ".", ""]
            about = doc.get("description", [])
            lines += [sentences(about), ""]
            lines += option_table(dict(sorted((doc.get("options") or {}).items())), None, "option")
            if entry.get("examples"):
                lines += ["```yaml", entry["examples"].strip("\n"), "```", ""]
            returned: Spec = entry.get("return") or {}
            if returned:
                lines += ["| returned | type | meaning |", "| --- | --- | --- |", *return_rows(returned), ""]
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    roles = [path.parent.parent for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml"))]
    made = {role / "README.md": role_page(role) for role in roles}
    made[ROOT / "docs/reference.md"] = reference_page(roles)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pages that follow from specifications.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    options = parser.parse_args()
    stale = [
        (path, text) for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        print(("out of date: " if options.check else "wrote ") + str(path.relative_to(ROOT)))
        if not options.check:
            path.write_text(text, encoding="utf-8")
    if options.check and stale:
        print("run `make docs` and commit the pages")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
