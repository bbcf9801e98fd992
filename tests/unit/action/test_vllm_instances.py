"""The controller half of vllm_instances: options and plan in, plain generations out."""

from __future__ import annotations

import json

import pytest

from ansible_collections.gpufleet.inference.plugins.action.vllm_instances import render
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

GPU = {"devices": [{"uuid": "GPU-a", "name": "NVIDIA L40S", "minor": 0}]}
ENTRY = {
    "name": "chat",
    "fits": True,
    "state": "started",
    "engine_version": "0.32.0",
    "model": "tiny",
    "port": 8000,
    "devices": ["GPU-a"],
    "arguments": ["serve", "/srv/models/tiny"],
    "environment": {},
    "settings": {"name": "chat"},
    "api_key_file": "/etc/keys/chat",
}
PLAN = {"instances": [ENTRY, {"name": "old", "fits": True, "state": "absent"}]}


def test_every_entry_of_the_plan_becomes_a_plain_generation():
    chat, old = render(PLAN, {}, GPU, {})
    assert json.loads(json.dumps(chat)) == {**chat, "start_after": [], "key_files": ["/etc/keys/chat"]}
    assert (chat["gpu"], chat["state"]) == ("NVIDIA L40S", "started")
    assert (old["state"], old["unit"]) == ("absent", "")


def test_flags_may_come_as_text_from_the_command_line():
    args = {"hardening": {"network": "false"}, "numa": "no", "ready_deadline": "60"}
    unit = render(PLAN, args, GPU, {})[0]["unit"]
    assert "RestrictAddressFamilies" not in unit
    assert "# Hardening off: network" in unit
    assert "--deadline 60 " in unit


def test_a_flag_that_is_neither_true_nor_false_is_named():
    with pytest.raises(FleetError, match=r"vllm_instances_hardening\.network"):
        render(PLAN, {"hardening": {"network": "maybe"}}, GPU, {})


def test_paths_and_users_of_the_role_reach_the_unit():
    unit = render(PLAN, {"user": "serve", "group": "gpu", "engine_root": "/srv/vllm"}, GPU, {})[0]["unit"]
    assert "User=serve\nGroup=gpu\n" in unit
    assert "/srv/vllm/0.32.0/bin/vllm serve" in unit
