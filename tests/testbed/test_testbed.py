"""The test bed keeps its promises: repeatable, survives being killed, leaves nothing behind.

Boots real containers; runs as root in `make test`, not in `make check`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
TESTBED = str(HERE / "testbed")
FLEET = """
name: selftest
hosts:
  - name: bare
  - name: ops
    sudo_password: true
"""
FROZEN = """
mkdir /run/freezer && mount -t cgroup -o freezer none /run/freezer && mkdir /run/freezer/test
sleep 600 > /dev/null 2>&1 &
echo $! > /run/freezer/test/cgroup.procs && echo FROZEN > /run/freezer/test/freezer.state
"""


def bed(*argv: str, **env: str) -> str:
    done = subprocess.run(
        [TESTBED, *argv], capture_output=True, text=True, timeout=600, check=False, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ansible(
    inventory: str, host: str, *argv: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("ansible")
    return subprocess.run(
        [str(program), "-i", inventory, host, *argv],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **(env or {})},
    )


def rows(fleet: str) -> dict[str, dict[str, str]]:
    return {row["host"]: row for row in json.loads(bed("status", "--json")) if row["fleet"] == fleet}


def trace(own: str) -> dict[str, set[str]]:
    """What the machine shows of containers and networks, without other fleets that are up meanwhile."""

    def output(*argv: str) -> set[str]:
        lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        return {re.sub(r"^\d+: ", "", line) for line in lines}

    found = {
        "links": {line.split(" ")[0] for line in output("ip", "-o", "link")},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "nat": output("iptables", "-t", "nat", "-S"),
        "filter": output("iptables", "-S"),
        "cgroups": {str(path) for path in Path("/sys/fs/cgroup").rglob("gpufleet-testbed/*") if path.is_dir()},
        "processes": set(),
        "forwarding": {Path("/proc/sys/net/ipv4/ip_forward").read_text()},
    }
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
            if not line:
                continue  # a kernel thread, or a dead process that init has not reaped yet
            line += (entry / "cgroup").read_text()
        except OSError:
            continue
        if own in line or str(REPO / ".build" / "testbed" / "selftest") in line:
            found["processes"].add(f"{entry.name} {line}")
    if json.loads(bed("status", "--json")):
        found["forwarding"] = set()
    other = re.compile(rf"(?!{own})gf[0-9a-f]{{6}}")
    return {name: {item for item in items if not other.search(item)} for name, items in found.items()}


def changes(own: str, before: dict[str, set[str]]) -> dict[str, set[str]]:
    now = trace(own)
    return {name: now[name] ^ before[name] for name in now if now[name] != before[name]}


@pytest.fixture(scope="module")
def fleet_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fleet") / "selftest.yml"
    path.write_text(FLEET)
    return str(path)


@pytest.fixture(scope="module")
def key() -> str:
    sys.path.insert(0, str(HERE))
    from hosts import Fleet

    return Fleet(name="selftest", hosts=()).key


@pytest.fixture(scope="module")
def before(fleet_file: str, key: str) -> dict[str, set[str]]:
    bed("down", "--fleet", fleet_file)
    return trace(key)


@pytest.fixture
def inventory(fleet_file: str, before: dict[str, set[str]]) -> Iterator[str]:
    yield bed("up", "--fleet", fleet_file)


@pytest.fixture(scope="module", autouse=True)
def taken_down(fleet_file: str) -> Iterator[None]:
    yield
    bed("down", "--fleet", fleet_file)


def boot_id(inventory: str, host: str) -> str:
    done = ansible(inventory, host, "-m", "ansible.builtin.raw", "-a", "cat /proc/sys/kernel/random/boot_id")
    assert done.returncode == 0, done.stdout
    return done.stdout.split("\n")[1].strip()


def test_second_up_keeps_the_running_hosts(inventory: str, fleet_file: str) -> None:
    ids = [boot_id(inventory, host) for host in ("bare", "ops")]
    assert bed("up", "--fleet", fleet_file) == inventory
    assert [boot_id(inventory, host) for host in ("bare", "ops")] == ids


def test_ansible_reboots_a_host_as_root_and_through_sudo(inventory: str) -> None:
    for host in ("bare", "ops"):
        first = boot_id(inventory, host)
        done = ansible(inventory, host, "-b", "-m", "ansible.builtin.reboot", "-a", "reboot_timeout=60")
        assert '"rebooted": true' in done.stdout, done.stdout + done.stderr
        assert boot_id(inventory, host) != first


def test_bare_host_has_systemd_sshd_python_and_little_else(inventory: str) -> None:
    for program in ("systemctl", "sshd", "python3"):
        bed("exec", "--fleet", "selftest", "bare", "--", "sh", "-c", f"command -v {program}")
    tools = "sudo curl wget gpg ip gcc pip pip3 nvidia-smi"
    script = f"for tool in {tools}; do command -v $tool; done; python3 -c 'import apt'; true"
    done = subprocess.run(
        [TESTBED, "exec", "--fleet", "selftest", "bare", "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert "No module named 'apt'" in done.stderr


def test_sudo_user_needs_the_password_and_root_cannot_log_in(inventory: str) -> None:
    asked = ansible(inventory, "ops", "-m", "ansible.builtin.raw", "-a", "sudo -n true")
    assert asked.returncode != 0
    assert "a password is required" in asked.stdout + asked.stderr
    became = ansible(inventory, "ops", "-b", "-m", "ansible.builtin.command", "-a", "id -un")
    assert became.returncode == 0
    assert became.stdout.split("\n")[1] == "root"
    refused = ansible(inventory, "ops", "-m", "ansible.builtin.raw", "-a", "true", "-e", "ansible_user=root")
    assert "Permission denied" in refused.stdout + refused.stderr


def test_remote_operations_are_counted_over_ssh_with_and_without_sudo(inventory: str, tmp_path: Path) -> None:
    sys.path.insert(0, str(REPO / "tests" / "plugins"))
    import counting

    output = tmp_path / "counts.json"
    done = ansible(inventory, "all", "-b", "-m", "ansible.builtin.ping", env=counting.environment(output))
    assert done.returncode == 0, done.stdout + done.stderr
    found = counting.read(output)["hosts"]
    assert {host: row["remote"] for host, row in found.items()} == {"bare": 1, "ops": 1}
    assert all(row["bytes_sent"] > 10_000 for row in found.values())


def test_hosts_reach_each_other_and_the_package_mirror(inventory: str) -> None:
    connect = "import socket; print(socket.create_connection(('ops', 22), 5).recv(4).decode())"
    assert bed("exec", "--fleet", "selftest", "bare", "--", "python3", "-c", connect) == "SSH-"
    bed("exec", "--fleet", "selftest", "bare", "--", "apt-get", "-q", "-o", "APT::Update::Error-Mode=any", "update")


def test_two_fleets_have_networks_of_their_own(inventory: str, tmp_path: Path) -> None:
    second = tmp_path / "second.yml"
    second.write_text("name: selftest2\nhosts: [{name: bare}]\n")
    try:
        bed("up", "--fleet", str(second))
        addresses = [rows(fleet)["bare"]["address"] for fleet in ("selftest", "selftest2")]
        assert addresses[0].rsplit(".", 1)[0] != addresses[1].rsplit(".", 1)[0]
        # One fleet's end does not cut off the other.
        bed("down", "--fleet", str(second))
        assert ansible(inventory, "bare", "-m", "ansible.builtin.ping").returncode == 0
        bed("exec", "--fleet", "selftest", "bare", "--", "apt-get", "-q", "update")
    finally:
        bed("down", "--fleet", str(second))


def kill_up_when(condition: Callable[[], bool], fleet_file: str, **env: str) -> None:
    """Start `up` and SIGKILL it at the moment the condition holds."""
    run = subprocess.Popen([TESTBED, "up", "--fleet", fleet_file], env={**os.environ, **env}, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while not condition():
        assert run.poll() is None, "up ended before the moment it should be killed at"
        assert time.monotonic() < end
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL, "up had ended before it was killed"


def copying() -> bool:
    folder = REPO / ".build" / "testbed" / "selftest" / "hosts" / "ops"
    return (folder / "root" / "usr").exists() and not (folder / "made-of").exists()


def command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_text(errors="replace")


def booting() -> bool:
    return any(line.startswith("systemd-nspawn") and "/selftest/hosts/" in line for line in command_lines())


@pytest.mark.parametrize("moment", [copying, booting], ids=["copying", "booting"])
def test_up_after_a_killed_up_gives_working_hosts(
    moment: Callable[[], bool], fleet_file: str, before: dict[str, set[str]]
) -> None:
    bed("down", "--fleet", fleet_file)
    kill_up_when(moment, fleet_file)
    inventory = bed("up", "--fleet", fleet_file)
    done = ansible(inventory, "all", "-b", "-m", "ansible.builtin.ping")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("moment", [copying, booting], ids=["copying", "booting"])
def test_down_after_a_killed_up_leaves_nothing(
    moment: Callable[[], bool], fleet_file: str, key: str, before: dict[str, set[str]]
) -> None:
    bed("down", "--fleet", fleet_file)
    kill_up_when(moment, fleet_file)
    bed("down", "--fleet", fleet_file)
    assert changes(key, before) == {}


def test_killed_image_build_leaves_no_mount_and_no_process(
    fleet_file: str, tmp_path: Path, key: str, before: dict[str, set[str]]
) -> None:
    bed("down", "--fleet", fleet_file)
    kill_up_when(
        lambda: any((tmp_path / "testbed" / "images").glob("*.partial/usr")), fleet_file, GPUFLEET_CACHE=str(tmp_path)
    )
    end = time.monotonic() + 5
    while left := [line for line in command_lines() if str(tmp_path) in line and "pytest" not in line]:
        assert time.monotonic() < end, f"processes {left} outlive the killed build"
        time.sleep(0.05)
    assert changes(key, before) == {}


def test_down_leaves_the_machine_as_it_was(
    inventory: str, fleet_file: str, key: str, before: dict[str, set[str]]
) -> None:
    assert ansible(inventory, "all", "-m", "ansible.builtin.ping").returncode == 0  # leaves SSH masters behind
    if any(" cgroup " in line and "freezer" in line for line in Path("/proc/self/mounts").read_text().splitlines()):
        bed("exec", "--fleet", "selftest", "bare", "--", "sh", "-c", FROZEN)  # cannot be killed as it is
    during = trace(key)
    assert during["links"] - before["links"]
    assert during["nat"] - before["nat"]
    assert during["processes"]
    bed("down", "--fleet", fleet_file)
    assert changes(key, before) == {}
    assert not (REPO / ".build" / "testbed" / "selftest").exists()
    bed("down", "--fleet", fleet_file)


def test_fleet_file_with_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text("name: bad\nhosts: [{name: bare, suit: trixie}]\n")
    done = subprocess.run([TESTBED, "up", "--fleet", str(bad)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "suit" in done.stderr
    assert "Traceback" not in done.stderr
