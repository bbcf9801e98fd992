"""Build the stub engine as a wheel of a given vLLM release: `build.py [--dir DIR] VERSION...`.

The wheel is pure Python without requirements, so it installs with no index at all. Its local version label `+stub`
still satisfies `vllm==VERSION`. The same version gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from wheels import write_wheel


def table() -> dict[str, Any]:
    """The release table beside this file."""
    loaded: dict[str, Any] = json.loads((HERE / "releases.json").read_text(encoding="utf-8"))
    return loaded


def release(version: str) -> dict[str, Any]:
    """What the stub of one release carries: rules of that release and its flags as argparse needs them."""
    data = table()
    if version not in data["versions"]:
        raise SystemExit(f"vLLM {version} is not in the stub's table ({data['order'][0]} to {data['order'][-1]})")
    rank = {name: position for position, name in enumerate(data["order"])}
    flags = {}
    for name, flag in data["flags"].items():
        steps = [step for step in flag["history"] if rank[step["since"]] <= rank[version]]
        if steps and rank[version] <= rank[flag["last"]]:
            flags[name] = {key: value for key, value in steps[-1].items() if key != "since"}
    for alias in {alias for flag in flags.values() for alias in flag.get("aliases", [])}:
        flags.pop(alias, None)  # listed by itself too, but it is the same setting
    return {"version": version, **data["versions"][version], "flags": flags}


def build(version: str, directory: Path) -> Path:
    """Write `vllm-VERSION+stub-py3-none-any.whl` into `directory`."""
    facts = release(version)
    info = f"vllm-{version}+stub.dist-info"
    members = {f"vllm/{file.name}": file.read_bytes() for file in sorted((HERE / "vllm").glob("*.py"))}
    members["vllm/release.json"] = json.dumps(facts, sort_keys=True).encode()
    members[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+stub\n"
        "Summary: Stand-in with the command line and HTTP interface of vLLM, for tests without a GPU\n"
        "Requires-Python: >=3.9\n"
    ).encode()
    members[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: gpufleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members[f"{info}/entry_points.txt"] = b"[console_scripts]\nvllm = vllm.cli:main\n"
    return write_wheel(directory / f"vllm-{version}+stub-py3-none-any.whl", members, info)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=HERE.parents[3] / ".build/engines/stub", help="where wheels go")
    parser.add_argument("versions", nargs="*", default=["0.32.0", "0.31.0"], metavar="VERSION")
    options = parser.parse_args()
    for version in options.versions:
        print(build(version, options.dir))


if __name__ == "__main__":
    main()
