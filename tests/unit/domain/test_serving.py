"""Generations: what decides their digest, and which step an instance needs."""

from __future__ import annotations

import copy
import json

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import serving
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.serving import Found, Generation, Options

GPU = {
    "devices": [
        {"uuid": "GPU-a", "minor": 0, "numa_node": 0},
        {"uuid": "GPU-b", "minor": 3, "numa_node": 1, "mig": {"devices": [{"uuid": "MIG-1"}]}},
    ]
}
HOST = {"cpus": {"count": 32, "numa": {"0": "0-15", "1": "16-31"}}}


def entry(**changes):
    result = {
        "name": "chat",
        "fits": True,
        "state": "started",
        "model": "tiny",
        "model_path": "/var/lib/vllm/models/tiny",
        "engine_version": "0.32.0",
        "port": 8000,
        "listen_address": "127.0.0.1",
        "devices": ["GPU-a"],
        "budget": [{"free": {"bytes": 5}}],
        "arguments": ["serve", "/var/lib/vllm/models/tiny"],
        "environment": {"CUDA_VISIBLE_DEVICES": "GPU-a"},
        "settings": {"name": "chat", "port": 8000},
        "start_after": ["alpha"],
        "kept": False,
    }
    result.update(changes)
    return copy.deepcopy(result)


def make(**changes) -> Generation:
    return serving.generation(entry(**changes), Options(), GPU, HOST)


def test_the_digest_follows_the_command_and_not_the_moment():
    base = make()
    assert make(kept=True, budget=[{"free": {"bytes": 6}}]).digest == base.digest
    assert make(arguments=["serve", "/other"]).digest != base.digest
    assert make(settings={"name": "chat", "port": 8001}).digest != base.digest
    assert len(base.digest) == 12


def test_only_an_instance_that_pools_is_asked_for_a_vector_and_no_other_unit_changes():
    assert make(task="generate").unit == make().unit
    with_flag = [line for line in make(task="pooling").unit.splitlines() if line not in make().unit.splitlines()]
    assert len(with_flag) == 1 and with_flag[0].startswith("ExecStartPost=") and with_flag[0].endswith(" --pooling")


def test_a_kept_plan_gives_the_same_record_byte_for_byte():
    first = make()
    again = serving.generation({**json.loads(first.record), "kept": True, "state": "started"}, Options(), GPU, HOST)
    assert (again.record, again.unit, again.digest) == (first.record, first.unit, first.digest)


def test_an_entry_that_does_not_fit_or_has_no_device_is_refused_with_its_name():
    with pytest.raises(FleetError, match="chat: 60 GiB are needed"):
        make(fits=False, reason={"code": "refused_kv", "text": "60 GiB are needed"})
    with pytest.raises(FleetError, match="chat is planned on GPU-z"):
        make(devices=["GPU-z"])


def test_an_instance_runs_next_to_its_gpus_when_they_share_a_node():
    assert "CPUAffinity=16-31\nNUMAPolicy=preferred\nNUMAMask=1" in make(devices=["GPU-b"]).unit
    assert "CPUAffinity" not in make(devices=["GPU-a", "GPU-b"]).unit
    one_node = serving.generation(entry(), Options(), GPU, {"cpus": {"numa": {"0": "0-15"}}})
    assert "NUMA" not in one_node.unit
    assert "NUMA" not in serving.generation(entry(), Options(numa=False), GPU, HOST).unit


def test_a_model_in_a_home_directory_stays_readable():
    assert "ProtectHome=yes" in make().unit
    assert "ProtectHome=read-only" in make(model_path="/home/models/tiny").unit


D1, D2 = "1" * 12, "2" * 12


def found(**values) -> Found:
    return Found("chat", **values)


UP = {"active_state": "active", "unit_linked": True, "enabled": True, "exists": True}
ONE = {**UP, "current": D1, "generations": frozenset({D1})}
TWO = {**UP, "current": D2, "generations": frozenset({D2})}


@pytest.mark.parametrize(
    ("state", "before", "consent", "verb", "due"),
    [
        ("started", {}, False, "start", False),
        ("started", ONE, False, "none", False),
        (
            "started",
            {**ONE, "active_state": "failed"},
            False,
            "start",
            False,
        ),
        (
            "started",
            {**TWO, "active_state": "inactive"},
            False,
            "start",
            False,
        ),
        ("started", TWO, False, "stage", True),
        ("started", {**UP, "current": D2, "generations": frozenset({D1, D2})}, False, "none", True),
        ("started", {**UP, "current": D2, "generations": frozenset({D1, D2})}, True, "restart", False),
        (
            "started",
            {**TWO, "active_state": "activating"},
            False,
            "stage",
            True,
        ),
        ("started", {**ONE, "enabled": False}, False, "stage", False),
        ("stopped", ONE, False, "stop", False),
        ("stopped", {}, False, "stage", False),
        ("stopped", {"exists": True, "generations": frozenset({D1})}, False, "none", False),
        ("absent", ONE, False, "remove", False),
        ("absent", {}, False, "none", False),
    ],
)
def test_the_step_of_an_instance(state, before, consent, verb, due):
    step = serving.decide(Generation("chat", state, D1, "u", "r"), found(**before), allow_disruption=consent)
    assert (step.verb, step.due) == (verb, due)
    if due:
        finding = serving.due_finding(step)
        assert "due: run upgrade" in finding["text"]
        assert "-e site_allow_disruption=true" in finding["remedy"]


def paths(state: str, before: Found, consent: bool = False) -> dict[str, str]:
    wanted = Generation("chat", state, D1, "u", "r")
    step = serving.decide(wanted, before, allow_disruption=consent)
    return {item["path"]: item.get("state", "file") for item in serving.files(wanted, before, step)}


def test_staging_leaves_current_and_the_running_unit_alone():
    staged = paths("started", found(**UP, current=D2, generations=frozenset({D2})))
    assert f"/etc/vllm/chat/{D1}/instance.json" in staged
    assert "/etc/vllm/chat/current" not in staged
    assert f"/etc/vllm/chat/{D2}" not in staged


def test_a_restart_moves_current_keeps_the_way_back_and_drops_what_is_older():
    older = "3" * 12
    moved = paths("started", found(**UP, current=D2, generations=frozenset({D2, older})), consent=True)
    assert moved["/etc/vllm/chat/current"] == "link"
    assert moved[f"/etc/vllm/chat/{older}"] == "absent"
    assert f"/etc/vllm/chat/{D2}" not in moved


def test_removal_names_only_paths_of_that_instance():
    gone = paths("absent", found(**UP, current=D1, generations=frozenset({D1})))
    assert set(gone.values()) == {"absent"}
    assert all("chat" in path for path in gone)


def test_starts_follow_start_after_and_end_in_a_cycle_too():
    entries = [
        Generation(name, "started", start_after=after) for name, after in (("b", ()), ("a", ("b",)), ("c", ("a",)))
    ]
    assert serving.order(entries) == ["b", "a", "c"]
    assert serving.order([Generation("x", "started", start_after=("x",))]) == ["x"]
