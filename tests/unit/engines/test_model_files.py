"""model_files: sources are checked before any download, come in order, survive interruption, and appear only whole."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gpufleet.inference.plugins.module_utils import _module
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import download, lock, model_store
from ansible_collections.gpufleet.inference.plugins.modules import model_files

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "testbed" / "engines"))
import tiny_model
from model_hub import COMMIT, TOKEN, Hub

NOBODY = pwd.getpwnam("nobody")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.shutdown()


@pytest.fixture
def shared(tmp_path):
    """A folder that everybody may enter, unlike pytest's own."""
    top = Path(tempfile.gettempdir())
    for parent in (tmp_path, *tmp_path.parents):
        if parent == top:
            break
        parent.chmod(0o755)
    return tmp_path


@pytest.fixture
def host(shared, monkeypatch, capsys, hub):
    def run(models: dict[str, Any], check: bool = False, user: str = "nobody", **options: Any) -> dict[str, Any]:
        monkeypatch.setattr(
            _module, "HostLock", lambda **kwargs: lock.HostLock(path=str(shared / "run" / "lock"), **kwargs)
        )
        args = {"models": models, "dir": str(shared / "models"), "user": user, "endpoint": hub.url}
        with patch_module_args({**args, "_ansible_check_mode": check, **options}), pytest.raises(SystemExit):
            model_files.main()
        text = capsys.readouterr().out
        assert TOKEN not in text
        return json.loads(text)

    run.models = shared / "models"  # type: ignore[attr-defined]
    return run


def archive_of(folder: Path, target: Path, name: str = "tiny") -> tuple[Path, str]:
    with tarfile.open(target, "w") as tar:
        tar.add(folder, name)
    return target, hashlib.sha256(target.read_bytes()).hexdigest()


def test_a_path_that_is_good_changes_nothing(host, tiny, shared):
    place = tiny_model.write(shared / "there")
    result = host({"a": {"path": str(place)}})
    assert not result["changed"]
    assert result["models"]["a"] == {"path": str(place), "complete": True, "commit": ""}


def test_a_hub_model_is_predicted_fetched_and_then_left_alone(host, hub, tiny):
    hub.repository("org/tiny", tiny, {"pytorch_model.bin": b"twice", "README.md": b"read me"})
    source = {"a": {"repo": "org/tiny"}}
    predicted = host(source, check=True)
    assert not host.models.exists()
    done = host(source)
    asked = len(hub.asked)
    again = host(source)
    assert (predicted["changed"], done["changed"], again["changed"]) == (True, True, False)
    assert predicted["diff"] == done["diff"]
    assert done["models"]["a"]["commit"] == COMMIT
    assert len(hub.asked) == asked
    assert (host.models / "a/model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert not (host.models / "a/pytorch_model.bin").exists()
    assert oct((host.models / "a/config.json").stat().st_mode)[-3:] == "644"


def test_metadata_of_all_models_comes_before_any_weights(host, hub, tiny):
    hub.repository("org/a", tiny)
    hub.repository("org/b", tiny)
    host({"a": {"repo": "org/a"}, "b": {"repo": "org/b"}})
    fetched = [path for _method, path, _range in hub.asked if "/resolve/" in path]
    kinds = [path.endswith(".safetensors") for path in fetched]
    assert kinds == sorted(kinds)
    assert kinds.count(True) == 2


def test_broken_metadata_stops_before_the_weights(host, hub, tiny):
    hub.repository("org/a", tiny)
    hub.files[f"/org/a/resolve/{COMMIT}/config.json"] = b"x" * len((tiny / "config.json").read_bytes())
    result = host({"a": {"repo": "org/a"}})
    assert result["error_code"] == "bad_config"
    assert not any(path.endswith(".safetensors") for _method, path, _range in hub.asked)


def test_an_interrupted_download_shows_no_model_and_is_continued(host, hub, tiny):
    hub.repository("org/a", tiny)
    hub.break_after = 100_000
    assert host({"a": {"repo": "org/a"}})["failed"]
    assert not (host.models / "a").exists()
    hub.break_after = None
    hub.asked.clear()
    assert host({"a": {"repo": "org/a"}})["models"]["a"]["complete"]
    assert [range_ for _method, path, range_ in hub.asked if path.endswith(".safetensors")] == ["bytes=100000-"]


def test_weights_that_are_not_what_the_hub_said_are_refused(host, hub, tiny):
    hub.repository("org/a", tiny)
    weights = bytearray((tiny / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    hub.files[f"/org/a/resolve/{COMMIT}/model.safetensors"] = bytes(weights)
    result = host({"a": {"repo": "org/a"}})
    assert result["error_code"] == "wrong_content"
    assert not (host.models / "a").exists()


def test_a_token_opens_the_hub_and_is_shown_nowhere(host, hub, tiny, shared):
    hub.repository("org/a", tiny)
    hub.token = TOKEN
    key = shared / "token"
    key.write_text(TOKEN + "\n")
    key.chmod(0o600)
    refused = host({"a": {"repo": "org/a"}})
    assert (refused["error_code"], "401" in refused["msg"]) == ("download_failed", True)
    assert host({"a": {"repo": "org/a", "token_file": str(key)}})["models"]["a"]["complete"]
    missing = host({"b": {"repo": "org/a"}}, token_file=str(shared / "none"))
    assert missing["error_code"] == "no_token"


def test_a_token_is_not_sent_on_to_another_host():
    request = download.request("http://hub.invalid/file", {"Authorization": f"Bearer {TOKEN}"})
    redirect = download._KeepTokenAtHome()
    away = redirect.redirect_request(request, None, 302, "Found", {}, "http://store.invalid/file")
    home = redirect.redirect_request(request, None, 302, "Found", {}, "http://hub.invalid/other")
    assert not away.has_header("Authorization")
    assert home.has_header("Authorization")


def test_an_archive_is_checked_unpacked_and_published(host, hub, tiny, shared):
    path, digest = archive_of(tiny, shared / "tiny.tar")
    hub.files["/tiny.tar"] = path.read_bytes()
    source = {"a": {"archive": f"{hub.url}/tiny.tar", "sha256": digest}}
    assert host(source, check=True)["changed"]
    assert host(source)["models"]["a"]["complete"]
    assert sorted(os.listdir(host.models)) == ["a"]
    assert (host.models / "a/config.json").exists()
    assert not host(source)["changed"]


def test_an_archive_with_another_checksum_is_refused(host, hub, tiny, shared):
    hub.files["/tiny.tar"] = archive_of(tiny, shared / "tiny.tar")[0].read_bytes()
    result = host({"a": {"archive": f"{hub.url}/tiny.tar", "sha256": "0" * 64}})
    assert result["error_code"] == "wrong_content"
    assert os.listdir(host.models) == []


def test_an_archive_that_leads_out_of_its_folder_is_refused(host, hub, tiny, shared):
    path, digest = archive_of(tiny, shared / "evil.tar", "../../evil")
    hub.files["/evil.tar"] = path.read_bytes()
    result = host({"a": {"archive": f"{hub.url}/evil.tar", "sha256": digest}})
    assert result["error_code"] == "bad_archive"
    assert not (shared / "evil").exists()


def test_a_complete_model_with_another_revision_is_kept_and_reported(host, hub, tiny):
    hub.repository("org/a", tiny)
    host({"a": {"repo": "org/a"}})
    result = host({"a": {"repo": "org/a", "revision": "f" * 40}})
    assert not result["changed"]
    assert [finding["code"] for finding in result["findings"]] == ["model_differs"]


def test_a_fetched_file_that_changed_its_size_is_named(host, hub, tiny):
    hub.repository("org/a", tiny)
    host({"a": {"repo": "org/a"}})
    weights = host.models / "a/model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, 100)
    result = host({"a": {"repo": "org/a"}})
    assert result["error_code"] == "model_damaged"
    assert f"{weights} has 100 bytes; it had {size}" in result["msg"]


def test_a_folder_of_somebody_else_is_not_overwritten(host, hub, tiny):
    hub.repository("org/a", tiny)
    (host.models / "a").mkdir(parents=True)
    assert host({"a": {"repo": "org/a"}})["error_code"] == "foreign_directory"


def test_all_refusals_come_at_once_and_before_any_download(host, hub, tiny, shared):
    hub.repository("org/a", tiny)
    broken = tiny_model.write(shared / "broken")
    (broken / "config.json").write_bytes(b'{"a": "\xff"}')
    result = host({"a": {"repo": "org/a"}, "b": {"path": "/nonexistent/b"}, "c": {"path": str(broken)}})
    assert "/nonexistent/b does not exist" in result["msg"]
    assert "byte 7 is 0xff, which is not UTF-8" in result["msg"]
    assert not any("/resolve/" in path for _method, path, _range in hub.asked)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "0 bytes"), (b'{"a": 1', "line 1 column 8"), (b"[1]", "holds no object"), (None, "has no config.json")],
)
def test_a_config_that_is_broken_is_refused_with_the_place(host, shared, content, words):
    place = tiny_model.write(shared / "there")
    (place / "config.json").unlink()
    if content is not None:
        (place / "config.json").write_bytes(content)
    result = host({"a": {"path": str(place)}})
    assert result["error_code"] == "bad_config"
    assert words in result["msg"]


def test_the_first_file_that_the_user_cannot_read_is_named(host, shared):
    place = tiny_model.write(shared / "there")
    (place / "model.safetensors").chmod(0o600)
    result = host({"a": {"path": str(place)}})
    assert result["error_code"] == "model_unreadable"
    assert f"nobody cannot read {place}/model.safetensors (mode 0600" in result["msg"]
    os.chown(place / "model.safetensors", NOBODY.pw_uid, 0)
    assert not host({"a": {"path": str(place)}}).get("failed")


def test_a_folder_above_that_cannot_be_entered_is_named(host, shared):
    place = tiny_model.write(shared / "closed" / "model")
    (shared / "closed").chmod(0o700)
    assert f"{shared}/closed (mode 0700" in host({"a": {"path": str(place)}})["msg"]


def test_a_link_into_a_closed_folder_is_found(host, shared):
    place, store = tiny_model.write(shared / "snapshot"), shared / "store"
    store.mkdir(mode=0o700)
    (place / "model.safetensors").rename(store / "blob")
    (place / "model.safetensors").symlink_to(store / "blob")
    assert f"and {store} has mode 0700" in host({"a": {"path": str(place)}})["msg"]


def test_a_user_that_does_not_exist_yet_needs_what_all_may_read(host, shared):
    place = tiny_model.write(shared / "there")
    assert not host({"a": {"path": str(place)}}, user="not-yet-there").get("failed")
    (place / "config.json").chmod(0o640)
    assert host({"a": {"path": str(place)}}, user="not-yet-there")["error_code"] == "model_unreadable"


def test_too_little_space_is_refused_with_both_figures_before_the_download(host, hub, tiny, monkeypatch):
    hub.repository("org/a", tiny)
    listing = json.loads(hub.files["/api/models/org/a/revision/main"])
    next(entry for entry in listing["siblings"] if entry["rfilename"].endswith(".safetensors"))["size"] = 10**15
    hub.files["/api/models/org/a/revision/main"] = json.dumps(listing).encode()
    result = host({"a": {"repo": "org/a"}}, check=True)
    assert result["error_code"] == "no_space"
    assert "931322.5" in result["msg"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "/a", "repo": "b"}, "path and repo"),
        ({}, "none of them"),
        ({"archive": "http://x.invalid/a.tar"}, "sha256"),
        ({"pth": "/a"}, "unknown key pth"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(entry, words):
    with pytest.raises(FleetError, match=words):
        model_store.parse({"m": entry}, endpoint="", token_file="")


def test_a_name_that_would_leave_the_folder_is_refused():
    with pytest.raises(FleetError, match="a name is made of"):
        model_store.parse({"../m": {"path": "/a"}}, endpoint="", token_file="")
