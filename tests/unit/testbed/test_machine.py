"""What the test bed reads from the machine: package sources and pip's configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "testbed"))
import machine
import pip_setup

MIRROR = "http://mirror.example/debian"
SECURITY = "http://mirror.example/debian-security"
EVERYTHING = "main contrib non-free non-free-firmware"


def sources(root: Path, suite: str) -> list[str]:
    return [line.split("] ")[1] for line in machine.apt_sources(suite, own="bookworm", root=root)]


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_deb822_sources_keep_the_mirror_and_get_the_wanted_suite(apt: Path) -> None:
    (apt / "sources.list.d/debian.sources").write_text(
        f"Types: deb deb-src\n# a comment\nURIs: {MIRROR}\nSuites: bookworm bookworm-updates\nComponents: main\n\n"
        f"Types: deb\nURIs: {SECURITY}\nSuites:\n bookworm-security\nComponents: main\n"
    )
    assert sources(apt, "trixie") == [
        f"{MIRROR} trixie {EVERYTHING}",
        f"{MIRROR} trixie-updates {EVERYTHING}",
        f"{SECURITY} trixie-security {EVERYTHING}",
    ]


def test_one_line_sources_are_read_with_and_without_options(apt: Path) -> None:
    (apt / "sources.list").write_text(
        f"# deb {MIRROR} bookworm main\n"
        f"deb [ arch=amd64 signed-by=/usr/share/keyrings/x.gpg ] {MIRROR} bookworm main # the mirror\n"
        f"deb {SECURITY} bookworm-security main\n"
        f"deb-src {MIRROR} bookworm main\n"
    )
    assert sources(apt, "bookworm") == [
        f"{MIRROR} bookworm {EVERYTHING}",
        f"{SECURITY} bookworm-security {EVERYTHING}",
    ]


def test_other_vendors_and_disabled_sources_are_left_out(apt: Path) -> None:
    (apt / "sources.list.d/vendor.list").write_text("deb https://vendor.example/apt vendor-bookworm main\n")
    (apt / "sources.list.d/off.sources").write_text(f"Enabled: no\nTypes: deb\nURIs: {MIRROR}\nSuites: bookworm\n")
    with pytest.raises(machine.TestbedError, match="no apt source of this machine has the suite bookworm"):
        sources(apt, "bookworm")


@pytest.fixture
def pip_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine with a local index, local wheels and constraints besides an index of its own."""
    (tmp_path / "index/simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "constraints.txt").write_text("torch<=2.14.1\n")
    listing = (
        "global.index-url='https://index.example/simple'\n"
        f"global.extra-index-url='file://{tmp_path}/index/simple https://more.example/simple'\n"
        f"global.constraint='{tmp_path}/constraints.txt'\n"
        "global.find-links='/nowhere'\n"
        f":env:.find-links='{tmp_path}/wheels'\n"
    )
    monkeypatch.setattr(pip_setup, "run", lambda argv: listing)
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent")
    for function in (pip_setup._settings, pip_setup._folders):
        function.cache_clear()
    yield tmp_path
    for function in (pip_setup._settings, pip_setup._folders):
        function.cache_clear()


def test_local_folders_are_mounted_under_neutral_names(pip_config: Path) -> None:
    assert set(pip_setup.binds().values()) == {f"{pip_config}/wheels", f"{pip_config}/index"}
    assert all(target.startswith("/srv/testbed/pip/") for target in pip_setup.binds())


def test_pip_and_uv_of_a_host_get_the_same_places(pip_config: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    pip_setup.write(root)
    where = {source: target for target, source in pip_setup.binds().items()}
    wheels, index = where[f"{pip_config}/wheels"], where[f"{pip_config}/index"]
    pip = (root / "etc/pip.conf").read_text()
    assert "index-url = https://index.example/simple\n" in pip
    assert f"extra-index-url = file://{index}/simple https://more.example/simple\n" in pip
    assert f"find-links = {wheels}\n" in pip
    assert "constraint = /etc/testbed/constraints.txt\n" in pip
    assert (root / "etc/testbed/constraints.txt").read_text() == "torch<=2.14.1\n"
    uv = (root / "etc/uv/uv.toml").read_text()
    assert 'index-url = "https://index.example/simple"\n' in uv
    assert f'find-links = ["{wheels}"]\n' in uv
    assert str(pip_config) not in pip + uv
