# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which versions of driver, CUDA, fabric manager, DCGM and vLLM go together. Private to gpufleet.inference.

The rules are data (``plugins/plugin_utils/_data/version_rules.json``, each with its source); what a vLLM release needs
is in the release table. Both are read on the controller and handed in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import engine_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.catalogue import entry as catalogue_entry
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.engine_rules import numbers
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import SEVERITIES, Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.gpu_findings import driver_findings

PACKAGES = (
    "*nvidia*",
    "libcuda1",
    "cuda-compat-*",
    "cuda-drivers*",
    "cuda-toolkit-*",
    "datacenter-gpu-manager*",
)
"""What host_facts must list for these rules."""

CAPABILITIES = {"maxwell": "5.0", "pascal": "6.0", "volta": "7.0", "turing": "7.5", "ampere": "8.0", "ada": "8.9"}
CAPABILITIES.update({"hopper": "9.0", "blackwell": "10.0"})
"""The lowest compute capability of an architecture in servers, for sets that name architectures and no GPU."""


@dataclass(frozen=True)
class Data:
    """The tables: version rules, ``versions`` of the release table, the GPU catalogue."""

    rules: Mapping[str, Any]
    releases: Mapping[str, Any]
    gpus: Mapping[str, Any]


def upstream(package_version: str) -> str:
    """The upstream part of a package version: "3:580.95.05-1.el9" -> "580.95.05" (epoch and revision do not count)."""
    return re.sub(r"^\d+:", "", package_version).split("-", maxsplit=1)[0].split("~", maxsplit=1)[0]


def matches(wanted: str, found: str) -> bool:
    """Whether a version is the wanted one as far as that is written: "580" takes any 580.x, "580.95" not 580.9."""
    left, right = numbers(wanted), numbers(found)
    return bool(left) and right[: len(left)] == left


def branch(version: str) -> int:
    """The branch of a driver version: "580.95.05" -> 580; 0 when there is none."""
    return numbers(version)[0] if numbers(version) else 0


def gpus(data: Data, gpu: Mapping[str, Any]) -> List[Dict[str, Any]]:
    """{address, name, device_id, architecture, capability} of each GPU, from NVML or the catalogue."""
    by_address = {device.get("pci_address"): device for device in gpu.get("devices") or []}
    found = []
    for item in gpu.get("pci") or []:
        device = by_address.get(item.get("address")) or {}
        listed = catalogue_entry(data.gpus, str(item.get("device_id") or "")) or {}
        found.append(
            {
                "address": str(item.get("address")),
                "device_id": str(item.get("device_id") or "").lower().replace("0x", ""),
                "name": str(device.get("name") or item.get("name") or listed.get("name") or "GPU"),
                "architecture": str(device.get("architecture") or listed.get("architecture") or ""),
                "capability": str(device.get("compute_capability") or listed.get("capability") or ""),
            }
        )
    return found


def findings(
    data: Data, gpu: Mapping[str, Any], host: Mapping[str, Any], wanted: Mapping[str, Any], today: str
) -> List[Finding]:
    """What the version rules say about a host, worst first.

    gpu, host: facts (host with ``packages`` of PACKAGES). wanted: a set as in a baseline; only ``vllm`` is looked at,
    and may be missing. today: ISO date, for ends of life.
    """
    driver = gpu.get("driver") or {}
    version = str(driver.get("running") or driver.get("installed") or "")
    devices = gpus(data, gpu)
    found = [*driver_findings(gpu)]
    if version:
        found += _branch(data, version, devices, today)
        found += _flavour(data, driver, version, devices)
        found += _oldest_driver(data, version, devices)
        found += _companions(data, gpu, host, version, devices)
    found += _kernels(driver, host)
    found += _forward_compatibility(data, host, devices)
    if wanted.get("vllm"):
        found += _engine(data, str(wanted["vllm"]), version, devices, host)
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# -- one rule a function -----------------------------------------------------------------------------------------------


def _branch(data: Data, version: str, devices: Sequence[Mapping[str, Any]], today: str) -> List[Finding]:
    number = branch(version)
    found = []
    for name, limit in _dropped(data, number, {device["architecture"]: device["name"] for device in devices}):
        text = f"Branch {number} no longer drives {name}: {limit} is the last branch that does."
        found.append(Finding("branch_drops_gpu", "error", "driver", text, f"Install a driver of branch {limit}."))
    branches: Mapping[str, Any] = data.rules["branches"]
    known = branches.get(str(number))
    advised = max((int(name) for name, item in branches.items() if item.get("advised")), default=0)
    advised = min([advised, *(limit for _name, limit in _limits(data, devices))])
    remedy = f"Move to branch {advised}." if advised != number else ""
    if known is None and number < min(int(name) for name in branches):
        text = f"Driver {version} is of a branch older than all that are still listed."
        found.append(Finding("branch_ended", "warning", "driver", text, remedy))
    elif known is not None and _over(known, today):
        since = f" since {known['ends']}" if known["ends"] else ""
        text = f"Driver branch {number} gets no more fixes{since} (driver {version})."
        found.append(Finding("branch_ended", "warning", "driver", text, remedy))
    elif known is not None and known["kind"] == "new-feature":
        text = f"Driver branch {number} is a new-feature branch: it ends with the next one, without a date."
        found.append(Finding("branch_short_lived", "info", "driver", text, remedy))
    return found


def _over(item: Mapping[str, Any], today: str) -> bool:
    return bool(item.get("ended")) or bool(item["ends"] and item["ends"] < today)


def _limits(data: Data, devices: Sequence[Mapping[str, Any]]) -> List[Tuple[str, int]]:
    table = data.rules["architectures"]
    limits = [(device["name"], (table.get(device["architecture"]) or {}).get("last_branch")) for device in devices]
    return [(name, int(limit)) for name, limit in limits if limit]


def _dropped(data: Data, number: int, names: Mapping[str, str]) -> List[Tuple[str, int]]:
    """(name, last branch) of architectures that a branch no longer drives."""
    rules = data.rules["architectures"]
    found = [(name, (rules.get(architecture) or {}).get("last_branch")) for architecture, name in names.items()]
    return [(f"{name}", int(limit)) for name, limit in found if limit and number > int(limit)]


def flavours(data: Data, architecture: str, device_id: str = "") -> Sequence[str]:
    """The module flavours that drive a GPU; empty when no rule is known."""
    special = (data.rules["devices"].get(device_id) or {}).get("flavours")
    allowed: Sequence[str] = special or (data.rules["architectures"].get(architecture) or {}).get("flavours") or ()
    return allowed


def _flavour(
    data: Data, driver: Mapping[str, Any], version: str, devices: Sequence[Mapping[str, Any]]
) -> List[Finding]:
    flavour = driver.get("flavour")
    wrong: Dict[str, List[str]] = {}
    for device in devices:
        allowed = flavours(data, device["architecture"], device["device_id"])
        if flavour and allowed and flavour not in allowed:
            wrong.setdefault(f"{device['name']} ({device['architecture']})", []).append(device["address"])
    found = []
    for name, addresses in wrong.items():
        need = "proprietary" if flavour == "open" else "open"
        text = f"The {flavour} kernel module {version} cannot drive {name}: it needs the {need} one."
        remedy = f"Install the {need} flavour of the driver in its place."
        found.append(Finding("wrong_flavour", "error", ", ".join(addresses), text, remedy))
    return found


def _oldest_driver(data: Data, version: str, devices: Sequence[Mapping[str, Any]]) -> List[Finding]:
    found = []
    for device_id in sorted({device["device_id"] for device in devices}):
        rule = data.rules["devices"].get(device_id) or {}
        least = rule.get("min_driver")
        if least and numbers(version) < numbers(least):
            text = f"Driver {version} is older than {least}, from which on the vendor lists {rule['name']}."
            found.append(Finding("driver_older_than_gpu", "warning", "driver", text, f"Install {least} or newer."))
    return found


def package(host: Mapping[str, Any], names: Sequence[str]) -> Tuple[str, Dict[str, Any]]:
    """(name, {version, held, candidate}) of the first installed package with such a name or such a start before a
    number ("nvidia-fabricmanager-535"); ("", {}) when there is none."""
    for name, item in sorted((host.get("packages") or {}).items()):
        if any(re.fullmatch(rf"{re.escape(start)}(-\d+)?", name) for start in names):
            return name, dict(item)
    return "", {}


def _companions(
    data: Data, gpu: Mapping[str, Any], host: Mapping[str, Any], version: str, devices: Sequence[Mapping[str, Any]]
) -> List[Finding]:
    found = []
    fabric = gpu.get("fabric") or {}
    switches = int(fabric.get("switches") or 0)
    name, item = package(host, data.rules["companions"]["fabric_manager"]["packages"])
    on_disk = str((gpu.get("driver") or {}).get("installed") or version)
    if switches and host.get("packages") is not None and not name:
        text = f"The host has {switches} NVSwitches and no fabric manager: CUDA answers with error 802."
        remedy = f"Install the fabric manager in version {on_disk}."
        found.append(Finding("fabric_manager_missing", "error", "fabric manager", text, remedy))
    elif switches and name and numbers(upstream(item["version"])) != numbers(on_disk):
        text = f"{name} is {upstream(item['version'])}, the driver {on_disk}: it refuses to start with another driver."
        remedy = f"Bring {name} to {on_disk}, in one step with the driver, and hold both."
        found.append(Finding("fabric_manager_mismatch", "error", "fabric manager", text, remedy))
    if switches and name and fabric.get("manager") not in (None, "active"):
        text = f"The unit nvidia-fabricmanager is {fabric['manager']}: CUDA answers with error 802 until it runs."
        remedy = "Look in its journal; start it once its version is the driver's."
        found.append(Finding("fabric_manager_down", "error", "fabric manager", text, remedy))
    if name and not switches and not any(device["architecture"] in ("blackwell", "rubin", "") for device in devices):
        text = f"{name} is installed and the host has no NVSwitch: its unit fails for ever."
        found.append(Finding("fabric_manager_not_needed", "info", "fabric manager", text, "Disable the unit."))
    dcgm = dcgm_series(host)
    major = cuda_major(data, gpu, version)
    if dcgm.startswith("4-cuda") and major and dcgm != f"4-cuda{major}":
        text = f"DCGM {dcgm} is installed; driver {version} belongs to CUDA {major}."
        remedy = f"Install datacenter-gpu-manager-4-cuda{major}."
        found.append(Finding("dcgm_of_other_cuda", "warning", "DCGM", text, remedy))
    return found


def dcgm_series(host: Mapping[str, Any]) -> str:
    """ "4-cuda13", "4" or "3"; "" when no DCGM is installed as a package."""
    names = set(host.get("packages") or {})
    for name in sorted(names, reverse=True):
        match = re.fullmatch(r"datacenter-gpu-manager-(4-cuda\d+)", name)
        if match:
            return match.group(1)
    if any(name.startswith("datacenter-gpu-manager-4") for name in names):
        return "4"
    return "3" if "datacenter-gpu-manager" in names else ""


def cuda_major(data: Data, gpu: Mapping[str, Any], version: str) -> int:
    """The CUDA major version of a driver: as it says itself, else by its branch; 0 when unknown."""
    said = gpu.get("cuda_driver_version") or (data.rules["branches"].get(str(branch(version))) or {}).get("cuda") or ""
    return branch(str(said))


def _kernels(driver: Mapping[str, Any], host: Mapping[str, Any]) -> List[Finding]:
    without, other = kernels_without_module(driver, host)
    found = []
    if without:
        text = (
            f"No NVIDIA module for the installed kernel {' and '.join(without)}: booted into it, the host has no GPU."
        )
        remedy = "Install the headers of that kernel and build the module (dkms autoinstall), or remove the kernel."
        found.append(Finding("kernel_without_module", "warning", "kernel", text, remedy))
    for kernel, version in other.items():
        text = f"Kernel {kernel} has module {version}, the running kernel {driver.get('installed')}."
        remedy = f"Build {driver.get('installed')} for it too, or the next boot brings another driver."
        found.append(Finding("kernel_with_other_module", "warning", "kernel", text, remedy))
    return found


def kernels_without_module(driver: Mapping[str, Any], host: Mapping[str, Any]) -> Tuple[List[str], Dict[str, str]]:
    """Bootable kernels without an NVIDIA module, and those with one of another version than the running kernel's.

    Empty when no kernel has one: then there is no driver at all, which is another finding.
    """
    modules = driver.get("modules_by_kernel") or {}
    if not modules:
        return [], {}
    without = [kernel for kernel in host.get("kernels") or [] if kernel not in modules]
    installed = driver.get("installed")
    other = {
        kernel: str(modules[kernel]["version"])
        for kernel in host.get("kernels") or []
        if kernel in modules and installed and modules[kernel].get("version") not in (None, installed)
    }
    return without, other


def _forward_compatibility(data: Data, host: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> List[Finding]:
    rule = data.rules["forward_compatibility"]
    compat = sorted(name for name in host.get("packages") or {} if name.startswith("cuda-compat-"))
    refused = sorted({d["name"] for d in devices if any(word in d["name"] for word in rule["refused_names"])})
    if not compat or not refused:
        return []
    text = (
        f"{', '.join(compat)} is installed; {', '.join(refused)} takes no part in forward compatibility: programs that "
        f"find its libraries end with CUDA error {rule['error']}."
    )
    return [Finding("compat_on_refused_gpu", "error", "CUDA", text, "Remove the package; install a newer driver.")]


def _engine(
    data: Data, vllm: str, version: str, devices: Sequence[Mapping[str, Any]], host: Mapping[str, Any]
) -> List[Finding]:
    subject = f"vLLM {vllm}"
    found = []
    capabilities = {device["name"]: device["capability"] for device in devices if device["capability"]}
    release = data.releases.get(vllm.split("+", maxsplit=1)[0])
    try:
        for problem in engine_rules.check_gpu(data.releases, vllm, version, capabilities):
            found.append(Finding(problem["code"], problem["severity"], subject, f"{subject}: {problem['text']}.", ""))
    except FleetError as exc:
        found.append(Finding(exc.code, "error", subject, exc.message, exc.hint))
    if release is None:
        return found
    try:
        engine_rules.check_host(vllm, release, str(host.get("arch") or "x86_64"), str(host.get("glibc") or ""))
    except FleetError as exc:
        found.append(Finding(exc.code, "error", subject, exc.message, exc.hint))
    present = any(e["version"] == vllm and e["complete"] for e in host.get("engines") or [])
    if not present and host.get("python") is not None:
        try:
            engine_rules.choose_python(vllm, release["python"], host["python"])
        except FleetError as exc:
            found.append(Finding(exc.code, "warning", subject, exc.message, exc.hint))
    return found


# -- sets of versions --------------------------------------------------------------------------------------------------


def contradictions(data: Data, wanted: Mapping[str, Any]) -> List[str]:
    """Why the members of a set cannot go together, one sentence a rule; empty when nothing speaks against it.

    wanted: a baseline. A key that it does not have is not looked at. A version is taken as far as it is written, so
    driver "580" passes a floor of 580.65.06.
    """
    said = []
    driver = str(wanted.get("driver") or "")
    flavour, cuda = wanted.get("flavour"), str(wanted.get("cuda") or "")
    architectures = [str(name) for name in wanted.get("architectures") or []]
    for name in architectures:
        rule = data.rules["architectures"].get(name)
        if rule is None:
            said.append(f"architecture {name} is none of {', '.join(data.rules['architectures'])}")
            continue
        if flavour and flavour not in rule["flavours"]:
            said.append(f"flavour {flavour} does not drive {name} GPUs, which need {' or '.join(rule['flavours'])}")
        if driver and rule["last_branch"] and branch(driver) > rule["last_branch"]:
            said.append(f"driver {driver} no longer drives {name} GPUs: {rule['last_branch']} is their last branch")
    last = (data.rules["flavours"].get(str(flavour)) or {}).get("last_branch")
    if driver and last and branch(driver) > last:
        said.append(f"driver {driver} has no {flavour} module: {last} is the last branch with one")
    if cuda and driver:
        rule = data.rules["cuda"].get(str(branch(cuda)))
        if rule is None:
            said.append(f"CUDA {cuda} is in no rule")
        elif _below(driver, rule["floor"]):
            said.append(f"CUDA {cuda} needs driver {rule['floor']} or newer, the set has {driver}")
    manager = str(wanted.get("fabric_manager") or "driver")
    if manager not in ("driver", driver):
        said.append(f"fabric manager {manager} is not the driver's version {driver}")
    dcgm, major = str(wanted.get("dcgm") or ""), cuda_major(data, {}, driver)
    if "cuda" in dcgm and major and dcgm != f"4-cuda{major}":
        said.append(f"dcgm {dcgm} does not go with driver {driver}, which belongs to CUDA {major}: 4-cuda{major}")
    return [*said, *_engine_contradictions(data, wanted)]


def _engine_contradictions(data: Data, wanted: Mapping[str, Any]) -> List[str]:
    vllm, driver, cuda = (str(wanted.get(key) or "") for key in ("vllm", "driver", "cuda"))
    if not vllm:
        return []
    release: Optional[Mapping[str, Any]] = data.releases.get(vllm)
    if release is None:
        return [f"vLLM {vllm} is not in the release table"]
    said = []
    if driver and _below(driver, release["driver_floor"]):
        said.append(
            f"vLLM {vllm} (CUDA {release['cuda']}) needs driver {release['driver_floor']}, the set has {driver}"
        )
    if cuda and branch(cuda) != branch(release["cuda"]):
        said.append(f"vLLM {vllm} is built for CUDA {release['cuda']}, the set has {cuda}")
    capabilities = {
        f"a {name} GPU": CAPABILITIES[name] for name in wanted.get("architectures") or [] if name in CAPABILITIES
    }
    said += [f"vLLM {vllm}: {item['text']}" for item in engine_rules.gpu_problems(release, "", capabilities)]
    python = str(wanted.get("python") or "")
    if python and not engine_rules.accepts(release["python"], python):
        said.append(f"vLLM {vllm} needs Python {release['python']}, the set has {python}")
    torch = str(wanted.get("torch") or "")
    if torch and not matches(torch, release["torch"]):
        said.append(f"vLLM {vllm} is built with torch {release['torch']}, the set has {torch}")
    transformers = str(wanted.get("transformers") or "")
    fits = not transformers or engine_rules.accepts(release.get("transformers") or "", transformers)
    if not fits:
        said.append(f"vLLM {vllm} needs transformers {release['transformers']}, the set has {transformers}")
    for name in wanted.get("systems") or []:
        system = data.rules["systems"].get(name)
        if system is None:
            said.append(f"system {name} is none of {', '.join(data.rules['systems'])}")
        elif release.get("glibc") and numbers(system["glibc"]) < numbers(release["glibc"]):
            said.append(f"vLLM {vllm} needs glibc {release['glibc']}, {name} has {system['glibc']}")
    return said


def _below(version: str, floor: str) -> bool:
    """Whether a version is below a floor, compared as far as the version is written."""
    written = numbers(version)
    return written < numbers(floor)[: len(written)]
