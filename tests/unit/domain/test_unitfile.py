"""The unit: confined, without the directives that break CUDA, and safe from what users put into it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import unitfile
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

UNIT = unitfile.Unit(
    name="chat",
    description="vLLM 0.32.0, instance chat",
    user="daemon",
    group="daemon",
    program="/bin/true",
    arguments=["serve", "/models/tiny"],
    environment={"CUDA_VISIBLE_DEVICES": "GPU-1"},
    gpus=["GPU-1"],
    served_name="chat",
    address="127.0.0.1",
    port=8000,
    device_nodes=["/dev/nvidiactl", "char-nvidia-uvm", "/dev/nvidia0"],
)


def text(**changes) -> str:
    return unitfile.render(dataclasses.replace(UNIT, **changes))


def values(unit: str, key: str) -> list[str]:
    return [line.partition("=")[2] for line in unit.splitlines() if line.startswith(f"{key}=")]


def test_no_directive_that_breaks_cuda_is_in_any_unit():
    unit = text()
    for word in ("ProcSubset", "MemoryDenyWriteExecute", "PrivateDevices", "RemoveIPC", "PrivateUsers"):
        assert word not in unit
    assert not any("@resources" in line for line in values(unit, "SystemCallFilter"))
    assert "AF_NETLINK" in values(unit, "RestrictAddressFamilies")[0]


@pytest.mark.parametrize("group", list(unitfile.HARDENING))
def test_each_hardening_group_can_be_switched_off_alone_and_the_unit_says_so(group):
    unit = text(hardening={group: False})
    first = unitfile.HARDENING[group][1][0].partition("{")[0]
    assert first in text()
    assert first not in unit
    assert f"# Hardening off: {group}\n" in unit
    others = [name for name in unitfile.HARDENING if name != group]
    assert f"# Hardening on: {', '.join(others)}\n" in unit


def test_an_unknown_hardening_group_is_refused_and_the_groups_are_listed():
    with pytest.raises(FleetError, match=r"names filesytem.*filesystem, privileges"):
        text(hardening={"filesytem": False})


def test_the_whole_control_group_is_stopped_and_a_clean_exit_is_restarted():
    unit = text()
    assert values(unit, "KillMode") == ["mixed"]
    assert values(unit, "Restart") == ["always"]
    assert int(values(unit, "TimeoutStopSec")[0]) <= 60
    assert int(values(unit, "TimeoutStartSec")[0]) > UNIT.lock_deadline + UNIT.ready_deadline


def test_words_of_users_reach_the_engine_unchanged():
    words = ["a b", 'quo"te', "back\\slash", "50%", "$HOME", '{"a": 1}', "it's", "-x=;"]
    line = values(text(arguments=words), "ExecStart")[0]
    assert split(line)[-len(words) :] == words


def split(line: str) -> list[str]:
    """How systemd.service(5) reads a command line: quotes, backslashes, %% and $$."""
    found, position = [], re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|(\S+))')
    for match in position.finditer(line):
        raw = match.group(1) if match.group(1) is not None else match.group(2)
        raw = re.sub(r"\\(.)", r"\1", raw)
        found.append(raw.replace("%%", "%").replace("$$", "$"))
    return found


def test_a_key_file_becomes_a_credential_and_is_on_no_command_line():
    unit = text(credentials={"api_key": "/etc/keys/chat"})
    assert values(unit, "LoadCredential") == ["api_key:/etc/keys/chat"]
    assert "/etc/keys/chat" not in "".join(values(unit, "ExecStart") + values(unit, "Environment"))


def test_an_exclusive_gpu_is_named_and_an_index_opens_the_class():
    devices = [{"uuid": "GPU-1", "minor": 3}]
    assert unitfile.device_nodes(devices, "GPU-1") == ["/dev/nvidiactl", "char-nvidia-uvm", "/dev/nvidia3"]
    assert "char-nvidia" in unitfile.device_nodes(devices, "0")
    assert "char-nvidia" in unitfile.device_nodes(devices, "0,1")
    assert "char-nvidia" in unitfile.device_nodes([{"uuid": "GPU-1", "minor": None}], "GPU-1")


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "vllm-chat.service"
    path.write_text(text(credentials={"api_key": "/etc/keys/chat"}, cpus="0-1", numa_nodes="0", start_after=["beta"]))
    return path


def test_systemd_accepts_every_directive(written):
    tool = shutil.which("systemd-analyze")
    assert tool, "systemd-analyze is part of the systemd that this project needs for its test bed"
    done = subprocess.run([tool, "verify", str(written)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "vllm-chat" in line and "gpufleet.pyz" not in line]
    assert ours == []


def test_the_exposure_is_at_most_two(written):
    tool = shutil.which("systemd-analyze")
    assert tool
    command = [tool, "security", "--offline=true", "--threshold=20", "--no-pager", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"exposure level for \S+: (\d+\.\d)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found.group(1)) <= 2.0
    assert done.returncode == 0
