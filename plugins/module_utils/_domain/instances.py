# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The instances a host shall run: checked, completed, or refused in one message. Private to gpufleet.inference."""

from __future__ import annotations

import difflib
import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import parse_size

NAME = re.compile(r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
STATES = ("started", "stopped", "absent")
ISOLATIONS = ("exclusive", "shared", "mps", "mig")
SECRET = re.compile(r"(_TOKEN|_KEY|_SECRET|PASSWORD[A-Z0-9_]*)$")
SECRET_FLAGS = ("--api-key", "--hf-token")

_ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True)
class Memory:
    """How much KV cache is wanted: ``mode`` auto, fraction (of the device), kv_cache_bytes or concurrency."""

    mode: str = "auto"
    value: float = 0.0


@dataclass(frozen=True)
class Instance:
    """One instance as the user wants it; None means "the planner decides"."""

    name: str
    model: str
    engine_version: str
    port: int
    listen_address: str = "127.0.0.1"
    state: str = "started"
    gpu_count: Optional[int] = None
    gpu_names: Tuple[str, ...] = ()
    mig_profile: Optional[str] = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "auto"
    quantization: Optional[str] = None
    kv_cache_dtype: str = "auto"
    block_size: Optional[int] = None
    max_model_len: Optional[int] = None
    max_num_seqs: Optional[int] = None
    max_num_batched_tokens: Optional[int] = None
    enforce_eager: bool = False
    isolation: str = "exclusive"
    memory: Memory = Memory()
    revision: Optional[str] = None
    tokenizer: Optional[str] = None
    trust_remote_code: bool = False
    lora: Optional[Mapping[str, Any]] = field(default=None, compare=False)
    speculative: Optional[Mapping[str, Any]] = field(default=None, compare=False)
    served_model_name: Optional[str] = None
    api_key_file: Optional[str] = None
    extra_args: Tuple[str, ...] = ()
    environment: Tuple[Tuple[str, str], ...] = ()

    @property
    def world_size(self) -> int:
        """GPUs of the instance: tensor × pipeline × data parallel."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def settings(self) -> Dict[str, Any]:
        """Everything that decides the command line, as plain data; equal settings keep a running command line."""
        result: Dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name == "state":
                continue
            if isinstance(value, Memory):
                value = {"mode": value.mode, "value": value.value}
            elif name == "environment":
                value = dict(value)
            elif isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            result[name] = value
        return result


def same_settings(recorded: Any, wanted: Instance) -> bool:
    """Whether a recorded plan was made from these wishes; keys that the record does not know yet count as defaults."""
    if not isinstance(recorded, Mapping):
        return False
    default = Instance(wanted.name, wanted.model, wanted.engine_version, wanted.port).settings()
    return all(recorded.get(key, default[key]) == value for key, value in wanted.settings().items())


class _Problem(Exception):
    pass


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise _Problem("is not text")
    text = str(value)
    if not text or "\n" in text or "\0" in text:
        raise _Problem("is empty or has a line break")
    return text


def _path(value: Any) -> str:
    text = _text(value)
    if not text.startswith("/"):
        raise _Problem(f'"{text}" is not an absolute path')
    return text


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not re.match(r"^\d{1,18}$", str(value)):
            raise _Problem(f"{value!r} is not a whole number")
        if not low <= int(value) <= high:
            raise _Problem(f"{value} is outside {low} to {high}")
        return int(value)

    return check


def _boolean(value: Any) -> bool:
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise _Problem(f"{value!r} is neither true nor false")


def _one_of(choices: Tuple[str, ...]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        text = str(value)
        if text not in choices:
            raise _Problem(f'"{text}" is none of {", ".join(choices)}{_did_you_mean(text, choices)}')
        return text

    return check


def _address(value: Any) -> str:
    text = _text(value)
    try:
        ipaddress.ip_address(text)
    except ValueError as error:
        raise _Problem(f'"{text}" is not an IP address') from error
    return text


def _length(value: Any) -> Optional[int]:
    return None if value == "auto" else _integer(1, 1 << 40)(value)


def _memory(value: Any) -> Memory:
    if value == "auto":
        return Memory()
    if not isinstance(value, Mapping) or len(value) != 1:
        raise _Problem("is neither `auto` nor one of fraction, kv_cache_bytes, concurrency")
    mode, amount = next(iter(value.items()))
    mode = _one_of(("fraction", "kv_cache_bytes", "concurrency"))(mode)
    try:
        number = float(parse_size(amount)) if mode == "kv_cache_bytes" else float(amount)
    except (TypeError, ValueError) as error:
        raise _Problem(f"{mode} {amount!r} is not a {'size' if mode == 'kv_cache_bytes' else 'number'}") from error
    if mode == "fraction" and not 0 < number <= 1:
        raise _Problem(f"fraction {amount} is outside 0 to 1")
    if not 0 < number < 1e15:
        raise _Problem(f"{mode} {amount} must be above 0")
    return Memory(mode, number)


def _arguments(value: Any) -> Tuple[str, ...]:
    if isinstance(value, (str, Mapping)) or not isinstance(value, (list, tuple)):
        raise _Problem('is not a list (write ["--flag", "value"] or ["--flag=value"])')
    return tuple(_text(item) if not isinstance(item, bool) else str(item).lower() for item in value)


def _environment(value: Any) -> Tuple[Tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise _Problem("is not a mapping of names to values")
    pairs = []
    for name, item in value.items():
        if not _ENV_NAME.match(str(name)):
            raise _Problem(f'"{name}" is not the name of a variable')
        if isinstance(item, (list, tuple, Mapping)) or item is None or "\n" in str(item):
            raise _Problem(f"{name} is not a plain value on one line")
        pairs.append((str(name), str(int(item)) if isinstance(item, bool) else str(item)))
    return tuple(sorted(pairs))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise _Problem("is not a mapping")
    return dict(value)


def _kv_dtype(value: Any) -> str:
    return _text(value)


def _lora(value: Any) -> Mapping[str, Any]:
    """``{modules: {name: path}, max_loras, max_lora_rank, max_cpu_loras}``."""
    given = _mapping(value)
    allowed = ("modules", "max_loras", "max_lora_rank", "max_cpu_loras")
    result: Dict[str, Any] = {}
    for key, item in sorted(given.items()):
        if key not in allowed:
            raise _Problem(f'"{key}" is none of {", ".join(allowed)}{_did_you_mean(str(key), allowed)}')
        if key == "modules":
            result[key] = {_text(name): _path(path) for name, path in sorted(_mapping(item).items())}
        else:
            result[key] = _integer(1, 4096)(item)
    return result


_FIELDS: Dict[str, Callable[[Any], Any]] = {
    "model": _text,
    "port": _integer(1, 65535),
    "listen_address": _address,
    "state": _one_of(STATES),
    "tensor_parallel_size": _integer(1, 64),
    "pipeline_parallel_size": _integer(1, 64),
    "data_parallel_size": _integer(1, 64),
    "enable_expert_parallel": _boolean,
    "dtype": _one_of(("auto", "half", "float16", "bfloat16", "float", "float32")),
    "quantization": _text,
    "kv_cache_dtype": _kv_dtype,
    "block_size": _integer(1, 1 << 16),
    "max_model_len": _length,
    "max_num_seqs": _integer(1, 1 << 20),
    "max_num_batched_tokens": _integer(1, 1 << 24),
    "enforce_eager": _boolean,
    "isolation": _one_of(ISOLATIONS),
    "memory": _memory,
    "engine_version": _text,
    "revision": _text,
    "tokenizer": _text,
    "trust_remote_code": _boolean,
    "lora": _lora,
    "speculative": _mapping,
    "served_model_name": _text,
    "api_key_file": _path,
    "extra_args": _arguments,
    "environment": _environment,
}
KEYS = ("name", "gpus", *_FIELDS)


def normalise(items: Any, engine_version: Optional[str]) -> List[Instance]:
    """The instances, sorted by name.

    items: the user's list of mappings. engine_version: for instances that name none.
    Raises FleetError ``bad_instances`` with every problem of the list in one message.
    """
    problems: List[str] = []
    instances: List[Instance] = []
    if not isinstance(items, (list, tuple)):
        raise FleetError(
            "bad_instances", "The instances are not a list of mappings.", "Write one `- name: …` for each."
        )
    for position, item in enumerate(items, start=1):
        instance = _one(position, item, engine_version, problems)
        if instance is not None:
            instances.append(instance)
    _duplicates(instances, problems)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise FleetError(
            "bad_instances",
            f"{count} in the list of instances: {'; '.join(problems)}" + ("" if problems[-1].endswith("?") else "."),
            "Correct the list; nothing was changed.",
            problems=problems,
        )
    return sorted(instances, key=lambda instance: instance.name)


def _one(position: int, item: Any, engine_version: Optional[str], problems: List[str]) -> Optional[Instance]:
    if not isinstance(item, Mapping):
        problems.append(f"entry {position} is not a mapping")
        return None
    name = str(item.get("name", ""))
    label = f'instance "{name}"' if name else f"entry {position}"
    before = len(problems)
    if not NAME.match(name):
        problems.append(
            f"{label} {'has no name' if not name else 'has a bad name'}"
            " (1 to 40 of a-z, 0-9 and -, not at the ends a -)"
        )
    for key in item:
        if key not in KEYS:
            problems.append(f'{label}: unknown key "{key}"{_did_you_mean(str(key), KEYS)}')
    values: Dict[str, Any] = {}
    for key, check in _FIELDS.items():
        if item.get(key) is None:
            continue
        try:
            values[key] = check(item[key])
        except _Problem as problem:
            problems.append(f"{label}: {key} {problem}")
    absent = values.get("state") == "absent"
    values.setdefault("engine_version", str(engine_version) if engine_version else "")
    for key in ("model", "port", "engine_version"):
        if not values.get(key) and item.get(key) is None and not absent:
            problems.append(f"{label}: {key} is missing")
    try:
        _gpus(item.get("gpus"), values)
    except _Problem as problem:
        problems.append(f"{label}: gpus {problem}")
    _secrets(label, values, problems)
    if len(problems) > before:
        return None
    values.setdefault("model", "")
    values.setdefault("port", 0)
    return Instance(name=name, **values)


def _gpus(wanted: Any, values: Dict[str, Any]) -> None:
    """Fill in the devices and the parallel sizes from each other."""
    others = values.get("pipeline_parallel_size", 1) * values.get("data_parallel_size", 1)
    if isinstance(wanted, Mapping):
        if set(wanted) != {"mig"}:
            raise _Problem("is neither a count, nor a list, nor {mig: <profile>}")
        values["mig_profile"] = _text(wanted["mig"])
        values.setdefault("isolation", "mig")
        if values["isolation"] != "mig":
            raise _Problem(f"asks for a MIG slice, but isolation is {values['isolation']}")
        count = 1
    elif isinstance(wanted, (list, tuple)):
        names = [str(name) for name in wanted]
        if not names or len(set(names)) != len(names):
            raise _Problem("is empty or names a device twice")
        values["gpu_names"] = tuple(names)
        count = len(names)
    elif wanted is None:
        count = values.get("tensor_parallel_size", 1) * others
    else:
        count = _integer(1, 4096)(wanted)
    values["gpu_count"] = count
    if "tensor_parallel_size" not in values:
        if count % others:
            raise _Problem(f"is {count}, which pipeline × data parallel {others} does not divide")
        values["tensor_parallel_size"] = count // others
    if values["tensor_parallel_size"] * others != count:
        raise _Problem(
            f"is {count}, but tensor × pipeline × data parallel is {values['tensor_parallel_size'] * others}"
        )


def _secrets(label: str, values: Mapping[str, Any], problems: List[str]) -> None:
    for name, value in values.get("environment", ()):
        if SECRET.search(name.upper()) and value:
            file = "`api_key_file:`" if name == "VLLM_API_KEY" else "a file on the target that only root can read"
            problems.append(f"{label}: environment {name} would show a secret in the unit; use {file}")
    for argument in values.get("extra_args", ()):
        flag = argument.split("=", 1)[0].replace("_", "-")
        if flag in SECRET_FLAGS:
            file = "`api_key_file:`" if flag == "--api-key" else "the model's `token_file:`"
            problems.append(f"{label}: {flag} would show a secret in the process list; use {file}")


def _duplicates(instances: List[Instance], problems: List[str]) -> None:
    seen: Dict[str, int] = {}
    for instance in instances:
        seen[instance.name] = seen.get(instance.name, 0) + 1
    problems.extend(f'name "{name}" is used {count} times' for name, count in sorted(seen.items()) if count > 1)
    ports: Dict[int, List[str]] = {}
    for instance in instances:
        if instance.state != "absent":
            ports.setdefault(instance.port, []).append(instance.name)
    for port, names in sorted(ports.items()):
        if len(names) > 1 and len(set(names)) > 1:
            problems.append(f"port {port} is used by {', '.join(sorted(names))}")


def _did_you_mean(text: str, known: Tuple[str, ...]) -> str:
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
    return f', did you mean "{near[0]}"?' if near else ""
