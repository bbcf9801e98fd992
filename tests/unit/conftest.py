"""Make the checkout importable as ansible_collections.gpufleet.inference, without installing it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from hypothesis import settings

# A busy machine is no defect: what may take long is bounded by the suite, not by the single example.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

ROOT = Path(__file__).resolve().parents[2]


def _namespace(name: str, path: Path | None) -> None:
    module = types.ModuleType(name)
    module.__path__ = [str(path)] if path else []  # type: ignore[attr-defined]
    sys.modules.setdefault(name, module)


_namespace("ansible_collections", None)
_namespace("ansible_collections.gpufleet", None)
_namespace("ansible_collections.gpufleet.inference", ROOT)
sys.modules["ansible_collections"].gpufleet = sys.modules["ansible_collections.gpufleet"]  # type: ignore[attr-defined]
sys.modules["ansible_collections.gpufleet"].inference = sys.modules["ansible_collections.gpufleet.inference"]  # type: ignore[attr-defined]
