"""The machine the hosts run on: its processes, cgroups, network and package sources.

Everything that outlives a call is findable again without our own records: processes by the
machine name on their command line, firewall rules by their comment, the bridge by its name.
That is what lets a later call clean up after one that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

RUN_DIR = Path("/run/gpufleet-testbed")
NETWORK = os.environ.get("GPUFLEET_TESTBED_NET", "10.231.0.0/16")
# With --keep-unit, systemd-nspawn leaves a reboot to its caller: it exits with 133 (systemd-nspawn(1)).
SUPERVISOR = 'while systemd-nspawn "$@"; [ $? -eq 133 ]; do :; done'
IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
PACKAGES = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "ssh": "openssh-client",
}
DEBIAN_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class TestbedError(Exception):
    """What went wrong and what to do next, in one message for a person."""

    __test__ = False  # not a test class, whatever pytest reads into the name


def run(argv: Sequence[str], *, check: bool = True, stdin: str | None = None, timeout: float = 900) -> str:
    """Run a program that must not outlive us; return its standard output.

    Raises TestbedError with the end of its output when it fails.
    """
    done = subprocess.run(
        list(argv),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        preexec_fn=die_with_parent,
    )
    if check and done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise TestbedError(f"`{' '.join(argv)}` exited {done.returncode}:\n{tail}")
    return done.stdout


def die_with_parent() -> None:
    """Ask the kernel to kill this child when its parent dies (PR_SET_PDEATHSIG, prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def locked(path: Path, deadline: float = 900) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it if we die."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        end = time.monotonic() + deadline
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TestbedError(f"{path} is still held by another run after {deadline:.0f} s") from None
                time.sleep(0.1)
        yield


def require() -> None:
    """Be root and have the programs; install the Debian packages that miss."""
    if os.geteuid() != 0:
        raise TestbedError("the test bed boots containers and edits the network: run it as root")
    missing = sorted({package for program, package in PACKAGES.items() if not shutil.which(program)})
    if not Path(DEBIAN_KEYRING).exists():
        missing.append("debian-archive-keyring")
    if not missing:
        return
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Install-Recommends=false"]
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    run([*apt, "update"])
    run([*apt, "install", "-y", *missing])


# --- processes -------------------------------------------------------------------------------


def processes(needle: str) -> list[int]:
    """Pids whose command line has `needle` as, or at the start of, one word of an argument."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split(" ")
            if any(word.startswith(needle) for word in words):
                found.append(int(entry.name))
    return found


def container(machine: str) -> tuple[int | None, int | None]:
    """The supervisor and the systemd-nspawn process of one machine name, each None if it is not there.

    Between the two halves of a reboot only the supervisor lives.
    """
    supervisor = nspawn = None
    for pid in processes(f"--machine={machine}"):
        with contextlib.suppress(OSError):
            exe, *argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if f"--machine={machine}" not in argv:
                continue
            if exe.endswith("systemd-nspawn"):
                nspawn = pid
            elif SUPERVISOR in argv:
                supervisor = pid
    return supervisor, nspawn


def leader_pid(nspawn: int) -> int | None:
    """The container's own pid 1 as the machine sees it; None while there is none (booting, rebooting)."""
    todo = [nspawn]
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            inside = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
            if len(inside) > 1 and inside[-1] == "1":
                return pid
            todo += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return None


def kill(pids: Sequence[int], deadline: float = 15) -> None:
    """SIGKILL and wait until the processes are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + deadline
    while alive := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > end:
            raise TestbedError(f"processes {alive} survive SIGKILL for {deadline:.0f} s")
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


# --- cgroups ---------------------------------------------------------------------------------


def make_cgroups(name: str) -> list[str]:
    """A cgroup `gpufleet-testbed/NAME` under our own in every hierarchy; return the folders.

    Two containers started from one cgroup would share the tree their systemd manages.
    """
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        own["" if number == "0" else controllers.removeprefix("name=")] = path.lstrip("/")
    folders = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        kind, _source, options = right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        key = "" if kind == "cgroup2" else next((k for k in own if k and k in options), None)
        if key is None or key not in own:
            continue
        folder = Path(left.split(" ")[4]) / own[key] / "gpufleet-testbed" / name
        if not folder.parent.parent.is_dir():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if key == "cpuset":
            for level in (folder.parent, folder):
                for item in ("cpuset.cpus", "cpuset.mems"):
                    (level / item).write_text((level.parent / item).read_text())
        folders.append(str(folder))
    return folders


def enter_cgroups(folders: Sequence[str]) -> None:
    """Move this process into them (between fork and exec)."""
    for folder in folders:
        with open(f"{folder}/cgroup.procs", "w") as handle:
            handle.write("0")


def thaw(folders: Sequence[str]) -> None:
    """Let frozen processes run on: in a version 1 hierarchy they cannot even be killed."""
    for folder in map(Path, folders):
        for state in folder.rglob("freezer.state"):
            with contextlib.suppress(OSError):
                state.write_text("THAWED")


def drop_cgroups(folders: Sequence[str]) -> None:
    """Kill what is still inside, remove the folders and their parent when it is empty."""
    for folder in map(Path, folders):
        left = [int(pid) for file in folder.rglob("cgroup.procs") for pid in file.read_text().split()]
        kill(left)
        for sub in sorted((p for p in folder.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)):
            _rmdir(sub)
        _rmdir(folder)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def _rmdir(folder: Path) -> None:
    end = time.monotonic() + 5
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise TestbedError(f"cgroup {folder} cannot be removed: something still runs in it") from None
            time.sleep(0.05)


# --- network ---------------------------------------------------------------------------------


def free_subnet(taken: Sequence[str]) -> ipaddress.IPv4Network:
    """The first /24 of GPUFLEET_TESTBED_NET that no route of the machine and no fleet uses."""
    used = [ipaddress.ip_network(item) for item in taken]
    for route in json.loads(run(["ip", "-j", "-4", "route", "show", "table", "main"]) or "[]"):
        if route["dst"] != "default":
            used.append(ipaddress.ip_network(route["dst"]))
    for candidate in ipaddress.IPv4Network(NETWORK).subnets(new_prefix=24):
        if not any(candidate.overlaps(other) for other in used):
            return candidate
    raise TestbedError(f"no free /24 left in {NETWORK}: set GPUFLEET_TESTBED_NET to another private network")


def _rules(bridge: str, subnet: str, comment: str) -> list[list[str]]:
    tag = ["-m", "comment", "--comment", comment]
    return [
        ["nat", "POSTROUTING", "-s", subnet, "!", "-d", subnet, *tag, "-j", "MASQUERADE"],
        ["filter", "FORWARD", "-i", bridge, *tag, "-j", "ACCEPT"],
        ["filter", "FORWARD", "-o", bridge, *tag, "-j", "ACCEPT"],
    ]


def network_up(bridge: str, subnet: str, comment: str) -> None:
    """Bridge with the subnet's first address, forwarding and masquerading. Idempotent."""
    gateway = next(ipaddress.ip_network(subnet).hosts())
    if not Path(f"/sys/class/net/{bridge}").exists():
        run(["ip", "link", "add", bridge, "type", "bridge"])
    run(["ip", "address", "replace", f"{gateway}/24", "dev", bridge])
    run(["ip", "link", "set", bridge, "up"])
    for table, chain, *rule in _rules(bridge, subnet, comment):
        where = ["iptables", "-w", "-t", table]
        if subprocess.run([*where, "-C", chain, *rule], capture_output=True, check=False).returncode:
            run([*where, "-I", chain, *rule])
    saved = RUN_DIR / "ip_forward"
    if not saved.exists():
        write_atomic(saved, IP_FORWARD.read_text())
    IP_FORWARD.write_text("1\n")


def network_down(bridge: str, comment: str) -> None:
    """Remove the bridge and every rule that carries our comment."""
    if Path(f"/sys/class/net/{bridge}").exists():
        run(["ip", "link", "delete", bridge])
    for table in ("nat", "filter"):
        for line in run(["iptables", "-w", "-t", table, "-S"]).splitlines():
            words = [word.strip('"') for word in line.split()]
            if words[0] == "-A" and comment in words:
                run(["iptables", "-w", "-t", table, "-D", *words[1:]])


def forwarding_back() -> None:
    """Put ip_forward back to what it was before the first fleet."""
    saved = RUN_DIR / "ip_forward"
    if saved.exists():
        IP_FORWARD.write_text(saved.read_text())
        saved.unlink()


# --- package sources -------------------------------------------------------------------------


def apt_sources(suite: str, own: str | None = None, root: Path = Path("/etc/apt")) -> list[str]:
    """One-line apt sources for `suite`, made from the machine's own Debian sources.

    The machine's mirror is kept, its suite name is exchanged, all components are asked for.
    """
    own = own or _own_codename()
    lines = []
    for uris, suites in _machine_sources(root):
        for name in suites:
            if name not in (own, f"{own}-updates", f"{own}-security"):
                continue
            for uri in uris:
                target = suite + name.removeprefix(own)
                lines.append(f"deb [signed-by={DEBIAN_KEYRING}] {uri} {target} main contrib non-free non-free-firmware")
    if not lines:
        raise TestbedError(f"no apt source of this machine has the suite {own}: the hosts need a Debian mirror")
    return list(dict.fromkeys(lines))


def _own_codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.split("=", 1)[1].strip('"')
    raise TestbedError("/etc/os-release has no VERSION_CODENAME: the test bed needs a Debian machine")


def _machine_sources(root: Path) -> Iterator[tuple[list[str], list[str]]]:
    for file in [root / "sources.list", *sorted((root / "sources.list.d").glob("*.list"))]:
        for line in file.read_text().splitlines() if file.exists() else []:
            words = line.split("#")[0].replace("]", "] ").split()
            if words[:1] != ["deb"]:
                continue
            if words[1].startswith("["):
                words = words[:1] + words[[w.endswith("]") for w in words].index(True) + 1 :]
            yield [words[1]], [words[2]]
    for file in sorted((root / "sources.list.d").glob("*.sources")):
        for stanza in file.read_text().split("\n\n"):
            fields: dict[str, str] = {}
            key = ""
            for line in stanza.splitlines():
                if line.startswith("#"):
                    continue
                if line[:1].isspace():
                    fields[key] = f"{fields.get(key, '')} {line.strip()}"
                elif ":" in line:
                    key, value = line.split(":", 1)
                    key = key.lower()
                    fields[key] = value.strip()
            if fields.get("enabled", "yes").lower() != "no" and "deb" in fields.get("types", "").split():
                yield fields["uris"].split(), fields["suites"].split()


def apt_options() -> list[str]:
    """The machine's proxy settings for apt, as configuration lines."""
    wanted = ("Acquire::http::Proxy", "Acquire::https::Proxy")
    return [line for line in run(["apt-config", "dump"]).splitlines() if line.split(" ")[0] in wanted]


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as handle:
        handle.write(text)
    part.rename(path)
