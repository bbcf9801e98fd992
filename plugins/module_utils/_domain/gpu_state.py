# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The wanted settings of GPUs against those found: an ordered plan of changes. Private to gpufleet.inference.

MIG and MPS are not settings of this plan. A lock of the clocks cannot be read back through NVML, so what was set is
remembered (``locks``) for as long as the kernel module stays loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.findings import Finding

# Selectors, the wider ones first: rank 0 names a set of GPUs, rank 1 a kind, rank 2 one GPU.
SELECTORS = {"all": 0, "model": 1, "uuid": 2, "pci_address": 2, "index": 2}
SETTINGS = ("persistence_mode", "ecc", "power_limit", "locked_clocks", "accounting", "compute_mode")
"""In the order in which they are set; persistence comes last when it is switched off."""
COMPUTE_MODES = ("default", "exclusive_process", "prohibited")
_SERVING = ("active", "activating", "reloading", "deactivating")
_NOT_THERE = re.compile(r"\(NVML (3|13)\)")
# Where the facts of a device tell why a setting has no value.
_PATHS = {
    "persistence_mode": ("persistence_mode",),
    "ecc": ("ecc",),
    "power_limit": ("power.limit_mw", "power"),
    "locked_clocks": ("clocks.max_sm_mhz",),
    "accounting": ("accounting_mode",),
    "compute_mode": ("compute_mode",),
}
_KEPT_BY_PERSISTENCE = ("power_limit", "compute_mode", "accounting")

Settings = Dict[str, Any]


@dataclass(frozen=True)
class Change:
    """One call on one GPU. Power limits are in milliwatts, clocks a pair of MHz or "reset"; ``before`` may be None."""

    uuid: str
    index: int
    pci_address: str
    setting: str
    before: Any
    after: Any

    @property
    def subject(self) -> str:
        """The GPU in words."""
        return f"GPU {self.index} ({self.pci_address})"

    def to_dict(self) -> Dict[str, Any]:
        """Plain data for results; values as words."""
        return {
            "uuid": self.uuid,
            "index": self.index,
            "pci_address": self.pci_address,
            "setting": self.setting,
            "before": words(self.setting, self.before),
            "after": words(self.setting, self.after),
        }


@dataclass
class Plan:
    """Changes in their order, what a person should know, and by UUID what is refused."""

    changes: List[Change] = field(default_factory=list)
    findings: List[Finding] = field(default_factory=list)
    refused: Dict[str, List[str]] = field(default_factory=dict)

    def refusal(self) -> Optional[FleetError]:
        """All refusals as one error; None when there are none."""
        texts = [text for uuid in self.refused for text in self.refused[uuid]]
        if not texts:
            return None
        return FleetError(
            "gpu_state_refused",
            f"Nothing was changed. {' '.join(texts)}",
            hint="Correct gpu_state_devices or free the GPU, then run again.",
            refused={uuid: list(found) for uuid, found in self.refused.items()},
        )

    def diff(self) -> List[Dict[str, str]]:
        """Before and after of each GPU that differs, as texts."""
        result: List[Dict[str, str]] = []
        for uuid in dict.fromkeys(change.uuid for change in self.changes):
            mine = [change for change in self.changes if change.uuid == uuid]
            entry = {"path": f"{mine[0].subject} {uuid}", "before": "", "after": ""}
            for change in mine:
                entry["before"] += f"{change.setting}: {words(change.setting, change.before)}\n"
                entry["after"] += f"{change.setting}: {words(change.setting, change.after)}\n"
            result.append(entry)
        return result


def words(setting: str, value: Any) -> str:
    """A value as a person writes it."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting == "power_limit":
        return f"{value / 1000:g} W"
    if setting == "locked_clocks" and value != "reset":
        return f"{value[0]}-{value[1]} MHz"
    return "not locked" if setting == "locked_clocks" else str(value)


# -- what is wanted ----------------------------------------------------------------------------------------------------


def check_settings(entry: Mapping[str, Any], where: str) -> Settings:
    """The settings of one entry in canonical form. FleetError `bad_gpu_state` names the entry and the value."""
    result: Settings = {}
    for setting in SETTINGS:
        value = entry.get(setting)
        if value is None:
            continue
        if setting in ("persistence_mode", "ecc", "accounting"):
            if not isinstance(value, bool):
                raise _bad(where, setting, value, "true or false")
        elif setting == "compute_mode":
            if value not in COMPUTE_MODES:
                raise _bad(where, setting, value, " or ".join(COMPUTE_MODES))
        elif setting == "power_limit":
            if value != "default":
                value = _watts(where, value)
        else:
            value = _clocks(where, value)
        result[setting] = value
    return result


def _watts(where: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(value, bool) or not 0 < number < 1e6:
        raise _bad(where, "power_limit", value, "a number of watts or `default`")
    return number


def _clocks(where: str, value: Any) -> Any:
    if value == "reset":
        return value
    expected = "`reset` or min_mhz and max_mhz, whole numbers with 0 < min_mhz <= max_mhz"
    if not isinstance(value, Mapping) or set(value) != {"min_mhz", "max_mhz"}:
        raise _bad(where, "locked_clocks", value, expected)
    try:
        low, high = int(value["min_mhz"]), int(value["max_mhz"])
    except (TypeError, ValueError):
        raise _bad(where, "locked_clocks", value, expected) from None
    if not 0 < low <= high:
        raise _bad(where, "locked_clocks", value, expected)
    return {"min_mhz": low, "max_mhz": high}


def _bad(where: str, key: str, value: Any, expected: str) -> FleetError:
    return FleetError("bad_gpu_state", f"{where}: {key} is {value!r}; it must be {expected}.")


def resolve(entries: Sequence[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]]) -> Dict[str, Settings]:
    """The settings wanted of each GPU, by UUID, in the order of the GPUs.

    A later entry overrides an earlier one, setting by setting. Two entries whose selectors are equally narrow and that
    want different values of one GPU contradict each other. FleetError `bad_gpu_state` for that, for unknown keys and
    for a selector of one GPU that finds none.
    """
    wanted: Dict[str, Settings] = {}
    said: Dict[Tuple[str, str, int], Tuple[Any, str]] = {}
    for number, entry in enumerate(entries):
        where = f"gpu_state_devices[{number}]"
        given = {key: value for key, value in entry.items() if value is not None}
        unknown = sorted(set(given) - set(SELECTORS) - set(SETTINGS))
        if unknown:
            known = ", ".join([*SELECTORS, *SETTINGS])
            raise FleetError("bad_gpu_state", f"{where}: unknown {', '.join(unknown)}; known are {known}.")
        kinds = [kind for kind in SELECTORS if kind in given]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise FleetError(
                "bad_gpu_state", f"{where}: one of {', '.join(SELECTORS)} selects the GPUs; found {found}."
            )
        kind = kinds[0]
        settings = check_settings(given, where)
        if not settings:
            raise FleetError("bad_gpu_state", f"{where}: no setting; known are {', '.join(SETTINGS)}.")
        for device in _select(kind, given[kind], devices, where):
            uuid = str(device["uuid"])
            for setting, value in settings.items():
                key = (uuid, setting, SELECTORS[kind])
                if key in said and said[key][0] != value:
                    raise FleetError(
                        "bad_gpu_state",
                        f"{where} and {said[key][1]} want different values of {setting} for {_subject(device)}, and "
                        f"neither selector is narrower.",
                        hint="Leave one of them out.",
                    )
                said[key] = (value, where)
                wanted.setdefault(uuid, {})[setting] = value
    order = [str(device["uuid"]) for device in devices]
    return {uuid: wanted[uuid] for uuid in order if uuid in wanted}


def _select(kind: str, value: Any, devices: Sequence[Mapping[str, Any]], where: str) -> List[Mapping[str, Any]]:
    if kind == "all":
        if value is not True:
            raise _bad(where, "all", value, "true")
        return [device for device in devices if device.get("uuid")]
    if kind == "model":
        return [device for device in devices if device.get("uuid") and device.get("name") == value]
    found = [device for device in devices if device.get("uuid") and _norm(device.get(kind)) == _norm(value)]
    if not found:
        there = ", ".join(str(device.get(kind)) for device in devices) or "none"
        raise FleetError("bad_gpu_state", f"{where}: no GPU has {kind} {value}; the host has {there}.")
    return found


def _norm(value: Any) -> str:
    """As text, without case, and a PCI domain without the zeros that some tools add."""
    text = str(value).lower()
    return text[4:] if re.match(r"^0000[0-9a-f]{4}:", text) else text


def _subject(device: Mapping[str, Any]) -> str:
    return f"GPU {device.get('index')} ({device.get('pci_address')})"


# -- against what is there ---------------------------------------------------------------------------------------------


def compare(
    wanted: Mapping[str, Settings],
    facts: Mapping[str, Any],
    locks: Mapping[str, Any],
    *,
    allow_in_use: bool = False,
    planned: Sequence[Mapping[str, Any]] = (),
) -> Plan:
    """The plan that brings the GPUs of ``facts`` (schema of gpu_facts) to ``wanted`` (of resolve).

    ``locks`` has by UUID the lock of the clocks that stands ("reset" or [min, max] in MHz); ``planned`` the instances
    (name, devices) that are about to run. A GPU that an instance of ours uses is left alone unless ``allow_in_use``.
    """
    plan = Plan()
    by_uuid = {device.get("uuid"): (number, device) for number, device in enumerate(facts["devices"])}
    for uuid, settings in wanted.items():
        if uuid not in by_uuid:
            plan.refused[uuid] = [f"The GPU {uuid} is not there."]
            continue
        number, device = by_uuid[uuid]
        reason = facts["unavailable"].get(f"devices.{number}") or facts["unavailable"].get("nvml")
        if reason:
            plan.refused[uuid] = [f"{_subject(device)} does not answer: {reason}."]
            continue
        view = _View(number, device, facts, locks)
        refused: List[str] = []
        changes: List[Change] = []
        for setting in SETTINGS:
            if setting in settings:
                change = _one(plan, view, setting, settings[setting], refused)
                if change is not None:
                    changes.append(change)
        _check_persistence(plan, view, settings, refused)
        refused += _crowded(view, settings, [*facts["instances"], *planned])
        users = view.users()
        if changes and users and not allow_in_use:
            texts = ", ".join(
                f"{c.setting} {words(c.setting, c.before)} → {words(c.setting, c.after)}" for c in changes
            )
            plan.findings.append(
                Finding(
                    "gpu_state_due",
                    "warning",
                    view.subject,
                    f"Due, and left alone while {', '.join(users)} uses the GPU: {texts}.",
                    "Stop the instance and run again, or run with gpu_state_allow_in_use=true.",
                )
            )
            changes = []
        refused += _held(view, changes)
        if refused:
            plan.refused[uuid] = refused
        plan.changes += sorted(changes, key=lambda change: change.setting == "persistence_mode" and not change.after)
    return plan


class _View:
    """One GPU as found."""

    def __init__(self, number: int, device: Mapping[str, Any], facts: Mapping[str, Any], locks: Mapping[str, Any]):
        self.device = device
        self.subject = _subject(device)
        self.uuid = str(device["uuid"])
        self._number = number
        self._facts = facts
        self._locks = locks

    def found(self, setting: str) -> Any:
        """The value that the GPU has, or would have after its next reset (ECC); None when it has no such setting."""
        device = self.device
        if setting == "power_limit":
            return device["power"]["limit_mw"]
        if setting == "ecc":
            return device["ecc"]["pending"]
        if setting == "accounting":
            return device["accounting_mode"]
        return device[setting]

    def lock(self) -> Any:
        """The lock of the clocks that stands; None when it is not known, or when the GPU runs faster than it allows."""
        lock = self._locks.get(self.uuid)
        running = self.device["clocks"]["sm_mhz"]
        if isinstance(lock, (list, tuple)) and running is not None and running > lock[1]:
            return None
        return list(lock) if isinstance(lock, (list, tuple)) else lock

    def reason(self, setting: str) -> str:
        """Why a setting has no value."""
        told = (self._facts["unavailable"].get(f"devices.{self._number}.{path}") for path in _PATHS[setting])
        return next((text for text in told if text), "no reason given")

    def users(self) -> List[str]:
        """Units of ours that use the GPU."""
        instances = self._facts["instances"]
        ours = {instance["unit"] for instance in instances}
        used = {
            instance["unit"]
            for instance in instances
            if instance["active_state"] in _SERVING and self.uuid in instance["devices"]
        }
        return sorted(used | {p["unit"] for p in self.device["processes"] or [] if p["unit"] in ours})

    def strangers(self) -> List[str]:
        """Processes on the GPU that are not ours."""
        ours = {instance["unit"] for instance in self._facts["instances"]}
        return [
            f"{process['name'] or '?'} (pid {process['pid']}, {process['unit'] or 'no unit'})"
            for process in self.device["processes"] or []
            if process["unit"] not in ours
        ]


def _one(plan: Plan, view: _View, setting: str, value: Any, refused: List[str]) -> Optional[Change]:
    """The change that a setting needs; None when there is none. Adds findings and refusals."""
    device = view.device
    supported = device["clocks"]["max_sm_mhz"] if setting == "locked_clocks" else view.found(setting)
    if supported is None:
        reason = view.reason(setting)
        if not _NOT_THERE.search(reason):
            refused.append(f"{view.subject}: {setting} cannot be read: {reason}.")
            return None
        plan.findings.append(
            Finding(
                "gpu_state_unsupported",
                "warning",
                view.subject,
                f"{device['name']} has no {setting}: {reason}.",
                f"Take {setting} out of the entry for this GPU.",
            )
        )
        return None
    before = view.lock() if setting == "locked_clocks" else view.found(setting)
    after = value
    if setting == "power_limit":
        after = _milliwatts(view, value, refused)
    elif setting == "locked_clocks" and value != "reset":
        after = [value["min_mhz"], value["max_mhz"]]
        if after[1] > supported:
            refused.append(
                f"{view.subject}: locked_clocks wants up to {after[1]} MHz, and the GPU ends at {supported} MHz."
            )
    if setting == "ecc" and device["ecc"]["current"] != value:
        now, then = words(setting, device["ecc"]["current"]), words(setting, value)
        plan.findings.append(
            Finding(
                "ecc_pending",
                "info",
                view.subject,
                f"ECC is {now} until the next reset of the GPU or reboot, {then} from then on.",
                "Reset the GPU or reboot when it suits.",
            )
        )
    if after is None or before == after:
        return None
    return Change(view.uuid, int(device["index"]), str(device["pci_address"]), setting, before, after)


def _milliwatts(view: _View, value: Any, refused: List[str]) -> Optional[int]:
    power = view.device["power"]
    if value == "default":
        if power["default_mw"] is None:
            refused.append(f"{view.subject}: the GPU does not tell its default power limit; give a number of watts.")
        return None if power["default_mw"] is None else int(power["default_mw"])
    after: int = round(value * 1000)
    low, high = power["min_mw"], power["max_mw"]
    if (low is not None and after < low) or (high is not None and after > high):
        refused.append(
            f"{view.subject}: power_limit wants {words('power_limit', after)}, and the GPU takes "
            f"{words('power_limit', low)} to {words('power_limit', high)}."
        )
    return after


def _check_persistence(plan: Plan, view: _View, settings: Settings, refused: List[str]) -> None:
    """Without persistence the driver forgets when the last user of the GPU leaves."""
    if settings.get("persistence_mode", view.device["persistence_mode"]) is not False:
        return
    if view.device["persistence_mode"] is None:
        return
    if settings.get("locked_clocks", "reset") != "reset":
        refused.append(
            f"{view.subject}: locked_clocks without persistence_mode would be lost when the last user of the GPU "
            "leaves, and nothing could tell; want persistence_mode: true as well."
        )
    lost = [setting for setting in _KEPT_BY_PERSISTENCE if setting in settings]
    if lost:
        plan.findings.append(
            Finding(
                "gpu_state_not_kept",
                "warning",
                view.subject,
                f"Persistence mode is off: {', '.join(lost)} may be lost when the last user of the GPU leaves.",
                "Want persistence_mode: true as well.",
            )
        )


def _crowded(view: _View, settings: Settings, instances: Sequence[Mapping[str, Any]]) -> List[str]:
    """EXCLUSIVE_PROCESS admits one process a GPU; tensor parallel workers and neighbours open more."""
    mode = settings.get("compute_mode")
    mine = {i["name"]: i["devices"] for i in instances if view.uuid in (i.get("devices") or [])}
    if mode == "prohibited" and mine:
        return [f"{view.subject}: compute_mode prohibited would keep {', '.join(sorted(mine))} from starting."]
    if mode != "exclusive_process":
        return []
    if len(mine) > 1:
        return [
            f"{view.subject}: compute_mode exclusive_process admits one process, and {len(mine)} instances share the "
            f"GPU: {', '.join(sorted(mine))}."
        ]
    wide = [name for name, devices in sorted(mine.items()) if len(devices) > 1]
    return [
        f"{view.subject}: compute_mode exclusive_process admits one process, and {name} runs on "
        f"{len(mine[name])} GPUs, whose workers open each other's."
        for name in wide
    ]


def _held(view: _View, changes: Sequence[Change]) -> List[str]:
    """A narrower compute mode would meet processes that are not ours; they are named, and nothing is changed."""
    strangers = view.strangers()
    narrower = [change for change in changes if change.setting == "compute_mode" and change.after != "default"]
    if not strangers or not narrower:
        return []
    return [
        f"{view.subject}: compute_mode {narrower[0].after} would disturb processes that are not ours: "
        f"{', '.join(strangers)}."
    ]
