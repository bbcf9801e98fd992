"""A model that is still to be fetched is read from its hub: the same facts, little traffic, nothing left behind."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from model_hub import TOKEN, Hub

from ansible_collections.gpufleet.inference.plugins.filter.plannable import plannable
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.plan import plan
from ansible_collections.gpufleet.inference.plugins.module_utils._host import model_preview
from ansible_collections.gpufleet.inference.plugins.modules import model_facts
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

GIB = 2**30


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.shutdown()


@pytest.fixture
def tiny(model: Path) -> Path:
    return model


def facts_of(capsys: pytest.CaptureFixture[str], path: str, **arguments: Any) -> dict[str, Any]:
    given = {"models": {"m": path}, "user": "root", **arguments}
    with patch_module_args(given), pytest.raises(SystemExit):
        model_facts.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_hub_tells_the_same_as_the_fetched_model(hub, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hub.repository("org/tiny", tiny)
    sources = {"m": {"repo": "org/tiny", "endpoint": hub.url}}
    ahead = facts_of(capsys, str(tmp_path / "nowhere"), sources=sources)["models"]["m"]
    here = facts_of(capsys, str(tiny))["models"]["m"]
    assert here["weights"]["format"] == "safetensors" and here["findings"] == []
    for key in ("config", "files", "weights", "digest", "estimated", "findings"):
        assert ahead[key] == here[key], key
    assert ahead["path"] == str(tmp_path / "nowhere") and ahead["readable_by"]["user"] is None
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("gpufleet-model-")] == []
    assert not (tmp_path / "nowhere").exists()


def test_weights_are_asked_for_their_first_bytes_only(hub, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model_preview, "FIRST_BYTES", 64)
    hub.repository("org/tiny", tiny)
    sources = {"m": {"repo": "org/tiny", "endpoint": hub.url}}
    found = facts_of(capsys, str(tmp_path / "nowhere"), sources=sources)["models"]["m"]
    assert found["findings"] == [] and found["weights"]["total_bytes"] > 100_000
    asked = [wanted for _command, path, wanted in hub.asked if path.endswith(".safetensors")]
    assert asked[0] == "bytes=0-63" and len(asked) == 2
    assert int(asked[1].rpartition("-")[2]) < 10_000, "the header, not the tensors"
    assert not [path for _command, path, _wanted in hub.asked if "tokenizer" in path]


def test_a_model_on_the_host_is_not_looked_up(hub, tiny, capsys):
    facts_of(capsys, str(tiny), sources={"m": {"repo": "org/tiny", "endpoint": hub.url}})
    assert hub.asked == []


def test_a_hub_that_does_not_answer_leaves_the_model_unknown_and_hides_no_other(hub, tiny, tmp_path, capsys):
    hub.token = TOKEN
    sources = {"m": {"repo": "org/tiny", "endpoint": hub.url}}
    given = {"m": str(tmp_path / "nowhere"), "other": str(tiny)}
    found = facts_of(capsys, "", models=given, sources=sources)
    codes = [finding["code"] for finding in found["models"]["m"]["findings"]]
    assert codes == ["model_missing", "model_unknown"] and "401" in found["models"]["m"]["findings"][1]["text"]
    assert found["models"]["other"]["findings"] == []
    assert plannable([{"name": "a", "model": "m"}], sources, found["models"]) == []


def test_what_cannot_fit_is_refused_before_it_is_fetched(hub, tiny, tmp_path, capsys):
    hub.repository("org/tiny", tiny)
    sources = {"m": {"repo": "org/tiny", "endpoint": hub.url}}
    found = facts_of(capsys, str(tmp_path / "nowhere"), sources=sources)["models"]
    wanted = plannable([{"name": "a", "model": "m", "port": 8000, "max_model_len": 99_999}], sources, found)
    gpu = {"uuid": "GPU-a", "name": "NVIDIA L4", "compute_capability": "8.9", "memory": {"total": 22 * GIB}}
    request = {"gpu": {"devices": [gpu]}, "models": found, "engine_version": "0.19.1", "data": planner_data()}
    (entry,) = plan({**request, "instances": wanted})["instances"]
    assert entry["reason"]["code"] == "unsupported_by_engine" and "99999" in entry["reason"]["text"]
    (fits,) = plan({**request, "instances": [{"name": "a", "model": "m", "port": 8000}]})["instances"]
    assert fits["fits"] and fits["model_path"] == str(tmp_path / "nowhere") and fits["estimated"] is False
