"""host_files: check mode reports what a run changes, a second run changes nothing, failures change nothing."""

from __future__ import annotations

import base64
import json
import os
import stat
import zlib
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gpufleet.inference.plugins.module_utils import _module
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import files, lock
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.modules import host_files

ME = {"owner": str(os.getuid()), "group": str(os.getgid())}


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the module as Ansible would; answers (exit code, result)."""

    def locked(**kwargs: Any) -> lock.HostLock:
        return lock.HostLock(path=str(tmp_path / "run" / "lock"), **kwargs)

    monkeypatch.setattr(_module, "HostLock", locked)

    def run(entries: list[dict[str, Any]], check: bool = False) -> dict[str, Any]:
        args = {"files": [{**ME, **entry} for entry in entries], "_ansible_check_mode": check, "_ansible_diff": True}
        with patch_module_args(args), pytest.raises(SystemExit):
            host_files.main()
        return json.loads(capsys.readouterr().out)

    return run


def wanted_tree(base) -> list[dict[str, Any]]:
    return [
        {"path": f"{base}/etc", "state": "directory", "mode": "0750"},
        {"path": f"{base}/etc/a.conf", "content": "one\n", "mode": "0640"},
        {"path": f"{base}/etc/key", "secret": "s3cret-value", "mode": "0600"},
        {"path": f"{base}/etc/bin", "content_z": base64.b64encode(zlib.compress(b"\0\1")).decode()},
        {"path": f"{base}/etc/current", "state": "link", "target": "a.conf"},
        {"path": f"{base}/etc/old", "state": "absent", "purge": True},
    ]


def test_check_mode_reports_what_the_run_changes_and_the_second_run_changes_nothing(tmp_path, call):
    base = tmp_path / "host"
    (base / "etc" / "old" / "deep").mkdir(parents=True)
    (base / "etc").chmod(0o700)
    predicted = call(wanted_tree(base), check=True)
    assert sorted(os.listdir(base / "etc")) == ["old"]
    done = call(wanted_tree(base))
    again = call(wanted_tree(base))
    assert (predicted["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert predicted["changes"] == done["changes"]
    assert predicted["diff"] == done["diff"]
    assert [change["action"] for change in done["changes"]] == ["attributes", *["create"] * 4, "remove"]
    assert again["changes"] == []


def test_the_files_are_as_wanted(tmp_path, call):
    base = tmp_path / "host"
    call(wanted_tree(base))
    assert (base / "etc" / "a.conf").read_text() == "one\n"
    assert stat.S_IMODE((base / "etc" / "a.conf").stat().st_mode) == 0o640
    assert stat.S_IMODE((base / "etc").stat().st_mode) == 0o750
    assert (base / "etc" / "bin").read_bytes() == b"\0\1"
    assert os.readlink(base / "etc" / "current") == "a.conf"
    assert sorted(os.listdir(base / "etc")) == ["a.conf", "bin", "current", "key"]


def test_a_changed_file_is_one_change_with_both_texts_in_the_diff(tmp_path, call):
    base = tmp_path / "host"
    call(wanted_tree(base))
    (base / "etc" / "a.conf").write_text("two\n")
    result = call(wanted_tree(base))
    assert result["changes"] == [{"path": f"{base}/etc/a.conf", "action": "update"}]
    assert (result["diff"][0]["before"], result["diff"][0]["after"]) == ("two\n", "one\n")


def test_a_changed_mode_is_repaired_without_writing_the_content(tmp_path, call):
    base = tmp_path / "host"
    call(wanted_tree(base))
    path = base / "etc" / "a.conf"
    path.chmod(0o666)
    before = path.stat().st_ino
    assert call(wanted_tree(base))["changes"] == [{"path": str(path), "action": "attributes"}]
    assert (path.stat().st_ino, stat.S_IMODE(path.stat().st_mode)) == (before, 0o640)


def test_a_secret_is_in_no_output(tmp_path, call):
    base = tmp_path / "host"
    first = call(wanted_tree(base))
    (base / "etc" / "key").write_text("other-secret")
    second = call(wanted_tree(base))
    assert second["changed"]
    for text in (json.dumps(first), json.dumps(second)):
        assert "s3cret-value" not in text
        assert "other-secret" not in text


@pytest.mark.parametrize(
    ("entry", "code", "words"),
    [
        ({"path": "relative", "content": "x"}, "bad_file", "absolute"),
        ({"path": "/", "state": "absent"}, "bad_file", "absolute"),
        ({"path": "/etc", "state": "absent", "purge": True}, "bad_file", "below a top directory"),
        ({"path": "/a/../etc/x", "content": "x"}, "bad_file", "absolute"),
        ({"path": "{base}/x", "state": "file"}, "bad_file", "content"),
        ({"path": "{base}/x", "state": "link"}, "bad_file", "target"),
        ({"path": "{base}/x", "content": "x", "mode": "u+x"}, "bad_file", "octal"),
        ({"path": "{base}/x", "content": "x", "secret": "y"}, "bad_file", "exclude"),
        ({"path": "{base}/taken/x", "content": "x"}, "path_taken", "not a directory"),
        ({"path": "{base}/taken", "state": "link", "target": "y"}, "path_taken", "not ours"),
        ({"path": "{base}/taken", "state": "directory"}, "path_taken", "a file is there"),
        ({"path": "{base}/full", "state": "absent"}, "directory_not_empty", "purge"),
        ({"path": "{base}/x", "content": "x", "owner": "nosuchuser"}, "no_such_owner", "nosuchuser"),
    ],
)
def test_what_cannot_be_is_refused_with_the_path_and_the_reason(tmp_path, call, entry, code, words):
    (tmp_path / "taken").write_text("theirs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    entry["path"] = entry["path"].replace("{base}", str(tmp_path))
    result = call([entry])
    assert result["failed"] is True
    assert result["error_code"] == code
    assert words in result["msg"]
    assert os.path.basename(entry["path"]) in result["msg"]
    assert (tmp_path / "taken").read_text() == "theirs"


def test_a_write_that_fails_leaves_the_earlier_files_as_they_were(tmp_path):
    root = Root(str(tmp_path))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_text("old")
    wanted = [files.parse({"path": f"/d/{name}", **ME}, b"new") for name in ("a", "b")]
    calls = []

    def failing_chown(fd: int, uid: int, gid: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", "/d/b")

    with pytest.raises(FleetError, match="No space left") as caught:
        files.apply(root, files.plan(root, wanted), chown=failing_chown)
    assert caught.value.code == "write_failed"
    assert (tmp_path / "d" / "a").read_text() == "old"
    assert sorted(os.listdir(tmp_path / "d")) == ["a"]


def test_one_path_given_twice_is_refused(tmp_path, call):
    entry = {"path": f"{tmp_path}/x", "content": "x"}
    assert "given twice" in call([entry, entry])["msg"]


def test_a_link_in_the_place_of_a_file_is_replaced_and_its_target_left_alone(tmp_path, call):
    (tmp_path / "target").write_text("theirs")
    (tmp_path / "x").symlink_to("target")
    call([{"path": f"{tmp_path}/x", "content": "ours"}])
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "target").read_text() == "theirs"


def test_a_digest_in_place_of_the_content_is_enough_when_the_host_has_it(tmp_path, call):
    (tmp_path / "x").write_bytes(b"same")
    (tmp_path / "x").chmod(0o644)
    entry = {"path": f"{tmp_path}/x", "sha256": files.parse({"path": "/d/x"}, b"same").sha256}
    assert call([entry])["changed"] is False
    (tmp_path / "x").write_bytes(b"different")
    assert call([entry])["error_code"] == "content_missing"


def test_a_directory_with_files_of_others_stays_when_only_an_empty_one_may_go(tmp_path, call):
    (tmp_path / "d").mkdir()
    entry = {"path": f"{tmp_path}/d", "state": "absent", "only_empty": True}
    (tmp_path / "d" / "theirs").write_text("x")
    assert call([entry])["changed"] is False
    (tmp_path / "d" / "theirs").unlink()
    assert call([entry])["changes"] == [{"path": f"{tmp_path}/d", "action": "remove"}]
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("full", [True, False], ids=["to a full directory", "to an empty one"])
def test_a_link_in_the_place_of_a_directory_stays_when_only_an_empty_one_may_go(tmp_path, call, full):
    (tmp_path / "data").mkdir()
    if full:
        (tmp_path / "data" / "theirs").write_text("x")
    (tmp_path / "d").symlink_to("data")
    (tmp_path / "f").write_text("x")
    entries = [{"path": f"{tmp_path}/{name}", "state": "absent", "only_empty": True} for name in "df"]
    assert call(entries, check=True)["changed"] is False
    assert call(entries)["changed"] is False
    assert os.readlink(tmp_path / "d") == "data"
    assert (tmp_path / "f").read_text() == "x"


def test_check_mode_counts_out_what_an_earlier_task_removes(tmp_path, call):
    (tmp_path / "d" / "inner").mkdir(parents=True)
    entry = {"path": f"{tmp_path}/d", "state": "absent", "only_empty": True, "besides": ["inner"]}
    predicted = call([entry], check=True)
    (tmp_path / "d" / "inner").rmdir()
    assert predicted["changes"] == call([entry])["changes"] == [{"path": f"{tmp_path}/d", "action": "remove"}]
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / "theirs").write_text("x")
    assert call([entry], check=True)["changed"] is False


def test_check_mode_knows_that_a_directory_is_empty_after_its_content_went(tmp_path, call):
    (tmp_path / "d" / "inner").mkdir(parents=True)
    entries = [{"path": f"{tmp_path}/d{name}", "state": "absent", "only_empty": True} for name in ("/inner", "")]
    predicted = call(entries, check=True)
    assert predicted["changes"] == call(entries)["changes"]
    assert len(predicted["changes"]) == 2
