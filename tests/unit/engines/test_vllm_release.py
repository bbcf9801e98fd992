"""vllm_release: check mode predicts, a run installs with the real uv, half-finished and foreign folders are handled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from support import ScriptedRunner

from ansible_collections.gpufleet.inference.plugins.action import vllm_release as action
from ansible_collections.gpufleet.inference.plugins.module_utils import _module
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import engine, lock
from ansible_collections.gpufleet.inference.plugins.module_utils._host.jobs import Jobs
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.modules import vllm_release

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests/testbed/engines"), str(ROOT / "tests/testbed/engines/stub_engine")]
import build

UV = Path(sys.executable).with_name("uv")
UV_VERSION = subprocess.run([UV, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
FACTS = {"python": ">=3.9", "glibc": None}


class Direct(Jobs):
    """Jobs that run at once in this process, with the same files and messages."""

    def __init__(self) -> None:
        super().__init__(Root(), ScriptedRunner())
        self.environments: list[dict[str, str]] = []
        self.argvs: list[list[str]] = []
        self.only_record = False

    def running(self, name: str) -> bool:
        return False

    def run(self, name: str, argv: Any, *, deadline: float, what: str, environment: Any = None) -> None:
        self.environments.append(dict(environment or {}))
        self.argvs.append(list(argv))
        if self.only_record:
            raise FleetError("job_failed", "recorded, not run")
        done = subprocess.run(
            argv, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FleetError("job_failed", f"{what} failed: {done.stderr}")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("0.31.0", "0.32.0"):
        build.build(version, folder)
    return folder


@pytest.fixture
def host(tmp_path, monkeypatch, capsys, wheels):
    """Call the module on this machine with its releases below tmp_path."""
    jobs = Direct()
    folder = tmp_path / "vllm"
    uv = folder / ".uv" / UV_VERSION / "uv"
    uv.parent.mkdir(parents=True)
    uv.symlink_to(UV)
    monkeypatch.setattr(
        _module, "HostLock", lambda **kwargs: lock.HostLock(path=str(tmp_path / "run" / "lock"), **kwargs)
    )
    monkeypatch.setattr(vllm_release, "Jobs", lambda root, runner: jobs)

    def run(*versions: str, check: bool = False, **options: Any) -> dict[str, Any]:
        args = {
            "releases": [{"version": v} if isinstance(v, str) else v for v in versions],
            "root": str(folder),
            "find_links": [str(wheels)],
            "python": {"path": sys.executable},
            "uv_version": UV_VERSION,
            "table": dict.fromkeys(("0.30.0", "0.31.0", "0.32.0"), FACTS),
            "_ansible_check_mode": check,
            **options,
        }
        with patch_module_args(args), pytest.raises(SystemExit):
            vllm_release.main()
        return json.loads(capsys.readouterr().out)

    run.folder, run.jobs = folder, jobs  # type: ignore[attr-defined]
    return run


def test_check_mode_predicts_the_run_and_the_second_run_changes_nothing(host):
    predicted = host("0.31.0", "0.32.0", check=True)
    assert not (host.folder / "0.32.0").exists()
    done, again = host("0.31.0", "0.32.0"), host("0.31.0", "0.32.0")
    assert (predicted["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert predicted["installed"] == done["installed"] == ["0.31.0", "0.32.0"]
    assert predicted["diff"] == done["diff"]
    assert [entry["complete"] for entry in done["releases"].values()] == [True, True]
    assert again["installed"] == []


def test_the_installed_release_is_the_wanted_one_and_says_what_is_in_it(host):
    manifest = host("0.32.0")["releases"]["0.32.0"]["manifest"]
    assert (manifest["version"], manifest["wheels"]["vllm"]) == ("0.32.0", "0.32.0+stub")
    vllm = subprocess.run([host.folder / "0.32.0/bin/vllm", "--version"], capture_output=True, text=True, check=True)
    assert vllm.stdout.strip() == "0.32.0"


def test_nobody_else_may_write_to_a_release_and_everybody_may_read_it(host):
    host("0.32.0")
    modes = {path: path.stat().st_mode for path in (host.folder / "0.32.0").rglob("*") if not path.is_symlink()}
    assert [path for path, mode in modes.items() if mode & 0o022] == []
    assert [path for path, mode in modes.items() if not mode & 0o004] == []
    assert (host.folder / ".cache").stat().st_mode & 0o077 == 0


def test_a_half_finished_release_is_made_anew(host):
    host("0.32.0")
    (host.folder / "0.32.0/.gpufleet.json").unlink()
    (host.folder / "0.32.0/left-over").write_text("")
    (host.folder / ".installing-0.32.0").write_text("")
    result = host("0.32.0")
    assert result["changed"]
    assert result["releases"]["0.32.0"]["complete"]
    assert not (host.folder / "0.32.0/left-over").exists()


def test_a_release_that_cannot_be_had_leaves_nothing_that_counts_as_installed(host):
    result = host("0.30.0")
    assert result["failed"]
    assert result["error_code"] == "job_failed"
    assert "0.30.0" in result["msg"]
    assert host("0.30.0", check=True)["changed"]


def test_a_folder_of_somebody_else_is_refused(host):
    (host.folder / "0.32.0").mkdir()
    (host.folder / "0.32.0/theirs").write_text("x")
    for check in (True, False):
        result = host("0.32.0", check=check)
        assert result["error_code"] == "foreign_directory"
    assert (host.folder / "0.32.0/theirs").read_text() == "x"


def test_a_complete_release_with_other_constraints_is_kept_and_reported(host):
    host("0.32.0")
    result = host({"version": "0.32.0", "constraints": ["transformers<5"]})
    assert not result["changed"]
    assert [finding["code"] for finding in result["findings"]] == ["engine_differs"]


def test_hashes_are_enforced(host, wheels):
    wheel = wheels / "vllm-0.32.0+stub-py3-none-any.whl"
    digest = engine.download.sha256_of(str(wheel))
    wrong = host(
        {"version": "0.32.0", "requirements": f"vllm==0.32.0+stub --hash=sha256:{'0' * 64}"}, require_hashes=True
    )
    right = host(
        {"version": "0.32.0", "requirements": f"vllm==0.32.0+stub --hash=sha256:{digest}"}, require_hashes=True
    )
    none = host("0.31.0", require_hashes=True, check=True)
    assert wrong["error_code"] == "job_failed"
    assert right["releases"]["0.32.0"]["complete"]
    assert none["error_code"] == "no_hashes"


def test_find_links_alone_mean_that_no_index_is_asked(host):
    host("0.32.0")
    assert "--no-index" in host.jobs.argvs[0]


def test_credentials_of_an_index_are_in_the_environment_only(host, wheels):
    host.jobs.only_record = True
    host("0.32.0", index_url=f"file://{wheels}", extra_index_urls=["https://user:s3cret@index.invalid/simple"])
    assert "s3cret" not in json.dumps(host.jobs.argvs)
    assert "s3cret" in host.jobs.environments[0]["UV_INDEX"]


def test_a_release_that_no_interpreter_fits_is_refused_before_anything_is_made(host):
    result = host("0.32.0", table={"0.32.0": {"python": ">=4.0", "glibc": None}})
    assert result["error_code"] == "no_python"
    assert not (host.folder / "0.32.0").exists()


def test_too_little_space_is_refused_with_both_figures(host):
    result = host("0.32.0", "0.31.0", min_free_gib=10**6, check=True)
    assert result["error_code"] == "no_space"
    assert "2000000.00 GiB" in result["msg"]


def test_uv_comes_out_of_its_wheel_and_a_wrong_checksum_is_refused(tmp_path, wheels):
    import zipfile

    machine = os.uname().machine
    name = f"uv-9.9.9-py3-none-manylinux_2_17_{machine}.manylinux2014_{machine}.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("uv-9.9.9.data/scripts/uv", "#!/bin/sh\n")
    engines = engine.Engines(Root(), ScriptedRunner(), Direct(), str(tmp_path / "vllm"), machine)
    sources = engine.Sources(find_links=(str(tmp_path),), uv_version="9.9.9", uv_sha256="0" * 64)
    with pytest.raises(FleetError, match="is wanted"):
        engines._uv(sources)
    path = engines._uv(engine.Sources(find_links=(str(tmp_path),), uv_version="9.9.9"))
    assert os.access(path, os.X_OK)
    with pytest.raises(FleetError, match=r"No wheel of uv 8\.8\.8"):
        engines._uv(engine.Sources(find_links=(str(tmp_path),), uv_version="8.8.8"))


def test_missing_packages_are_found_with_their_interpreter_and_installed_first(tmp_path):
    root = Root(str(tmp_path / "host"))
    for path in ("usr/bin/apt-get", "usr/bin/python3.12"):
        (tmp_path / "host" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "host" / path).write_text("")
    runner = ScriptedRunner(
        {
            ("/usr/bin/python3.12",): "3.12.3\n",
            ("dpkg-query",): (1, "installed libnuma1\nnot-installed g++\n", "dpkg-query: no packages found\n"),
        }
    )
    engines = engine.Engines(root, runner, Direct(), "/opt/vllm", "x86_64")
    release = engine.Release("0.32.0", {"python": "<3.15,>=3.11", "glibc": "2.28"})
    plan = engines.plan(
        [release], engine.Python(), engine.Sources(), ["g++", "libnuma1", "{python}-dev"], min_free=0, glibc="2.36"
    )
    assert plan.packages == ("g++", "python3.12-dev", "python3-pip")
    assert plan.interpreters == {"0.32.0": "/usr/bin/python3.12"}


def test_an_interpreter_from_a_package_counts_before_it_is_installed(tmp_path):
    root = Root(str(tmp_path))
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/apt-get").write_text("")
    engines = engine.Engines(root, ScriptedRunner(), Direct(), "/opt/vllm", "x86_64")
    release = engine.Release("0.32.0", {"python": "<3.15,>=3.11", "glibc": "2.28"})
    sources = engine.Sources(find_links=("/srv",))
    plan = engines.plan([release], engine.Python(package="python3.12"), sources, [], min_free=0, glibc="2.36")
    assert plan.packages == ("python3.12",)
    with pytest.raises(FleetError, match=r"needs Python <3\.15,>=3\.11"):
        engines.plan([release], engine.Python(package="python3.10"), sources, [], min_free=0, glibc="2.36")


@pytest.mark.parametrize(
    ("python", "words"),
    [({"path": "/a", "package": "b"}, "path and package"), ({"archive": "https://x.invalid/a.tar"}, "together")],
)
def test_ways_to_an_interpreter_exclude_each_other(python, words):
    with pytest.raises(FleetError, match=words):
        vllm_release.wanted_python(python)


def test_the_action_refuses_before_the_host_is_asked_and_reports_warnings():
    facts = {"driver": {"running": "570.195.03"}, "devices": [{"name": "H100", "compute_capability": "9.0"}]}
    versions = action.planner_data()["releases"]["versions"]
    with pytest.raises(FleetError, match=r"580\.65\.06"):
        action.check({"releases": [{"version": "0.32.0"}]}, facts, versions)
    facts["driver"] = {"running": "535.261.03"}
    table, findings = action.check({"releases": [{"version": "0.19.1"}]}, facts, versions)
    assert table["0.19.1"]["python"] == versions["0.19.1"]["python"]
    assert [finding["code"] for finding in findings] == ["driver_below_toolkit"]
    assert action.check({"releases": [{"version": "0.32.0"}], "driver_version": "580.95.05"}, facts, versions)[1] == []
