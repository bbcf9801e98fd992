"""Models of a host: what their files say, and that no broken one hides the others."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import checkpoints
import oracle_cases as cases
import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import weights
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.shape import parse_shape
from ansible_collections.gpufleet.inference.plugins.module_utils._host import model_reader
from ansible_collections.gpufleet.inference.plugins.module_utils._host.model_store import Reader
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.modules import model_facts

CONFIG: dict[str, Any] = cases.ORACLE["configs"]["llama-3.2-1b"]
ME = Reader("me", os.getuid(), (os.getgid(),))
OTHER = Reader("vllm", 54321, ())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model in one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    checkpoints.write(folder / "model.safetensors", checkpoints.tensors(CONFIG))
    return folder


def read(folder: Path, user: Reader = ME) -> dict[str, Any]:
    return model_reader.read_model(Root(), "m", str(folder), user)


def codes(facts: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in facts["findings"]}


def test_a_whole_model_is_described_without_reading_its_tensors(model: Path) -> None:
    facts = read(model)
    assert facts["findings"] == []
    assert facts["config"] == CONFIG
    assert facts["weights"]["format"] == "safetensors"
    assert facts["weights"]["by_dtype"] == {"BF16": facts["weights"]["total_bytes"]}
    assert not facts["estimated"]
    assert json.loads(json.dumps(facts)) == facts
    assert len(json.dumps(facts["weights"])) < 4096
    shape = parse_shape(CONFIG)
    exact = weights.rank_weights(shape, facts)
    assert exact.bytes == pytest.approx(weights.rank_weights(shape, None).bytes, rel=1e-6)


def test_copies_in_another_precision_do_not_count(model: Path) -> None:
    before = read(model)["weights"]
    for number, part in enumerate((dict(list(checkpoints.tensors(CONFIG).items())[:50]), {})):
        checkpoints.write(model / f"model.fp32-0000{number + 1}-of-00002.safetensors", part)
    facts = read(model)
    assert facts["weights"] == before and facts["findings"] == []


def test_shards_of_an_index_count_and_stray_copies_do_not(model: Path) -> None:
    whole = read(model)["weights"]["total_bytes"]
    spec = list(checkpoints.tensors(CONFIG).items())
    (model / "model.safetensors").unlink()
    for number, part in enumerate((dict(spec[:50]), dict(spec[50:]))):
        checkpoints.write(model / f"model-{number}.safetensors", part)
    checkpoints.write(model / "consolidated.safetensors", dict(spec))
    assert read(model)["weights"]["total_bytes"] == whole
    index = {"weight_map": {name: f"model-{int(i >= 50)}.safetensors" for i, (name, _) in enumerate(spec)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = read(model)
    assert facts["weights"]["total_bytes"] == whole
    assert facts["findings"] == []


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-9.safetensors"}})
    )
    facts = read(model)
    assert codes(facts) == {"bad_safetensors"}
    assert "model-9.safetensors" in facts["findings"][0]["text"]
    assert facts["weights"]["format"] == "broken"
    assert facts["estimated"]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, "model_broken", "has no config.json"),
        (b'{"hidden_size": 10', "model_broken", "not JSON"),
        (b'{"a": "\xff\xfe"}', "model_broken", "not UTF-8"),
        (b"[1, 2]", "model_broken", "no object"),
        (b'{"a":' * 50000, "model_broken", "not JSON"),
        (b'{"a": ' + b"9" * 10000 + b"}", "model_broken", "not JSON"),
        (b'{"hidden_size": NaN}', "bad_config", "lacks"),
        (b'{"model_type": "llama", "num_hidden_layers": 1e9}', "bad_config", "between 1 and 1024"),
    ],
)
def test_a_broken_config_is_a_finding(model: Path, content: bytes | None, code: str, words: str) -> None:
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_bytes(content)
    facts = read(model)
    assert code in codes(facts)
    assert any(words in finding["text"] for finding in facts["findings"])
    assert all(finding["remedy"] for finding in facts["findings"])


def test_a_huge_config_is_not_read(model: Path) -> None:
    with (model / "config.json").open("wb") as stream:
        stream.truncate(1 << 40)
    assert "4194304 allowed" in read(model)["findings"][0]["text"]


def test_a_pipe_for_a_config_does_not_hang(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert codes(read(model)) == {"model_broken"}


@pytest.mark.parametrize("size", [0, 4, 8, 1000])
def test_a_cut_off_file_is_a_finding(model: Path, size: int) -> None:
    os.truncate(model / "model.safetensors", size)
    facts = read(model)
    assert codes(facts) == {"bad_safetensors"}
    assert facts["weights"]["format"] == "broken"


def test_a_header_that_claims_the_world_is_refused_unread(model: Path) -> None:
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "format allows 100000000" in read(model)["findings"][0]["text"]


def test_a_tensor_in_two_files_is_a_finding(model: Path) -> None:
    checkpoints.write(model / "z.safetensors", checkpoints.tensors(CONFIG))
    assert codes(read(model)) == {"bad_safetensors"}


def test_what_the_service_user_may_not_read_is_named(model: Path) -> None:
    for folder in (model, *model.parents):
        if folder.stat().st_uid == os.getuid() and str(folder) != "/":
            folder.chmod(0o755)
    (model / "model.safetensors").chmod(0o600)
    facts = read(model, OTHER)
    assert facts["readable_by"] == {"user": False, "first_unreadable": str(model / "model.safetensors")}
    assert codes(facts) == {"model_unreadable"}
    (model / "model.safetensors").chmod(0o644)
    assert read(model, OTHER)["readable_by"]["user"]
    model.chmod(0o700)
    assert read(model, OTHER)["readable_by"]["first_unreadable"] == str(model)


def test_the_digest_follows_content_not_time(model: Path) -> None:
    before = read(model)["digest"]
    os.utime(model / "config.json", (1, 1))
    assert read(model)["digest"] == before
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 128257}))
    assert read(model)["digest"] != before


@pytest.mark.parametrize(("name", "kind"), [("model.gguf", "gguf"), ("pytorch_model.bin", "bin")])
def test_other_formats_are_told_apart_and_estimated(model: Path, name: str, kind: str) -> None:
    (model / "model.safetensors").rename(model / name)
    facts = read(model)
    assert facts["weights"]["format"] == kind
    assert facts["weights"]["total_bytes"] == (model / name).stat().st_size
    assert facts["estimated"]


@pytest.mark.parametrize("check", [False, True])
def test_one_bad_model_hides_no_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], check: bool
) -> None:
    models = {"good": str(model), "gone": str(tmp_path / "gone")}
    arguments = {"models": models, "user": "root", "_ansible_check_mode": check}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        model_facts.main()
    result = json.loads(capsys.readouterr().out)
    assert not result["changed"]
    assert result["models"]["good"]["weights"]["format"] == "safetensors"
    assert [finding["code"] for finding in result["findings"]] == ["model_missing"]


def test_a_relative_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with patch_module_args({"models": {"m": "models/m"}}), pytest.raises(SystemExit):
        model_facts.main()
    assert json.loads(capsys.readouterr().out)["error_code"] == "bad_model"
