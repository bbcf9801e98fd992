# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each vLLM release needs, knows and defaults to. Private to gpufleet.inference.

The facts come from the release table (``plugins/plugin_utils/_data/releases.json``), which is read once on the
controller and handed in; its ``sources`` say where each section was read.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

Version = Tuple[int, ...]
Capability = Tuple[int, int]

_VERSION = re.compile(r"^v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:\.post(\d+))?(?:\+[A-Za-z0-9.]+)?$")


def parse_version(text: str) -> Version:
    """A vLLM version as a tuple that compares: "0.9.1" -> (0, 9, 1), "0.8.5.post1" -> (0, 8, 5, 1).

    The local part ("+cpu") does not count. Raises FleetError for anything else (pre-releases, branches).
    """
    match = _VERSION.match(str(text).strip())
    if not match:
        raise FleetError(
            "unknown_release",
            f'"{text}" is not the version of a vLLM release.',
            "Write it like 0.19.1 or 0.8.5.post1.",
        )
    major, minor, patch, fourth, post = match.groups()
    numbers = [int(major), int(minor), int(patch or 0)]
    if fourth or post:
        numbers.append(int(fourth or post))
    return tuple(numbers)


def parse_capability(text: str) -> Capability:
    """A compute capability as a tuple: "9.0" -> (9, 0). Raises FleetError for anything else."""
    match = re.match(r"^(\d+)\.(\d+)$", str(text).strip())
    if not match:
        raise FleetError("bad_capability", f'"{text}" is not a compute capability.', "Write it like 9.0.")
    return int(match.group(1)), int(match.group(2))


@dataclass(frozen=True)
class Flag:
    """A flag of ``vllm serve`` as one release knows it; ``choices`` empty means anything of the type."""

    name: str
    kind: str
    default: Any = None
    choices: Tuple[Any, ...] = ()
    negatable: bool = False
    deprecated: bool = False


@dataclass(frozen=True)
class Release:
    """One release. Only ``version`` is needed to ask the memory rules; the rest comes from the release table."""

    version: str
    python: str = ""
    torch: str = ""
    cuda: str = ""
    driver_floor: str = ""
    toolkit_driver: str = ""
    capability: Capability = (0, 0)
    blackwell: Tuple[bool, bool] = (True, True)
    glibc: Optional[str] = None
    transformers: Optional[str] = None
    engine: str = "v1"
    v0_below_cc8: bool = False
    utilization: float = 0.9
    quantization: Mapping[str, Optional[int]] = field(default_factory=dict, compare=False)
    env_warns: bool = False
    batch: Tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    flags: Mapping[str, Flag] = field(default_factory=dict, compare=False, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> Version:
        """The version as a tuple that compares."""
        return parse_version(self.version)

    def has_flag(self, name: str) -> bool:
        """Whether this release's ``vllm serve`` knows the flag (long name or alias)."""
        return name in self.flags

    def batch_defaults(self, total: int, device_name: str) -> Tuple[int, int]:
        """(max_num_batched_tokens, max_num_seqs) that the API server would choose itself on such a device.

        total: device memory in bytes. Source: the batch rules in the engine's argument code, one tier per device class.
        """
        name = device_name.lower()
        for tier in self.batch:
            if total < tier["gib"] * 1024**3:
                continue
            if tier.get("names") and not any(part in name for part in tier["names"]):
                continue
            if any(part in name for part in tier.get("not_names", ())):
                continue
            return int(tier["tokens"]), int(tier["seqs"])
        return 2048, 256


class ReleaseTable:
    """The release table, ready to be asked. Built once per process; releases are built when first asked for."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._releases: Dict[str, Release] = {}
        self._by_key: Dict[Version, str] = {parse_version(name): name for name in data["versions"]}
        self._ranges: Dict[str, Tuple[Version, Optional[Version]]] = {}

    @property
    def names(self) -> List[str]:
        """All releases of the table, oldest first."""
        return [self._by_key[key] for key in sorted(self._by_key)]

    def release(self, version: str) -> Release:
        """The release; FleetError ``unknown_release`` names the nearest known ones and what to do."""
        text = str(version)
        if text not in self._releases:
            self._releases[text] = self._build(text)
        return self._releases[text]

    def _build(self, text: str) -> Release:
        key = parse_version(text)
        name = self._by_key.get(key)
        if name is None:
            older = [self._by_key[known] for known in sorted(self._by_key) if known < key][-1:]
            newer = [self._by_key[known] for known in sorted(self._by_key) if known > key][:1]
            near = " or ".join(older + newer)
            raise FleetError(
                "unknown_release",
                f"vLLM {text} is not in the release table, which holds {self.names[0]} to {self.names[-1]}.",
                f"Use {near}, or add the release in a checkout of this collection, with scripts/make_release_table.py.",
                nearest=older + newer,
            )
        facts = self._data["versions"][name]
        return Release(
            version=text,
            python=facts["python"],
            torch=facts["torch"],
            cuda=facts["cuda"],
            driver_floor=facts["driver_floor"],
            toolkit_driver=facts["toolkit_driver"],
            capability=parse_capability(facts["capability"]),
            blackwell=(bool(facts["blackwell"][0]), bool(facts["blackwell"][1])),
            glibc=facts["glibc"],
            transformers=facts["transformers"],
            engine=facts["engine"],
            v0_below_cc8=facts["v0_below_cc8"],
            utilization=facts["utilization"],
            quantization=facts["quantization"],
            env_warns=facts["env_warns"],
            batch=tuple(facts["batch"]),
            flags=self._flags(key),
            environment={
                name: kind
                for name, (first, last, kind) in self._data["env"].items()
                if _known(parse_version(first), parse_version(last) if last else None, key)
            },
        )

    def _flags(self, key: Version) -> Dict[str, Flag]:
        flags: Dict[str, Flag] = {}
        for name, entry in self._data["flags"].items():
            if not _known(parse_version(entry["first"]), parse_version(entry["last"]) if entry["last"] else None, key):
                continue
            step = [step for step in entry["history"] if parse_version(step["since"]) <= key][-1]
            flag = Flag(
                name=name,
                kind=step["type"],
                default=step.get("default"),
                choices=tuple(step.get("choices") or ()),
                negatable=bool(step.get("negatable")),
                deprecated=bool(step.get("deprecated")),
            )
            for alias in (name, *(step.get("aliases") or ())):
                flags[alias] = flag
        return flags

    def facts(self) -> Iterable[Mapping[str, Any]]:
        """The raw entries of all releases."""
        return list(self._data["versions"].values())

    def range_of(self, name: str) -> str:
        """When a flag or variable existed, in words: "0.5.4 to 0.17.1", "since 0.24.0", "in no release", ""."""
        if name in self._data["nowhere"]:
            return "in no release"
        entry = self._data["flags"].get(name)
        span = (entry["first"], entry["last"]) if entry else tuple((self._data["env"].get(name) or [None, None])[:2])
        if span[0] is None:
            return ""
        return f"{span[0]} to {span[1]}" if span[1] else f"since {span[0]}"

    def successor(self, name: str) -> str:
        """What to use instead of a name that is gone; "" when nothing is known."""
        return str(self._data["successors"].get(name, ""))

    def suggestion(self, name: str, known: Iterable[str]) -> str:
        """The known name that looks most like this one; "" when none does."""
        return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.7)), "")


def _known(first: Version, last: Optional[Version], key: Version) -> bool:
    return first <= key and (last is None or key <= last)


_TABLES: Dict[int, Tuple[Mapping[str, Any], ReleaseTable]] = {}


def table(data: Mapping[str, Any]) -> ReleaseTable:
    """The table of this data, built once per data object (which must not be changed afterwards)."""
    cached = _TABLES.get(id(data))
    if cached is None or cached[0] is not data:
        cached = (data, ReleaseTable(data))
        _TABLES.clear()
        _TABLES[id(data)] = cached
    return cached[1]
