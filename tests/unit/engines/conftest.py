"""The stub engine unpacked, a model for it, and command lines that start it."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

ENGINES = Path(__file__).resolve().parents[2] / "testbed" / "engines"
sys.path[:0] = [str(ENGINES), str(ENGINES / "stub_engine")]
import build
import tiny_model


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory):
    """A function that unpacks the stub wheel of one release and gives the folder to put on the path."""
    root = tmp_path_factory.mktemp("stub")

    def unpack(version: str) -> Path:
        target = root / version
        if not target.exists():
            with zipfile.ZipFile(build.build(version, root)) as wheel:
                wheel.extractall(target)
        return target

    return unpack


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def command(installed):
    def make(version: str, *arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
        run = [sys.executable, "-c", "from vllm.cli import main; main()", *arguments]
        settings = {**os.environ, "PYTHONPATH": str(installed(version)), "GPUFLEET_STUB_DEVICE": "cpu"}
        return run, {**settings, "GPUFLEET_STUB_START_SECONDS": "0.1", **environment}

    return make
