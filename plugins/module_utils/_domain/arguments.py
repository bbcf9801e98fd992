# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line and environment of an instance, as its release takes them. Private to gpufleet.inference."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import Instance
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import Device
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Flag, Release, ReleaseTable
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import MIB

# Flags that the planner writes itself, with the instance key that sets them.
PLANNED = {
    "--model": "model",
    "--host": "listen_address",
    "--port": "port",
    "--served-model-name": "served_model_name",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--kv-cache-memory-bytes": "memory",
    "--gpu-memory-utilization": "memory",
    "--block-size": "block_size",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--tensor-parallel-size": "tensor_parallel_size",
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "--data-parallel-size": "data_parallel_size",
    "--enable-expert-parallel": "enable_expert_parallel",
    "--enforce-eager": "enforce_eager",
    "--revision": "revision",
    "--tokenizer": "tokenizer",
    "--trust-remote-code": "trust_remote_code",
    "--enable-lora": "lora",
    "--lora-modules": "lora",
    "--max-loras": "lora",
    "--max-lora-rank": "lora",
    "--max-cpu-loras": "lora",
    "--speculative-config": "speculative",
    "--device-ids": "gpus",
    "--device": "gpus",
}
# Flags that an instance cannot have, and what to do instead.
NOT_FOR_INSTANCES = {
    "--config": "the plan must see every setting: write them as keys of the instance or in extra_args",
    "--headless": "an instance over several hosts is not supported yet",
    "--uds": "an instance listens on its `port:`, and is ready when it answers there",
    "--ssl-keyfile": "an instance is ready when it answers in plain HTTP: let the gateway speak TLS",
    "--ssl-certfile": "an instance is ready when it answers in plain HTTP: let the gateway speak TLS",
}
# Flags of extra_args that move memory in ways the plan follows only roughly or not at all.
MOVES_MEMORY = frozenset(
    {
        "--additional-config",
        "--attention-backend",
        "--compilation-config",
        "--cpu-offload-gb",
        "--cuda-graph-sizes",
        "--cudagraph-capture-sizes",
        "--decode-context-parallel-size",
        "--disable-hybrid-kv-cache-manager",
        "--enable-sleep-mode",
        "--hf-overrides",
        "--kv-transfer-config",
        "--limit-mm-per-prompt",
        "--load-format",
        "--mamba-cache-dtype",
        "--mamba-ssm-cache-dtype",
        "--max-cudagraph-capture-size",
        "--max-seq-len-to-capture",
        "--mm-encoder-tp-mode",
        "--mm-processor-kwargs",
        "--num-gpu-blocks-override",
        "--optimization-level",
        "--rope-scaling",
        "--skip-mm-profiling",
    }
)
# Variables that the planner writes itself.
PLANNED_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "gpus",
    "CUDA_DEVICE_ORDER": "gpus",
    "CUDA_MPS_PIPE_DIRECTORY": "isolation",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "memory",
}
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_BOOLEAN_TEXT = ("0", "1", "true", "false", "True", "False")
_INTEGER = re.compile(r"^-?\d+$")
_SIZED_INTEGER = re.compile(r"^-?\d+(\.\d+)?[kKmMgGtT]?$")
UUID_RELEASE = (0, 24, 0)


@dataclass(frozen=True)
class Extra:
    """The checked extra_args: problems, notes, and the values of those flags that move memory."""

    problems: Tuple[str, ...] = ()
    warnings: Tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    moves_memory: Tuple[str, ...] = ()


def check(instance: Instance, release: Release, table: ReleaseTable, mig: bool = False) -> Extra:
    """Check ``extra_args`` and ``environment`` against what this release knows.

    mig: the instance runs on a MIG slice. Never raises; every problem is one sentence that says what to do.
    """
    problems: List[str] = []
    warnings: List[str] = []
    values = _check_flags(instance, release, table, problems, warnings)
    _check_environment(instance, release, table, problems, warnings)
    _check_allocator(instance, release, values, mig, problems)
    return Extra(tuple(problems), tuple(warnings), values, tuple(sorted(set(values) & MOVES_MEMORY)))


def _check_flags(
    instance: Instance, release: Release, table: ReleaseTable, problems: List[str], warnings: List[str]
) -> Dict[str, Any]:
    values: Dict[str, Any] = {}
    tokens = list(instance.extra_args)
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("-") or _INTEGER.match(token):
            if table.range_of(token):
                problems.append(_unknown(token, release, table, release.flags))
            else:
                problems.append(f'"{token}" is no flag; a value stands after its flag or as --flag=value')
            continue
        name, has_value, inline = _split(token, release)
        name, dotted = _long(name)
        flag, negated = _lookup(name, release)
        if flag is None:
            problems.append(_unknown(name, release, table, release.flags))
            while position < len(tokens) and not tokens[position].startswith("-"):
                position += 1
            continue
        if flag.name in PLANNED:
            problems.append(f"{name} is a planned setting; set `{PLANNED[flag.name]}:` of the instance")
        if flag.name in NOT_FOR_INSTANCES:
            problems.append(f"{name} cannot be set for an instance: {NOT_FOR_INSTANCES[flag.name]}")
        if flag.deprecated:
            warnings.append(f"{name} is deprecated in vLLM {release.version}")
        given: List[str] = [inline] if has_value else []
        if flag.kind == "bool":
            if has_value:
                problems.append(f"{name} takes no value in vLLM {release.version}")
            values[flag.name] = not negated
            continue
        while not has_value and position < len(tokens) and not _is_flag(tokens[position]):
            given.append(tokens[position])
            position += 1
            if flag.kind != "list":
                break
        if not given and flag.kind != "optional-value":
            problems.append(f"{name} needs a value")
            continue
        values[flag.name] = given if flag.kind == "list" else (given[0] if given else True)
        if not dotted:
            problems.extend(_bad_values(name, flag, given, release))
    return values


def _split(token: str, release: Release) -> Tuple[str, bool, str]:
    """(flag, whether a value is attached, that value): --flag=value, or a short flag with its value, as in -O3."""
    name, equals, inline = token.partition("=")
    if not token.startswith("--") and not equals and token not in release.flags:
        short = next((token[:end] for end in range(len(token) - 1, 1, -1) if token[:end] in release.flags), "")
        if short:
            return short, True, token[len(short) :]
    return name, bool(equals), inline


def _long(name: str) -> Tuple[str, bool]:
    """The flag as the release table writes it, and whether it was the dotted form of a JSON flag."""
    if not name.startswith("--"):
        return name, False
    base, dot, _rest = name.partition(".")
    return base.replace("_", "-"), bool(dot)


def _is_flag(token: str) -> bool:
    return token.startswith("-") and not re.match(r"^-\d", token)


def _lookup(name: str, release: Release) -> Tuple[Optional[Flag], bool]:
    flag = release.flags.get(name)
    if flag is not None:
        return flag, False
    if name.startswith("--no-"):
        flag = release.flags.get("--" + name[len("--no-") :])
        if flag is not None and flag.negatable:
            return flag, True
    return None, False


def _unknown(name: str, release: Release, table: ReleaseTable, known: Mapping[str, Any]) -> str:
    """Why a flag or variable is refused: never was, gone, not yet, or mistyped."""
    span = table.range_of(name)
    plain = "--" + name[len("--no-") :] if name.startswith("--no-") else name
    if plain != name and plain in release.flags:
        return f"{name} does not exist in vLLM {release.version}: {plain} has no --no- form there"
    if span == "in no release":
        text = f"{name} exists in no vLLM release"
    elif span:
        text = f"{name} does not exist in vLLM {release.version} (it exists {'in ' * (' to ' in span)}{span})"
    else:
        text = f"{name} is not known to vLLM {release.version}"
        near = table.suggestion(name, known)
        if near:
            text += f", did you mean {near}?"
    successor = table.successor(name)
    return f"{text}; use instead: {successor}" if successor else text


def _bad_values(name: str, flag: Flag, given: Sequence[str], release: Release) -> List[str]:
    problems = []
    for value in given:
        if flag.choices and value not in [str(choice) for choice in flag.choices if choice is not None]:
            allowed = ", ".join(str(choice) for choice in flag.choices if choice is not None)
            problems.append(f'{name} "{value}" is none of {allowed} in vLLM {release.version}')
        elif flag.kind == "int" and not _SIZED_INTEGER.match(value):
            problems.append(f'{name} "{value}" is not a whole number')
        elif flag.kind == "float" and not _is_float(value):
            problems.append(f'{name} "{value}" is not a number')
        elif flag.kind.startswith("json") and not _is_json(value):
            problems.append(f'{name} "{value}" is not JSON')
    return problems


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_json(text: str) -> bool:
    # Releases also take short forms (`image=2`) and paths for some of these flags.
    if text[:1] not in "{[":
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _check_environment(
    instance: Instance, release: Release, table: ReleaseTable, problems: List[str], warnings: List[str]
) -> None:
    for name, value in instance.environment:
        if name in PLANNED_ENVIRONMENT:
            problems.append(f"environment {name} is planned; set `{PLANNED_ENVIRONMENT[name]}:` of the instance")
            continue
        kind = release.environment.get(name)
        if kind is None:
            if name.startswith("VLLM_") or table.range_of(name) == "in no release":
                problems.append(f"environment {_unknown(name, release, table, release.environment)}")
            continue
        if kind == "int" and not _INTEGER.match(value):
            problems.append(f'environment {name} "{value}" is not a whole number')
        elif kind == "float" and not _is_float(value):
            problems.append(f'environment {name} "{value}" is not a number')
        elif kind == "bool" and value not in _BOOLEAN_TEXT:
            problems.append(f'environment {name} "{value}" is neither 0 nor 1')
        if name == "VLLM_LOGGING_LEVEL" and value.upper() not in LOG_LEVELS:
            problems.append(f'environment {name} "{value}" is none of {", ".join(LOG_LEVELS)}')
    if dict(instance.environment).get("VLLM_SERVER_DEV_MODE") in ("1", "true", "True"):
        warnings.append("VLLM_SERVER_DEV_MODE opens endpoints that anyone who reaches the port can use")


def _check_allocator(
    instance: Instance, release: Release, values: Mapping[str, Any], mig: bool, problems: List[str]
) -> None:
    """Settings of PyTorch's allocator that a feature of the engine cannot live with.

    Sources: issues 39874 (MIG), the texts of 0.8.0-0.20.0 (sleep mode) and of 0.32 (KV connectors).
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    text = ",".join(value for name, value in instance.environment if name in names).lower().replace(" ", "")
    if "expandable_segments:true" not in text:
        return
    if values.get("--enable-sleep-mode") and (0, 8, 0) <= release.key <= (0, 20, 0):
        problems.append(
            f"expandable_segments:True and --enable-sleep-mode exclude each other in vLLM {release.version} "
            "(0.20.1 switches by itself); drop one"
        )
    if mig:
        problems.append("expandable_segments:True fails on a MIG slice; drop it from PYTORCH_CUDA_ALLOC_CONF")
    if "--kv-transfer-config" in values:
        problems.append("expandable_segments:True and --kv-transfer-config exclude each other; drop one")


@dataclass(frozen=True)
class Settings:
    """The planned figures that become arguments; lengths in tokens, sizes in bytes."""

    model_path: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: Optional[int] = None


def command(instance: Instance, release: Release, settings: Settings) -> List[str]:
    """The words after the ``vllm`` program: ``serve MODEL --host …``; only flags that the release knows."""
    words = ["serve", settings.model_path, "--host", instance.listen_address, "--port", str(instance.port)]
    served = instance.served_model_name or instance.model
    words += ["--served-model-name", *dict.fromkeys((served, instance.name))]

    def option(flag: str, value: Any, wanted: bool = True) -> None:
        if wanted and value is not None:
            words.extend([flag, str(value)])

    option("--revision", instance.revision)
    option("--tokenizer", instance.tokenizer)
    option("--dtype", settings.dtype, settings.dtype != "auto")
    option("--quantization", instance.quantization)
    option("--kv-cache-dtype", instance.kv_cache_dtype, instance.kv_cache_dtype != "auto")
    option("--block-size", instance.block_size)
    option("--tensor-parallel-size", instance.tensor_parallel_size, instance.tensor_parallel_size > 1)
    option("--pipeline-parallel-size", instance.pipeline_parallel_size, instance.pipeline_parallel_size > 1)
    option("--data-parallel-size", instance.data_parallel_size, instance.data_parallel_size > 1)
    option("--max-model-len", settings.max_model_len)
    option("--max-num-seqs", settings.max_num_seqs)
    option("--max-num-batched-tokens", settings.max_num_batched_tokens)
    option("--gpu-memory-utilization", f"{settings.gpu_memory_utilization:.4f}")
    option("--kv-cache-memory-bytes", settings.kv_cache_memory_bytes)
    if instance.enable_expert_parallel:
        words.append("--enable-expert-parallel")
    if instance.enforce_eager:
        words.append("--enforce-eager")
    if instance.trust_remote_code:
        words.append("--trust-remote-code")
    if instance.lora is not None:
        words.append("--enable-lora")
        for key in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            option("--" + key.replace("_", "-"), instance.lora.get(key))
        modules = instance.lora.get("modules") or {}
        if modules:
            words += ["--lora-modules", *(f"{name}={path}" for name, path in sorted(modules.items()))]
    if instance.speculative is not None:
        option("--speculative-config", json.dumps(dict(instance.speculative), sort_keys=True, separators=(",", ":")))
    return words + list(instance.extra_args)


def bad_choices(instance: Instance, release: Release) -> List[str]:
    """Values of planned settings that this release's parser rejects."""
    wanted = {
        "--dtype": instance.dtype,
        "--quantization": instance.quantization,
        "--kv-cache-dtype": instance.kv_cache_dtype,
        "--block-size": instance.block_size,
        "--max-lora-rank": (instance.lora or {}).get("max_lora_rank"),
    }
    problems: List[str] = []
    for name, value in wanted.items():
        flag = release.flags.get(name)
        if value is None or flag is None:
            continue
        key = PLANNED[name]
        problems += [text.replace(name, f"`{key}:`", 1) for text in _bad_values(name, flag, [str(value)], release)]
    return problems


def needed_flags(instance: Instance) -> List[str]:
    """Flags that the instance's own keys ask for and that younger or older releases lack."""
    wanted = {
        "--data-parallel-size": instance.data_parallel_size > 1,
        "--enable-expert-parallel": instance.enable_expert_parallel,
        "--speculative-config": instance.speculative is not None,
    }
    return [flag for flag, used in wanted.items() if used]


def environment(
    instance: Instance,
    release: Release,
    devices: Sequence[Device],
    footprint: int = 0,
    pipe_directory: Optional[str] = None,
) -> Dict[str, str]:
    """The variables of the unit, without secrets.

    devices: in the order of ranks. footprint: planned bytes per device, for the limit under MPS.
    """
    result = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible_devices(release, devices),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if instance.world_size > 1:
        result.update({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})
    if instance.isolation == "mps":
        # The limit's keys are positions among the visible devices; free becomes the limit, total stays the GPU's.
        limit = -(-footprint // MIB)
        result["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{rank}={limit}M" for rank in range(len(devices)))
        if pipe_directory:
            result["CUDA_MPS_PIPE_DIRECTORY"] = pipe_directory
    result.update(dict(instance.environment))
    return dict(sorted(result.items()))


def visible_devices(release: Release, devices: Sequence[Device]) -> str:
    """CUDA_VISIBLE_DEVICES in a form that the release accepts.

    GPU UUIDs from 0.24.0 on (before, the engine reads integers only). A MIG slice is "0": its unit lets it see nothing
    else, because no release so far handles MIG UUIDs rightly (they crash up to 0.23.0, later the slice's index is
    taken for a GPU's).
    """
    if any(device.parent is not None for device in devices):
        return "0"
    if release.key >= UUID_RELEASE and all(device.uuid.startswith("GPU-") for device in devices):
        return ",".join(device.uuid for device in devices)
    return ",".join(str(device.index) for device in devices)
