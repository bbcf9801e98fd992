# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Devices and memory for all instances of a host at once. Private to gpufleet.inference.

An instance passes through here as a ``Job``: take over what runs (``_keep``), place it with the least it needs
(``_place``), share out what is left (``_grow``), put it in a queue for its devices (``_queue``). On every device the
upper ends of all terms of all instances, and a margin, never exceed what is free there.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import arguments, placement, pooling, profiles
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.estimate import (
    Estimate,
    Model,
    Need,
    Profiles,
    estimate,
    lora_bytes,
)
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import Instance, same_settings
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.kvcache import Settings, Speculative
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import (
    Device,
    Host,
    Ledger,
    Refusal,
    recorded,
)
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.release_rules import (
    batch_defaults,
    counts_other_processes,
)
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.release_rules import engine as engine_of
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Release, ReleaseTable, table
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB, gib

# `auto` never means fewer tokens than this; below the second figure the plan says so.
AUTO_LENGTH_FLOOR = 512
SHORT_LENGTH = 4096
# Units in these states hold their memory and their command line.
RUNNING_STATES = ("active", "activating", "reloading", "refreshing")
# Names that checkpoints carry for methods that releases list under another one.
QUANTIZATION_ALIASES = {
    "auto-round": "inc",
    "auto_round": "inc",
    "intel/auto-round": "inc",
    "compressed_tensors": "compressed-tensors",
}
# Refusals that another way of sharing may lift.
FOR_WANT_OF_MEMORY = ("refused_kv", "refused_free_memory", "oom_risk")
TRUE = ("1", "true", "True")
OLD_ENGINE_LENGTHS = (32768, 16384, 8192, 4096, 2048, 1024, AUTO_LENGTH_FLOOR)
# (max_num_batched_tokens, max_num_seqs): the smallest that any release from 0.8.0 on takes by itself.
SMALL_BATCH = (2048, 256)


@dataclass(frozen=True)
class Sized:
    """One way to run an instance on one kind of device; bytes are upper ends, one for each of its devices."""

    settings: Settings
    found: Estimate
    length: int
    blocks: int
    sizes: Tuple[int, ...]


@dataclass(frozen=True)
class Frugal:
    """How all instances of a host hold back so that others find room."""

    least_length: bool = False
    small_batch: bool = False
    old_engine_length: float = math.inf


LAVISH = Frugal()


@dataclass
class Job:
    """One instance on its way through the planner."""

    instance: Instance
    release: Release
    model: Model
    path: str
    extra: arguments.Extra
    draft: Optional[Model] = None
    warnings: List[str] = field(default_factory=list)
    reason: Optional[Refusal] = None
    kept: Optional[Dict[str, Any]] = None
    devices: Tuple[Device, ...] = ()
    way: Optional[Sized] = None
    before: Tuple[str, ...] = ()
    ahead: Tuple[int, ...] = ()  # bytes of those that start before, per device
    home: Tuple[str, ...] = ()  # UUIDs of the devices it has now
    task: str = pooling.GENERATE

    @property
    def engine(self) -> str:
        """v0 or v1, as the release decides on these devices."""
        capability = self.devices[0].capability if self.devices else (9, 0)
        return engine_of(self.release.key, capability, self.way.settings.engine if self.way else "")

    @property
    def cumulative(self) -> bool:
        """Whether the release counts all used memory of the device against the utilisation."""
        return counts_other_processes(self.release.key, self.engine)

    @property
    def by_bytes(self) -> bool:
        """Whether the KV cache is given in bytes; otherwise the engine sizes it by the utilisation."""
        return self.release.has_flag("--kv-cache-memory-bytes")

    @property
    def name(self) -> str:
        """The instance's name."""
        return self.instance.name

    @property
    def placed(self) -> Sized:
        """How it runs on its devices; LookupError before it has any, and for one that keeps its command line."""
        if self.way is None:
            raise LookupError(f"{self.name} was not placed")
        return self.way

    def need(self, rank: int) -> Need:
        """What the instance needs on its device number ``rank``."""
        return self.placed.found.need(rank)

    def planned(self, rank: int) -> int:
        """Upper end of the bytes on its device number ``rank``, KV cache included."""
        if self.kept is not None:
            return recorded(self.kept, "high")[self.devices[rank].uuid]
        need = self.need(rank)
        return need.fixed + self.placed.blocks * need.block_bytes


def solve(live: Sequence[Instance], request: Mapping[str, Any], host: Host) -> List[Job]:
    """Place all instances and give them their memory; in the order of their names.

    First each free length starts at the model's own. Where that leaves no room for others, all start at the least and
    grow together. Where that does not do either, all take the smallest batch (an engine's own is larger on a larger
    GPU, so that without this step a larger GPU could hold fewer instances), and those of the old engine, which do not
    grow, ever shorter lengths.
    """
    best = _attempt(live, request, host)
    frugal = [Frugal(True), Frugal(True, True)]
    if any(job.engine == "v0" for job in best):
        frugal += [Frugal(True, True, length) for length in OLD_ENGINE_LENGTHS]
    for way in frugal:
        if not any(job.reason and job.reason.code in FOR_WANT_OF_MEMORY for job in best):
            break
        jobs = _attempt(live, request, host, way)
        if sum(not job.reason for job in jobs) > sum(not job.reason for job in best):
            best = jobs
    return best


def _attempt(live: Sequence[Instance], request: Mapping[str, Any], host: Host, frugal: Frugal = LAVISH) -> List[Job]:
    releases = table(request["data"]["releases"])
    ledger = Ledger()
    jobs = [_job(instance, request, releases) for instance in live]
    if not request.get("replan"):
        facts = {str(item.get("name")): item for item in (request.get("gpu") or {}).get("instances") or []}
        for job in jobs:
            _keep(job, facts.get(job.name) or {}, host, ledger)
    for job in sorted(jobs, key=_order):
        if not job.reason and not job.kept:
            try:
                _place(job, host, ledger, request, frugal)
            except FleetError as error:  # what the engine would refuse about the model under these settings
                job.reason = Refusal("unsupported_by_engine", f"{error.message} {error.hint}".strip())
    _grow(jobs, ledger)
    _queue(jobs)
    return jobs


def _job(instance: Instance, request: Mapping[str, Any], releases: ReleaseTable) -> Job:
    release = releases.release(instance.engine_version)
    models = request["models"]
    path = _path(instance.model, models, request)
    extra = arguments.check(instance, release, releases, mig=instance.isolation == "mig")
    draft = str((instance.speculative or {}).get("model") or "")
    if instance.speculative and draft in models:
        instance = replace(instance, speculative={**instance.speculative, "model": _path(draft, models, request)})
    job = Job(instance, release, Model.of(instance.model, models[instance.model]), path, extra)
    job.warnings += extra.warnings
    if job.model.shape is not None:
        files = [str(entry.get("name")) for entry in models[instance.model].get("files") or []]
        shape = job.model.shape
        job.task = pooling.task(shape.architecture, files, release.key, extra.values, encoder_only=shape.encoder_only)
    if draft in models:
        job.draft = Model.of(draft, models[draft])
    elif draft and draft != instance.model:
        job.warnings.append(f"the plan is an estimate: there are no facts of the draft model {draft}")
    if extra.moves_memory:
        job.warnings.append(f"the plan is an estimate: {', '.join(extra.moves_memory)} moves memory")
    problems = [
        *extra.problems,
        *(
            f"{flag} does not exist in vLLM {release.version} (it exists {releases.range_of(flag)})"
            for flag in arguments.needed_flags(instance)
            if not release.has_flag(flag)
        ),
        *arguments.bad_choices(instance, release),
    ]
    if problems:
        job.reason = Refusal("unknown_argument", "; ".join(problems))
    else:
        job.reason = _port_conflict(instance, request) or _unsupported(job, releases)
    return job


def _path(name: str, models: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """Where a model lies on the host, or will lie."""
    directory = str(request.get("models_dir") or "/var/lib/vllm/models").rstrip("/")
    known = (models.get(name) or {}).get("path")
    return str(known or (name if name.startswith("/") else f"{directory}/{name}"))


def _port_conflict(instance: Instance, request: Mapping[str, Any]) -> Optional[Refusal]:
    ours = {f"vllm-{name}.service" for name in (instance.name, *(request.get("leaving") or ()))}
    for listener in (request.get("host") or {}).get("ports") or []:
        if int(listener.get("port") or 0) != instance.port or listener.get("unit") in ours:
            continue
        address = str(listener.get("address") or "")
        wild = ("0.0.0.0", "::", "*", "")
        if address in wild or instance.listen_address in wild or address == instance.listen_address:
            who = listener.get("process") or listener.get("unit") or "a process"
            return Refusal(
                "port_conflict",
                f"port {instance.port} is taken by {who} (pid {listener.get('pid')}) on {address or 'all addresses'}",
            )
    return None


def _unsupported(job: Job, releases: ReleaseTable) -> Optional[Refusal]:
    """What the release refuses on any device."""
    instance, release = job.instance, job.release
    method = _quantization(job)
    if method and method not in release.quantization:
        if instance.quantization or any(method in facts["quantization"] for facts in releases.facts()):
            known = ", ".join(sorted(release.quantization))
            return Refusal(
                "unsupported_by_engine",
                f"vLLM {release.version} does not know the quantisation {method}; it knows {known}",
            )
        job.warnings.append(f"no release is known to name the checkpoint's quantisation {method}: it may be refused")
    native = job.model.native_length
    allowed = dict(instance.environment).get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") in TRUE
    if instance.max_model_len and instance.max_model_len > native and not allowed:
        return Refusal(
            "unsupported_by_engine",
            f"max_model_len {instance.max_model_len} is above the {native} that the engine derives from config.json",
        )
    if (instance.max_num_batched_tokens or instance.max_num_seqs or 0) < (instance.max_num_seqs or 0):
        return Refusal(
            "unsupported_by_engine",
            f"max_num_batched_tokens {instance.max_num_batched_tokens} is below max_num_seqs {instance.max_num_seqs}",
        )
    if instance.isolation == "mig" and instance.world_size > 1:
        return Refusal("unsupported_by_engine", "one process sees one MIG slice: an instance on MIG has one device")
    return job.model.refusal(_split(instance))


def _quantization(job: Job) -> str:
    """The method in the name this release has for it; "" for none. Checkpoints carry older names, too."""
    name = (job.instance.quantization or job.model.quantization).lower()
    other = QUANTIZATION_ALIASES.get(name, name)
    return other if name not in job.release.quantization else name


def _device_refusal(job: Job, device: Device) -> Optional[str]:
    """Why this device cannot serve the instance at all, whatever its memory."""
    instance, release = job.instance, job.release
    wanted, has = release.capability, device.capability
    if has < wanted:
        return f"compute capability {_dotted(has)}, vLLM {release.version} has code from {_dotted(wanted)} on"
    if (has[0] == 10 and not release.blackwell[0]) or (has[0] == 12 and not release.blackwell[1]):
        return f"compute capability {_dotted(has)}, for which vLLM {release.version} has no code"
    method = _quantization(job)
    least = release.quantization.get(method) if method else None
    if least and has[0] * 10 + has[1] < least:
        return f"{method} needs compute capability {least / 10:.1f}, this GPU has {_dotted(has)}"
    cache = instance.kv_cache_dtype
    if cache.startswith(("fp8", "int8", "int4")) and has < (8, 0):
        return f"kv_cache_dtype {cache} needs compute capability 8.0, this GPU has {_dotted(has)}"
    if cache.startswith("nvfp4") and has < (10, 0):
        return f"kv_cache_dtype {cache} needs compute capability 10.0, this GPU has {_dotted(has)}"
    if instance.dtype == "bfloat16" and has < (8, 0):
        return f"bfloat16 needs compute capability 8.0, this GPU has {_dotted(has)}"
    if device.compute_mode == "exclusive_process" and (instance.isolation == "shared" or instance.world_size > 1):
        return "compute mode exclusive_process lets one process in; several need isolation mps or mode default"
    return None


def _dotted(capability: Tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _keep(job: Job, fact: Mapping[str, Any], host: Host, ledger: Ledger) -> None:
    """Take over the recorded plan of an instance whose wishes, model and devices are still the same."""
    record = fact.get("record")
    record = record if isinstance(record, Mapping) else {}
    home = record.get("devices")
    job.home = tuple(str(uuid) for uuid in home) if isinstance(home, (list, tuple)) else ()
    if job.reason or not same_settings(record.get("settings"), job.instance) or record.get("model_path") != job.path:
        return
    if record.get("task", pooling.GENERATE) != job.task:
        return
    digests = (record.get("model_digest"), job.model.digest)
    if None not in digests and digests[0] != digests[1]:
        return
    sizes = recorded(record, "high")
    devices = [device for device in (host.find(uuid) for uuid in job.home) if device and device.uuid in sizes]
    if not devices or len(devices) != len(job.home):
        return
    needed = [sizes[device.uuid] for device in devices]
    running = str(fact.get("active_state")) in RUNNING_STATES
    if not running and any(size > ledger.remaining(device, job.name) for device, size in zip(devices, needed)):
        return
    job.kept, job.devices = dict(record), tuple(devices)
    ledger.add(job.name, devices, needed, placement.is_exclusive(job.instance))


def _order(job: Job) -> Tuple[Any, ...]:
    """Who is placed first: named devices, then many devices, then those alone on theirs, then by size."""
    instance = job.instance
    each = -job.model.size // instance.world_size
    return (not instance.gpu_names, -instance.world_size, not placement.is_exclusive(instance), each, instance.name)


def _place(job: Job, host: Host, ledger: Ledger, request: Mapping[str, Any], frugal: Frugal) -> None:
    """Find devices for the least the instance needs.

    A free length starts at the model's own and comes down; where the user left the batch open, the engine's default
    for the device gives way to the smallest one before a shorter length is tried.
    """
    spread = request.get("placement") == "spread"
    records = request.get("profiles") or []
    last: Optional[Refusal] = None
    for length, batch in itertools.product(_lengths(job, frugal), (True,) if frugal.small_batch else (False, True)):
        sized = _Sizer(job, length, batch, records)
        devices, refusal = placement.choose(host, job.instance, ledger, sized.need, spread, prefer=job.home)
        if refusal is None:
            refusal = _device_problem(job, devices)
        if refusal and refusal.code == "unsupported_by_device":
            reasons = dict.fromkeys(filter(None, (_device_refusal(job, device) for device in host.devices)))
            job.reason = Refusal(refusal.code, "; ".join(dict.fromkeys([refusal.text, *reasons])))
            return
        if refusal and refusal.device and sized.need(refusal.device) is not None:
            devices = [refusal.device] * job.instance.world_size
        if devices:
            way = sized.on(devices[0])
            refusal = _short(job, way, devices, ledger)
        if refusal is None:
            job.devices, job.way = tuple(devices), way
            ledger.add(job.name, devices, way.sizes, placement.is_exclusive(job.instance))
            return
        last = refusal
    job.reason = last


class _Sizer:
    """Sizes of one instance at one length, computed once per kind of device."""

    def __init__(self, job: Job, length: int, small: bool, records: Sequence[Mapping[str, Any]]) -> None:
        self._job, self._length, self._small, self._records = job, length, small, records
        self._ways: Dict[Any, Sized] = {}
        self._needs: Dict[Any, Optional[int]] = {}

    def on(self, device: Device) -> Sized:
        key = device.kind
        if key not in self._ways:
            self._ways[key] = _least(self._job, device, self._length, self._small, self._records)
        return self._ways[key]

    def need(self, device: Device) -> Optional[int]:
        key = (device.kind, device.compute_mode)
        if key not in self._needs:
            refused = _device_refusal(self._job, device)
            self._needs[key] = None if refused else max(self.on(device).sizes)
        return self._needs[key]


def _device_problem(job: Job, devices: Sequence[Device]) -> Optional[Refusal]:
    bad = next(filter(None, (_device_refusal(job, device) for device in devices)), None)
    return Refusal("unsupported_by_device", bad) if bad else None


def _lengths(job: Job, frugal: Frugal) -> List[int]:
    """Lengths to try: the user's, or for `auto` the model's own first, halved down to a floor (or only the floor)."""
    if job.instance.max_model_len:
        return [job.instance.max_model_len]
    lengths = [job.model.native_length]
    while lengths[-1] > AUTO_LENGTH_FLOOR and job.instance.memory.mode in ("auto", "concurrency"):
        lengths.append(max(AUTO_LENGTH_FLOOR, lengths[-1] // 2))
    if job.engine == "v0":
        return [length for length in lengths if length <= frugal.old_engine_length] or lengths[-1:]
    return lengths[-1:] if frugal.least_length else lengths


def _least(job: Job, device: Device, length: int, small: bool, records: Sequence[Mapping[str, Any]]) -> Sized:
    """The least the instance needs on such devices."""
    settings = _settings(job, device, length, small)
    found = estimate(job.model, job.release, device, settings, _profile(job, device, settings, records))
    blocks = _wanted_blocks(job.instance, found, length, device)
    if job.instance.max_model_len is None and job.instance.memory.mode in ("fraction", "kv_cache_bytes"):
        length = _longest(found, blocks, 1, 1, length)
    sizes = tuple(
        found.need(rank).fixed + blocks * found.need(rank).block_bytes for rank in range(job.instance.world_size)
    )
    return Sized(settings, found, length, blocks, sizes)


def _settings(job: Job, device: Device, length: int, small: bool) -> Settings:
    instance, release = job.instance, job.release
    extra = _from_extra(job)
    engine = engine_of(release.key, device.capability, extra.get("engine", ""))
    tokens, seqs = SMALL_BATCH if small else release.batch_defaults(device.total, device.name)
    if instance.max_num_batched_tokens:
        seqs = min(seqs, instance.max_num_batched_tokens)
    seqs = instance.max_num_seqs or seqs
    chunked = job.extra.values.get("--enable-chunked-prefill")
    if engine == "v0" and not chunked:
        tokens, _seqs = batch_defaults(release.key, engine, device.total, device=device.name, length=length)
    if chunked is False or job.task == pooling.POOLING:
        # The engine refuses a step that is shorter than a prompt which it cannot cut, as that of an encoder.
        tokens = max(tokens, length)
    tokens = instance.max_num_batched_tokens or max(tokens, seqs)
    half = job.model.dtype == "bfloat16" and instance.dtype == "auto" and device.capability < (8, 0)
    return replace(
        _split(instance),
        dtype="half" if half else instance.dtype,
        quantization=instance.quantization or "",
        kv_cache_dtype=instance.kv_cache_dtype,
        block_size=instance.block_size,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enforce_eager=instance.enforce_eager,
        capability=device.capability,
        **extra,
    )


def _split(instance: Instance) -> Settings:
    return Settings(
        tensor_parallel_size=instance.tensor_parallel_size,
        pipeline_parallel_size=instance.pipeline_parallel_size,
        enable_expert_parallel=instance.enable_expert_parallel,
    )


def _from_extra(job: Job) -> Dict[str, Any]:
    """Settings of the memory model that come from extra_args, environment and the draft."""
    values = job.extra.values
    found: Dict[str, Any] = {}
    for flag, name in (
        ("--decode-context-parallel-size", "decode_context_parallel_size"),
        ("--num-gpu-blocks-override", "num_gpu_blocks_override"),
    ):
        if flag in values:
            found[name] = int(values[flag])
    for flag, name in (
        ("--enable-prefix-caching", "enable_prefix_caching"),
        ("--async-scheduling", "async_scheduling"),
    ):
        if flag in values:
            found[name] = bool(values[flag])
    if "--disable-hybrid-kv-cache-manager" in values:
        found["hybrid_kv_cache_manager"] = not values["--disable-hybrid-kv-cache-manager"]
    for flag, name in (
        ("--attention-backend", "attention_backend"),
        ("--mamba-cache-dtype", "mamba_cache_dtype"),
        ("--mamba-ssm-cache-dtype", "mamba_ssm_cache_dtype"),
    ):
        if flag in values:
            found[name] = str(values[flag])
    if "--cpu-offload-gb" in values:
        found["cpu_offload_bytes"] = int(float(values["--cpu-offload-gb"]) * GIB)
    switch = dict(job.instance.environment).get("VLLM_USE_V1")
    if switch is not None:
        found["engine"] = "v1" if switch in TRUE else "v0"
    if "--limit-mm-per-prompt" in values:
        images = re.search(r"image\W+(\d+)", str(values["--limit-mm-per-prompt"]))
        found["images_per_prompt"] = int(images.group(1)) if images else None
    if job.instance.speculative is not None:
        wish = job.instance.speculative
        found["speculative"] = Speculative(
            method=str(wish.get("method") or ("draft_model" if wish.get("model") else "ngram")),
            tokens=int(wish.get("num_speculative_tokens") or 1),
            draft=job.draft.shape if job.draft else None,
        )
    lora = job.instance.lora
    if lora is not None and job.model.shape is not None:
        adapters, rank = int(lora.get("max_loras") or 1), int(lora.get("max_lora_rank") or 16)
        found["lora_bytes"] = lora_bytes(job.model.shape, job.instance.tensor_parallel_size, adapters, rank)
    return found


def _profile(job: Job, device: Device, settings: Settings, records: Sequence[Mapping[str, Any]]) -> Profiles:
    if not records or not job.model.digest:
        return None, None
    wishes = {name: job.instance.settings().get(name) for name in profiles.KEY_SETTINGS}
    wishes.update({name: getattr(settings, name) for name in profiles.PLANNED_SETTINGS})
    return profiles.find(records, job.model.digest, job.release.version, device.name, wishes)


def _wanted_blocks(instance: Instance, found: Estimate, length: int, device: Device) -> int:
    """Blocks of the KV cache that the instance must have."""
    memory, block = instance.memory, found.block_bytes
    if not block:
        return 0
    if memory.mode == "kv_cache_bytes":
        return int(memory.value) // block
    if memory.mode == "fraction":
        room = min(int(memory.value * device.total) - need.inside.high for need in found.needs)
        return max(0, room // block)
    return _blocks_for(instance, found, length)


def _blocks_for(instance: Instance, found: Estimate, length: int) -> int:
    """Blocks that serve the wanted concurrency at this length, and the one the engine keeps for itself."""
    concurrency = instance.memory.value if instance.memory.mode == "concurrency" else 1.0
    return math.ceil(found.blocks(length) * concurrency) + 1 if found.block_bytes else 0


def _short(job: Job, way: Sized, devices: Sequence[Device], ledger: Ledger) -> Optional[Refusal]:
    """The reason, in figures, when the instance does not fit on these devices."""
    found, memory = way.found, job.instance.memory
    least = found.blocks(way.length) + 1 if found.block_bytes else 0
    if way.blocks < least:
        have, want = way.blocks * found.block_bytes, least * found.block_bytes
        return Refusal(
            "refused_kv",
            f"{gib(want)} of KV cache are needed for one request of {way.length} tokens, "
            f"memory {memory.mode} leaves {gib(max(0, have))}",
        )
    for rank, (device, size) in enumerate(zip(devices, way.sizes)):
        left = ledger.remaining(device, job.name)
        if size <= left:
            continue
        need = found.need(rank)
        cache = way.blocks * need.block_bytes
        figures = (
            f"GPU {device.index} has {gib(max(0, left))} left for it; at {way.length} tokens it needs weights "
            f"{gib(need.weights.bytes)}, activation {gib(need.activation.bytes)}, runtime {gib(need.non_torch.bytes)}, "
            f"CUDA graphs {gib(need.graphs.bytes)} and KV cache {gib(cache)}, up to {gib(size)} in all"
        )
        if memory.mode == "fraction" and memory.value * device.total + need.context.low > left + device.margin:
            return Refusal("refused_free_memory", figures)
        if need.weights.low > left or need.middle + cache <= left:
            return Refusal("oom_risk", figures)
        return Refusal("refused_kv", figures)
    return None


def _grow(jobs: Sequence[Job], ledger: Ledger) -> None:
    """Share what is left on each device equally among the instances that take what they get."""
    growing = [job for job in jobs if _grows(job)]
    sharing: Dict[str, List[str]] = {}
    for job in growing:
        for device in job.devices:
            sharing.setdefault(device.uuid, []).append(job.name)
    for job in growing:
        way, memory = job.placed, job.instance.memory
        more = min(
            _share(job, device, sharing[device.uuid], ledger) // max(1, job.need(rank).block_bytes)
            for rank, device in enumerate(job.devices)
        )
        most = way.blocks + max(0, more)
        length = way.length
        # In the old engine a prompt is one step: a longer length means a larger step, and so more activation.
        if job.instance.max_model_len is None and job.engine != "v0":
            concurrency = memory.value if memory.mode == "concurrency" else 1.0
            length = _longest(way.found, most, concurrency, length, job.model.native_length)
        wanted = _blocks_for(job.instance, way.found, length)
        blocks = most if memory.mode == "auto" else max(way.blocks, min(most, wanted))
        job.way = replace(way, length=length, blocks=blocks)


def _share(job: Job, device: Device, sharing: Sequence[str], ledger: Ledger) -> int:
    """The instance's part of what is left: equal parts, and never what another one still holds."""
    equal = ledger.remaining(device, job.name, sharing) // len(sharing)
    return min(equal, ledger.remaining(device, job.name))


def _grows(job: Job) -> bool:
    if job.reason or job.kept or not job.placed.found.block_bytes:
        return False
    free_length = job.instance.max_model_len is None and job.placed.length < job.model.native_length
    return job.instance.memory.mode == "auto" or (free_length and job.instance.memory.mode == "concurrency")


def _longest(found: Estimate, blocks: int, concurrency: float, low: int, high: int) -> int:
    """The greatest length from low to high whose wanted concurrency these blocks serve."""
    while low < high:
        middle = (low + high + 1) // 2
        if math.ceil(found.blocks(middle) * concurrency) + 1 <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _queue(jobs: Sequence[Job]) -> None:
    """On each device instances start one after another: those that keep their unit first, then by name.

    A kept unit names its own forerunners; none of them is told to wait for it, or both would wait for ever.
    """
    placed = sorted((job for job in jobs if job.devices and not job.reason), key=lambda job: (not job.kept, job.name))
    waits: Dict[str, List[str]] = {job.name: list((job.kept or {}).get("start_after") or ()) for job in placed}
    for position, job in enumerate(placed):
        mine = {device.uuid for device in job.devices}
        before = [earlier for earlier in placed[:position] if mine & {device.uuid for device in earlier.devices}]
        if not job.kept:
            for earlier in before:
                if not _waits_for(waits, earlier.name, job.name):
                    waits[job.name].append(earlier.name)
        job.before = tuple(sorted(waits[job.name]))
        job.ahead = tuple(
            sum(
                earlier.planned(rank)
                for earlier in before
                for rank, other in enumerate(earlier.devices)
                if other.uuid == device.uuid
            )
            for device in job.devices
        )


def _waits_for(waits: Mapping[str, Sequence[str]], name: str, other: str) -> bool:
    """Whether the instance starts after the other one, directly or by way of more."""
    seen, ahead = set(), [name]
    while ahead:
        current = ahead.pop()
        if current == other:
            return True
        if current not in seen:
            seen.add(current)
            ahead.extend(waits.get(current, ()))
    return False
