"""Fleets of systemd hosts on one machine: bring up, reboot, take down.

A fleet file says which hosts there are. A host is a copy of a cached image that systemd-nspawn
boots with an address on the fleet's own bridge; it is reached over SSH like any other host.
Every step can be repeated: what is there is kept, what is half there is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import pip_setup
import yaml
from images import image
from machine import RUN_DIR, TestbedError, locked, run, write_atomic

REPO = Path(__file__).resolve().parents[2]
GPUSIM = Path(__file__).resolve().parent / "gpusim" / "gpusim.py"
SUITES = ("bookworm", "trixie")
SUDO_USER = "ops"
MARKER = "made-of"  # beside a finished root: what it was made of
BOOT_DEADLINE = 120.0
# boot_id may be the machine's own; the stamp of this systemd's start is on the machine's clock and moves on every boot.
BOOT_TIME_COMMAND = "systemctl show --property=UserspaceTimestampMonotonic --value"


@dataclass(frozen=True)
class Host:
    """One host as the fleet file asks for it."""

    name: str
    suite: str = "bookworm"
    gpus: str | None = None
    sudo_password: bool = False
    packages: tuple[str, ...] = ()
    groups: tuple[str, ...] = ("gpu_hosts",)
    binds: tuple[tuple[str, str], ...] = ()

    @property
    def all_packages(self) -> tuple[str, ...]:
        return (*self.packages, "sudo") if self.sudo_password else self.packages


@dataclass(frozen=True)
class Fleet:
    """The hosts of one fleet file and the names everything of it carries on the machine."""

    name: str
    hosts: tuple[Host, ...]
    folder: Path = field(init=False)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", REPO / ".build" / "testbed" / self.name)
        digest = hashlib.sha256(str(self.folder).encode()).hexdigest()
        object.__setattr__(self, "key", f"gf{digest[:6]}")

    @property
    def comment(self) -> str:
        return f"gpufleet-testbed-{self.key}"

    @property
    def record(self) -> Path:
        return RUN_DIR / f"{self.key}.json"

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory.yml"

    def machine(self, host: Host | str) -> str:
        return f"{self.key}-{host if isinstance(host, str) else host.name}"

    def root(self, host: Host | str) -> Path:
        return self.folder / "hosts" / (host if isinstance(host, str) else host.name) / "root"

    def host(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise TestbedError(f"fleet {self.name} has no host {name}: it has {', '.join(h.name for h in self.hosts)}")


def load(name_or_file: str) -> Fleet:
    """Read a fleet file, or the one of that name in tests/testbed/fleets or that is up."""
    choices = [Path(name_or_file), Path(__file__).parent / "fleets" / f"{name_or_file}.yml"]
    choices.append(REPO / ".build" / "testbed" / name_or_file / "fleet.yml")
    file = next((path for path in choices if path.is_file()), None)
    if file is None:
        known = ", ".join(sorted(path.stem for path in choices[1].parent.glob("*.yml")))
        raise TestbedError(f"no fleet file {name_or_file}: give a file, or one of {known}")
    data = yaml.safe_load(file.read_text())
    try:
        return _fleet(data)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise TestbedError(f"{file}: {error}") from None


def _fleet(data: dict[str, Any]) -> Fleet:
    if unknown := set(data) - {"name", "hosts"}:
        raise ValueError(f"unknown keys {sorted(unknown)}; a fleet has name, hosts")
    hosts = []
    for entry in data["hosts"]:
        item = dict(entry)
        item["packages"] = tuple(sorted(item.get("packages") or ()))
        item["groups"] = tuple(item.get("groups") or ("gpu_hosts",))
        item["binds"] = tuple(sorted((item.get("binds") or {}).items()))
        hosts.append(Host(**item))
        if hosts[-1].suite not in SUITES:
            raise ValueError(f"host {hosts[-1].name}: suite {hosts[-1].suite} is none of {', '.join(SUITES)}")
        if not hosts[-1].name.replace("-", "").isalnum() or len(hosts[-1].name) > 20:
            raise ValueError(f"host name {hosts[-1].name!r}: letters, digits and - only, at most 20")
    if len({host.name for host in hosts}) != len(hosts):
        raise ValueError("two hosts have the same name")
    return Fleet(name=str(data["name"]), hosts=tuple(hosts))


# --- up --------------------------------------------------------------------------------------


def up(fleet: Fleet) -> Path:
    """Bring the fleet up and return its inventory. Repeatable; finishes what a killed run began."""
    machine.require()
    with locked(RUN_DIR / f"{fleet.key}.lock"):
        say(f"fleet {fleet.name}: {len(fleet.hosts)} hosts")
        images = {host.name: image(host.suite, host.all_packages) for host in fleet.hosts}
        state = _register(fleet)
        for name in set(state["hosts"]) - {host.name for host in fleet.hosts}:
            _remove_host(fleet, name, state)
        _keys(fleet)
        fresh = [host for host in fleet.hosts if _ensure_root(fleet, host, images[host.name], state)]
        started = {host.name: time.monotonic() for host in fleet.hosts if _ensure_booted(fleet, host, state)}
        for host in fleet.hosts:
            wait_ready(fleet, host, state, strict=host in fresh)
            if host.name in started:
                address = state["hosts"][host.name]["address"]
                seconds = time.monotonic() - started[host.name]
                say(f"{host.name} ({host.suite}, {address}) answers after {seconds:.1f} s")
        _write_inventory(fleet, state)
        return fleet.inventory


def _register(fleet: Fleet) -> dict[str, Any]:
    """Write down what will exist before any of it does; give the fleet its subnet and bridge."""
    with locked(RUN_DIR / "lock"):
        for other in records():
            if other["key"] != fleet.key and _is_dead(other):
                _forget(other)
        state = _read(fleet.record) or {"hosts": {}}
        if "subnet" not in state:
            state["subnet"] = str(machine.free_subnet([other["subnet"] for other in records()]))
        state.update(key=fleet.key, name=fleet.name, folder=str(fleet.folder), owner=_identity(os.getpid()))
        numbers = {entry["number"] for entry in state["hosts"].values()}
        for host in fleet.hosts:
            if host.name not in state["hosts"]:
                number = next(n for n in range(11, 250) if n not in numbers)
                numbers.add(number)
                address = str(ipaddress.ip_network(state["subnet"])[number])
                state["hosts"][host.name] = {"number": number, "address": address, "cgroups": []}
        _save(fleet, state)
        machine.network_up(fleet.key, state["subnet"], fleet.comment)
    return state


def _keys(fleet: Fleet) -> None:
    plain = {"name": fleet.name, "hosts": [_plain(host) for host in fleet.hosts]}
    write_atomic(fleet.folder / "fleet.yml", yaml.safe_dump(plain, sort_keys=False))
    if not (fleet.folder / "id_ed25519.pub").exists():
        (fleet.folder / "id_ed25519").unlink(missing_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(fleet.folder / "id_ed25519")])
    if any(host.sudo_password for host in fleet.hosts) and not password_file(fleet).exists():
        write_atomic(password_file(fleet), secrets.token_urlsafe(18) + "\n", mode=0o600)


def password_file(fleet: Fleet) -> Path:
    """Where the password of the sudo user lies (mode 0600)."""
    return fleet.folder / f"{SUDO_USER}.password"


def _ensure_root(fleet: Fleet, host: Host, base: Path, state: dict[str, Any]) -> bool:
    """Make the host's root file system unless a finished one of the same recipe is there."""
    root = fleet.root(host)
    address = state["hosts"][host.name]["address"]
    wanted = json.dumps([base.name, repr(host), address, state["subnet"], _hosts_file(fleet, state), _simulator(host)])
    marker = root.parent / MARKER
    if marker.exists() and marker.read_text() == wanted:
        return False
    if marker.exists():
        say(f"{host.name} is made again: what it is made of has changed")
    _stop(fleet, host.name, state)
    if root.parent.exists():
        shutil.rmtree(root.parent)
    root.parent.mkdir(parents=True)
    run(["cp", "-a", "--reflink=auto", str(base), str(root)])
    _configure(fleet, host, root, state)
    if host.gpus:
        if not GPUSIM.exists():
            raise TestbedError(f"host {host.name} wants the GPUs {host.gpus}, but {GPUSIM} does not exist")
        run([sys.executable, str(GPUSIM), "--root", str(root), "init", "--profile", host.gpus])
    write_atomic(marker, wanted)
    return True


def _simulator(host: Host) -> str:
    """What the simulated GPUs are made of, so that a change of the simulator makes the host again."""
    if not host.gpus:
        return ""
    files = sorted(path for path in GPUSIM.parent.rglob("*") if path.suffix in (".py", ".c", ".h", ".json", ".txt"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _hosts_file(fleet: Fleet, state: dict[str, Any]) -> str:
    names = "".join(f"{entry['address']}\t{name}\n" for name, entry in sorted(state["hosts"].items()))
    return f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{names}"


def _configure(fleet: Fleet, host: Host, root: Path, state: dict[str, Any]) -> None:
    entry = state["hosts"][host.name]
    gateway = ipaddress.ip_network(state["subnet"])[1]
    public = (fleet.folder / "id_ed25519.pub").read_text()
    files = {
        "etc/hostname": f"{host.name}\n",
        "etc/hosts": _hosts_file(fleet, state),
        "etc/resolv.conf": Path("/etc/resolv.conf").read_text(),
        "etc/machine-id": f"{uuid.uuid4().hex}\n",
        "etc/systemd/network/10-testbed.network": (
            "[Match]\nName=host0\n\n[Network]\n"
            f"Address={entry['address']}/24\nGateway={gateway}\n"
            "LinkLocalAddressing=no\nIPv6AcceptRA=no\nLLDP=no\nEmitLLDP=no\n"
        ),
        "etc/ssh/sshd_config.d/testbed.conf": (
            "PasswordAuthentication no\nHostKey /etc/ssh/ssh_host_ed25519_key\n"
            f"PermitRootLogin {'no' if host.sudo_password else 'prohibit-password'}\n"
            # Our probes read the banner and leave; on a busy machine that adds up to a penalty (sshd 9.8 and later).
            + ("PerSourcePenalties no\n" if host.suite != "bookworm" else "")
        ),
    }
    for name, text in files.items():
        path = root / name
        path.unlink(missing_ok=True)  # resolv.conf may be a link that points out of the root
        write_atomic(path, text)
    key = root / "etc/ssh/ssh_host_ed25519_key"
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", str(key)])
    home, owner = root / "root", "root"
    if host.sudo_password:
        home, owner = root / "home" / SUDO_USER, SUDO_USER
        run(["chroot", str(root), "useradd", "-m", "-s", "/bin/bash", "-G", "sudo", SUDO_USER])
        run(["chroot", str(root), "chpasswd"], stdin=f"{SUDO_USER}:{password_file(fleet).read_text()}")
    write_atomic(home / ".ssh" / "authorized_keys", public, mode=0o600)
    (home / ".ssh").chmod(0o700)
    run(["chroot", str(root), "chown", "-R", f"{owner}:{owner}", f"/{home.relative_to(root)}/.ssh"])
    pip_setup.write(root)


def _ensure_booted(fleet: Fleet, host: Host, state: dict[str, Any]) -> bool:
    supervisor, nspawn = machine.container(fleet.machine(host))
    if supervisor and nspawn:
        return False
    _stop(fleet, host.name, state)  # what a dead run left
    root = fleet.root(host)
    cgroups = machine.make_cgroups(fleet.machine(host))
    state["hosts"][host.name]["cgroups"] = cgroups
    _save(fleet, state)
    binds = [f"--bind-ro={source}:{target}" for target, source in pip_setup.binds().items()]
    for target, source in host.binds:
        path = (REPO / source).resolve()
        path.mkdir(parents=True, exist_ok=True)
        binds.append(f"--bind-ro={path}:{target}")

    def prepare() -> None:
        machine.enter_cgroups(cgroups)

    with (root.parent / "console.log").open("ab") as console:
        subprocess.Popen(
            [
                *("sh", "-c", machine.SUPERVISOR, "testbed", "--quiet", "--boot", "--register=no", "--keep-unit"),
                *("--resolv-conf=off", "--timezone=off", "--link-journal=no", f"--hostname={host.name}"),
                *(f"--machine={fleet.machine(host)}", f"--network-bridge={fleet.key}", f"--directory={root}", *binds),
            ],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - one thread only
            env={"PATH": os.environ.get("PATH", os.defpath), "TERM": "dumb"},
        )
    return True


def wait_ready(fleet: Fleet, host: Host, state: dict[str, Any], strict: bool = True) -> None:
    """Wait until systemd has finished starting and SSH answers.

    With `strict` a failed unit is an error: a new host must be clean.
    """
    end = time.monotonic() + BOOT_DEADLINE
    address = state["hosts"][host.name]["address"]
    seen = "no systemd yet"
    while time.monotonic() < end:
        supervisor, nspawn = machine.container(fleet.machine(host))
        if supervisor is None:
            log = (fleet.root(host).parent / "console.log").read_text(errors="replace").strip().splitlines()
            raise TestbedError(f"{host.name} stopped while it booted; its console ended with:\n" + "\n".join(log[-10:]))
        if nspawn and (leader := machine.leader_pid(nspawn)):
            done = subprocess.run(
                [*_nsenter(leader), "systemctl", "is-system-running"], capture_output=True, text=True, check=False
            )
            seen = done.stdout.strip() or "systemd does not answer"
            if seen == "degraded" and strict:
                (fleet.root(host).parent / MARKER).unlink()  # the next `up` makes it again
                units = run([*_nsenter(leader), "systemctl", "--failed", "--plain", "--no-legend"]).strip()
                raise TestbedError(f"{host.name} booted with failed units:\n{units}")
            if seen in ("running", "degraded"):
                if _ssh_answers(address):
                    return
                seen += ", but SSH is silent"
        time.sleep(0.1)
    detail = ""
    if nspawn and (leader := machine.leader_pid(nspawn)):
        script = "networkctl list --no-pager; journalctl -b --no-pager -n 30 -u systemd-networkd -u ssh"
        detail = "\n" + run([*_nsenter(leader), "sh", "-c", script], check=False)
    raise TestbedError(f"{host.name} is not ready {BOOT_DEADLINE:.0f} s after its start: {seen}{detail}")


def _ssh_answers(address: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, 22), timeout=1) as connection:
        connection.settimeout(5)
        return connection.recv(4) == b"SSH-"
    return False


def _write_inventory(fleet: Fleet, state: dict[str, Any]) -> None:
    known = fleet.folder / "known_hosts"
    lines = []
    for host in fleet.hosts:
        public = (fleet.root(host) / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
        lines.append(f"{state['hosts'][host.name]['address']} {public[0]} {public[1]}\n")
    write_atomic(known, "".join(lines))
    ssh = f"-F /dev/null -o UserKnownHostsFile={known} -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
    common = {
        "ansible_ssh_private_key_file": str(fleet.folder / "id_ed25519"),
        "ansible_ssh_common_args": ssh,
        "ansible_control_path_dir": str(_control_dir(fleet)),
        "ansible_ssh_pipelining": True,
        "ansible_python_interpreter": "/usr/bin/python3",
        "testbed_boot_time_command": BOOT_TIME_COMMAND,
    }
    groups: dict[str, Any] = {}
    for host in fleet.hosts:
        own: dict[str, Any] = {"ansible_host": state["hosts"][host.name]["address"], "ansible_user": "root"}
        if host.sudo_password:
            own["ansible_user"] = SUDO_USER
            lookup = f"{{{{ lookup('ansible.builtin.file', '{password_file(fleet)}') }}}}"
            own["ansible_become_password"] = lookup
        for group in host.groups:
            groups.setdefault(group, {"hosts": {}})["hosts"][host.name] = own if group == host.groups[0] else {}
    text = yaml.safe_dump({"all": {"vars": common, "children": groups}}, sort_keys=False)
    write_atomic(fleet.inventory, f"# Made by tests/testbed/testbed; goes when the fleet goes down.\n{text}")
    _control_dir(fleet).mkdir(mode=0o700, exist_ok=True)


def _plain(host: Host) -> dict[str, Any]:
    data = json.loads(json.dumps(host.__dict__))
    return {**data, "binds": dict(data["binds"])}


def _control_dir(fleet: Fleet) -> Path:
    return RUN_DIR / f"{fleet.key}.ssh"  # short: a socket's path has 107 bytes at most


# --- reboot, exec ----------------------------------------------------------------------------


def _nsenter(leader: int) -> list[str]:
    clean = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"]
    return ["nsenter", "-t", str(leader), "-m", "-u", "-n", "-p", "-i", "-C", "-r", "-w", *clean]


def leader(fleet: Fleet, host: Host) -> int:
    """The machine's pid of the host's pid 1."""
    nspawn = machine.container(fleet.machine(host))[1]
    found = machine.leader_pid(nspawn) if nspawn else None
    if found is None:
        raise TestbedError(f"{host.name} of fleet {fleet.name} is not up: run `testbed up --fleet {fleet.name}`")
    return found


def inside(fleet: Fleet, host: Host) -> list[str]:
    """The words before a command that is to run as root inside a host that is up."""
    return _nsenter(leader(fleet, host))


def execute(fleet: Fleet, host: Host, argv: Sequence[str]) -> int:
    """Run a command as root inside a host, without SSH; return its exit status."""
    return subprocess.run([*inside(fleet, host), *argv], check=False).returncode


def reboot(fleet: Fleet, host: Host) -> None:
    """Reboot as a person would and wait until the host answers again."""
    before = leader(fleet, host)
    execute(fleet, host, ["systemctl", "reboot"])
    end = time.monotonic() + BOOT_DEADLINE
    while True:
        nspawn = machine.container(fleet.machine(host))[1]
        if nspawn and machine.leader_pid(nspawn) not in (None, before):
            break
        if time.monotonic() > end:
            raise TestbedError(f"{host.name} did not go down {BOOT_DEADLINE:.0f} s after `systemctl reboot`")
        time.sleep(0.1)
    wait_ready(fleet, host, _read(fleet.record) or {}, strict=False)


# --- down ------------------------------------------------------------------------------------


def down(fleet: Fleet) -> None:
    """Take the fleet down and remove all that it had. Repeatable."""
    with locked(RUN_DIR / f"{fleet.key}.lock"):
        state = _read(fleet.record) or {"hosts": {}}
        state = {"key": fleet.key, "name": fleet.name, "folder": str(fleet.folder), **state}
        with locked(RUN_DIR / "lock"):
            _forget(state)
        if fleet.folder.exists():
            shutil.rmtree(fleet.folder)


def clean(everything: bool = False) -> list[str]:
    """Take down every fleet of this checkout (or of the machine); also what dead runs left."""
    gone = []
    for state in records():
        folder = Path(state["folder"])
        ours = folder.is_relative_to(REPO)
        if not (everything or ours or _is_dead(state)):
            continue
        with locked(RUN_DIR / f"{state['key']}.lock"), locked(RUN_DIR / "lock"):
            _forget(state)
            if (everything or ours) and folder.exists():
                shutil.rmtree(folder)
        gone.append(state["name"])
    return gone


def _forget(state: dict[str, Any]) -> None:
    """Stop all hosts of a recorded fleet, remove its network and its record. Needs the machine lock."""
    stub = Fleet(name=state["name"], hosts=())
    object.__setattr__(stub, "key", state["key"])
    object.__setattr__(stub, "folder", Path(state["folder"]))
    machine.kill(machine.processes(f"{_control_dir(stub)}/"))
    for name in state["hosts"]:
        _stop(stub, name, state)
    machine.network_down(stub.key, stub.comment)
    shutil.rmtree(_control_dir(stub), ignore_errors=True)
    stub.record.unlink(missing_ok=True)
    if not records():
        machine.forwarding_back()


def _remove_host(fleet: Fleet, name: str, state: dict[str, Any]) -> None:
    _stop(fleet, name, state)
    shutil.rmtree(fleet.root(name).parent, ignore_errors=True)
    del state["hosts"][name]
    _save(fleet, state)


def _stop(fleet: Fleet, name: str, state: dict[str, Any]) -> None:
    supervisor, nspawn = machine.container(fleet.machine(name))
    inside = machine.leader_pid(nspawn) if nspawn else None
    machine.thaw(state["hosts"].get(name, {}).get("cgroups", []))
    machine.kill([pid for pid in (supervisor, nspawn, inside) if pid])
    machine.drop_cgroups(state["hosts"].get(name, {}).get("cgroups", []))
    shutil.rmtree(Path("/run/systemd/nspawn/propagate") / fleet.machine(name), ignore_errors=True)


# --- records ---------------------------------------------------------------------------------


def records() -> list[dict[str, Any]]:
    """What is written down about every fleet on this machine."""
    found = [_read(path) for path in sorted(RUN_DIR.glob("gf*.json"))]
    return [item for item in found if item]


def status() -> Iterator[dict[str, Any]]:
    """Each fleet with the state of its hosts, for people and scripts."""
    for state in records():
        for name, entry in state["hosts"].items():
            nspawn = machine.container(f"{state['key']}-{name}")[1]
            yield {
                "fleet": state["name"],
                "host": name,
                "address": entry["address"],
                "state": "up" if nspawn and machine.leader_pid(nspawn) else "down",
                "root": f"{state['folder']}/hosts/{name}/root",
                "inventory": f"{state['folder']}/inventory.yml",
            }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        return data
    except (OSError, ValueError):
        return None


def _save(fleet: Fleet, state: dict[str, Any]) -> None:
    write_atomic(fleet.record, json.dumps(state, indent=1))


def _identity(pid: int) -> list[Any]:
    """A process as pid and start time, so that a reused pid is not mistaken for it."""
    return [pid, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]]


def _is_dead(state: dict[str, Any]) -> bool:
    """Neither a host nor the run that made them lives."""
    with contextlib.suppress(OSError):
        if _identity(state["owner"][0]) == state["owner"]:
            return False
    return not any(any(machine.container(f"{state['key']}-{name}")) for name in state["hosts"])


def say(text: str) -> None:
    """Progress for a person; standard output stays free for answers."""
    print(f"testbed: {text}", file=sys.stderr, flush=True)
