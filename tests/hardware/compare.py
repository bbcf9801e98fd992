"""Compare our own readings of a real GPU with nvidia-smi's, torch's and a private MPS daemon's.

Reads only. `nvidia-smi -q -x` is the reference: each figure it prints is compared with the one that our adapter reads
through NVML. Figures that move by themselves (used and free memory) get a tolerance, which is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import types
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
MOVING = 64 * MIB
"""Used and free memory change between two readings; nvidia-smi prints whole MiB."""

TORCH_TOLERANCE = 64 * MIB
"""torch reports the driver's total minus what the driver keeps; NVML tells both."""

MPS_PERCENT = "37"


class Check(NamedTuple):
    """One comparison: what, the reference's figure, ours, and whether they agree."""

    name: str
    reference: str
    ours: str
    agree: bool


def collection() -> None:
    """Make the checkout importable as ansible_collections.gpufleet.inference."""
    for name, path in (
        ("ansible_collections", None),
        ("ansible_collections.gpufleet", None),
        ("ansible_collections.gpufleet.inference", ROOT),
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(path)] if path else []
        sys.modules.setdefault(name, module)


def bindings() -> Any:
    """pynvml from GPUFLEET_PYNVML, the Python path or the checkout's .venv."""
    named = os.environ.get("GPUFLEET_PYNVML")
    places = [Path(named).parent] if named else []
    places += [path.parent for path in sorted(ROOT.glob(".venv/lib/python3*/site-packages/pynvml.py"))]
    sys.path[:0] = [str(path) for path in places[:1]] if named else []
    try:
        import pynvml
    except ImportError:
        if not places:
            raise SystemExit("hardware: no pynvml; set GPUFLEET_PYNVML to nvidia-ml-py's pynvml.py") from None
        sys.path.append(str(places[0]))
        import pynvml
    return pynvml


# ---- nvidia-smi's XML ------------------------------------------------------------------------------------------


def amount(text: Optional[str]) -> Optional[float]:
    """The number of "81559 MiB" (bytes), "700.00 W" (milliwatts) or "1980 MHz"; None for "N/A"."""
    words = (text or "").split()
    try:
        number = float(words[0])
    except (IndexError, ValueError):
        return None
    return number * {"MiB": MIB, "W": 1000}.get(words[1] if len(words) > 1 else "", 1)


def switch(text: Optional[str]) -> Optional[bool]:
    return {"Enabled": True, "Disabled": False}.get(text or "")


def smi_facts(xml: str) -> dict[str, Any]:
    """nvidia-smi's figures under our paths; what it does not say is left out."""
    root = ET.fromstring(xml)
    facts: dict[str, Any] = {
        "driver.nvml": root.findtext("driver_version"),
        "cuda_driver_version": root.findtext("cuda_version"),
        "count": len(root.findall("gpu")),
    }
    for index, gpu in enumerate(root.findall("gpu")):
        at = f"devices.{index}"
        bus = gpu.findtext("pci/pci_bus_id") or gpu.get("id", "")
        facts[f"{at}.uuid"] = gpu.findtext("uuid")
        facts[f"{at}.name"] = gpu.findtext("product_name")
        facts[f"{at}.pci_address"] = bus[-12:].lower() or None
        facts[f"{at}.persistence_mode"] = switch(gpu.findtext("persistence_mode"))
        mode = gpu.findtext("compute_mode")
        facts[f"{at}.compute_mode"] = mode.lower() if mode else None
        for part in ("total", "reserved", "used", "free"):
            facts[f"{at}.memory.{part}"] = amount(gpu.findtext(f"fb_memory_usage/{part}"))
        power = gpu.find("gpu_power_readings")
        power = power if power is not None else gpu.find("power_readings")
        if power is not None:
            now = power.findtext("current_power_limit") or power.findtext("power_limit")
            facts[f"{at}.power.limit_mw"] = amount(now)
            for ours, theirs in (("default", "default"), ("min", "min"), ("max", "max")):
                facts[f"{at}.power.{ours}_mw"] = amount(power.findtext(f"{theirs}_power_limit"))
        facts[f"{at}.clocks.max_sm_mhz"] = amount(gpu.findtext("max_clocks/sm_clock"))
        facts[f"{at}.clocks.max_memory_mhz"] = amount(gpu.findtext("max_clocks/mem_clock"))
        facts[f"{at}.ecc.current"] = switch(gpu.findtext("ecc_mode/current_ecc"))
        facts[f"{at}.mig.mode"] = switch(gpu.findtext("mig_mode/current_mig"))
        facts[f"{at}.mig.pending"] = switch(gpu.findtext("mig_mode/pending_mig"))
    return {path: value for path, value in facts.items() if value is not None}


# ---- comparisons -----------------------------------------------------------------------------------------------


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Readings with nested mappings spelt as paths, as nvidia-smi's are."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        if isinstance(value, Mapping):
            found.update({f"{path}.{name}": inner for name, inner in value.items()})
        else:
            found[path] = value
    return found


def tolerance(path: str) -> float:
    """How far two right readings may lie apart: bytes for memory, milliwatts for power, else 0."""
    if path.endswith((".used", ".free")):
        return MOVING
    if ".memory." in path:
        return MIB
    return 10 if path.endswith("_mw") else 0


def compare(reference: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Check]:
    """One check for each of the reference's figures, matched by device UUID order."""
    for path, wanted in reference.items():
        found = ours.get(path)
        if isinstance(wanted, (int, float)) and not isinstance(wanted, bool) and isinstance(found, (int, float)):
            agree = abs(wanted - found) <= tolerance(path)
        else:
            agree = wanted == found
        yield Check(path, str(wanted), str(found), agree)


def torch_checks(ours: Mapping[str, Any]) -> Iterator[Check]:
    """torch's total memory of each device against total minus reserved; nothing where torch sees no CUDA."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: its totals are not compared")
        return
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: its totals are not compared")
        return
    uuids = {value: path.split(".")[1] for path, value in ours.items() if path.endswith(".uuid")}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        index = uuids.get(f"GPU-{getattr(properties, 'uuid', '')}", str(number))
        total = ours.get(f"devices.{index}.memory.total")
        expected = None if total is None else total - (ours.get(f"devices.{index}.memory.reserved") or 0)
        agree = expected is not None and abs(expected - properties.total_memory) <= TORCH_TOLERANCE
        yield Check(f"devices.{index} total as torch sees it", str(properties.total_memory), str(expected), agree)


def mps_checks(pipe: str) -> Iterator[Check]:
    """The private daemon takes a limit and tells it back; an exit code alone proves nothing."""

    def ask(command: str) -> str:
        done = subprocess.run(
            ["nvidia-cuda-mps-control"],
            check=False,
            input=command + "\n",
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipe},
        )
        return (done.stdout + done.stderr).strip()

    ask(f"set_default_active_thread_percentage {MPS_PERCENT}")
    answer = ask("get_default_active_thread_percentage")
    yield Check("MPS thread percentage read back", MPS_PERCENT + ".0", answer, answer == MPS_PERCENT + ".0")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our readings of a real GPU with the driver's tools.")
    parser.add_argument("--smi", required=True, type=Path, help="output of nvidia-smi -q -x")
    parser.add_argument("--mps", help="pipe directory of a private MPS daemon")
    parser.add_argument("--out", type=Path, help="write readings and checks here as JSON")
    options = parser.parse_args()
    collection()
    from ansible_collections.gpufleet.inference.plugins.module_utils._host import nvml

    reading = nvml.read(bindings(), 20.0)
    if reading.fatal is not None:
        print(f"hardware: NVML gave nothing: {reading.fatal}")
        print("0 passed, 1 failed")
        return 1
    ours = flat(reading.values)
    checks = list(compare(smi_facts(options.smi.read_text(encoding="utf-8", errors="replace")), ours))
    checks += torch_checks(ours)
    checks += mps_checks(options.mps) if options.mps else []
    for check in checks:
        print(f"{'ok  ' if check.agree else 'DIFF'} {check.name}: {check.reference} / ours {check.ours}")
    for path, failure in sorted(reading.failures.items()):
        print(f"--   {path}: {failure}")
    failed = sum(not check.agree for check in checks)
    print(f"one reading took {reading.seconds:.3f} s; memory used and free may differ by {MOVING // MIB} MiB")
    print(f"{len(checks) - failed} passed, {failed} failed")
    if options.out:
        report = {
            "seconds": reading.seconds,
            "values": reading.values,
            "failures": {path: str(failure) for path, failure in reading.failures.items()},
            "checks": [check._asdict() for check in checks],
        }
        options.out.write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")
    return 1 if failed or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
