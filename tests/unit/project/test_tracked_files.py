"""What no tracked file may hold, and what pages point to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import ROOT, load, relative, text_of, tracked

# Written in pieces, so that this file does not hold what it looks for.
REGISTRY_HOSTS = ("://de" + r"b\.", "python" + "hosted", "://regis" + r"try\.", "://py" + r"pi\.", "npm" + r"js\.org")
MACHINE_PATHS = (r"(?<![\w.])/wo" + r"rk/[a-z.]", "/root/" + r"\.pyenv", "/opt/" + "wheels", "/opt/" + "pypi")
HIDING = (
    r"ignore_" + r"errors:\s*(true|yes)",
    r"failed_" + r"when:\s*false",
    r"that:\s*\[?\s*" + "true",
    "assert " + r"True\b",
    r"mark\." + r"skip\b",
    "xf" + "ail",
    "pytest" + r"\.skip\(",
)
VENDOR_HOSTS = ("huggingface" + r"\.co", "download" + r"\.nvidia\.com", "download" + r"\.pytorch\.org")
ADDRESS_BOOK = "plugins/plugin_utils/_data/endpoints.yml"
FRAGMENTS = tracked("changelogs/fragments/*")


def hits(patterns: tuple[str, ...], paths: list[Path]) -> list[str]:
    """File:line: text of each line that matches one of the patterns."""
    wanted = re.compile("|".join(patterns))
    found = []
    for path in paths:
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            if wanted.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()[:120]}")
    return found


def test_no_host_of_a_package_registry_is_named() -> None:
    assert hits(REGISTRY_HOSTS, tracked()) == []


def test_no_path_of_a_developers_machine_is_named() -> None:
    assert hits(MACHINE_PATHS, tracked()) == []


def test_nothing_hides_a_failure() -> None:
    assert hits(HIDING, tracked("*.py", "*.yml", "*.yaml")) == []


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    planted = ROOT / ".build" / f"planted-{tmp_path.name}.yml"
    planted.parent.mkdir(exist_ok=True)
    planted.write_text("failed_" + "when: false\nurl: https://py" + "pi.example/simple\n", encoding="utf-8")
    try:
        assert len(hits(HIDING, [planted])) == 1
        assert len(hits(REGISTRY_HOSTS, [planted])) == 1
    finally:
        planted.unlink()


def test_vendors_addresses_stand_in_one_file() -> None:
    shipped = [path for path in tracked("plugins", "roles", "playbooks") if relative(path) != ADDRESS_BOOK]
    code = [path for path in shipped if path.suffix != ".json" and path.name != "README.md"]
    assert hits(tuple("https?://[a-z0-9.-]*" + host for host in VENDOR_HOSTS), code) == []


@pytest.mark.parametrize("page", tracked("*.md"), ids=relative)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", text_of(page) or "")
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=relative)
def test_a_changelog_fragment_is_in_known_sections_and_whole_sentences(fragment: Path) -> None:
    config = load(ROOT / "changelogs/config.yaml")
    known = {name for name, _title in config["sections"]} | {"release_summary", "trivial"}
    content = load(fragment)
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.yml", fragment.name)
    assert set(content) <= known
    for section, entries in content.items():
        texts = [entries] if section == "release_summary" else entries
        for text in texts:
            assert text.strip().endswith("."), f"{section}: {text}"


def test_ci_and_scripts_can_be_started() -> None:
    for name in (".ci/run", "scripts/find-python.sh", "tests/hardware/run.sh"):
        assert (ROOT / name).stat().st_mode & 0o111, f"{name} has no run bit"
