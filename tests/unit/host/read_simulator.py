"""Prints the GPU facts of a simulated host as JSON: read_simulator.py ROOT DEADLINE STALL [deaf].

A process of its own, because the loader reads LD_LIBRARY_PATH only when a process starts. "deaf" makes kill do nothing.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import types
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
for name, path in (
    ("ansible_collections", None),
    ("ansible_collections.gpufleet", None),
    ("ansible_collections.gpufleet.inference", REPOSITORY),
):
    package = types.ModuleType(name)
    package.__path__ = [str(path)] if path else []
    sys.modules[name] = package


from ansible_collections.gpufleet.inference.plugins.module_utils._host import gpu, nvml
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Result
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _bindings


class NoRunner:
    def run(self, argv, *, timeout=None, data=None, env=None):
        return Result(127, "", "")


def main() -> None:
    root, deadline, stall = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    left = []
    kill = (lambda pid, number: left.append(pid)) if "deaf" in sys.argv[4:] else os.kill
    read = functools.partial(nvml.read, stall=stall, kill=kill)
    started = time.monotonic()
    facts = gpu.gather(Root(root), NoRunner(), nvml.load_bindings(_bindings.packed()), deadline, read_nvml=read)
    seconds = time.monotonic() - started
    print(json.dumps({"facts": facts, "seconds": seconds, "left": left}))


main()
