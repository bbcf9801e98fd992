"""An interpreter with a real vLLM (CPU build): GPUFLEET_VLLM_PYTHON, or an environment made from the wheelhouse."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))
_spec = importlib.util.spec_from_file_location("unit_conftest", ROOT / "tests/unit/conftest.py")
assert _spec is not None
assert _spec.loader is not None
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))

VLLM = "0.32.0"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter; the environment is made once and kept beside the wheelhouse it came from."""
    given = os.environ.get("GPUFLEET_VLLM_PYTHON")
    if given:
        return given
    tool = ROOT / "tests/testbed/engines/wheelhouse.py"
    made = subprocess.run(
        [sys.executable, str(tool), "--version", VLLM], check=True, stdout=subprocess.PIPE, text=True, timeout=1500
    )
    wheels = Path(made.stdout.strip().splitlines()[-1])
    place = wheels.with_name(wheels.name.replace("wheelhouse", "oracle"))
    python = place / "bin/python"
    if not (place / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True, timeout=120)
        install = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), f"vllm=={VLLM}+cpu"]
        subprocess.run([str(python), *install], check=True, timeout=900)
        (place / "complete").touch()
    return str(python)
