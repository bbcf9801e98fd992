# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of one host: which GPUs, how many bytes, which command lines. Private to gpufleet.inference.

``plan(request)`` is pure: facts, models, wishes and data tables in, plain data out. ``solving`` finds devices and
memory; here the answer is written down. An instance that does not fit is planned again with one wish changed at a
time; the changes that help are its alternatives.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import arguments, catalogue, placement
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.estimate import exact, total
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import Instance, Memory, normalise
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.memory import Term
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import PARTS, Host
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.solving import SHORT_LENGTH, Job, solve

# The engine reads the utilisation with any number of digits; four keep a step below 0.01 % of the device.
DIGITS = 10_000
MOST_ALTERNATIVES = 5


@dataclass(frozen=True)
class Context:
    """What an entry shows of its surroundings: the host, pipe directories of MPS daemons, and the load per device."""

    host: Host
    mps: Sequence[str]
    load: Mapping[str, Term]


def plan(request: Mapping[str, Any]) -> Dict[str, Any]:
    """The plan for one host, as plain data (the schema is in the documentation of vllm_plan).

    request: ``gpu`` (facts), ``models`` (name -> facts), ``instances`` (list), ``engine_version``, ``data``
    (``{releases, gpus}``), and optionally ``host`` (facts), ``profiles``, ``reserve`` (bytes per GPU), ``replan``,
    ``placement`` (pack or spread), ``models_dir``.
    Raises FleetError for malformed input only; what does not fit is an answer.
    """
    try:
        return _plan(request)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FleetError(
            "bad_facts",
            f"The facts of the host or its instances are not of the form that their modules return ({error}).",
            "Pass what gpu_facts, host_facts and model_facts returned, unchanged.",
        ) from error


def _plan(request: Mapping[str, Any]) -> Dict[str, Any]:
    wanted = normalise(request.get("instances") or [], request.get("engine_version"))
    live = [instance for instance in wanted if instance.state != "absent"]
    _known_models(live, request.get("models") or {})
    findings: List[Finding] = []
    host = _host(request, wanted, findings) if live else Host(())
    request = {**request, "leaving": [item.name for item in wanted if item.state == "absent"]}
    jobs = solve(live, request, host)
    alternatives = {job.name: _alternatives(job, jobs, request, host) for job in jobs if job.reason}
    mps = [str(daemon.get("pipe_directory")) for daemon in (request.get("gpu") or {}).get("mps") or []]
    context = Context(host, mps, _load(jobs))
    entries = {job.name: _entry(job, context, alternatives.get(job.name, [])) for job in jobs}
    entries.update({instance.name: _absent(instance) for instance in wanted if instance.state == "absent"})
    findings += _findings(request, jobs)
    return {
        "fits": all(entry["fits"] for entry in entries.values()),
        "findings": [finding.to_dict() for finding in findings],
        "instances": [entries[instance.name] for instance in wanted],
        "gpus": _gpus(host, jobs),
    }


def _known_models(live: Sequence[Instance], models: Mapping[str, Any]) -> None:
    unknown = sorted({instance.model for instance in live} - set(models))
    if unknown:
        raise FleetError(
            "unknown_model",
            f"No facts of model {', '.join(unknown)}; known are {', '.join(sorted(models)) or 'none'}.",
            "Add the model to vllm_models_list, or correct `model:`.",
        )
    bad = sorted({instance.model for instance in live if not isinstance(models[instance.model], Mapping)})
    if bad:
        raise FleetError(
            "bad_models", f"The facts of model {', '.join(bad)} are no mapping.", "Pass what model_facts returned."
        )


def _host(request: Mapping[str, Any], wanted: Sequence[Instance], findings: List[Finding]) -> Host:
    """The devices of the facts; on a bare host those that the catalogue expects behind the PCI ids.

    Where a driver runs and NVML is silent, nothing is expected: the devices are there and none can be used.
    """
    gpu = dict(request.get("gpu") or {})
    ram = (request.get("host") or {}).get("ram")
    mute = catalogue.silent(gpu)
    if mute:
        gpu["devices"] = catalogue.silent_devices(gpu, f"{mute.text}. {mute.remedy}".rstrip(". "))
        findings.append(replace(mute, code="nvml_silent"))
    elif not any(device.get("compute_capability") for device in gpu.get("devices") or []):
        gpu["devices"], unknown = catalogue.expected_devices(request["data"]["gpus"], gpu.get("pci") or [])
        if unknown:
            findings.append(
                Finding(
                    "unknown_gpu",
                    "warning",
                    ", ".join(unknown),
                    "GPUs that are not in the catalogue cannot be planned for before a driver runs.",
                    "Install the driver, then plan again.",
                )
            )
    names = [instance.name for instance in wanted]
    return placement.host_of(
        gpu,
        int(request.get("reserve") or 0),
        ram if isinstance(ram, Mapping) else None,
        names=names,
        leaving=names if request.get("replan") else [item.name for item in wanted if item.state == "absent"],
    )


# -- alternatives ------------------------------------------------------------------------------------------------------


def _alternatives(job: Job, jobs: Sequence[Job], request: Mapping[str, Any], host: Host) -> List[Dict[str, Any]]:
    """Changes of one wish (or a few) with which the whole host's plan holds, best first, each planned in full."""
    if not job.reason or job.reason.code not in (
        "refused_kv",
        "refused_free_memory",
        "oom_risk",
        "unsupported_by_device",
        "bad_shape",
    ):
        return []
    fitting = {other.name for other in jobs if not other.reason}
    result: List[Dict[str, Any]] = []
    for change, words in _changes(job, host):
        variant = replace(job.instance, **change)
        others = [other.instance if other is not job else variant for other in jobs]
        again = {found.name: found for found in solve(others, request, host)}
        found = again[job.name]
        if found.reason or any(again[name].reason for name in fitting):
            continue
        entry = _entry(found, Context(host, (), _load(list(again.values()))))
        result.append(
            {
                "change": _as_wishes(change, variant),
                "text": (
                    f"{words}: {entry['max_model_len']} tokens of context, {entry['kv_cache_tokens']} tokens of KV "
                    f"cache, concurrency {entry['max_concurrency']:.2f}"
                ),
                "fits": True,
                **{key: entry[key] for key in _FIGURES},
            }
        )
        if len(result) == MOST_ALTERNATIVES:
            break
    return result


_FIGURES = (
    "devices",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_tokens",
    "max_concurrency",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
)


def _changes(job: Job, host: Host) -> List[Tuple[Dict[str, Any], str]]:
    """Changes worth trying, those that cost least first."""
    instance = job.instance
    changes: List[Tuple[Dict[str, Any], str]] = []
    if instance.gpu_names:
        changes.append(({"gpu_names": ()}, "on other GPUs of the host"))
    if instance.memory.mode != "auto":
        changes.append(({"memory": Memory()}, "memory: auto"))
    fewer = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    if (instance.max_num_seqs or 65) > 64:
        changes.append((dict(fewer), "max_num_seqs: 64 and max_num_batched_tokens: 2048"))
    smaller_cache = {"kv_cache_dtype": "fp8"}
    if instance.kv_cache_dtype == "auto":
        changes.append((dict(smaller_cache), "kv_cache_dtype: fp8"))
    for size in (2, 4, 8, 16):
        tensor = instance.tensor_parallel_size * size
        count = tensor * instance.pipeline_parallel_size * instance.data_parallel_size
        if count <= len(host.devices) and instance.mig_profile is None:
            more = {"tensor_parallel_size": tensor, "gpu_count": count, "gpu_names": ()}
            changes.append((more, f"tensor_parallel_size: {tensor}"))
    if instance.max_model_len:
        changes.append(({"max_model_len": None}, "a shorter max_model_len"))
        changes.append(({"max_model_len": None, **smaller_cache}, "a shorter max_model_len and kv_cache_dtype: fp8"))
    if not instance.enforce_eager:
        changes.append(({"enforce_eager": True}, "enforce_eager: true"))
    small: Dict[str, Any] = {**smaller_cache, "max_model_len": None, "memory": Memory(), "enforce_eager": True}
    small.update({"max_num_seqs": 16, "max_num_batched_tokens": 2048})
    changes.append((small, "16 sequences, eager, fp8 KV cache and a shorter max_model_len"))
    return changes


def _as_wishes(change: Mapping[str, Any], variant: Instance) -> Dict[str, Any]:
    """A change in the keys and forms of the list of instances."""
    wishes: Dict[str, Any] = {}
    for key, value in change.items():
        if key in ("gpu_names", "gpu_count"):
            wishes["gpus"] = variant.world_size
        elif isinstance(value, Memory):
            wishes[key] = "auto" if value.mode == "auto" else {value.mode: value.value}
        else:
            wishes[key] = "auto" if value is None else value
    return wishes


# -- writing it down ---------------------------------------------------------------------------------------------------


def _utilisation(job: Job) -> float:
    """``--gpu-memory-utilization``.

    With a KV cache in bytes it only serves the engine's check at start: what the instance needs, rounded down, so that
    it passes where the plan holds. Without, it sizes the cache: rounded up, so that the planned blocks are there.
    Releases that count all used memory need what stands before the instance as well.
    """
    by_bytes = job.by_bytes
    shares = []
    for rank, device in enumerate(job.devices):
        need = job.need(rank)
        size = need.inside.high + job.placed.blocks * need.block_bytes
        size += _counted_before(job, rank) + (need.context.high if job.cumulative else 0)
        shares.append(size / device.total)
    share = min(shares) if by_bytes else max(shares)
    digits = math.floor(share * DIGITS) if by_bytes else math.ceil(share * DIGITS)
    return min(1.0, max(1, digits) / DIGITS)


def _counted_before(job: Job, rank: int) -> int:
    """Bytes of others that the release counts against this instance's utilisation."""
    return job.devices[rank].foreign + job.ahead[rank] if job.cumulative else 0


def _entry(job: Job, context: Context, alternatives: Sequence[Dict[str, Any]] = ()) -> Dict[str, Any]:
    instance = job.instance
    if job.kept is not None:
        return {**job.kept, "kept": True, "state": instance.state}
    entry: Dict[str, Any] = {
        "name": instance.name,
        "fits": job.reason is None,
        "state": instance.state,
        "model": instance.model,
        "model_path": job.path,
        "model_digest": job.model.digest,
        "task": job.task,
        "engine_version": instance.engine_version,
        "port": instance.port,
        "listen_address": instance.listen_address,
        "served_model_name": instance.served_model_name or instance.model,
        "api_key_file": instance.api_key_file,
        "isolation": instance.isolation,
        "settings": instance.settings(),
        "devices": [device.uuid for device in job.devices],
        "budget": [],
        "kv_cache_tokens": 0,
        "kv_cache_blocks": 0,
        "max_concurrency": 0.0,
        "max_model_len": instance.max_model_len or 0,
        "max_num_seqs": instance.max_num_seqs or 0,
        "max_num_batched_tokens": instance.max_num_batched_tokens or 0,
        "gpu_memory_utilization": None,
        "kv_cache_memory_bytes": None,
        "arguments": [],
        "environment": {},
        "start_after": list(job.before),
        "estimated": job.model.estimated or bool(job.extra.moves_memory) or bool(job.way and job.way.found.estimated),
        "warnings": list(dict.fromkeys(job.warnings)),
        "reason": {"code": job.reason.code, "text": job.reason.text} if job.reason else None,
        "alternatives": list(alternatives),
        "kept": False,
    }
    if job.reason:
        return entry
    way = job.placed
    wishes, capacity = way.settings, way.found.capacity(way.blocks, way.length)
    utilisation = _utilisation(job)
    kv_bytes = way.blocks * way.found.block_bytes if job.by_bytes and way.found.block_bytes else None
    settings = arguments.Settings(
        model_path=job.path,
        dtype=wishes.dtype,
        max_model_len=way.length,
        max_num_seqs=wishes.max_num_seqs or 0,
        max_num_batched_tokens=wishes.max_num_batched_tokens or 0,
        gpu_memory_utilization=utilisation,
        kv_cache_memory_bytes=kv_bytes,
    )
    entry.update(
        {
            "budget": [_budget(job, rank, utilisation, context.load) for rank in range(len(job.devices))],
            "kv_cache_tokens": capacity.tokens,
            "kv_cache_blocks": way.blocks,
            "max_concurrency": round(capacity.concurrency, 2),
            "max_model_len": way.length,
            "max_num_seqs": wishes.max_num_seqs,
            "max_num_batched_tokens": wishes.max_num_batched_tokens,
            "gpu_memory_utilization": utilisation,
            "kv_cache_memory_bytes": kv_bytes,
            "arguments": arguments.command(instance, job.release, settings),
            "environment": arguments.environment(
                instance,
                job.release,
                job.devices,
                footprint=max(job.planned(rank) for rank in range(len(job.devices))),
                pipe_directory=context.mps[0] if len(context.mps) == 1 else None,
            ),
            "warnings": list(dict.fromkeys([*job.warnings, *_warnings(job, context)])),
        }
    )
    return entry


def _warnings(job: Job, context: Context) -> List[str]:
    settings = job.placed.settings
    warnings = list(job.placed.found.notes)
    length = job.placed.length
    if job.instance.max_model_len is None and length < min(SHORT_LENGTH, job.model.native_length):
        warnings.append(f"only {length} tokens of context fit, the model can take {job.model.native_length}")
    if job.instance.isolation == "mig":
        warnings.append("isolation on MIG slices is experimental: it has not run on hardware")
    if settings.dtype != job.instance.dtype:
        warnings.append(f"dtype is {settings.dtype}: the model is bfloat16, which this GPU cannot compute")
    if job.instance.isolation == "mps" and len(context.mps) != 1:
        warnings.append(
            f"{len(context.mps)} MPS control daemons run: without CUDA_MPS_PIPE_DIRECTORY no limit holds, silently"
        )
    uuids = sorted(device.uuid for device in job.devices)
    apart = [f"{one} and {two}" for one, two in itertools.combinations(uuids, 2) if (one, two) in context.host.no_p2p]
    if apart:
        warnings.append(
            f"no peer access between {'; '.join(apart)} (ACS, IOMMU or the topology): traffic goes through host memory"
        )
    unified = next((device for device in job.devices if device.unified), None)
    if unified:
        warnings.append(f"GPU {unified.index} shares the host's memory: what other processes take is missing here")
    return warnings


def _budget(job: Job, rank: int, utilisation: float, load: Mapping[str, Term]) -> Dict[str, Any]:
    need, device = job.need(rank), job.devices[rank]
    measured = "expected" if device.expected else "measured"
    beside = load[device.uuid]
    headroom = Term(
        device.available - beside.bytes, "modelled", device.available - beside.high, device.available - beside.low
    )
    return {
        "uuid": device.uuid,
        "total": Term(device.total, measured, device.total, device.total).plain(),
        "free": Term(device.available, measured, device.available, device.available).plain(),
        "requested": exact(int(utilisation * device.total)).plain(),
        "weights": need.weights.plain(),
        "activation": need.activation.plain(),
        "non_torch": need.non_torch.plain(),
        "cuda_graphs": need.graphs.plain(),
        "kv_cache": _kv_cache(job, rank).plain(),
        "headroom": headroom.plain(),
    }


def _kv_cache(job: Job, rank: int) -> Term:
    """The cache: as given in bytes, or what the engine's own profile leaves inside the utilisation."""
    need, device = job.need(rank), job.devices[rank]
    cache = job.placed.blocks * need.block_bytes
    if job.by_bytes:
        return exact(cache)
    before = _counted_before(job, rank) + (need.context.bytes if job.cumulative else 0)
    room = int(_utilisation(job) * device.total) - before
    low, middle, high = (room - part for part in (need.inside.high, need.inside.bytes, need.inside.low))
    return Term(max(cache, middle), "modelled", max(0, min(cache, low)), max(cache, high))


def _load(jobs: Sequence[Job]) -> Dict[str, Term]:
    """What all instances take on each device, by UUID."""
    load: Dict[str, Term] = {}
    for job in jobs:
        for rank, device in enumerate(job.devices if not job.reason else ()):
            if job.kept is not None:
                terms = [Term(**job.kept["budget"][rank][part]) for part in PARTS]
            else:
                need = job.need(rank)
                terms = [need.inside, need.outside, _kv_cache(job, rank)]
                if not job.by_bytes:
                    # The cache takes what the other terms leave: together they end where the proof does.
                    taken = job.planned(rank)
                    terms = [Term(taken, "modelled", need.least + job.placed.blocks * need.block_bytes, taken)]
            load[device.uuid] = total(load[device.uuid], *terms) if device.uuid in load else total(*terms)
    return load


def _absent(instance: Instance) -> Dict[str, Any]:
    return {
        "name": instance.name,
        "fits": True,
        "state": "absent",
        "devices": [],
        "budget": [],
        "arguments": [],
        "environment": {},
        "start_after": [],
        "warnings": [],
        "reason": None,
        "alternatives": [],
        "kept": False,
    }


def _gpus(host: Host, jobs: Sequence[Job]) -> List[Dict[str, Any]]:
    """Per device: what is there, what is free, who takes how much (upper ends)."""
    shares: Dict[str, List[Dict[str, Any]]] = {}
    for job in jobs:
        if job.reason is None:
            for rank, device in enumerate(job.devices):
                shares.setdefault(device.uuid, []).append({"name": job.name, "bytes": job.planned(rank)})
    result = []
    for device in host.devices:
        parts = shares.get(device.uuid, [])
        planned = sum(int(part["bytes"]) for part in parts)
        result.append(
            {
                "uuid": device.uuid,
                "index": device.index,
                "pci_address": device.pci_address,
                "name": device.name,
                "mig_profile": device.mig_profile,
                "total": device.total,
                "free": device.available,
                "foreign": device.foreign,
                "margin": device.margin,
                "planned": planned,
                "headroom": device.available - planned,
                "instances": parts,
                "expected": device.expected,
            }
        )
    return result


def _findings(request: Mapping[str, Any], jobs: Sequence[Job]) -> List[Finding]:
    """What a person should know about the plan as a whole."""
    findings: List[Finding] = []
    running = str(((request.get("gpu") or {}).get("driver") or {}).get("running") or "")
    for version in sorted({job.release.version for job in jobs}):
        release = next(job.release for job in jobs if job.release.version == version)
        if running and _numbers(running) < _numbers(release.driver_floor):
            findings.append(
                Finding(
                    "driver_too_old",
                    "error",
                    f"vLLM {version}",
                    f"The running driver {running} is too old: CUDA {release.cuda} needs {release.driver_floor}.",
                    "Upgrade the driver, or use a release built with an older CUDA.",
                )
            )
        elif running and _numbers(running) < _numbers(release.toolkit_driver):
            findings.append(
                Finding(
                    "driver_below_toolkit",
                    "info",
                    f"vLLM {version}",
                    f"The running driver {running} is older than the CUDA toolkit's own ({release.toolkit_driver}): "
                    "kernels that are compiled at run time may fail.",
                    f"Prefer a driver from {release.toolkit_driver} on.",
                )
            )
    for job in jobs:
        instance = job.instance
        if instance.listen_address not in ("127.0.0.1", "::1") and not instance.api_key_file:
            findings.append(
                Finding(
                    "open_listener",
                    "warning",
                    instance.name,
                    f"It listens on {instance.listen_address}:{instance.port} without a key.",
                    "Set `api_key_file:`, or listen on 127.0.0.1 behind the gateway.",
                )
            )
    return findings


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
