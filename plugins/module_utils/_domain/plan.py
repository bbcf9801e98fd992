# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of one host: which GPUs, how many bytes, which command lines. Private to gpufleet.inference.

``plan(request)`` is pure: facts, models, wishes and data tables in, plain data out. Memory is proven per device: the
upper ends of all terms of all instances on a device never exceed what is free there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import arguments, placement
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import Instance, normalise
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import Device, Host, Ledger, Refusal
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Release, ReleaseTable, table
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB, gib

KV_BYTES_RELEASE = (0, 10, 2)
SAFETY_BYTES = int(0.3 * GIB)
SAFETY_SHARE = 0.02
# An `auto` length is placed with at least this many tokens before it grows into the room that is left.
AUTO_LENGTH_FLOOR = 4096
PARTS = ("weights", "activation", "non_torch", "cuda_graphs", "kv_cache")
KEPT_STATES = ("active", "activating", "reloading")


@dataclass(frozen=True)
class Term:
    """A part of the budget: bytes, where the figure comes from, and its band."""

    bytes: int
    source: str
    low: int
    high: int

    def plain(self) -> Dict[str, Any]:
        """As the plan shows it."""
        return {"bytes": self.bytes, "source": self.source, "low": self.low, "high": self.high}


def exact(size: int) -> Term:
    """A term without error."""
    return Term(size, "exact", size, size)


def modelled(size: float, error: float) -> Term:
    """A term with a relative error on both sides."""
    return Term(int(size), "modelled", int(size * (1 - error)), int(size * (1 + error)))


@dataclass(frozen=True)
class Need:
    """What one instance needs on one device, without its KV cache."""

    weights: Term
    activation: Term
    non_torch: Term
    graphs: Term
    graphs_inside: bool
    block_bytes: int
    block_tokens: int

    @property
    def fixed(self) -> int:
        """Upper end of everything but the KV cache."""
        return self.weights.high + self.activation.high + self.non_torch.high + self.graphs.high

    @property
    def inside(self) -> int:
        """What the engine's own utilisation counts, without KV."""
        return self.weights.high + self.activation.high + (self.graphs.high if self.graphs_inside else 0)

    def blocks(self, length: int) -> int:
        """Blocks of one request of that length, and one that the engine keeps."""
        return -(-length // self.block_tokens)


@dataclass
class Job:
    """One instance on its way through the planner."""

    instance: Instance
    release: Release
    facts: Mapping[str, Any]
    path: str
    warnings: List[str]
    reason: Optional[Refusal] = None
    kept: Optional[Dict[str, Any]] = None
    devices: Tuple[Device, ...] = ()
    need: Optional[Need] = None
    length: int = 0
    batched: int = 0
    seqs: int = 0
    kv_bytes: int = 0
    alternatives: Tuple[Dict[str, Any], ...] = ()


def plan(request: Mapping[str, Any]) -> Dict[str, Any]:
    """The plan for one host, as plain data (see docs/planning.md for the schema).

    request: ``gpu`` (facts), ``models`` (name -> facts), ``instances`` (list), ``engine_version``, ``data``
    (``{releases, gpus}``), and optionally ``host`` (facts), ``profiles``, ``reserve`` (bytes per GPU), ``replan``,
    ``placement`` (pack or spread), ``models_dir``.
    Raises FleetError for malformed input only; what does not fit is an answer.
    """
    releases = table(request["data"]["releases"])
    wanted = normalise(request.get("instances") or [], request.get("engine_version"))
    live = [instance for instance in wanted if instance.state != "absent"]
    models = request.get("models") or {}
    unknown = sorted({instance.model for instance in live} - set(models))
    if unknown:
        raise FleetError(
            "unknown_model",
            f"No facts of model {', '.join(unknown)}; known are {', '.join(sorted(models)) or 'none'}.",
            "Add the model to vllm_models_list, or correct `model:`.",
        )
    jobs = [_job(instance, request, releases) for instance in live]
    host = (
        placement.host_of(request.get("gpu") or {}, int(request.get("reserve") or 0), _ram(request))
        if jobs
        else Host(())
    )
    ledger = Ledger()
    if not request.get("replan"):
        for job in jobs:
            _keep(job, request.get("gpu") or {}, host, ledger)
    for job in sorted(jobs, key=_order):
        _place(job, host, ledger, spread=request.get("placement") == "spread")
    _grow(jobs, ledger)
    entries = {job.instance.name: _entry(job, jobs, host) for job in jobs}
    for instance in wanted:
        if instance.state == "absent":
            entries[instance.name] = _absent(instance)
    return {
        "fits": all(entry["fits"] for entry in entries.values()),
        "findings": [],
        "instances": [entries[instance.name] for instance in wanted],
        "gpus": _gpus(host, jobs),
    }


def _ram(request: Mapping[str, Any]) -> Optional[Mapping[str, Any]]:
    ram = (request.get("host") or {}).get("ram")
    return ram if isinstance(ram, Mapping) else None


def _job(instance: Instance, request: Mapping[str, Any], releases: ReleaseTable) -> Job:
    release = releases.release(instance.engine_version)
    facts = request["models"][instance.model]
    directory = str(request.get("models_dir") or "/var/lib/vllm/models").rstrip("/")
    path = str(facts.get("path") or (instance.model if instance.model[:1] == "/" else f"{directory}/{instance.model}"))
    extra = arguments.check(instance, release, releases, mig=instance.isolation == "mig")
    job = Job(instance, release, facts, path, list(extra.warnings))
    problems = list(extra.problems)
    problems += [
        f"{flag} does not exist in vLLM {release.version} (it exists {releases.range_of(flag)})"
        for flag in arguments.needed_flags(instance)
        if not release.has_flag(flag)
    ]
    if problems:
        job.reason = Refusal("unknown_argument", "; ".join(problems))
    return job


def _keep(job: Job, gpu: Mapping[str, Any], host: Host, ledger: Ledger) -> None:
    """Take over the recorded plan of an instance whose wishes, release and devices are still the same."""
    fact: Mapping[str, Any] = next(
        (item for item in gpu.get("instances") or [] if item.get("name") == job.instance.name), {}
    )
    record = fact.get("record") or {}
    record = record.get("plan") or record
    devices = [host.find(str(uuid)) for uuid in record.get("devices") or []]
    if job.reason or record.get("settings") != job.instance.settings() or not devices or None in devices:
        return
    sizes = [sum(int(term["high"]) for key, term in part.items() if key in PARTS) for part in record["budget"]]
    found = [device for device in devices if device is not None]
    if str(fact.get("active_state")) not in KEPT_STATES and any(
        size > ledger.remaining(device) for device, size in zip(found, sizes)
    ):
        return
    job.kept, job.devices = dict(record), tuple(found)
    ledger.add(job.instance.name, found, sizes, placement.is_exclusive(job.instance))


def _order(job: Job) -> Tuple[Any, ...]:
    instance = job.instance
    return (not instance.gpu_names, -instance.world_size, instance.isolation != "exclusive", instance.name)


def _place(job: Job, host: Host, ledger: Ledger, spread: bool) -> None:
    if job.reason or job.kept:
        return
    native = _native_length(job)
    floor = min(native, job.instance.max_model_len or AUTO_LENGTH_FLOOR)
    for length in dict.fromkeys((job.instance.max_model_len or native, floor)):

        def need(device: Device, length: int = length) -> Optional[int]:
            found = _need(job, device)
            return found.fixed + _least_kv(job.instance, found, length) + _margin(device)

        devices, refusal = placement.choose(host, job.instance, ledger, need, spread)
        if not refusal and all(need(device) or ledger.remaining(device) >= 0 for device in devices):
            break
    if refusal:
        job.reason = refusal
        return
    job.devices = tuple(devices)
    job.need = _need(job, devices[0])
    sizes = [need(device) or 0 for device in devices]
    short = [(device, size) for device, size in zip(devices, sizes) if size > ledger.remaining(device)]
    if short:
        device, size = short[0]
        job.reason = Refusal(
            "refused_kv",
            f"{gib(size)} are needed on GPU {device.index}, {gib(ledger.remaining(device))} are left there",
        )
        return
    job.length = length
    job.kv_bytes = _least_kv(job.instance, job.need, length)
    job.batched, job.seqs = _batch(job, devices[0])
    ledger.add(job.instance.name, devices, sizes, placement.is_exclusive(job.instance))


def _grow(jobs: Sequence[Job], ledger: Ledger) -> None:
    """Share what is left on each device equally among the instances that take what they get."""
    growing = [
        job for job in jobs if job.devices and not job.reason and not job.kept and job.instance.memory.mode == "auto"
    ]
    counts: Dict[str, int] = {}
    for job in growing:
        for device in job.devices:
            counts[device.uuid] = counts.get(device.uuid, 0) + 1
    for job in growing:
        assert job.need is not None
        share = min(ledger.remaining(device) // counts[device.uuid] for device in job.devices)
        job.kv_bytes += share // job.need.block_bytes * job.need.block_bytes
        if job.instance.max_model_len is None:
            blocks = job.kv_bytes // job.need.block_bytes - 1
            job.length = max(1, min(_native_length(job), blocks * job.need.block_tokens))


def _least_kv(instance: Instance, need: Need, length: int) -> int:
    if instance.memory.mode == "kv_cache_bytes":
        return int(instance.memory.value) // need.block_bytes * need.block_bytes
    concurrency = instance.memory.value if instance.memory.mode == "concurrency" else 1.0
    return (math.ceil(need.blocks(length) * concurrency) + 1) * need.block_bytes


def _margin(device: Device) -> int:
    return max(SAFETY_BYTES, int(SAFETY_SHARE * device.total))


def _batch(job: Job, device: Device) -> Tuple[int, int]:
    tokens, seqs = job.release.batch_defaults(device.total, device.name)
    seqs = job.instance.max_num_seqs or seqs
    return max(job.instance.max_num_batched_tokens or tokens, min(seqs, tokens)), seqs


def _native_length(job: Job) -> int:
    config = job.facts.get("config") or {}
    return int(config.get("max_position_embeddings") or 2048)


def _need(job: Job, device: Device) -> Need:
    """A first simple budget: weights from files or shape, the rest from the device's size."""
    config = job.facts.get("config") or {}
    hidden, layers = int(config.get("hidden_size") or 1), int(config.get("num_hidden_layers") or 1)
    heads = int(config.get("num_attention_heads") or 1)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    inner, vocab = int(config.get("intermediate_size") or 4 * hidden), int(config.get("vocab_size") or 32000)
    ranks = job.instance.tensor_parallel_size * job.instance.pipeline_parallel_size
    tp = job.instance.tensor_parallel_size
    total = (job.facts.get("weights") or {}).get("total_bytes")
    if not total:
        per_layer = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim + 3 * hidden * inner
        total = 2 * (layers * per_layer + 2 * hidden * vocab)
    batched, seqs = _batch(job, device)
    activation = max(
        batched * 2 * (3 * inner // tp + 4 * hidden), batched * hidden * 2 + 15 * min(seqs, batched) * vocab
    )
    element = 1 if job.instance.kv_cache_dtype.startswith("fp8") else 2
    block = job.instance.block_size or 16
    width = 2 * element * head_dim * max(1, kv_heads // tp)
    return Need(
        weights=modelled(total / ranks, 0.02),
        activation=modelled(activation, 0.2),
        non_torch=modelled(0.8 * GIB if tp == 1 else 3.5 * GIB, 0.2),
        graphs=exact(0) if job.instance.enforce_eager else modelled(0.9 * GIB, 0.3),
        graphs_inside=job.release.key >= (0, 20, 0),
        block_bytes=width * block * -(-layers // job.instance.pipeline_parallel_size),
        block_tokens=block,
    )


def _utilisation(job: Job, device: Device) -> float:
    assert job.need is not None
    return max(0.01, math.floor((job.need.inside + job.kv_bytes) / device.total * 10000) / 10000)


def _entry(job: Job, jobs: Sequence[Job], host: Host) -> Dict[str, Any]:
    instance = job.instance
    fits = job.reason is None
    if job.kept is not None:
        return {**job.kept, "kept": True, "state": instance.state}
    entry: Dict[str, Any] = {
        "name": instance.name,
        "fits": fits,
        "state": instance.state,
        "model": instance.model,
        "model_path": job.path,
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
        "max_model_len": job.length,
        "max_num_seqs": job.seqs,
        "max_num_batched_tokens": job.batched,
        "gpu_memory_utilization": None,
        "kv_cache_memory_bytes": None,
        "arguments": [],
        "environment": {},
        "start_after": [],
        "warnings": job.warnings,
        "reason": {"code": job.reason.code, "text": job.reason.text} if job.reason else None,
        "alternatives": list(job.alternatives),
        "kept": False,
    }
    if not fits or job.need is None:
        return entry
    need = job.need
    utilisation = _utilisation(job, job.devices[0])
    blocks = job.kv_bytes // need.block_bytes
    kv_bytes = job.kv_bytes if job.release.has_flag("--kv-cache-memory-bytes") else None
    settings = arguments.Settings(
        model_path=job.path,
        dtype=instance.dtype,
        max_model_len=job.length,
        max_num_seqs=job.seqs,
        max_num_batched_tokens=job.batched,
        gpu_memory_utilization=utilisation,
        kv_cache_memory_bytes=kv_bytes,
    )
    entry.update(
        {
            "budget": [_budget(job, device) for device in job.devices],
            "kv_cache_tokens": blocks * need.block_tokens,
            "kv_cache_blocks": blocks,
            "max_concurrency": round(blocks / need.blocks(job.length), 2),
            "gpu_memory_utilization": utilisation,
            "kv_cache_memory_bytes": kv_bytes,
            "arguments": arguments.command(instance, job.release, settings),
            "environment": arguments.environment(instance, job.release, job.devices, need.fixed + job.kv_bytes),
            "start_after": _before(job, jobs),
        }
    )
    return entry


def _before(job: Job, jobs: Sequence[Job]) -> List[str]:
    mine = {device.uuid for device in job.devices}
    return sorted(
        other.instance.name
        for other in jobs
        if other.reason is None
        and other.instance.name < job.instance.name
        and mine & {device.uuid for device in other.devices}
    )


def _budget(job: Job, device: Device) -> Dict[str, Any]:
    assert job.need is not None
    need = job.need
    requested = int(_utilisation(job, device) * device.total)
    used = need.weights.bytes + need.activation.bytes + need.non_torch.bytes + need.graphs.bytes + job.kv_bytes
    source = "expected" if device.expected else "measured"
    return {
        "uuid": device.uuid,
        "total": Term(device.total, source, device.total, device.total).plain(),
        "free": Term(device.available, source, device.available, device.available).plain(),
        "requested": exact(requested).plain(),
        "weights": need.weights.plain(),
        "activation": need.activation.plain(),
        "non_torch": need.non_torch.plain(),
        "cuda_graphs": need.graphs.plain(),
        "kv_cache": exact(job.kv_bytes).plain(),
        "headroom": modelled(device.available - used, 0).plain(),
    }


def _planned(job: Job, device: Device) -> int:
    """Upper end of the bytes planned for the instance on the device."""
    if job.kept is not None:
        part = next(part for part in job.kept["budget"] if part["uuid"] == device.uuid)
        return sum(int(part[key]["high"]) for key in PARTS)
    return job.need.fixed + job.kv_bytes if job.need else 0


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
    }


def _gpus(host: Host, jobs: Sequence[Job]) -> List[Dict[str, Any]]:
    result = []
    for device in host.devices:
        parts = [
            {"name": job.instance.name, "bytes": _planned(job, device)}
            for job in jobs
            if job.reason is None and device in job.devices
        ]
        planned = sum(_planned(job, device) for job in jobs if job.reason is None and device in job.devices)
        result.append(
            {
                "uuid": device.uuid,
                "index": device.index,
                "pci_address": device.pci_address,
                "name": device.name,
                "total": device.total,
                "free": device.available,
                "foreign": device.foreign,
                "planned": planned,
                "headroom": device.available - planned,
                "instances": parts,
                "expected": device.expected,
            }
        )
    return result
