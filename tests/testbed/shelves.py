"""Fill the folders that hosts of the stub fleets mount: `.build/engines/stub` (wheels) and `.build/engines/models`.

Run by Molecule and by the tests before they bring such a fleet up. Repeatable; only uv is downloaded, once, by pip.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / ".build" / "engines"
UV = "0.13.9"  # the default of the role vllm_engine


def fill() -> None:
    """Stub releases and uv as in any wheelhouse, and a tiny model."""
    stub, model = BUILD / "stub", BUILD / "models" / "tiny"
    python("engines/stub_engine/build.py", "--dir", stub)
    python("engines/tiny_model.py", model)
    if not list(stub.glob(f"uv-{UV}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(stub), f"uv=={UV}"], check=True)


def python(script: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, str(HERE / script), *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    fill()
