#!/usr/bin/env python3
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lays simulated GPUs into a host and changes them: see README.md beside this file.

Works on a host's root folder from outside (`--root`) and inside the host. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from standins import indices, kernel_version, make_nodes, mount_all, point, unmount_all, write_tree

HERE = Path(__file__).resolve().parent
STATE_DIR = "var/lib/gpusim"
TOOL_DIR = "usr/local/lib/gpusim"
UNIT = "gpusim-mounts.service"
SHARED_MEMORY = Path("/dev/shm/gpusim")  # for units that see /var read-only
BUILT = HERE.parents[2] / ".build/gpusim/libnvidia-ml.so.1" if len(HERE.parents) > 2 else Path("/nonexistent")
MIG_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7, 6: 6}  # NVML compute instance profile number: compute slices
MULTIPLES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "": 1}


class Problem(Exception):
    """An error that the person at the keyboard can act on."""


# ---- state ------------------------------------------------------------------------------------


def in_bytes(value: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(KiB|MiB|GiB|K|M|G|)\s*", value)
    if not match:
        raise Problem(f"not a size: {value!r} (write 1024, 20G or 81559MiB)")
    return int(float(match.group(1)) * MULTIPLES[match.group(2)])


class Host:
    """The simulator's files below one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        own = os.environ.get("GPUSIM_STATE") if str(root) == "/" else None
        self.state = Path(own) if own else root / STATE_DIR / "state"
        self.folder = self.state.parent
        self.tree = self.folder / "root"
        self.registrations = [self.folder / "processes"]
        if str(root) == "/" and not own:
            self.registrations.append(SHARED_MEMORY)

    def forget_processes(self) -> None:
        for folder in self.registrations:
            for path in folder.glob("*"):
                path.unlink(missing_ok=True)

    def read(self) -> dict[str, str]:
        try:
            lines = self.state.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise Problem(f"no simulator in {self.root}: {self.state} is missing; run `init --profile NAME`") from None
        found = {}
        for number, line in enumerate(lines, 1):
            if line and not line.startswith("#"):
                key, equals, value = line.partition("=")
                if not equals or not key:
                    raise Problem(f"{self.state}:{number}: not a key=value line")
                found[key] = value
        return found

    def write(self, values: dict[str, str]) -> None:
        for key, value in values.items():
            if "\n" in value or "=" in key or "\n" in key:
                raise Problem(f"key or value with a line break or '=' in the key: {key!r}")
        new = self.state.with_name(f"state.new.{os.getpid()}")
        new.write_text("".join(f"{key}={values[key]}\n" for key in sorted(values)), encoding="utf-8")
        new.chmod(0o644)
        new.replace(self.state)

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, str]]:
        """Read, let the caller edit, write: under the same lock as the library's setters."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            values = self.read()
            yield values
            self.write(values)
        write_tree(self.tree, values)


def flatten(tree: Any, prefix: str = "") -> dict[str, str]:
    """Nested JSON to dotted keys; names that start with an underscore are comments."""
    if not isinstance(tree, dict):
        text = str(int(tree)) if isinstance(tree, bool) else str(tree)
        if re.fullmatch(r"[0-9.]+ [KMG]iB", text):
            text = str(in_bytes(text))
        return {prefix: text}
    out: dict[str, str] = {}
    for name, value in tree.items():
        if not name.startswith("_"):
            out.update(flatten(value, f"{prefix}.{name}" if prefix else name))
    return out


def online_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def spread(cpus: list[int], nodes: int) -> list[str]:
    """The machine's real processors dealt out to the profile's nodes: affinities must be ones the kernel accepts."""
    shares = []
    for node in range(nodes):
        mine = cpus[node * len(cpus) // nodes : (node + 1) * len(cpus) // nodes] or cpus[-1:]
        text = ""
        for cpu in mine:
            if text and cpu - 1 in mine:
                text = re.sub(r"(-\d+)?$", f"-{cpu}", text, count=1) if not text.endswith(",") else text
            else:
                text += f"{',' if text else ''}{cpu}"
        shares.append(text)
    return shares


def load_profile(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith(".json") else HERE / "profiles" / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (HERE / "profiles").glob("*.json")))
        raise Problem(f"no profile {name!r}; there are: {known}; or give the path of a .json file")
    return json.loads(path.read_text(encoding="utf-8"))


def fnv(text: str, start: int) -> int:
    value = start
    for byte in text.encode():
        value = ((value ^ byte) * 1099511628211) % (1 << 64)
    return value


def mig_uuid(gpu_uuid: str, gi: int, ci: int, epoch: int) -> str:
    """The same UUID as the library gives to a slice that is created through NVML."""
    seed = f"{gpu_uuid}/{gi}/{ci}/{epoch}"
    one, two = fnv(seed, 14695981039346656037), fnv(seed, (1099511628211 * 7919) % (1 << 64))
    parts = (f"{one >> 32:08x}", f"{one >> 16 & 0xFFFF:04x}", f"5{one & 0xFFF:03x}", f"8{two >> 52:03x}")
    return f"MIG-{'-'.join(parts)}-{two & 0xFFFFFFFFFFFF:012x}"


def add_slices(values: dict[str, str], gpu: int, names: list[str]) -> None:
    """MIG slices of a profile: one compute instance per GPU instance, placed in the order given."""
    key = f"gpu.{gpu}"
    profiles = {}
    for number in range(0x12):
        row = values.get(f"{key}.mig.profile.{number}", "").split(",")
        if len(row) == 12:
            profiles[row[1]] = (number, int(row[2]), int(row[3]))
    taken: set[int] = set()
    for index, name in enumerate(names):
        if name not in profiles:
            raise Problem(f"GPU {gpu} has no MIG profile {name!r}; it has {', '.join(profiles)}")
        number, compute, size = profiles[name]
        places = [int(p) for p in values[f"{key}.mig.placements.{number}"].split(";")]
        start = next((p for p in places if not taken & set(range(p, p + size))), None)
        if start is None:
            raise Problem(f"GPU {gpu} has no room for MIG slice {index + 1}, {name}")
        taken |= set(range(start, start + size))
        gi = 0 if size == 8 else index + 1
        ci_number = next(n for n, slices in MIG_SLICES.items() if slices == compute)
        values[f"{key}.gi.{gi}"] = f"{number},{start}"
        values[f"{key}.gi.{gi}.ci.0"] = f"{ci_number},0,{mig_uuid(values[f'{key}.uuid'], gi, 0, 0)}"


def follow_versions(values: dict[str, str]) -> None:
    """Version strings that go with the driver; the running module and its firmware may lag behind user space."""
    version = values["system.driver_version"]
    values["system.nvml_version"] = f"{int(values['system.cuda_driver_version']) // 1000}.{version}"
    values["system.driver_branch"] = f"r{version.split('.')[0]}_00"
    for index in indices(values, "gpu"):
        if values.get(f"gpu.{index}.gsp.enabled") == "1":
            values[f"gpu.{index}.gsp.version"] = kernel_version(values)


def state_of_profile(name: str, seed: str, cpus: str) -> dict[str, str]:
    """All keys of a fresh host. `seed` makes UUIDs and serial numbers differ between hosts, the same on every run."""
    profile = load_profile(name)
    values = {"profile": Path(name).stem, "seed": seed, "system.gpus": str(len(profile["gpus"]))}
    values.update(flatten(profile["system"], "system"))
    nodes = profile.get("nodes", {"0": "0"})
    real = dict(zip(nodes, spread(online_cpus(), len(nodes))))
    chosen = nodes if cpus == "profile" else real
    values.update(flatten(chosen, "node"))
    switches = profile.get("switches", {})
    for index, gpu in enumerate(profile["gpus"]):
        key = f"gpu.{index}"
        model = json.loads((HERE / "models" / f"{gpu['model']}.json").read_text(encoding="utf-8"))
        values.update(flatten(model, key))
        values.update(flatten({k: v for k, v in gpu.items() if k not in ("model", "slices")}, key))
        identity = uuid.uuid5(uuid.NAMESPACE_OID, f"gpusim/{seed}/{Path(name).stem}/{index}")
        values.setdefault(f"{key}.uuid", f"GPU-{identity}")
        values.setdefault(f"{key}.serial", str(1320000000000 + identity.int % 99999999999))
        address = values[f"{key}.pci.address"]
        values.setdefault(f"{key}.board_id", str(int(address.replace(":", "").split(".")[0], 16)))
        values.setdefault(f"{key}.minor", str(index))
        values[f"{key}.cpus"] = chosen[values[f"{key}.numa_node"]]
        if switches.get("addresses") and values.get(f"{key}.nvlink.remote_type") == "2":
            values.setdefault(f"{key}.nvlink.remote", ";".join(switches["addresses"]))
        add_slices(values, index, gpu.get("slices", []))
    for index, address in enumerate(switches.get("addresses", [])):
        values[f"switch.{index}.address"] = address
        values[f"switch.{index}.device_id"] = switches["device_id"]
    values.update(flatten({str(i): item for i, item in enumerate(profile.get("pci_extra", []))}, "pci_extra"))
    follow_versions(values)
    return values


# ---- verbs ------------------------------------------------------------------------------------

UNIT_TEXT = """\
[Unit]
Description=Simulated NVIDIA devices: stand-ins for /proc, /sys and /dev
DefaultDependencies=no
After=local-fs.target systemd-tmpfiles-setup-dev.service
Before=sysinit.target shutdown.target
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/python3 /usr/local/lib/gpusim/gpusim.py boot

[Install]
WantedBy=sysinit.target
"""


def library_paths(root: Path, values: dict[str, str]) -> tuple[Path, Path]:
    folder = root / f"usr/lib/{platform.machine()}-linux-gnu"
    return folder / f"libnvidia-ml.so.{values['system.driver_version']}", folder / "libnvidia-ml.so.1"


def remove_library(root: Path) -> None:
    for path in (root / f"usr/lib/{platform.machine()}-linux-gnu").glob("libnvidia-ml.so.*"):
        if path.is_symlink() or b"gpusim: " in path.read_bytes():
            path.unlink()


def install_library(host: Host, values: dict[str, str], built: Path) -> None:
    remove_library(host.root)
    if values.get("system.library") == "0":
        return
    if not built.is_file():
        raise Problem(f"{built} is missing: run `make -C tests/testbed/gpusim` first")
    file, link = library_paths(host.root, values)
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built, file)
    file.chmod(0o644)
    link.unlink(missing_ok=True)
    link.symlink_to(file.name)


def init(host: Host, args: argparse.Namespace) -> None:
    hostname = host.root / "etc/hostname"
    seed = args.seed or (hostname.read_text(encoding="utf-8").strip() if hostname.is_file() else "") or "gpusim"
    values = state_of_profile(args.profile, seed, args.cpus)
    host.folder.mkdir(parents=True, exist_ok=True)
    (host.folder / "processes").mkdir(exist_ok=True)
    (host.folder / "processes").chmod(0o1777)
    host.write(values)
    (host.folder / "lock").touch(mode=0o644)
    (host.folder / "fresh").touch()
    if args.state_only:
        return
    tool = host.root / TOOL_DIR
    tool.mkdir(parents=True, exist_ok=True)
    if tool.resolve() != HERE:
        for part in ("profiles", "models"):
            shutil.rmtree(tool / part, ignore_errors=True)
            shutil.copytree(HERE / part, tool / part)
        for part in ("gpusim.py", "standins.py"):
            shutil.copyfile(HERE / part, tool / part)
    if (HERE / "Makefile").is_file():
        subprocess.run(["make", "--silent", "-C", str(HERE)], check=True)
        shutil.copyfile(BUILT, tool / "libnvidia-ml.so.1")
    install_library(host, values, tool / "libnvidia-ml.so.1")
    write_tree(host.tree, values)
    unit = host.root / "etc/systemd/system" / UNIT
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(UNIT_TEXT, encoding="utf-8")
    point(host.root / f"etc/systemd/system/sysinit.target.wants/{UNIT}", f"../{UNIT}")
    print(f"{values['profile']}: {values['system.gpus']} GPU(s) in {host.root}")


def uninstall(host: Host, args: argparse.Namespace) -> None:
    if str(host.root) == "/":
        unmount_all(host.tree)
        shutil.rmtree(SHARED_MEMORY, ignore_errors=True)
    remove_library(host.root)
    (host.root / f"etc/systemd/system/sysinit.target.wants/{UNIT}").unlink(missing_ok=True)
    (host.root / "etc/systemd/system" / UNIT).unlink(missing_ok=True)
    for folder in (host.root / STATE_DIR, host.root / TOOL_DIR):
        shutil.rmtree(folder, ignore_errors=True)


def set_value(host: Host, args: argparse.Namespace) -> None:
    if args.value is None and not args.unset:
        raise Problem("give a value, or --unset")
    with host.change() as values:
        path = args.path
        if "*" in path or "?" in path:
            wanted = [k for k in values if fnmatch.fnmatchcase(k, path)]
            match = re.match(r"gpu\.\*\.([^*?]+)$", path)
            if match and not args.unset:
                wanted = [f"gpu.{i}.{match.group(1)}" for i in indices(values, "gpu")]
            if not wanted:
                raise Problem(f"no key matches {path!r}")
        else:
            wanted = [path]
            index = re.match(r"gpu\.(\d+)\.", path)
            if index and int(index.group(1)) >= int(values["system.gpus"]):
                raise Problem(f"this host has {values['system.gpus']} GPU(s), there is no {path.split('.')[1]}")
        for key in wanted:
            if args.unset:
                values.pop(key, None)
            else:
                is_size = re.search(r"\.(total|reserved|foreign|used)$", key) and not args.value.startswith("!")
                values[key] = str(in_bytes(args.value)) if is_size else args.value
        if any(k.startswith("system.") and k.endswith("driver_version") for k in wanted):
            follow_versions(values)
        if any(k in ("system.driver_version", "system.library") for k in wanted) and (host.root / TOOL_DIR).is_dir():
            install_library(host, values, host.root / TOOL_DIR / "libnvidia-ml.so.1")


def next_id(values: dict[str, str], group: str) -> int:
    used = [int(k.split(".")[1]) for k in values if re.fullmatch(rf"{group}\.\d+", k)]
    return max(used, default=0) + 1


def fault(host: Host, args: argparse.Namespace) -> None:
    if args.action == "list":
        for key, value in sorted(host.read().items()):
            if key.startswith("fault."):
                print(f"{key.split('.')[1]}\t{value}")
        return
    with host.change() as values:
        if args.action == "clear":
            gone = [k for k in values if k.startswith("fault.") and args.id in (None, k.split(".")[1])]
            if args.id and not gone:
                raise Problem(f"there is no fault {args.id}")
            for key in gone:
                del values[key]
            return
        words = [f"call={args.call}", f"device={args.device}"]
        for name in ("code", "late_code", "delay_ms", "nth", "times"):
            if getattr(args, name) is not None:
                words.append(f"{name}={getattr(args, name)}")
        words += ["crash=1"] if args.crash else []
        words += ["silent=1"] if args.silent else []
        words += [f"hang={args.hang}"] if args.hang else []
        if len(words) == 2:
            raise Problem("say what goes wrong: --code, --late-code, --delay-ms, --hang, --crash or --silent")
        number = next_id(values, "fault")
        values[f"fault.{number}"] = " ".join(words)
        print(number)


def start_time(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def processes_alive(host: Host, values: dict[str, str]) -> list[dict[str, str]]:
    found = []
    for key, value in values.items():
        if key.startswith("process."):
            item = dict(re.findall(r"(\w+)=((?<=name=).*|\S*)", value), id=key.split(".")[1])
            began = start_time(int(item["pid"]))
            if item.get("pinned") == "1" or (began is not None and item.get("start", began) == began):
                found.append(item)
    for path in [path for folder in host.registrations for path in folder.glob("*")]:
        if path.name.isdigit() and start_time(int(path.name)) is not None:
            item = {"id": "file", "pid": path.name}
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                name, equals, value = line.partition("=")
                if equals:
                    item[name] = value if name not in item else f"{item[name]}+{value}"
            found.append(item)
    return found


def process(host: Host, args: argparse.Namespace) -> None:
    if args.action == "list":
        for item in processes_alive(host, host.read()):
            fields = ("id", "pid", "device", "bytes", "kind", "name")
            print("\t".join(item.get(name, "-") for name in fields))
        return
    with host.change() as values:
        if args.action == "remove":
            key = f"process.{args.id}"
            if key not in values:
                raise Problem(f"there is no process entry {args.id}")
            del values[key]
            return
        if args.device.isdigit() and int(args.device) >= int(values["system.gpus"]):
            raise Problem(f"this host has {values['system.gpus']} GPU(s), there is no {args.device}")
        number = next_id(values, "process")
        pid, words = args.pid, []
        if args.spawn:
            child = subprocess.Popen(["sleep", "infinity"], start_new_session=True)  # its end removes the entry
            pid = child.pid
        if pid is None or args.pinned:
            words.append("pinned=1")
            pid = pid or 400000 + number
        else:
            began = start_time(pid)
            if began is None:
                raise Problem(f"there is no process {pid} here; use --pinned for one that only the simulation knows")
            words.append(f"start={began}")
        what = [f"pid={pid}", f"device={args.device}", f"bytes={in_bytes(args.bytes)}", f"kind={args.kind}"]
        values[f"process.{number}"] = " ".join([*what, *words, f"name={args.name}"])
        print(f"{number}\t{pid}" if args.spawn else number)


def show(host: Host, args: argparse.Namespace) -> None:
    values = host.read()
    if args.path:
        for key in sorted(values):
            if fnmatch.fnmatchcase(key, args.path) or key == args.path:
                print(f"{key}={values[key]}")
        return
    flavour = values.get("system.flavour", "?")
    print(f"profile {values['profile']}, driver {values['system.driver_version']} ({flavour})")
    for index in indices(values, "gpu"):
        key = f"gpu.{index}"
        got = {k[len(key) + 1 :]: v for k, v in values.items() if k.startswith(f"{key}.")}
        print(
            f"  {index} {got['pci.address']} {got['name']}, {int(got.get('memory.total', '0')) / (1 << 30):.2f} GiB, "
            f"node {got['numa_node']}, persistence {got.get('persistence_mode', '-')}, "
            f"compute mode {got.get('compute_mode', '-')}, MIG {got.get('mig.mode', '-')}, {got['uuid']}"
        )
    for key, value in sorted(values.items()):
        if key.startswith(("fault.", "process.")):
            print(f"  {key}: {value}")


def after_reboot(values: dict[str, str]) -> None:
    """What a reboot of a real host changes: driver.md section 9 and the MIG notes of the vendor's guide."""
    for key in [k for k in values if k.startswith("process.")]:
        del values[key]
    for index in indices(values, "gpu"):
        key = f"gpu.{index}"

        def reset(name: str, value: str, key: str = key) -> None:
            if f"{key}.{name}" in values and not values[f"{key}.{name}"].startswith("!"):
                values[f"{key}.{name}"] = value

        for name in ("persistence_mode", "compute_mode", "accounting_mode"):
            reset(name, "0")
        reset("power.limit", values.get(f"{key}.power.default", "0"))
        for name in ("clocks.locked_gpu", "clocks.locked_memory", "lost"):
            values.pop(f"{key}.{name}", None)
        reset("ecc.current", values.get(f"{key}.ecc.pending", "0"))
        for name in ("ecc.volatile.corrected", "ecc.volatile.uncorrected", "remapped.pending", "retired.pending"):
            reset(name, "0")
        for name in ("repair.channel_pending", "repair.tpc_pending", "health.recovery_action"):
            reset(name, "0")
        kept = values.get(f"{key}.mig.survives_reboot") == "1"
        reset("mig.mode", values.get(f"{key}.mig.pending", "0") if kept else "0")
        reset("mig.pending", values.get(f"{key}.mig.mode", "0"))
        for name in [k for k in values if k.startswith(f"{key}.gi.")]:
            del values[name]
        if values.get(f"{key}.mig.new_uuids") == "1":
            values[f"{key}.mig.epoch"] = str(int(values.get(f"{key}.mig.epoch", "0")) + 1)
    values.pop("system.kernel_driver_version", None)  # what is installed is now what runs
    follow_versions(values)


def reboot(host: Host, args: argparse.Namespace) -> None:
    with host.change() as values:
        after_reboot(values)
    host.forget_processes()
    (host.folder / "fresh").touch()  # the boot that follows must not do it again


def boot(host: Host, args: argparse.Namespace) -> None:
    """At boot: a reboot has happened, unless the state is fresh; then the stand-ins are put in place."""
    host.forget_processes()
    if (host.folder / "fresh").exists():
        (host.folder / "fresh").unlink()
    else:
        with host.change() as values:
            after_reboot(values)
    mount(host, args)


def mount(host: Host, args: argparse.Namespace) -> None:
    values = host.read()
    write_tree(host.tree, values)
    mount_all(host.tree, values)
    SHARED_MEMORY.mkdir(exist_ok=True)
    SHARED_MEMORY.chmod(0o1777)


def refresh(host: Host, args: argparse.Namespace) -> None:
    """Bring the stand-ins up to date after changes that were made through NVML (MIG slices, say)."""
    write_tree(host.tree, host.read())
    if str(host.root) == "/":
        make_nodes(host.tree)


def thaw(host: Host, args: argparse.Namespace) -> None:
    """End processes that an `unkillable` hang has frozen."""
    for root in ("/run/gpusim/freezer", "/sys/fs/cgroup/freezer"):
        for folder in Path(root).glob("gpusim-*"):
            for pid in (folder / "cgroup.procs").read_text(encoding="utf-8").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            (folder / "freezer.state").write_text("THAWED", encoding="utf-8")
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except OSError:
                    subprocess.run(["sleep", "0.02"], check=False)
            print(f"ended {folder.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="/", type=Path, help="root folder of the host (default: this one)")
    verbs = parser.add_subparsers(dest="verb", required=True)

    verb = verbs.add_parser("init", help="lay a profile into the host")
    verb.set_defaults(run=init)
    verb.add_argument("--profile", required=True)
    verb.add_argument("--seed", help="makes UUIDs and serials; default: the host's name")
    verb.add_argument("--cpus", choices=("real", "profile"), default="real", help="processors named in affinities")
    verb.add_argument("--state-only", action="store_true", help="state and processes folder, no library, unit or tree")

    verb = verbs.add_parser("set", help="change a key, e.g. gpu.0.memory.foreign 10G or gpu.*.power.draw '!15'")
    verb.set_defaults(run=set_value)
    verb.add_argument("path")
    verb.add_argument("value", nargs="?")
    verb.add_argument("--unset", action="store_true")

    verb = verbs.add_parser("fault", help="make calls fail")
    verb.set_defaults(run=fault)
    actions = verb.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add")
    add.add_argument("--call", default="*", help="NVML function or pattern; nvmlInit stands for all its versions")
    add.add_argument("--device", default="*", help="index or UUID")
    add.add_argument("--code", type=int, help="answer with this NVML code")
    add.add_argument("--late-code", type=int, help="do the work, then answer with this code")
    add.add_argument("--delay-ms", type=int)
    add.add_argument("--hang", nargs="?", const="plain", choices=("plain", "stubborn", "unkillable"))
    add.add_argument("--crash", action="store_true", help="abort the calling process")
    add.add_argument("--silent", action="store_true", help="setters report success and change nothing")
    add.add_argument("--nth", type=int, help="only the nth such call of each process")
    add.add_argument("--times", type=int, help="only the first so many calls on the host")
    clear = actions.add_parser("clear")
    clear.add_argument("id", nargs="?")
    actions.add_parser("list")

    verb = verbs.add_parser("process", help="processes that hold GPU memory")
    verb.set_defaults(run=process)
    actions = verb.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add")
    add.add_argument("--device", default="0", help="index, GPU-… or MIG-…")
    add.add_argument("--bytes", required=True)
    add.add_argument("--pid", type=int, help="the entry ends with this process")
    add.add_argument("--pinned", action="store_true", help="keep the entry whether or not the process exists")
    add.add_argument("--spawn", action="store_true", help="start a process that does nothing; prints its pid")
    add.add_argument("--name", default="python3")
    add.add_argument("--kind", choices=("compute", "graphics", "mps"), default="compute")
    remove = actions.add_parser("remove")
    remove.add_argument("id")
    actions.add_parser("list")

    verb = verbs.add_parser("show", help="an overview, or the keys that match a pattern")
    verb.set_defaults(run=show)
    verb.add_argument("path", nargs="?")

    for name, action, text in (
        ("reboot", reboot, "apply what a reboot keeps and loses"),
        ("uninstall", uninstall, "remove everything of the simulator"),
        ("boot", boot, "inside the host, by its unit: reboot semantics, then mount"),
        ("mount", mount, "inside the host: put the stand-ins in place now"),
        ("refresh", refresh, "bring the stand-ins up to date with the state"),
        ("thaw", thaw, "end processes frozen by an unkillable hang"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.set_defaults(run=action)

    args = parser.parse_args()
    host = Host(args.root.resolve())
    try:
        args.run(host, args)
    except Problem as problem:
        print(f"gpusim: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
