"""The hardware check finds a figure that differs, on a sample in nvidia-smi's layout (values invented)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

SPEC = importlib.util.spec_from_file_location("hardware_compare", ROOT / "tests/hardware/compare.py")
assert SPEC and SPEC.loader
compare: Any = importlib.util.module_from_spec(SPEC)
sys.modules["hardware_compare"] = compare
SPEC.loader.exec_module(compare)

SAMPLE = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>570.00.00</driver_version><cuda_version>12.8</cuda_version><attached_gpus>1</attached_gpus>
  <gpu id="00000000:18:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name><uuid>GPU-1</uuid>
    <persistence_mode>Enabled</persistence_mode><compute_mode>Exclusive_Process</compute_mode>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>N/A</pending_mig></mig_mode>
    <pci><pci_bus_id>00000000:18:00.0</pci_bus_id></pci>
    <fb_memory_usage><total>81559 MiB</total><reserved>563 MiB</reserved><used>4 MiB</used><free>80993 MiB</free>
    </fb_memory_usage>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <gpu_power_readings><current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
    <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
  </gpu>
</nvidia_smi_log>"""

OURS = {
    "driver.nvml": "570.00.00",
    "cuda_driver_version": "12.8",
    "count": 1,
    "devices.0.uuid": "GPU-1",
    "devices.0.name": "NVIDIA H100 80GB HBM3",
    "devices.0.pci_address": "0000:18:00.0",
    "devices.0.persistence_mode": True,
    "devices.0.compute_mode": "exclusive_process",
    "devices.0.memory": {
        "total": 85520809984,
        "reserved": 590348288,
        "used": 4194304 + 30 * 2**20,
        "free": 84926266368 - 30 * 2**20,
    },
    "devices.0.power.limit_mw": 700000,
    "devices.0.clocks.max_sm_mhz": 1980,
    "devices.0.ecc": {"current": True, "pending": True},
    "devices.0.mig": {"mode": False, "pending": False, "devices": []},
}


def differing(ours: dict[str, Any]) -> list[str]:
    return [check.name for check in compare.compare(compare.smi_facts(SAMPLE), compare.flat(ours)) if not check.agree]


def test_equal_readings_agree_although_free_memory_moved_a_little() -> None:
    assert differing(OURS) == []


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("devices.0.uuid", "GPU-2"),
        ("devices.0.compute_mode", "default"),
        ("devices.0.power.limit_mw", 650000),
        ("devices.0.persistence_mode", None),
    ],
)
def test_a_reading_that_differs_is_named(path: str, wrong: Any) -> None:
    assert differing({**OURS, path: wrong}) == [path]


def test_a_total_that_lies_apart_by_more_than_rounding_is_named() -> None:
    memory = {**OURS["devices.0.memory"], "total": 85520809984 - 590348288}  # type: ignore[dict-item]
    assert differing({**OURS, "devices.0.memory": memory}) == ["devices.0.memory.total"]


def test_a_machine_without_a_driver_is_told_so_and_is_a_failure_only_on_request(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "env"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    for arguments, status in (([], 0), (["--require-gpu"], 1)):
        done = subprocess.run(
            ["/usr/bin/bash", str(ROOT / "tests/hardware/run.sh"), *arguments],
            check=False,
            env={"PATH": str(tools)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == status
        assert "no NVIDIA driver" in done.stdout and "Nothing was checked" in done.stdout
