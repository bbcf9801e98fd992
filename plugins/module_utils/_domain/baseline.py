# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host against its baseline: wanted, installed, running and held of each component. Private to gpufleet.inference.

Verdicts: ``ok``, ``drift`` (differs), ``unknown`` (could not be read), ``error`` (the baseline cannot hold here).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import version_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.engine_rules import numbers
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.version_rules import Data, matches, upstream

VERDICTS = ("error", "drift", "unknown", "ok")
"""The worst first: the verdict of a host is the worst of its components'."""

_PINS = (
    "driver",
    "flavour",
    "cuda",
    "fabric_manager",
    "dcgm",
    "vllm",
    "python",
    "torch",
    "transformers",
    "numpy",
    "nccl",
)
KEYS = frozenset({"number", "title", "architectures", "systems", "source", "note", *_PINS})

Component = Dict[str, Any]


def choose(data: Data, shipped: Sequence[Mapping[str, Any]], own: Sequence[Any], number: Any) -> Mapping[str, Any]:
    """The baseline of a number: the user's sets come before those that are shipped.

    FleetError `unknown_baseline`, `bad_baseline` (not written as one), or `baseline_contradiction` with each rule.
    """
    sets: Dict[int, Mapping[str, Any]] = {}
    for item in [*shipped, *own]:
        if not isinstance(item, Mapping) or not isinstance(item.get("number"), int):
            raise FleetError("bad_baseline", "Each of baseline_sets is a mapping with a whole number as its `number`.")
        strange = sorted(set(item) - KEYS)
        if strange:
            raise FleetError(
                "bad_baseline",
                f"Baseline {item['number']} has keys that mean nothing: {', '.join(strange)}.",
                f"The keys are {', '.join(sorted(KEYS))}.",
            )
        sets[item["number"]] = item
    wanted = sets.get(int(number)) if str(number).isdigit() else None
    if wanted is None:
        listed = "; ".join(f"{at}: {sets[at].get('title', 'no title')}" for at in sorted(sets))
        said = "No baseline is named" if number is None else f"There is no baseline {number}"
        raise FleetError(
            "unknown_baseline",
            f"{said}. Known: {listed}.",
            "Set baseline_number for the host, its group or the fleet.",
        )
    against = version_rules.contradictions(data, wanted)
    if against:
        raise FleetError(
            "baseline_contradiction",
            f"Baseline {number} contradicts the version rules: {'; '.join(against)}.",
            "Change the set in baseline_sets, or choose another number.",
        )
    return wanted


def compare(
    data: Data, wanted: Mapping[str, Any], gpu: Mapping[str, Any], host: Mapping[str, Any], today: str
) -> Dict[str, Any]:
    """``{number, title, verdict, components, findings}`` of one host.

    gpu, host: facts (host with ``packages``). A component is {component, wanted, installed, running, held, candidate,
    verdict, why}; only those that the set names, and the modules of all kernels, are compared.
    """
    found = [item.to_dict() for item in version_rules.findings(data, gpu, host, wanted, today)]
    if not gpu.get("pci"):
        row = _row("gpu", "NVIDIA GPU", ("", ""), "error", "no NVIDIA GPU on the PCI bus: no baseline applies")
        return _result(wanted, [row], found)
    rows = [*_applies(data, wanted, gpu), *_system(wanted, host)]
    rows += _driver(wanted, gpu, host) if wanted.get("driver") else []
    compared: Dict[str, Callable[..., Component]] = {"cuda": _cuda, "dcgm": _dcgm, "vllm": _vllm}
    if wanted.get("flavour"):
        rows.append(_flavour(wanted, gpu))
    rows += [function(wanted, gpu, host) for key, function in compared.items() if wanted.get(key)]
    if wanted.get("fabric_manager") and (gpu.get("fabric") or {}).get("switches"):
        rows.append(_fabric_manager(data, gpu, host))
    rows += _wheels(wanted, host)
    refusals = [item["text"] for item in found if item["severity"] == "error" and item["subject"].startswith("vLLM ")]
    if refusals and not _driver_drifts(rows):
        rows.append(_row("rules", "", ("", ""), "error", " ".join(refusals)))
    return _result(wanted, rows, found)


def _driver_drifts(rows: Sequence[Component]) -> bool:
    """A wrong driver explains why the release cannot run: bringing it in line mends that."""
    return any(row["component"] == "driver" and row["verdict"] != "ok" for row in rows)


def _result(wanted: Mapping[str, Any], rows: List[Component], found: List[Dict[str, str]]) -> Dict[str, Any]:
    verdict = min((row["verdict"] for row in rows), key=VERDICTS.index, default="unknown")
    return {
        "number": wanted["number"],
        "title": str(wanted.get("title") or ""),
        "verdict": verdict,
        "components": rows,
        "findings": found,
    }


def _row(
    component: str,
    wanted: str,
    versions: Tuple[Any, Any],
    verdict: str,
    why: str = "",
    *,
    held: Optional[bool] = None,
    candidate: Optional[str] = None,
) -> Component:
    """versions: what is installed and what runs."""
    installed, running = versions
    return {
        "component": component,
        "wanted": wanted,
        "installed": None if installed is None else str(installed),
        "running": None if running is None else str(running),
        "held": held,
        "candidate": candidate,
        "verdict": verdict,
        "why": why,
    }


# -- components --------------------------------------------------------------------------------------------------------


def _applies(data: Data, wanted: Mapping[str, Any], gpu: Mapping[str, Any]) -> List[Component]:
    """An error row when the set is not for this host's GPUs."""
    allowed = wanted.get("architectures")
    kinds = sorted({item["architecture"] for item in version_rules.gpus(data, gpu)} - {""})
    other = [kind for kind in kinds if allowed and kind not in allowed]
    if not other:
        return []
    why = f"the baseline is for {', '.join(allowed or ())}; the host has {', '.join(other)}"
    return [_row("gpu", ", ".join(allowed or ()), (", ".join(kinds), None), "error", why)]


def system_name(host: Mapping[str, Any]) -> str:
    """The system as baselines write it: "debian-12", "ubuntu-24.04", "el-9"; "" when the host does not tell."""
    told = host.get("distribution") or {}
    name, version = str(told.get("id") or ""), str(told.get("version") or "")
    if not name or not version:
        return ""
    if name in ("rhel", "rocky", "almalinux", "centos", "ol"):
        return f"el-{version.split('.', maxsplit=1)[0]}"
    return f"{name}-{version}"


def _system(wanted: Mapping[str, Any], host: Mapping[str, Any]) -> List[Component]:
    """An error row when the set is not for this host's system."""
    allowed, found = wanted.get("systems"), system_name(host)
    if not allowed or not found or found in allowed:
        return []
    why = f"the baseline is for {', '.join(allowed)}; the host has {found}"
    return [_row("system", ", ".join(allowed), (found, None), "error", why)]


def _driver(wanted: Mapping[str, Any], gpu: Mapping[str, Any], host: Mapping[str, Any]) -> List[Component]:
    driver, want = gpu["driver"], str(wanted["driver"])
    installed, running, userland = driver["installed"], driver["running"], driver["userland"]
    why, verdict = "", "ok"
    if installed is None and host.get("kernel") in driver["modules_by_kernel"]:
        verdict, why = "unknown", str(gpu["unavailable"].get("driver.installed") or "the module does not tell")
    elif installed is None:
        verdict, why = "drift", "no module for the running kernel"
    elif not matches(want, installed):
        verdict, why = "drift", f"{installed} is on disk"
    elif running is None:
        verdict, why = "drift", "no module is loaded"
    elif running != installed:
        verdict, why = "drift", f"{running} is loaded: reload or reboot due"
    held, candidate = _held(host, ("nvidia-driver", "nvidia-open", "cuda-drivers", "libnvidia-compute", "nvidia-smi"))
    rows = [_row("driver", want, (installed, running), verdict, why, held=held, candidate=candidate)]
    verdict, why = "ok", ""
    base = running or installed
    if userland is None and (running or installed) and not gpu["unavailable"].get("nvml", "").endswith("(NVML 12)"):
        verdict, why = "unknown", str(gpu["unavailable"].get("driver.userland") or "the library does not tell")
    elif userland is None:
        verdict, why = "drift", "there is no NVML library"
    elif not matches(want, userland):
        verdict, why = "drift", f"{userland} is on disk"
    elif base and not matches(userland, base):
        verdict, why = "drift", f"the module is {base}: not one version"
    rows.append(_row("driver libraries", want, (userland, None), verdict, why))
    without, other = version_rules.kernels_without_module(driver, host)
    kernels = host.get("kernels") or []
    if kernels and driver["modules_by_kernel"]:
        why = ", ".join([f"none for {name}" for name in without] + [f"{name} has {other[name]}" for name in other])
        good = len(kernels) - len(without) - len(other)
        verdict = "drift" if why else "ok"
        rows.append(_row("kernel modules", f"{len(kernels)} of {len(kernels)} kernels", (good, None), verdict, why))
    return rows


def _held(host: Mapping[str, Any], starts: Sequence[str]) -> Any:
    """(held, candidate) of the first installed package with such a start; held only when all of them are."""
    packages = host.get("packages") or {}
    mine = {name: item for name, item in sorted(packages.items()) if name.startswith(tuple(starts))}
    if not mine:
        return None, None
    candidates = [item["candidate"] for item in mine.values() if item.get("candidate")]
    return all(item["held"] for item in mine.values()), candidates[0] if candidates else None


def _flavour(wanted: Mapping[str, Any], gpu: Mapping[str, Any]) -> Component:
    want, found = str(wanted["flavour"]), gpu["driver"]["flavour"]
    if found is None:
        missing = not gpu["driver"]["modules_by_kernel"] and gpu["driver"]["running"] is None
        why = str(gpu["unavailable"].get("driver.flavour") or "the module does not tell")
        return _row("module flavour", want, (None, None), "drift" if missing else "unknown", why)
    return _row("module flavour", want, (found, found), "ok" if found == want else "drift")


def _cuda(wanted: Mapping[str, Any], gpu: Mapping[str, Any], host: Mapping[str, Any]) -> Component:
    want, found = str(wanted["cuda"]), gpu.get("cuda_driver_version")
    if not found:
        if gpu["driver"]["running"] is None:
            return _row("CUDA of the driver", f">= {want}", (None, None), "drift", "no driver runs")
        why = str(
            gpu["unavailable"].get("cuda_driver_version") or gpu["unavailable"].get("nvml") or "NVML does not tell"
        )
        return _row("CUDA of the driver", f">= {want}", (None, None), "unknown", why)
    # Within a major version older drivers run newer CUDA; across majors they do not.
    good = numbers(found)[:1] >= numbers(want)[:1]
    why = "" if good else f"CUDA {want} needs a driver of CUDA {numbers(want)[0]}"
    return _row("CUDA of the driver", f">= {numbers(want)[0]}", (None, found), "ok" if good else "drift", why)


def _dcgm(wanted: Mapping[str, Any], gpu: Mapping[str, Any], host: Mapping[str, Any]) -> Component:
    want = str(wanted["dcgm"])
    if host.get("packages") is None:
        return _row("DCGM", want, (None, None), "unknown", "no package manager told")
    found = version_rules.dcgm_series(host)
    if not found:
        return _row("DCGM", want, (None, None), "ok", "not installed, and not needed to serve")
    held, candidate = _held(host, ("datacenter-gpu-manager",))
    verdict = "ok" if found == want else "drift"
    return _row("DCGM", want, (found, None), verdict, held=held, candidate=candidate)


def _fabric_manager(data: Data, gpu: Mapping[str, Any], host: Mapping[str, Any]) -> Component:
    want = str(gpu["driver"]["installed"] or gpu["driver"]["running"] or "driver")
    state = gpu["fabric"].get("manager")
    if host.get("packages") is None:
        return _row("fabric manager", want, (None, state), "unknown", "no package manager told")
    name, item = version_rules.package(host, data.rules["companions"]["fabric_manager"]["packages"])
    if not name:
        return _row("fabric manager", want, (None, state), "drift", "not installed, and the host has NVSwitches")
    version, why = upstream(item["version"]), ""
    if numbers(version) != numbers(want):
        why = f"{name} is not of the driver's version"
    elif state not in (None, "active"):
        why = f"its unit is {state}"
    verdict = "drift" if why else "ok"
    return _row("fabric manager", want, (version, state), verdict, why, held=item["held"], candidate=item["candidate"])


def _vllm(wanted: Mapping[str, Any], gpu: Mapping[str, Any], host: Mapping[str, Any]) -> Component:
    want = str(wanted["vllm"])
    if host.get("engines") is None:
        return _row("vLLM", want, (None, None), "unknown", "the engines were not read")
    complete = [entry["version"] for entry in host["engines"] if entry["complete"]]
    runs = [item for item in gpu.get("instances") or [] if item.get("active_state") == "active"]
    running = sorted({str((item.get("record") or {}).get("engine_version") or "") for item in runs} - {""})
    other = [version for version in running if version.split("+", maxsplit=1)[0] != want]
    installed = [version for version in complete if version.split("+", maxsplit=1)[0] == want]
    why = f"instances run {', '.join(other)}" if other else ("" if installed else "not installed")
    shown = ", ".join(installed or complete) or None
    return _row("vLLM", want, (shown, ", ".join(running) or None), "drift" if why else "ok", why)


def _wheels(wanted: Mapping[str, Any], host: Mapping[str, Any]) -> List[Component]:
    """What stands under the wanted release; nothing to compare where it is not installed, which is a drift already."""
    release = str(wanted.get("vllm") or "")
    engine = next(
        (e for e in host.get("engines") or [] if e["complete"] and e["version"].split("+", maxsplit=1)[0] == release),
        None,
    )
    if engine is None:
        return []
    rows = []
    wheels = engine.get("wheels") or {}
    nccl = next((version for name, version in wheels.items() if name.startswith("nvidia-nccl-")), None)
    found = {"python": engine.get("python"), "nccl": nccl}
    for key in ("python", "torch", "transformers", "numpy", "nccl"):
        if wanted.get(key):
            want, version = str(wanted[key]), found.get(key) if key in found else wheels.get(key)
            verdict = "unknown" if not version else ("ok" if matches(want, version) else "drift")
            why = "" if version else "the manifest of the release does not tell"
            rows.append(_row(key, want, (version, None), verdict, why))
    return rows
