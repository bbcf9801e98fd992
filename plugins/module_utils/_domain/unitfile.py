# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The systemd unit of one instance as text. Private to gpufleet.inference.

What is never in a GPU unit, because it breaks CUDA, JIT compilation, NCCL or NUMA binding: ProcSubset=pid,
MemoryDenyWriteExecute, PrivateDevices, an address family list without AF_NETLINK, a call filter with ~@resources.
RemoveIPC is left out too: it would remove the shared memory of the user's other instances. So is PrivateUsers: every
process of the unit gets a user namespace of its own, and the probe could not see which of them listens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

HELPER = "/usr/local/lib/gpufleet/gpufleet.pyz"
PYTHON = "/usr/bin/python3"

# Each group can be switched off alone; order and texts are those of the unit.
HARDENING: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "filesystem": (
        "nothing but its own cache and run directory is writable",
        ("ProtectSystem=strict", "ProtectHome={home}", "PrivateTmp=yes", "UMask=0077"),
    ),
    "privileges": (
        "no capability, no way to gain one",
        (
            "NoNewPrivileges=yes",
            "CapabilityBoundingSet=",
            "AmbientCapabilities=",
            "RestrictNamespaces=yes",
            "RestrictSUIDSGID=yes",
            "RestrictRealtime=yes",
            "LockPersonality=yes",
            "KeyringMode=private",
        ),
    ),
    "kernel": (
        "kernel settings, modules, log, clock and control groups cannot be changed",
        (
            "ProtectKernelTunables=yes",
            "ProtectKernelModules=yes",
            "ProtectKernelLogs=yes",
            "ProtectControlGroups=yes",
            "ProtectClock=yes",
            "ProtectHostname=yes",
            "ProtectProc=invisible",
        ),
    ),
    "syscalls": (
        "only the calls of a normal service",
        (
            "SystemCallArchitectures=native",
            "SystemCallFilter=@system-service",
            "SystemCallFilter=~@privileged",
            "SystemCallErrorNumber=EPERM",
        ),
    ),
    "network": (
        "no raw or exotic sockets; NCCL needs AF_NETLINK",
        ("RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",),
    ),
    "devices": ("no device but its GPUs", ("DevicePolicy=closed",)),
}


@dataclass(frozen=True)
class Unit:
    """Everything that decides the text of a unit; times in seconds."""

    name: str
    description: str
    user: str
    group: str
    program: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    gpus: Sequence[str]
    served_name: str
    address: str
    port: int
    device_nodes: Sequence[str] = ()
    start_after: Sequence[str] = ()
    credentials: Mapping[str, str] = field(default_factory=dict)
    cpus: str = ""
    numa_nodes: str = ""
    home_hidden: bool = True
    hardening: Mapping[str, bool] = field(default_factory=dict)
    ready_deadline: int = 900
    lock_deadline: int = 900
    stop_deadline: int = 30
    restart_delay: int = 5
    requires_path: Optional[str] = None
    pooling: bool = False


def unit_name(instance: str) -> str:
    """The unit of an instance."""
    return f"vllm-{instance}.service"


def caches(instance: str) -> Dict[str, str]:
    """Where an engine and the compilers it calls keep their files: below the unit's own cache directory."""
    base = f"/var/cache/vllm/{instance}"
    return {
        "HOME": base,
        "XDG_CACHE_HOME": base,
        "XDG_CONFIG_HOME": f"{base}/config",
        "VLLM_CACHE_ROOT": f"{base}/vllm",
        "VLLM_CONFIG_ROOT": f"{base}/config/vllm",
        "HF_HOME": f"{base}/huggingface",
        "TORCHINDUCTOR_CACHE_DIR": f"{base}/inductor",
        "TRITON_CACHE_DIR": f"{base}/triton",
        "CUDA_CACHE_PATH": f"{base}/cuda",
        "FLASHINFER_WORKSPACE_BASE": base,
    }


def render(unit: Unit) -> str:
    """The text of the unit. FleetError `bad_hardening` for a group that does not exist."""
    switches = hardening(unit.hardening)
    lines = [
        "# Written by gpufleet.inference: changes made here are lost. `systemctl edit` makes a drop-in that stays.",
        f"# Hardening on: {', '.join(name for name in HARDENING if switches[name]) or 'none'}",
        f"# Hardening off: {', '.join(name for name in HARDENING if not switches[name]) or 'none'}",
        "",
        *_unit_section(unit),
        "",
        "[Service]",
        "Type=exec",
        f"User={unit.user}",
        f"Group={unit.group}",
        f"SyslogIdentifier=vllm-{unit.name}",
        "LogRateLimitIntervalSec=0",
        f"CacheDirectory=vllm/{unit.name}",
        "CacheDirectoryMode=0750",
        f"RuntimeDirectory=vllm-{unit.name}",
        "RuntimeDirectoryMode=0750",
        f"WorkingDirectory=/var/cache/vllm/{unit.name}",
        *(f"LoadCredential={name}:{_percent(path)}" for name, path in sorted(unit.credentials.items())),
        "",
        *_environment(unit),
        "",
        *_commands(unit),
        "",
        *_lifecycle(unit),
        *_placement(unit),
    ]
    for name, (text, directives) in HARDENING.items():
        if switches[name]:
            home = "yes" if unit.home_hidden else "read-only"
            lines += ["", f"# {name}: {text}", *(directive.format(home=home) for directive in directives)]
            if name == "devices":
                lines += [f"DeviceAllow={node} rw" for node in unit.device_nodes]
    lines += ["", "[Install]", "WantedBy=multi-user.target", ""]
    return "\n".join(lines)


def hardening(wanted: Mapping[str, bool]) -> Dict[str, bool]:
    """Every group with its switch; groups are on unless switched off."""
    unknown = sorted(set(wanted) - set(HARDENING))
    if unknown:
        raise FleetError(
            "bad_hardening",
            f"vllm_instances_hardening names {', '.join(unknown)}, which is none of the groups {', '.join(HARDENING)}.",
        )
    return {name: wanted.get(name, True) for name in HARDENING}


def device_nodes(devices: Sequence[Mapping[str, object]], visible: str) -> List[str]:
    """What DeviceAllow lists, for GPUs or MIG slices given as facts; visible is CUDA_VISIBLE_DEVICES.

    Class names (`char-…`) are used where the major number is dynamic. A GPU's own node is named only when the engine
    finds its GPU by UUID: an index would count among the nodes that the unit may open.
    """
    nodes = ["/dev/nvidiactl", "char-nvidia-uvm"]
    minors = [device.get("minor") for device in devices]
    if visible.isdigit() or ("," in visible and visible.replace(",", "").isdigit()) or None in minors:
        own = ["char-nvidia", "char-nvidia-frontend"]
    else:
        own = [f"/dev/nvidia{minor}" for minor in minors]
    if any("MIG-" in str(device.get("uuid")) for device in devices):
        own.append("char-nvidia-caps")
    return [*nodes, *own]


def quote(word: str) -> str:
    """One word of a command line or one assignment of Environment=, safe from systemd's own syntax."""
    text = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if re.match(r"^[A-Za-z0-9_@%+=:,./$-]+$", text):
        return text
    return '"' + text.replace('"', '\\"').replace("\t", "\\t") + '"'


def _unit_section(unit: Unit) -> List[str]:
    after = ["network-online.target", "modprobe@nvidia_uvm.service", "nvidia-persistenced.service"]
    after += ["nvidia-fabricmanager.service", "gpufleet-restore.service", *map(unit_name, unit.start_after)]
    lines = [
        "[Unit]",
        f"Description={_percent(unit.description)}",
        "Wants=network-online.target modprobe@nvidia_uvm.service",
        f"After={' '.join(after)}",
        # Five starts that fail within the time that five full starts may take, and a person must look.
        f"StartLimitIntervalSec={5 * (unit.ready_deadline + unit.restart_delay)}",
        "StartLimitBurst=5",
    ]
    if unit.requires_path:
        lines.append(f"AssertPathExists={_percent(unit.requires_path)}")
    return lines


def _environment(unit: Unit) -> List[str]:
    values = {**caches(unit.name), **unit.environment}
    return [f"Environment={_assignment(name, value)}" for name, value in sorted(values.items())]


def _assignment(name: str, value: str) -> str:
    # Environment= expands % but not $.
    return quote(f"{name}={value}").replace("$$", "$")


def _commands(unit: Unit) -> List[str]:
    start = [PYTHON, "-I", HELPER, "start", "--instance", unit.name]
    for gpu in unit.gpus:
        start += ["--gpu", gpu]
    start += ["--deadline", str(unit.lock_deadline), "--hold", str(unit.ready_deadline + 60), "--"]
    start += [unit.program, *unit.arguments]
    host = f"[{unit.address}]" if ":" in unit.address else unit.address
    ready = [PYTHON, "-I", HELPER, "ready", "--url", f"http://{host}:{unit.port}", "--name", unit.served_name]
    ready += ["--deadline", str(unit.ready_deadline), "--lock-deadline", str(unit.lock_deadline)]
    ready += ["--pooling"] if unit.pooling else []
    return [f"ExecStart={' '.join(map(quote, start))}", f"ExecStartPost={' '.join(map(quote, ready))}"]


def _lifecycle(unit: Unit) -> List[str]:
    return [
        # The API server exits 0 when its engine dies, and its children outlive it.
        "Restart=always",
        f"RestartSec={unit.restart_delay}",
        "KillMode=mixed",
        f"TimeoutStartSec={unit.lock_deadline + unit.ready_deadline + 60}",
        f"TimeoutStopSec={unit.stop_deadline}",
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
        "TasksMax=infinity",
    ]


def _placement(unit: Unit) -> List[str]:
    lines = []
    if unit.cpus:
        lines.append(f"CPUAffinity={unit.cpus}")
    if unit.numa_nodes:
        lines += ["NUMAPolicy=preferred", f"NUMAMask={unit.numa_nodes}"]
    return lines


def _percent(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")
