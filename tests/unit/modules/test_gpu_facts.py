from __future__ import annotations

import json
from pathlib import Path

import pynvml
import pytest
from ansible.module_utils.testing import patch_module_args
from fake_host import FakeHost

from ansible_collections.gpufleet.inference.plugins.module_utils._host import gpu, nvml
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.modules import gpu_facts
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    host = FakeHost(tmp_path / "host").h100("0000:18:00.0")
    monkeypatch.setattr(gpu_facts, "Root", lambda: Root(str(host.folder)))

    def call(**arguments):
        with patch_module_args(arguments), pytest.raises(SystemExit):
            gpu_facts.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_bindings_from_the_controller_are_used_and_never_shown(run):
    packed = nvml.pack_bindings(Path(pynvml.__file__).read_bytes())
    result = run(bindings=packed)
    facts = result["ansible_facts"]["gpufleet_gpu"]
    assert facts["present"]
    assert "libnvidia-ml.so.1 is missing (NVML 12)" in facts["unavailable"]["nvml"]
    assert packed[:200] not in json.dumps(result)
    assert result["invocation"]["module_args"]["bindings"] == "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"
    assert not result["changed"]


def test_without_bindings_the_reason_is_told(run):
    facts = run()["ansible_facts"]["gpufleet_gpu"]
    assert facts["unavailable"]["nvml"] == "not asked: no NVML bindings came with the task"
    assert [entry["address"] for entry in facts["pci"]] == ["0000:18:00.0"]


def test_bindings_from_the_host_helper_are_used_when_it_is_the_one_expected(run, tmp_path, monkeypatch):
    artefact = _zipapp.build()
    (tmp_path / "gpufleet.pyz").write_bytes(artefact)
    monkeypatch.setattr(gpu, "HELPER", str(tmp_path / "gpufleet.pyz"))
    facts = run(helper_digest=_zipapp.digest(artefact))["ansible_facts"]["gpufleet_gpu"]
    assert "libnvidia-ml.so.1 is missing" in facts["unavailable"]["nvml"]


def test_a_helper_that_changed_is_not_loaded(run, tmp_path, monkeypatch):
    (tmp_path / "gpufleet.pyz").write_bytes(b"something else")
    monkeypatch.setattr(gpu, "HELPER", str(tmp_path / "gpufleet.pyz"))
    result = run(helper_digest="0" * 64)
    assert result["failed"]
    assert result["error_code"] == "helper_changed"


def test_a_deadline_too_short_to_ask_anything_is_refused(run):
    result = run(deadline=0.5)
    assert result["failed"]
    assert "at least 1 second, found 0.5" in result["msg"]
