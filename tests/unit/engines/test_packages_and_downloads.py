"""Missing packages are told apart and read back; index pages are read; an interpreter comes out of an archive."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from pathlib import Path

import pytest
from support import ScriptedRunner

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import download, engine, packages
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root


class Recorded:
    """Jobs that only remember what they were asked for."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, list[str]]] = []

    def run(self, name, argv, *, deadline, what, environment=None) -> None:
        self.jobs.append((name, list(argv)))

    def running(self, name) -> bool:
        return False


def host(tmp_path: Path, *files: str) -> Root:
    for file in files:
        path = tmp_path / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return Root(str(tmp_path))


def test_dpkg_states_that_are_not_installed_count_as_missing(tmp_path):
    runner = ScriptedRunner({("dpkg-query",): (1, "installed gcc\nconfig-files g++\n", "no packages found: openssl")})
    assert packages.missing(host(tmp_path, "/usr/bin/apt-get"), runner, ["gcc", "g++", "openssl"]) == ["g++", "openssl"]


def test_rpm_is_asked_where_there_is_dnf(tmp_path):
    root = host(tmp_path, "/usr/bin/dnf")
    runner = ScriptedRunner({("rpm", "--query", "--whatprovides", "gcc-c++"): "gcc-c++-11.4.1-3.el9.x86_64\n"})
    runner.answers[("rpm",)] = (1, "no package provides openssl\n", "")
    assert packages.family(root) == "redhat"
    assert packages.missing(root, runner, ["gcc-c++", "openssl"]) == ["openssl"]
    jobs = Recorded()
    with pytest.raises(FleetError, match="still missing"):
        packages.install(root, runner, jobs, ["openssl"], deadline=5)
    assert jobs.jobs == [("packages", ["dnf", "-q", "-y", "install", "openssl"])]


def test_no_wish_asks_nothing(tmp_path):
    runner = ScriptedRunner()
    assert packages.missing(host(tmp_path, "/usr/bin/apt-get"), runner, []) == []
    assert runner.calls == []


def test_a_host_without_package_manager_is_told_what_is_missing(tmp_path):
    with pytest.raises(FleetError, match="openssl are missing and this host has neither"):
        packages.install(Root(str(tmp_path)), ScriptedRunner(), Recorded(), ["openssl"], deadline=5)


@pytest.mark.parametrize("form", ["html", "json"])
def test_an_index_page_gives_names_addresses_and_hashes(tmp_path, form):
    digest = "a" * 64
    page = tmp_path / "index.html"
    if form == "html":
        page.write_text(f'<a href="../f/uv-1.whl#sha256={digest}">uv-1.whl</a> <a href="uv-2%2Bx.whl">uv-2</a>')
    else:
        files = [
            {"filename": "uv-1.whl", "url": "../f/uv-1.whl", "hashes": {"sha256": digest}},
            {"filename": "uv-2+x.whl", "url": "uv-2%2Bx.whl", "hashes": {}},
        ]
        page.write_text(json.dumps({"files": files}))
    first, second = download.page_links(page.as_uri())
    assert (first.name, first.sha256) == ("uv-1.whl", digest)
    assert first.url == f"{tmp_path.parent.as_uri()}/f/uv-1.whl"
    assert (second.name, second.sha256) == ("uv-2+x.whl", "")


def test_credentials_in_an_address_become_a_header_and_are_not_shown():
    request = download.request("https://user:s3cret@index.invalid/simple/uv/?q=1")
    assert "s3cret" not in request.full_url
    assert request.get_header("Authorization").startswith("Basic ")
    assert download.shown("https://user:s3cret@index.invalid/simple/?token=x") == "https://index.invalid/simple/"


def test_a_server_that_cannot_be_reached_is_named_without_credentials():
    with pytest.raises(FleetError, match=r"http://127\.0\.0\.1:9/x could not be read") as caught:
        download.get("http://user:s3cret@127.0.0.1:9/x")
    assert "s3cret" not in caught.value.message


def test_another_kind_of_address_is_refused():
    with pytest.raises(FleetError, match="not an http, https or file address"):
        download.request("ftp://x.invalid/a")


def archive(tmp_path: Path, *names: str) -> tuple[str, str]:
    tree = tmp_path / "tree"
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("#!/bin/sh\n")
        (tree / name).chmod(0o755)
    path = tmp_path / "python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tree, ".")
    return path.as_uri(), hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_interpreter_comes_out_of_an_archive_once(tmp_path):
    url, digest = archive(tmp_path, "python/bin/python3")
    engines = engine.Engines(Root(), ScriptedRunner(), Recorded(), str(tmp_path / "vllm"), "x86_64")
    python = engine.Python(archive=url, sha256=digest)
    first = engines._unpack_python(python)
    Path(url.removeprefix("file://")).unlink()
    assert engines._unpack_python(python) == first
    assert os.access(first, os.X_OK)


def test_an_archive_without_an_interpreter_is_refused(tmp_path):
    url, digest = archive(tmp_path, "Python-3.12/configure")
    engines = engine.Engines(Root(), ScriptedRunner(), Recorded(), str(tmp_path / "vllm"), "x86_64")
    with pytest.raises(FleetError, match="holds no bin/python3"):
        engines._unpack_python(engine.Python(archive=url, sha256=digest))


def test_without_addresses_the_settings_of_the_hosts_pip_hold():
    answer = "global.index-url='https://mirror.invalid/simple'\nglobal.extra-index-url='https://a.invalid/x https://b.invalid/y'\n"
    engines = engine.Engines(
        Root(), ScriptedRunner({("python3", "-m", "pip"): answer}), Recorded(), "/opt/vllm", "x86_64"
    )
    found = engines._from_pip(engine.Sources(uv_version="1"))
    assert found.index_url == "https://mirror.invalid/simple"
    assert found.extra_index_urls == ("https://a.invalid/x", "https://b.invalid/y")
    own = engine.Sources(find_links=("/srv",), uv_version="1")
    assert engines._from_pip(own) is own


def test_the_installation_without_addresses_leaves_the_hosts_settings_in_force(tmp_path):
    engines = engine.Engines(Root(), ScriptedRunner(), Recorded(), "/opt/vllm", "x86_64")
    assert "UV_NO_CONFIG" not in engines._environment(engine.Sources())
    assert engines._environment(engine.Sources(find_links=("/srv",)))["UV_NO_CONFIG"] == "1"


def test_proxies_of_the_task_reach_the_installation(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    engines = engine.Engines(Root(), ScriptedRunner(), Recorded(), "/opt/vllm", "x86_64")
    assert engines._environment(engine.Sources())["HTTPS_PROXY"] == "http://proxy.invalid:3128"
