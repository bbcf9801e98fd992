# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The facts of a host that are not about its GPUs. Private to gpufleet.inference."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Mapping, Optional, Sequence

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._host import children, package_versions, procfs
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner

ENGINES = "/opt/vllm"
MANIFEST = ".gpufleet.json"
_PATIENCE_S = 3.0
_PYTHON_FOLDERS = ("/usr/bin", "/usr/local/bin")
_PYTHON = re.compile(r"^python(3\.\d+)$")
_UNIT_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
_PSEUDO = re.compile(
    "proc|sysfs|cgroup2?|devpts|mqueue|hugetlbfs|debugfs|tracefs|securityfs|pstore|bpf|configfs|fusectl|autofs|"
    "binfmt_misc|ramfs|nsfs|rpc_pipefs|efivarfs|devtmpfs|squashfs|selinuxfs"
)
_CONTAINER = re.compile(r"/(docker|libpod|crio|cri-containerd|nerdctl|lxc)[-/:]([0-9a-z-]+)")
_POD = re.compile(r"/(kube)pods[^/]*/.*?([0-9a-f]{12,})")
# What a release of vLLM stands on and what breaks it most often.
_WHEELS = re.compile(r"^(vllm|torch|transformers|numpy|nvidia-nccl-cu\d+)$")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")
_CREDENTIALS = re.compile(r"//[^/@\s]*@")


def gather(
    root: Root,
    runner: Runner,
    paths: Sequence[str],
    environment: Mapping[str, str],
    *,
    user: tuple[str, int],
    package_patterns: Sequence[str] = (),
) -> dict[str, Any]:
    """Facts in the schema of host_facts. ``user`` is (name, uid) of who reads.

    ``package_patterns`` names the OS packages to list, with wildcards.
    """
    release = _key_values(root.read_text("/etc/os-release") or root.read_text("/usr/lib/os-release") or "")
    system = os.uname()
    mounts = _mounts(root)
    sizes, silent = _sizes(root, [*(mount["path"] for mount in mounts), *paths])
    for mount in mounts:
        mount["size"], mount["free"] = sizes.get(mount["path"], (None, None))
    processes = [(pid, procfs.process_name(root, pid) or "") for pid in procfs.pids(root)]
    names = {name for _pid, name in processes}
    prefix = procfs.manager_prefix(root)
    facts: dict[str, Any] = {
        "distribution": {
            "id": release.get("ID"),
            "version": release.get("VERSION_ID"),
            "codename": release.get("VERSION_CODENAME"),
        },
        "arch": system.machine,
        "kernel": system.release,
        "glibc": _glibc(),
        "systemd": _systemd(runner),
        "python": _pythons(root),
        "user": {"name": user[0], "uid": user[1], "become_ok": _may_become(runner, user[1])},
        "selinux": _selinux(root),
        "fapolicyd": "fapolicyd" in names,
        "firewall": _firewall(root, names),
        "mounts": mounts,
        "noexec_paths": [path for path in paths if "noexec" in _mount_of(path, mounts)["options"].split(",")],
        "disk": {path: sizes.get(path, (None, None))[1] for path in paths},
        "ram": _memory(root),
        "cpus": _cpus(root),
        "ports": _ports(root, [pid for pid, _name in processes], prefix),
        "vllm_units": _vllm_units(root, processes, prefix),
        "containers_with_gpu": _containers(root, processes),
        "kernels": _kernels(root),
        "packages": package_versions.versions(root, runner, package_patterns),
        "engines": _engines(root),
        "proxies": _proxies(root, environment),
        "unavailable": {f"disk.{path}": reason for path, reason in silent.items()},
    }
    facts["findings"] = [finding.to_dict() for finding in host_findings(facts)]
    return facts


def host_findings(facts: Mapping[str, Any]) -> list[Finding]:
    """What a person should know before anything is changed, worst first."""
    found = []
    if not facts["user"]["become_ok"]:
        text = f"The user {facts['user']['name']} is not root and sudo wants a password or refuses."
        remedy = "Run with become: true and a become password (-K), or allow sudo for this user."
        found.append(Finding("no_become", "error", "user", text, remedy))
    if facts["systemd"] is None:
        text = "systemctl does not answer: the host does not run systemd."
        found.append(Finding("no_systemd", "error", "host", text, "Use a host that systemd manages."))
    for path in facts["noexec_paths"]:
        text = f"{path} lies on a file system that is mounted noexec: nothing there can be started."
        remedy = "Mount it without noexec, or put the path elsewhere."
        found.append(Finding("noexec", "error", path, text, remedy))
    for path, reason in facts["unavailable"].items():
        found.append(
            Finding(
                "mount_silent", "error", path.partition(".")[2], f"The file system {reason}.", "Unmount or mend it."
            )
        )
    if facts["fapolicyd"]:
        text = "fapolicyd runs: it stops programs that no package brought."
        remedy = f"Trust {ENGINES} in fapolicyd before engines are installed there."
        found.append(Finding("fapolicyd", "warning", "host", text, remedy))
    for entry in facts["vllm_units"]:
        if not entry["ours"]:
            text = f"{entry['unit']} runs or describes a vLLM that is not managed here."
            found.append(
                Finding("foreign_vllm", "warning", entry["unit"], text, "It is left alone: mind its GPUs and port.")
            )
    for entry in facts["containers_with_gpu"]:
        text = f"A container of {entry['runtime']} holds GPU devices ({', '.join(entry['processes'])})."
        found.append(Finding("container_with_gpu", "warning", entry["id"], text, "It is left alone: mind its GPUs."))
    if facts["firewall"]:
        text = f"{facts['firewall']} is active."
        found.append(
            Finding("firewall", "info", "host", text, "Open the ports of instances that listen beyond loopback.")
        )
    return found


# -- system ------------------------------------------------------------------------------------------------------------


def _key_values(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, _equals, value in pairs}


def _glibc() -> Optional[str]:
    try:
        name, _space, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (OSError, ValueError):
        return None
    return version if name == "glibc" else None


def _systemd(runner: Runner) -> Optional[int]:
    result = runner.run(["systemctl", "--version"], timeout=_PATIENCE_S)
    match = re.match(r"systemd (\d+)", result.out)
    return int(match.group(1)) if result.rc == 0 and match else None


def _pythons(root: Root) -> list[dict[str, str]]:
    """Interpreters by their name with the minor version; links to one interpreter are listed once."""
    found: dict[str, dict[str, str]] = {}
    for folder in _PYTHON_FOLDERS:
        for name in root.listdir(folder):
            match = _PYTHON.match(name)
            if match and root.exists(f"{folder}/{name}"):
                found.setdefault(
                    root.realpath(f"{folder}/{name}"), {"path": f"{folder}/{name}", "version": match.group(1)}
                )
    return sorted(found.values(), key=lambda entry: (int(entry["version"].partition(".")[2]), entry["path"]))


def _may_become(runner: Runner, uid: int) -> bool:
    return uid == 0 or runner.run(["sudo", "-n", "true"], timeout=_PATIENCE_S).rc == 0


def _selinux(root: Root) -> str:
    text = root.read_text("/sys/fs/selinux/enforce")
    if text is None:
        return "disabled"
    return "enforcing" if text.strip() == "1" else "permissive"


def _firewall(root: Root, names: set[str]) -> Optional[str]:
    if "firewalld" in names:
        return "firewalld"
    enabled = _key_values(root.read_text("/etc/ufw/ufw.conf") or "").get("ENABLED", "no")
    return "ufw" if enabled.lower() == "yes" else None


def _memory(root: Root) -> dict[str, Optional[int]]:
    fields = {}
    for line in (root.read_text("/proc/meminfo") or "").splitlines():
        name, _colon, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * 1024
    return {"total": fields.get("MemTotal"), "available": fields.get("MemAvailable")}


def _cpus(root: Root) -> dict[str, Any]:
    base = "/sys/devices/system/node"
    nodes = [name for name in root.listdir(base) if re.fullmatch(r"node\d+", name)]
    lists = {name[4:]: (root.read_text(f"{base}/{name}/cpulist") or "").strip() for name in nodes}
    return {"count": os.cpu_count(), "numa": lists}


# -- file systems ------------------------------------------------------------------------------------------------------


def _mounts(root: Root) -> list[dict[str, Any]]:
    """Real file systems; of several mounts on one path the last one is in effect."""
    found: dict[str, dict[str, Any]] = {}
    for line in (root.read_text("/proc/self/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) >= 4 and not _PSEUDO.fullmatch(fields[2]) and not fields[1].startswith(("/sys/", "/proc/")):
            path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[1])
            found[path] = {"path": path, "fstype": fields[2], "options": fields[3]}
    return [found[path] for path in sorted(found)]


def _mount_of(path: str, mounts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    above = [mount for mount in mounts if (path + "/").startswith(mount["path"].rstrip("/") + "/")]
    return max(above, key=lambda mount: len(mount["path"]), default={"path": "/", "fstype": "", "options": ""})


def _sizes(root: Root, paths: Sequence[str]) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """(size, free for users) of the file system of each path, and why it is unknown.

    A dead network mount never answers: a child asks, and after a silent path another child goes on.
    """
    sizes: dict[str, tuple[int, int]] = {}
    silent: dict[str, str] = {}
    waiting = list(dict.fromkeys(paths))

    def work(emit: children.Emit) -> None:
        for path in waiting:
            emit([path, None], True)
            there = path
            while not root.exists(there) and there not in ("/", ""):
                there = there.rsplit("/", 1)[0] or "/"
            try:
                status = os.statvfs(root.path(there))
            except OSError:
                continue
            emit([path, [status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail]], False)

    current = ""

    def receive(message: Any) -> float:
        nonlocal current
        current = message[0]
        if message[1] is not None:
            sizes[current] = tuple(message[1])
        return _PATIENCE_S

    while waiting:
        current = ""
        outcome = children.watch(work, receive, _PATIENCE_S)
        if outcome.done:
            break
        silent[current or waiting[0]] = outcome.died or f"gives no answer within {_PATIENCE_S:g} s"
        waiting = waiting[waiting.index(current) + 1 :] if current else []
    return sizes, silent


# -- what runs and what is installed -----------------------------------------------------------------------------------


def _ports(root: Root, pids: Sequence[int], prefix: str) -> list[dict[str, Any]]:
    sockets = list(procfs.listening(root))
    wanted = {f"socket:[{inode}]" for _address, _port, inode in sockets}
    owners: dict[str, int] = {}
    for pid in pids:
        if len(owners) == len(wanted):
            break
        for link in procfs.descriptors(root, pid):
            if link in wanted:
                owners.setdefault(link, pid)
    found = {}
    for address, port, inode in sockets:
        owner = owners.get(f"socket:[{inode}]")
        found[(port, address, owner)] = {
            "address": address,
            "port": port,
            "pid": owner,
            "process": procfs.process_name(root, owner) if owner else None,
            "unit": procfs.unit_of(root, owner, prefix) if owner else None,
        }
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1], key[2] or 0))]


def _vllm_units(root: Root, processes: Sequence[tuple[int, str]], prefix: str) -> list[dict[str, Any]]:
    """Units that run a vLLM or are named after it; ours are those that link into /etc/vllm."""
    units: dict[str, bool] = {}
    for folder in _UNIT_FOLDERS:
        for name in root.listdir(folder):
            if "vllm" in name and name.endswith(".service"):
                target = root.readlink(f"{folder}/{name}") or ""
                units[name] = units.get(name, False) or target.startswith("/etc/vllm/")
    for pid, name in processes:
        if name == "vllm" or name.startswith("VLLM::"):
            unit = procfs.unit_of(root, pid, prefix)
            if unit:
                units.setdefault(unit, False)
    return [{"unit": unit, "ours": units[unit]} for unit in sorted(units)]


def _containers(root: Root, processes: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Containers of which a process has a GPU device open."""
    found: dict[str, dict[str, Any]] = {}
    for pid, name in processes:
        groups = root.read_text(f"/proc/{pid}/cgroup") or ""
        match = _CONTAINER.search(groups) or _POD.search(groups)
        if match and any(link.startswith("/dev/nvidia") for link in procfs.descriptors(root, pid)):
            runtime, number = match.groups()
            entry = found.setdefault(
                number, {"id": number, "runtime": "kubernetes" if runtime == "kube" else runtime, "processes": []}
            )
            entry["processes"].append(f"{name} (pid {pid})")
    return [found[number] for number in sorted(found)]


def _engines(root: Root) -> list[dict[str, Any]]:
    names = [name for name in root.listdir(ENGINES) if root.exists(f"{ENGINES}/{name}/bin") or _complete(root, name)]
    return [{"version": name, "complete": _complete(root, name), **_wheels(root, name)} for name in names]


def _wheels(root: Root, name: str) -> dict[str, Any]:
    """The interpreter's version and the wheels that a release stands on, from its manifest; empty without one."""
    try:
        manifest = json.loads(root.read_text(f"{ENGINES}/{name}/{MANIFEST}") or "")
        installed = {str(key).lower().replace("_", "-"): str(version) for key, version in manifest["wheels"].items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        return {"python": None, "wheels": {}}
    return {
        "python": _python_of(root, f"{ENGINES}/{name}"),
        "wheels": {key: version for key, version in sorted(installed.items()) if _WHEELS.match(key)},
    }


def _python_of(root: Root, folder: str) -> Optional[str]:
    """The version that the environment was made with, as its pyvenv.cfg says."""
    for line in (root.read_text(f"{folder}/pyvenv.cfg") or "").splitlines():
        key, _separator, value = line.partition("=")
        if key.strip() in ("version", "version_info"):
            return value.strip()
    return None


def _kernels(root: Root) -> list[str]:
    """Kernels that the machine can boot: those with modules and an image."""
    return [
        name
        for name in root.listdir("/lib/modules")
        if root.exists(f"/lib/modules/{name}/modules.dep")
        and (root.exists(f"/boot/vmlinuz-{name}") or root.exists(f"/lib/modules/{name}/vmlinuz"))
    ]


def _complete(root: Root, name: str) -> bool:
    return root.exists(f"{ENGINES}/{name}/{MANIFEST}")


def _proxies(root: Root, environment: Mapping[str, str]) -> dict[str, str]:
    """Proxies of the login environment and of /etc/environment, without user names and passwords."""
    known = {**_key_values(root.read_text("/etc/environment") or ""), **environment}
    found = {}
    for name in _PROXIES:
        value = known.get(name) or known.get(name.upper())
        if value:
            found[name] = _CREDENTIALS.sub("//", value)
    return found
