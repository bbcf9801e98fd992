"""Runs the module gpu_state against a simulated host: set_simulator.py ROOT, runs as JSON on standard input.

A run is {"arguments": …, "check": bool} or {"sim": [words of gpusim.py]}; the results come back as a JSON list, with
the simulator's state after each run. One process for many runs, because a start of Python costs more than a run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
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

from ansible.module_utils.testing import patch_module_args

from ansible_collections.gpufleet.inference.plugins.module_utils import _module
from ansible_collections.gpufleet.inference.plugins.module_utils._host.lock import HostLock
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.modules import gpu_state
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _bindings


def settings() -> dict[str, str]:
    lines = Path(os.environ["GPUSIM_STATE"]).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith("gpu."))


def main() -> None:
    root = sys.argv[1]
    gpu_state.Root = lambda: Root(root)
    _module.HostLock = functools.partial(HostLock, path=f"{root}/run/gpufleet/lock")
    packed = _bindings.packed(setting=True)
    results = []
    for run in json.load(sys.stdin):
        if "sim" in run:
            simulator = REPOSITORY / "tests/testbed/gpusim/gpusim.py"
            folder = root.partition("/var/lib/gpusim/root")[0]
            command = [sys.executable, str(simulator), "--root", folder, *run["sim"]]
            subprocess.run(command, check=True, capture_output=True)
            results.append({})
            continue
        arguments = {"bindings": packed, "deadline": 20, **run["arguments"], "_ansible_check_mode": run["check"]}
        said = io.StringIO()
        with patch_module_args(arguments), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            gpu_state.main()
        result = json.loads(said.getvalue())
        result.pop("invocation", None)
        results.append({**result, "state": settings()})
    print(json.dumps(results))


main()
