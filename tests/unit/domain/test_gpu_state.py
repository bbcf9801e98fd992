"""The plan of device state, against any wishes and any GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import gpu_state
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

LOW, HIGH, TOP = 100_000, 700_000, 1980


def device(index: int, **changes: Any) -> dict[str, Any]:
    values = {
        "uuid": f"GPU-{index}",
        "index": index,
        "pci_address": f"0000:{0x18 + index:02x}:00.0",
        "name": "NVIDIA H100 80GB HBM3" if index < 2 else "NVIDIA L40S",
        "persistence_mode": False,
        "compute_mode": "default",
        "accounting_mode": False,
        "power": {"limit_mw": 500_000, "default_mw": 600_000, "min_mw": LOW, "max_mw": HIGH},
        "clocks": {"sm_mhz": 345, "max_sm_mhz": TOP},
        "ecc": {"current": True, "pending": True},
        "processes": [],
    }
    return {**values, **changes}


def facts(
    *devices: dict[str, Any], instances: list[dict[str, Any]] | None = None, **unavailable: str
) -> dict[str, Any]:
    given = {path.replace("__", "."): text for path, text in unavailable.items()}
    return {"devices": list(devices), "instances": instances or [], "unavailable": given}


def plan(entries, found, locks=None, **words):
    return gpu_state.compare(gpu_state.resolve(entries, found["devices"]), found, locks or {}, **words)


def applied(found: dict[str, Any], locks: dict[str, Any], changes) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a host is after the changes."""
    found, locks = copy.deepcopy(found), copy.deepcopy(locks)
    for change in changes:
        target = next(d for d in found["devices"] if d["uuid"] == change.uuid)
        if change.setting == "power_limit":
            target["power"]["limit_mw"] = change.after
        elif change.setting == "ecc":
            target["ecc"]["pending"] = change.after
        elif change.setting == "accounting":
            target["accounting_mode"] = change.after
        elif change.setting == "locked_clocks":
            locks[change.uuid] = change.after
            if change.after != "reset":
                target["clocks"]["sm_mhz"] = min(target["clocks"]["sm_mhz"], change.after[1])
        else:
            target[change.setting] = change.after
    return found, locks


WISHES = st.fixed_dictionaries(
    {"persistence_mode": st.just(True)},
    optional={
        "compute_mode": st.sampled_from(gpu_state.COMPUTE_MODES),
        "power_limit": st.one_of(st.just("default"), st.integers(LOW // 1000, HIGH // 1000)),
        "locked_clocks": st.one_of(
            st.just("reset"),
            st.tuples(st.integers(1, TOP), st.integers(1, TOP)).map(
                lambda pair: {"min_mhz": min(pair), "max_mhz": max(pair)}
            ),
        ),
        "ecc": st.booleans(),
        "accounting": st.booleans(),
    },
)
SELECTORS = st.one_of(
    st.just({"all": True}),
    st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA B200"]).map(lambda name: {"model": name}),
    st.integers(0, 3).map(lambda index: {"index": index}),
)
ENTRIES = st.lists(
    st.builds(lambda selector, wishes: {**selector, **wishes}, SELECTORS, WISHES),
    max_size=4,
    unique_by=lambda entry: str({key: entry.get(key) for key in gpu_state.SELECTORS}),
)
DEVICES = st.lists(
    st.fixed_dictionaries(
        {
            "persistence_mode": st.booleans(),
            "compute_mode": st.sampled_from(gpu_state.COMPUTE_MODES),
            "accounting_mode": st.booleans(),
            "ecc": st.fixed_dictionaries({"current": st.booleans(), "pending": st.booleans()}),
        }
    ),
    min_size=4,
    max_size=4,
).map(lambda changes: facts(*(device(index, **change) for index, change in enumerate(changes))))


@given(ENTRIES, DEVICES)
@settings(max_examples=200, deadline=None)
def test_after_a_plan_was_applied_the_next_plan_is_empty(entries, found):
    first = plan(entries, found)
    assert first.refusal() is None
    after, locks = applied(found, {}, first.changes)
    assert plan(entries, after, locks).changes == []


@given(ENTRIES, DEVICES, st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_a_run_that_broke_off_anywhere_is_completed_by_the_next(entries, found, done):
    changes = plan(entries, found).changes
    after, locks = applied(found, {}, changes[:done])
    rest = plan(entries, after, locks).changes
    assert applied(after, locks, rest) == applied(found, {}, changes)


@given(ENTRIES, DEVICES)
@settings(max_examples=200, deadline=None)
def test_each_change_is_one_that_an_entry_asked_for(entries, found):
    by_uuid = {d["uuid"]: d for d in found["devices"]}
    for change in plan(entries, found).changes:
        target = by_uuid[change.uuid]
        assert change.before != change.after
        assert any(
            change.setting in entry
            and (entry.get("all") or entry.get("model") == target["name"] or entry.get("index") == target["index"])
            for entry in entries
        )


@given(st.permutations([{"index": index, "power_limit": 200 + index, "ecc": index % 2 == 0} for index in range(4)]))
def test_the_order_of_entries_that_do_not_overlap_is_irrelevant(entries):
    found = facts(*map(device, range(4)))
    assert plan(entries, found).changes == plan(sorted(entries, key=lambda entry: entry["index"]), found).changes


def test_a_later_entry_wins_setting_by_setting():
    found = facts(device(0), device(1))
    wide, narrow = {"all": True, "power_limit": 300, "ecc": False}, {"index": 1, "power_limit": 200}
    values = {c.uuid: c.after for c in plan([wide, narrow], found).changes if c.setting == "power_limit"}
    assert values == {"GPU-0": 300_000, "GPU-1": 200_000}
    values = {c.uuid: c.after for c in plan([narrow, wide], found).changes if c.setting == "power_limit"}
    assert values == {"GPU-0": 300_000, "GPU-1": 300_000}
    assert [c.uuid for c in plan([wide, narrow], found).changes if c.setting == "ecc"] == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"index": 0, "ecc": True}, {"uuid": "GPU-0", "ecc": False}], "want different values of ecc for GPU 0"),
        ([{"all": True, "ecc": True}, {"all": True, "ecc": False}], "neither selector is narrower"),
        ([{"ecc": True}], "found none"),
        ([{"all": True, "index": 0, "ecc": True}], "found all and index"),
        ([{"index": 9, "ecc": True}], "no GPU has index 9; the host has 0, 1"),
        ([{"uuid": "GPU-9", "ecc": True}], "the host has GPU-0, GPU-1"),
        ([{"all": False, "ecc": True}], "all is False"),
        ([{"index": 0}], "no setting"),
        ([{"index": 0, "mig": "1g.10gb"}], "unknown mig"),
        ([{"index": 0, "power_limit": "lots"}], "a number of watts"),
        ([{"index": 0, "power_limit": -1}], "a number of watts"),
        ([{"index": 0, "locked_clocks": {"min_mhz": 9, "max_mhz": 8}}], "0 < min_mhz <= max_mhz"),
        ([{"index": 0, "locked_clocks": {"max_mhz": 8}}], "0 < min_mhz <= max_mhz"),
        ([{"index": 0, "compute_mode": "exclusive"}], "default or exclusive_process or prohibited"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_entry(entries, said):
    with pytest.raises(FleetError, match="gpu_state_devices") as refused:
        gpu_state.resolve(entries, [device(0), device(1)])
    assert said in refused.value.message


@pytest.mark.parametrize("address", ["0000:18:00.0", "00000000:18:00.0", "0000:18:00.0".upper()])
def test_a_pci_address_is_found_in_every_spelling(address):
    assert list(gpu_state.resolve([{"pci_address": address, "ecc": False}], [device(0), device(1)])) == ["GPU-0"]


@pytest.mark.parametrize("state", ["active", "activating", "reloading", "deactivating"])
def test_a_gpu_that_an_instance_of_ours_uses_is_due_and_left_alone(state):
    chat = {"name": "chat", "unit": "vllm-chat.service", "active_state": state, "devices": ["GPU-0"]}
    found = facts(device(0), device(1), instances=[chat])
    result = plan([{"all": True, "power_limit": 300}], found)
    assert [change.uuid for change in result.changes] == ["GPU-1"]
    due = [finding for finding in result.findings if finding.code == "gpu_state_due"]
    assert [finding.subject for finding in due] == ["GPU 0 (0000:18:00.0)"]
    assert "vllm-chat.service uses the GPU: power_limit 500 W → 300 W" in due[0].text
    allowed = plan([{"all": True, "power_limit": 300}], found, allow_in_use=True)
    assert [change.uuid for change in allowed.changes] == ["GPU-0", "GPU-1"]


def test_a_process_of_ours_counts_as_use_even_when_its_unit_tells_nothing():
    chat = {"name": "chat", "unit": "vllm-chat.service", "active_state": None, "devices": []}
    process = {"pid": 7, "name": "vllm", "unit": "vllm-chat.service"}
    result = plan([{"all": True, "ecc": False}], facts(device(0, processes=[process]), instances=[chat]))
    assert result.changes == []
    assert "gpu_state_due" in {finding.code for finding in result.findings}


def test_a_stopped_instance_does_not_keep_a_gpu_from_being_changed():
    chat = {"name": "chat", "unit": "vllm-chat.service", "active_state": "inactive", "devices": ["GPU-0"]}
    assert len(plan([{"all": True, "ecc": False}], facts(device(0), instances=[chat])).changes) == 1


def test_widening_the_compute_mode_disturbs_nobody():
    stranger = {"pid": 7, "name": "python3", "unit": None}
    found = facts(device(0, compute_mode="exclusive_process", processes=[stranger]))
    assert len(plan([{"all": True, "compute_mode": "default"}], found).changes) == 1
    assert "python3 (pid 7, no unit)" in str(plan([{"all": True, "compute_mode": "prohibited"}], found).refusal())


def test_locked_clocks_without_persistence_are_refused():
    lock = {"min_mhz": 300, "max_mhz": 900}
    assert "without persistence_mode" in str(plan([{"all": True, "locked_clocks": lock}], facts(device(0))).refusal())
    assert plan([{"all": True, "locked_clocks": lock}], facts(device(0, persistence_mode=True))).refusal() is None


def test_settings_that_may_be_lost_without_persistence_are_named():
    findings = plan([{"all": True, "power_limit": 300}], facts(device(0))).findings
    assert [finding.code for finding in findings] == ["gpu_state_not_kept"]
    assert plan([{"all": True, "power_limit": 300, "persistence_mode": True}], facts(device(0))).findings == []


def test_a_setting_that_a_gpu_lacks_is_a_finding_and_a_failed_read_a_refusal():
    bare = device(0, ecc={"current": None, "pending": None})
    entry = [{"all": True, "ecc": True}]
    lacking = plan(entry, facts(bare, devices__0__ecc="nvmlDeviceGetEccMode on GPU 0: not supported (NVML 3)"))
    assert [finding.code for finding in lacking.findings] == ["gpu_state_unsupported"]
    assert lacking.refusal() is None
    failed = plan(entry, facts(bare, devices__0__ecc="nvmlDeviceGetEccMode on GPU 0: unknown error (NVML 999)"))
    assert "ecc cannot be read" in str(failed.refusal())


def test_a_gpu_that_does_not_answer_is_refused():
    result = plan([{"all": True, "ecc": True}], facts(device(0), devices__0="the GPU is lost (NVML 15)"))
    assert "does not answer: the GPU is lost" in str(result.refusal())


def test_prohibited_is_refused_where_an_instance_is_planned():
    planned = [{"name": "chat", "devices": ["GPU-0"]}]
    result = plan([{"all": True, "compute_mode": "prohibited"}], facts(device(0)), planned=planned)
    assert "would keep chat from starting" in str(result.refusal())


def test_the_diff_names_each_gpu_once_with_all_its_settings():
    result = plan([{"all": True, "power_limit": 300, "persistence_mode": True}], facts(device(0), device(1)))
    assert [entry["path"] for entry in result.diff()] == [
        "GPU 0 (0000:18:00.0) GPU-0",
        "GPU 1 (0000:19:00.0) GPU-1",
    ]
    assert result.diff()[0]["before"] == "persistence_mode: off\npower_limit: 500 W\n"
    assert result.diff()[0]["after"] == "persistence_mode: on\npower_limit: 300 W\n"
