# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs an instance gets: best fit, near each other, always the same. Private to gpufleet.inference."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import Instance
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.releases import Capability
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import GIB, MIB, gib, round_up

# Foreign use is rounded up to this step, so that a neighbour that grows a little does not change the plan.
FOREIGN_STEP = 256 * MIB

# What stays unplanned on each device: the planner's recipe in the memory facts (section 7), and on a GPU that shares
# the host's memory a part for the operating system and its page cache (a cautious choice, no measurement).
SAFETY_GIB = 0.3
SAFETY_SHARE = 0.02
SYSTEM_GIB = 4
SYSTEM_SHARE = 0.05

# Compute capabilities of GPUs that have no memory of their own (Orin, Thor, GB10; memory facts, section 8).
INTEGRATED = ((8, 7), (11, 0), (12, 1))
# Terms of a budget that take memory.
PARTS = ("weights", "activation", "non_torch", "cuda_graphs", "kv_cache")

# How near two GPUs are, nearest first; the names are those of `nvidia-smi topo -m`.
DISTANCE = {"nvlink": 0, "psb": 1, "pix": 1, "pxb": 2, "phb": 3, "node": 4, "sys": 5}
UNKNOWN_DISTANCE = 5
NO_PEER_ACCESS = 6
# Recovery actions of NVML after which a GPU serves nobody until it was reset.
OUT_OF_SERVICE = ("reset", "reboot", "drain_and_reset")


@dataclass(frozen=True)
class Device:
    """A GPU or a MIG slice as the planner sees it; memory in bytes, ``total`` as torch sees it."""

    uuid: str
    index: int
    pci_address: str
    name: str
    architecture: str
    capability: Capability
    total: int
    available: int
    foreign: int = 0
    numa_node: Optional[int] = None
    parent: Optional[str] = None
    mig_profile: Optional[str] = None
    usable: bool = True
    why_not: str = ""
    expected: bool = False
    unified: bool = False
    compute_mode: str = "default"
    held: Tuple[Tuple[str, int], ...] = ()  # bytes that our own instances hold now, by name

    @property
    def margin(self) -> int:
        """Bytes that no plan gives away: max(0.3 GiB, 2 % of the device), for what the model cannot know.

        A GPU that shares the host's memory also leaves the operating system its part.
        """
        size = max(int(SAFETY_GIB * GIB), int(SAFETY_SHARE * self.total))
        return size + (max(SYSTEM_GIB * GIB, int(SYSTEM_SHARE * self.total)) if self.unified else 0)

    @property
    def kind(self) -> Tuple[Capability, str, int]:
        """What must be equal for tensor parallel work."""
        return self.capability, self.name, self.total


@dataclass(frozen=True)
class Host:
    """The devices of one host and how near they are to each other."""

    devices: Tuple[Device, ...]
    distance: Mapping[Tuple[str, str], int] = field(default_factory=dict)
    no_p2p: FrozenSet[Tuple[str, str]] = frozenset()

    def between(self, first: str, second: str) -> int:
        """The distance of two devices by uuid; without peer access they are farther than any path."""
        key = (min(first, second), max(first, second))
        return NO_PEER_ACCESS if key in self.no_p2p else self.distance.get(key, UNKNOWN_DISTANCE)

    def find(self, wanted: str) -> Optional[Device]:
        """A device by UUID, PCI address or index."""
        text = wanted.lower()
        for device in self.devices:
            if text == device.uuid.lower() or (
                device.parent is None and (_pci(text) == _pci(device.pci_address) or text == str(device.index))
            ):
                return device
        return None


def _pci(address: str) -> str:
    """A PCI address without case and with a domain of four digits: "00000000:18:00.0" -> "0000:18:00.0"."""
    domain, _colon, rest = address.lower().rpartition(":")
    domain, _colon, bus = domain.rpartition(":")
    return f"{(domain or '0')[-4:].rjust(4, '0')}:{bus}:{rest}"


@dataclass
class Ledger:
    """What is taken so far on each device: bytes, and by whom."""

    taken: Dict[str, int] = field(default_factory=dict)
    given: Dict[Tuple[str, str], int] = field(default_factory=dict)
    users: Dict[str, List[str]] = field(default_factory=dict)
    exclusive: Dict[str, str] = field(default_factory=dict)

    def remaining(self, device: Device, name: str = "", ignore: Sequence[str] = ()) -> int:
        """Bytes still free for planning for the instance of this name.

        What another instance holds now beyond what it is planned to hold is not free before that instance restarts;
        ``ignore`` names instances of which that does not count.
        """
        left = device.available - device.margin - self.taken.get(device.uuid, 0)
        for holder, held in device.held:
            if holder != name and holder not in ignore:
                left -= max(0, held - self.given.get((device.uuid, holder), 0))
        return left

    def add(self, name: str, devices: Sequence[Device], need: Sequence[int], exclusive: bool) -> None:
        """Give the devices to the instance."""
        for device, size in zip(devices, need):
            self.taken[device.uuid] = self.taken.get(device.uuid, 0) + size
            self.given[(device.uuid, name)] = size
            self.users.setdefault(device.uuid, []).append(name)
            if exclusive:
                self.exclusive[device.uuid] = name

    def open_to(self, device: Device, exclusive: bool) -> bool:
        """Whether another instance may come to this device."""
        if device.uuid in self.exclusive:
            return False
        return not (exclusive and self.users.get(device.uuid))


@dataclass(frozen=True)
class Refusal:
    """Why no devices were found: a code of the plan, the figures, and the device that came nearest."""

    code: str
    text: str
    device: Optional[Device] = None


def is_exclusive(instance: Instance) -> bool:
    """Whether the instance wants its GPUs for itself (a MIG slice is one's own by nature)."""
    return instance.isolation in ("exclusive", "mig")


def candidates(host: Host, instance: Instance, ledger: Ledger) -> Tuple[List[Device], Optional[Refusal]]:
    """The devices this instance may use at all, or the reason why there are not enough."""
    wants_slice = instance.mig_profile is not None or instance.isolation == "mig"
    whole = [device for device in host.devices if (device.mig_profile is not None) == wants_slice]
    if instance.gpu_names:
        named = []
        for wanted in instance.gpu_names:
            device = host.find(wanted)
            if device is None:
                known = ", ".join(f"{item.index}: {item.uuid}" for item in host.devices) or "none"
                return [], Refusal("unsupported_by_device", f'GPU "{wanted}" is not on this host; it has {known}')
            named.append(device)
        bad = [device for device in named if not device.usable]
        if bad:
            return [], Refusal("unsupported_by_device", f"GPU {bad[0].uuid} cannot be used: {bad[0].why_not}")
        taken = [device for device in named if not ledger.open_to(device, is_exclusive(instance))]
        if taken:
            others = ", ".join(sorted(ledger.users[taken[0].uuid]))
            return [], Refusal(
                "refused_free_memory",
                f"GPU {taken[0].uuid} is given to {others}; one of them wants it alone (isolation exclusive)",
            )
        return named, None
    if instance.mig_profile:
        whole = [device for device in whole if device.mig_profile == instance.mig_profile]
    if len(whole) < instance.world_size:
        what = f"MIG slices {instance.mig_profile or ''}".strip() if wants_slice else "GPUs"
        code = "unsupported_by_device"
        text = f"{instance.world_size} {what} are wanted, this host has {len(whole)}"
        if not wants_slice and whole:
            text += "; an instance over several hosts is not supported yet"
        return [], Refusal(code, text)
    usable = [device for device in whole if device.usable]
    if len(usable) < instance.world_size:
        alike: Dict[str, List[str]] = {}
        for device in whole:
            if not device.usable:
                alike.setdefault(device.why_not, []).append(str(device.index))
        reasons = "; ".join(f"{', '.join(numbers)}: {why}" for why, numbers in alike.items())
        return [], Refusal(
            "unsupported_by_device", f"{instance.world_size} GPUs are wanted, {len(usable)} can be used ({reasons})"
        )
    free = [device for device in usable if ledger.open_to(device, is_exclusive(instance))]
    if len(free) < instance.world_size:
        return [], Refusal(
            "refused_free_memory",
            f"{instance.world_size} GPUs are wanted with isolation {instance.isolation}, "
            f"{len(free)} of {len(usable)} are not yet given to other instances",
        )
    return free, None


def choose(
    host: Host,
    instance: Instance,
    ledger: Ledger,
    need: Callable[[Device], Optional[int]],
    spread: bool = False,
    *,
    prefer: Sequence[str] = (),
) -> Tuple[List[Device], Optional[Refusal]]:
    """The devices for one instance, or why there are none.

    need: bytes on a device, None where the device cannot serve it at all. prefer: UUIDs of the devices it runs on now,
    taken again when they still serve. Best fit: the nearest devices of one kind, among those the ones that leave least
    free (``spread``: most free), then by PCI address and UUID.
    """
    allowed, refusal = candidates(host, instance, ledger)
    if refusal:
        return [], refusal
    if instance.gpu_names:
        kinds = {device.capability for device in allowed}
        if len(kinds) > 1:
            found = ", ".join(sorted(f"{major}.{minor}" for major, minor in kinds))
            return [], Refusal("unsupported_by_device", f"the GPUs have different compute capabilities: {found}")
        return list(allowed), None
    fitting = []
    for device in allowed:
        size = need(device)
        if size is not None and size <= ledger.remaining(device, instance.name):
            fitting.append(device)
    same = [device for device in fitting if device.uuid in prefer]
    if len(same) == len(prefer) == instance.world_size and len({device.kind for device in same}) == 1:
        return same, None
    best: Optional[Tuple[Any, List[Device]]] = None
    groups: Dict[Any, List[Device]] = {}
    for device in fitting:
        groups.setdefault(device.kind, []).append(device)
    for group in groups.values():
        for chosen in _near_sets(host, group, instance.world_size):
            free = sum(ledger.remaining(device, instance.name) for device in chosen)
            order = (_spread_of(host, chosen), -free if spread else free, sorted(_place(device) for device in chosen))
            if best is None or order < best[0]:
                best = (order, chosen)
    if best is not None:
        return sorted(best[1], key=_place), None
    most = max((ledger.remaining(device, instance.name) for device in allowed), default=0)
    least = min((size for size in (need(device) for device in allowed) if size is not None), default=None)
    if least is None:
        return [], Refusal("unsupported_by_device", "no GPU of this host can serve it")
    if len(fitting) >= instance.world_size:
        return [], Refusal(
            "unsupported_by_device",
            f"{instance.world_size} GPUs of one kind are wanted; those with room are of different kinds",
        )
    emptiest = sorted(allowed, key=lambda device: (-ledger.remaining(device, instance.name), _place(device)))
    return [], Refusal(
        "refused_free_memory",
        f"{gib(least)} are needed on each of {instance.world_size} GPU(s); {len(fitting)} have that much left, "
        f"the emptiest has {gib(most)}",
        emptiest[min(len(emptiest), instance.world_size) - 1],
    )


def _place(device: Device) -> Tuple[str, int, str]:
    return device.pci_address, device.index, device.uuid


def _near_sets(host: Host, group: List[Device], count: int) -> List[List[Device]]:
    """For each device of the group, the set of its nearest ones: n sets instead of all combinations."""
    if count > len(group):
        return []
    ordered = sorted(group, key=_place)
    if count == 1:
        return [[device] for device in ordered]
    sets = []
    for seed in ordered:
        near = sorted(
            (device for device in ordered if device is not seed),
            key=lambda device, seed=seed: (host.between(seed.uuid, device.uuid), _place(device)),  # type: ignore[misc]
        )
        sets.append([seed, *near[: count - 1]])
    return sets


def _spread_of(host: Host, chosen: Sequence[Device]) -> Tuple[int, int, int]:
    """(widest distance, sum of distances, NUMA nodes): smaller is nearer."""
    pairs = [host.between(one.uuid, two.uuid) for one, two in itertools.combinations(chosen, 2)]
    return max(pairs, default=0), sum(pairs), len({device.numa_node for device in chosen})


def host_of(
    gpu: Mapping[str, Any],
    reserve: int = 0,
    ram: Optional[Mapping[str, Any]] = None,
    *,
    names: Optional[Sequence[str]] = None,
    leaving: Optional[Sequence[str]] = None,
) -> Host:
    """The host of the facts ``gpufleet_gpu``; devices in PCI order.

    reserve: bytes kept free on each GPU. ram: ``{total, available}`` of the host for GPUs that share its memory.
    names: the instances that the plan is about (default: all that the facts know); the memory of their units is free
    for the plan, any other is not. leaving: those of them that give their memory up before anything starts.
    Raises FleetError ``no_gpu_facts`` when the facts hold no device.
    """
    owners = {
        str(item.get("unit") or ""): item
        for item in gpu.get("instances") or []
        if item.get("unit") and (names is None or item.get("name") in names)
    }
    devices: List[Device] = []
    for fact in gpu.get("devices") or []:
        devices.extend(_device(fact, owners, reserve, ram))
    if leaving:
        gone = frozenset(leaving)
        devices = [
            replace(device, held=tuple(pair for pair in device.held if pair[0] not in gone)) for device in devices
        ]
    if not devices:
        raise FleetError(
            "no_gpu_facts",
            "The facts of this host hold no GPU to plan for.",
            "Run gpufleet.inference.gpu_facts first; on a host without a driver the PCI ids must be in the catalogue.",
        )
    devices.sort(key=_place)
    return Host(tuple(devices), *_links(gpu, [device for device in devices if device.parent is None]))


def _device(
    fact: Mapping[str, Any], owners: Mapping[str, Any], reserve: int, ram: Optional[Mapping[str, Any]]
) -> List[Device]:
    major, _dot, minor = str(fact.get("compute_capability") or "0.0").partition(".")
    capability = (int(major or 0), int(minor or 0))
    mode = str(fact.get("compute_mode") or "default")
    base: Dict[str, Any] = {
        "index": int(fact.get("index") or 0),
        "pci_address": str(fact.get("pci_address") or ""),
        "name": str(fact.get("name") or ""),
        "architecture": str(fact.get("architecture") or ""),
        "capability": capability,
        "numa_node": fact.get("numa_node"),
        "compute_mode": mode,
        "expected": bool(fact.get("expected")),
    }
    uuid = str(fact.get("uuid") or fact.get("pci_address"))
    mig = fact.get("mig") or {}
    slices = []
    for part in mig.get("devices") or []:
        slice_uuid = str(part.get("uuid"))
        held = _held(fact, owners, slice_uuid, part.get("gi"))
        sizes = _sizes(part.get("memory") or {}, held, reserve)
        slices.append(
            Device(uuid=slice_uuid, parent=uuid, mig_profile=str(part.get("profile") or ""), held=held, **sizes, **base)
        )
    if slices or str(mig.get("mode") or "").lower() in ("enabled", "true", "1"):
        return slices
    memory = fact.get("memory") or {}
    unified = not memory.get("total") and capability in INTEGRATED and bool(ram)
    if unified and ram:
        memory = {"total": ram.get("total"), "free": ram.get("available")}
    held = _held(fact, owners, uuid)
    sizes = _sizes(memory, held, reserve)
    unknown = ["memory"] if not sizes["total"] else []
    unknown += ["compute capability"] if not fact.get("compute_capability") else []
    why_not = f"its {' and '.join(unknown)} {'are' if unknown[1:] else 'is'} not known" if unknown else ""
    why_not = str(fact.get("silent") or why_not)
    if mode == "prohibited":
        why_not = "compute mode is prohibited"
    action = str((fact.get("health") or {}).get("recovery_action") or "")
    if action in OUT_OF_SERVICE:
        why_not = f"it needs a {action.replace('_', ' ')} after an error"
    return [Device(uuid=uuid, usable=not why_not, why_not=why_not, unified=unified, held=held, **sizes, **base)]


def _sizes(memory: Mapping[str, Any], held: Sequence[Tuple[str, int]], reserve: int) -> Dict[str, Any]:
    """total as torch sees it, what others use (rounded up), and what the plan may use."""
    total = int(memory.get("total") or 0) - int(memory.get("reserved") or 0)
    free = int(memory["free"]) if memory.get("free") is not None else total
    foreign = round_up(max(0, total - free - sum(size for _name, size in held)), FOREIGN_STEP)
    return {"total": total, "foreign": foreign, "available": max(0, total - foreign - reserve)}


def _held(
    fact: Mapping[str, Any], owners: Mapping[str, Any], uuid: str, gi: Optional[int] = None
) -> Tuple[Tuple[str, int], ...]:
    """Bytes that each of our instances holds on the device, or on one slice of it; by name.

    Where NVML does not tell a process's memory, the instance's recorded plan does.
    """
    held: Dict[str, int] = {}
    untold = set()
    for process in fact.get("processes") or []:
        owner = owners.get(str(process.get("unit") or ""))
        if owner is None or (gi is not None and process.get("gi") != gi):
            continue
        name = str(owner.get("name"))
        held[name] = held.get(name, 0) + int(process.get("used") or 0)
        if process.get("used") is None:
            untold.add(name)
    for owner in owners.values():
        name = str(owner.get("name"))
        if name in untold:
            held[name] = max(held[name], recorded(owner.get("record"), "bytes").get(uuid, 0))
    return tuple(sorted(held.items()))


def recorded(record: Any, end: str) -> Dict[str, int]:
    """Bytes per device UUID in a recorded plan (``end``: bytes, low or high); empty when it cannot be read."""
    try:
        terms = [part[term] for part in record["budget"] for term in PARTS]
        whole = all(set(term) == {"bytes", "source", "low", "high"} for term in terms)
        figures = [term[name] for term in terms for name in ("bytes", "low", "high")]
        if not whole or not all(isinstance(figure, int) and not isinstance(figure, bool) for figure in figures):
            return {}
        return {str(part["uuid"]): sum(part[term][end] for term in PARTS) for part in record["budget"]}
    except (KeyError, TypeError, ValueError):
        return {}


def _links(
    gpu: Mapping[str, Any], devices: Sequence[Device]
) -> Tuple[Dict[Tuple[str, str], int], FrozenSet[Tuple[str, str]]]:
    """Distances and pairs without peer access, from the matrices whose rows are the devices by index."""
    distance: Dict[Tuple[str, str], int] = {}
    no_p2p = set()
    links = gpu.get("links") or {}
    for one, two in itertools.combinations(devices, 2):
        key = (min(one.uuid, two.uuid), max(one.uuid, two.uuid))
        text = str(_cell(links.get("matrix"), one.index, two.index) or "").lower()
        distance[key] = DISTANCE["nvlink"] if text.startswith("nv") else DISTANCE.get(text, UNKNOWN_DISTANCE)
        if _cell(links.get("peer_access"), one.index, two.index) is False:
            no_p2p.add(key)
    return distance, frozenset(no_p2p)


def _cell(matrix: Any, row: int, column: int) -> Any:
    try:
        return matrix[row][column]
    except (IndexError, TypeError):
        return None
