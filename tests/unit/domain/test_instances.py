"""The list of instances: completed, or refused in one message."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import (
    Memory,
    normalise,
    same_settings,
)

GOOD = {"name": "chat", "model": "llama", "port": 8000}


def one(**more):
    return normalise([{**GOOD, **more}], "0.19.1")[0]


def problems(*items):
    with pytest.raises(FleetError) as refused:
        normalise(list(items), "0.19.1")
    assert refused.value.code == "bad_instances"
    return refused.value.details["problems"]


def test_defaults_are_filled_in():
    instance = one()
    assert instance.engine_version == "0.19.1"
    assert instance.listen_address == "127.0.0.1"
    assert instance.world_size == 1 and instance.gpu_count == 1
    assert instance.isolation == "exclusive"
    assert instance.memory == Memory("auto")


def test_text_from_the_command_line_is_understood():
    instance = one(port="8000", enforce_eager="yes", max_model_len="4096", tensor_parallel_size="2")
    assert (instance.port, instance.enforce_eager, instance.max_model_len) == (8000, True, 4096)
    assert instance.tensor_parallel_size == 2 and instance.gpu_count == 2


def test_tensor_parallel_size_follows_the_number_of_gpus():
    assert one(gpus=4).tensor_parallel_size == 4
    assert one(gpus=4, pipeline_parallel_size=2).tensor_parallel_size == 2
    assert one(gpus=["GPU-a", "GPU-b"]).tensor_parallel_size == 2


def test_a_mig_profile_is_one_slice():
    instance = one(gpus={"mig": "1g.10gb"})
    assert (instance.mig_profile, instance.isolation, instance.world_size) == ("1g.10gb", "mig", 1)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("auto", Memory()),
        ({"fraction": 0.5}, Memory("fraction", 0.5)),
        ({"kv_cache_bytes": "4GiB"}, Memory("kv_cache_bytes", 4 * 2**30)),
        ({"concurrency": 8}, Memory("concurrency", 8)),
    ],
)
def test_memory_has_four_forms(memory, expected):
    assert one(memory=memory).memory == expected


def test_all_problems_come_in_one_message():
    found = problems(
        {**GOOD, "max_modell_len": 10},
        {"name": "Chat!", "model": "m", "port": 70000},
        {"name": "b", "port": 8000},
        "nonsense",
    )
    text = "; ".join(found)
    assert 'unknown key "max_modell_len", did you mean "max_model_len"?' in text
    assert "bad name" in text and "70000 is outside 1 to 65535" in text
    assert 'instance "b": model is missing' in text
    assert "entry 4 is not a mapping" in text


def test_duplicate_names_and_ports_are_refused():
    assert problems(GOOD, {**GOOD, "port": 8001}) == ['name "chat" is used 2 times']
    assert problems(GOOD, {**GOOD, "name": "other"}) == ["port 8000 is used by chat, other"]


def test_an_absent_instance_needs_only_its_name_and_frees_its_port():
    instances = normalise([GOOD, {"name": "old", "state": "absent", "port": 8000}], "0.19.1")
    assert [instance.state for instance in instances] == ["started", "absent"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"environment": {"HF_TOKEN": "x"}}, "HF_TOKEN would show a secret"),
        ({"environment": {"VLLM_API_KEY": "x"}}, "api_key_file"),
        ({"environment": {"DB_PASSWORD": "x"}}, "DB_PASSWORD would show a secret"),
        ({"extra_args": ["--api-key", "x"]}, "api_key_file"),
        ({"extra_args": ["--api_key=x"]}, "api_key_file"),
        ({"extra_args": "--seed 1"}, "is not a list"),
        ({"gpus": 2, "tensor_parallel_size": 4}, "tensor × pipeline × data parallel is 4"),
        ({"gpus": 3, "pipeline_parallel_size": 2}, "does not divide"),
        ({"gpus": {"mig": "1g.10gb"}, "isolation": "shared"}, "isolation is shared"),
        ({"memory": {"fraction": 1.5}}, "outside 0 to 1"),
        ({"memory": {"share": 1}}, "none of fraction"),
        ({"listen_address": "everywhere"}, "not an IP address"),
        ({"api_key_file": "key"}, "not an absolute path"),
        ({"state": "running"}, "none of started"),
        ({"dtype": "bf16"}, "none of auto"),
        ({"enforce_eager": "maybe"}, "neither true nor false"),
        ({"environment": {"A B": "x"}}, "not the name of a variable"),
    ],
)
def test_a_bad_value_is_named_with_what_is_wanted(more, text):
    found = problems({**GOOD, **more})
    assert len(found) == 1
    assert text in found[0]


def test_engine_version_may_be_missing_nowhere():
    with pytest.raises(FleetError) as refused:
        normalise([GOOD], None)
    assert "engine_version is missing" in refused.value.message


def test_a_record_from_before_a_key_existed_is_still_the_same_wish():
    instance = one(environment={"A": "b"}, gpus=2)
    recorded = json.loads(json.dumps(instance.settings()))
    assert same_settings(recorded, instance)
    del recorded["isolation"]
    assert same_settings(recorded, instance)
    del recorded["environment"]
    assert not same_settings(recorded, instance)
    assert not same_settings(None, instance)


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_keys = st.sampled_from(
    [*GOOD, "gpus", "memory", "lora", "environment", "extra_args", "isolation", "speculative", "zzz"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(_keys, _junk, max_size=6), max_size=3))
def test_any_junk_is_refused_with_a_message_or_accepted(items):
    try:
        found = normalise(items, "0.19.1")
    except FleetError as refused:
        assert refused.code == "bad_instances" and refused.message
    else:
        assert len(found) == len(items)


def test_a_message_that_ends_with_a_question_has_no_further_stop():
    with pytest.raises(FleetError) as caught:
        normalise([{**GOOD, "enforce_eagr": True}], "0.19.1")
    assert 'did you mean "enforce_eager"?' in str(caught.value)
    assert "?." not in str(caught.value)
