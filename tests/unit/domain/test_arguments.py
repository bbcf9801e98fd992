"""Command lines and environments in the form of each release."""

from __future__ import annotations

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import arguments, releases
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import normalise
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import Device
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

TABLE = releases.table(planner_data()["releases"])
GOOD = {"name": "chat", "model": "llama", "port": 8000}
GPU = Device("GPU-1111", 3, "0000:18:00.0", "NVIDIA H100 80GB HBM3", "hopper", (9, 0), 80 << 30, 80 << 30)
SLICE = Device(
    "MIG-1", 0, "0000:18:00.0", "H100", "hopper", (9, 0), 10 << 30, 10 << 30, parent="GPU-1", mig_profile="1g.10gb"
)
SETTINGS = arguments.Settings("/models/llama", "auto", 8192, 256, 8192, 0.9012, None)


def checked(version="0.19.1", mig=False, **more):
    return arguments.check(normalise([{**GOOD, **more}], version)[0], TABLE.release(version), TABLE, mig=mig)


def only_problem(version="0.19.1", mig=False, **more):
    found = checked(version, mig, **more).problems
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("version", "flag", "texts"),
    [
        ("0.19.1", "--swap-space", ["does not exist in vLLM 0.19.1", "0.5.4 to 0.17.1", "V1 does not swap"]),
        ("0.23.0", "--device-idss", ["not known"]),
        ("0.19.1", "--max-loggprobs", ["did you mean --max-logprobs?"]),
        ("0.9.2", "--attention-backend", ["since 0.13.0"]),
        ("0.19.1", "--kv-cache-memory", ["exists in no vLLM release", "kv_cache_bytes"]),
        ("0.19.1", "--task", ["0.6.4 to 0.12.0", "--runner"]),
        ("0.8.5", "--no-disable-log-stats", ["--disable-log-stats has no --no- form"]),
    ],
)
def test_flags_that_the_release_does_not_know_are_refused_with_the_range_and_the_way_out(version, flag, texts):
    problem = only_problem(version, extra_args=[flag, "4"])
    for text in texts:
        assert text in problem


def test_a_flag_is_accepted_exactly_where_the_release_has_it():
    assert not checked("0.17.1", extra_args=["--swap-space", "4"]).problems
    assert checked("0.18.0", extra_args=["--swap-space", "4"]).problems


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("VLLM_CRASH_HANDLER", ["exists in no vLLM release"]),
        ("VLLM_PROFILE_MEMORY", ["exists in no vLLM release", "--profiler-config"]),
        ("VLLM_LOGING_LEVEL", ["did you mean VLLM_LOGGING_LEVEL?"]),
        ("VLLM_ATTENTION_BACKEND", ["0.5.4 to 0.14.1", "--attention-backend"]),
        ("VLLM_HTTP_MAX_REQUEST_BODY_SIZE", ["since 0.33.0"]),
        ("CUDA_DISABLE_DEPRECATED_PTX", ["exists in no vLLM release"]),
        ("CUDA_VISIBLE_DEVICES", ["set `gpus:`"]),
    ],
)
def test_variables_that_the_release_does_not_know_are_refused(name, texts):
    problem = only_problem(environment={name: "1"})
    for text in texts:
        assert text in problem


def test_variables_of_others_pass():
    assert not checked(environment={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 4}).problems


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"VLLM_LOGGING_LEVEL": "LOUD"}, "none of DEBUG"),
        ({"VLLM_PORT": "tcp://10.0.0.1:80"}, "not a whole number"),
        ({"VLLM_NO_USAGE_STATS": "perhaps"}, "neither 0 nor 1"),
    ],
)
def test_values_of_variables_are_checked(environment, text):
    assert text in only_problem(environment=environment)


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--max-model-len", "10"], "set `max_model_len:`"),
        (["--max_model_len=10"], "set `max_model_len:`"),
        (["-tp", "2"], "set `tensor_parallel_size:`"),
        (["--gpu-memory-utilization", "0.5"], "set `memory:`"),
        (["--seed", "many"], "not a whole number"),
        (["--scheduling-policy", "random"], "none of fcfs"),
        (["--seed"], "needs a value"),
        (["--enable-prefix-caching=yes"], "takes no value"),
        (["--compilation-config", "{bad"], "is not JSON"),
        (["stray"], "is no flag"),
        (["--cpu-offload-gb", "much"], "is not a number"),
        (["vllm-engine"], "exists in no vLLM release; use instead: `vllm serve`"),
        (["-tp2"], "set `tensor_parallel_size:`"),
        (["--config", "/etc/x.yaml"], "the plan must see every setting"),
        (["--uds", "/run/x"], "listens on its `port:`"),
        (["--tensor-parallel", "2"], "not known to vLLM"),
    ],
)
def test_values_and_planned_settings_in_extra_args_are_refused(extra, text):
    assert text in only_problem(extra_args=extra)


def test_good_extra_args_pass_and_memory_movers_are_named():
    found = checked(
        extra_args=[
            "--seed",
            "-1",
            "--no-enable-prefix-caching",
            "--cpu-offload-gb=4",
            "--compilation-config.level",
            "3",
        ]
    )
    assert not found.problems
    assert found.values["--enable-prefix-caching"] is False
    assert found.moves_memory == ("--compilation-config", "--cpu-offload-gb")


def test_a_short_flag_takes_its_value_attached():
    assert not checked("0.11.2", extra_args=["-O3"]).problems
    assert checked("0.11.2", extra_args=["-O3"]).values == {"--compilation-config": "3"}


def test_deprecated_flags_are_a_warning():
    assert "deprecated" in checked("0.9.2", extra_args=["--enable-reasoning"]).warnings[0]


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("version", "mig", "extra", "refused"),
    [
        ("0.19.1", False, [], False),
        ("0.19.1", False, ["--enable-sleep-mode"], True),
        ("0.20.1", False, ["--enable-sleep-mode"], False),
        ("0.32.0", True, [], True),
        ("0.32.0", False, ["--kv-transfer-config", '{"kv_connector": "x"}'], True),
    ],
)
def test_allocator_settings_are_checked_against_the_features_they_break(version, mig, extra, refused):
    assert bool(checked(version, mig, environment=EXPANDABLE, extra_args=extra).problems) is refused


def test_command_holds_the_planned_settings_and_only_known_flags():
    for version in TABLE.names:
        release = TABLE.release(version)
        instance = normalise(
            [{**GOOD, "gpus": 2, "enforce_eager": True, "kv_cache_dtype": "fp8", "lora": {"max_loras": 2}}], version
        )[0]
        words = arguments.command(instance, release, SETTINGS)
        assert words[:2] == ["serve", "/models/llama"]
        assert words[words.index("--gpu-memory-utilization") + 1] == "0.9012"
        assert words[words.index("--served-model-name") + 1 :][:2] == ["llama", "chat"]
        for word in words:
            assert not word.startswith("--") or release.has_flag(word), (version, word)


def test_lora_and_speculative_settings_are_written_as_the_engine_reads_them():
    instance = normalise(
        [
            {
                **GOOD,
                "lora": {"modules": {"b": "/l/b", "a": "/l/a"}},
                "speculative": {"method": "ngram", "num_speculative_tokens": 3},
            }
        ],
        "0.19.1",
    )[0]
    words = arguments.command(instance, TABLE.release("0.19.1"), SETTINGS)
    assert words[words.index("--lora-modules") + 1 :][:2] == ["a=/l/a", "b=/l/b"]
    assert '{"method":"ngram","num_speculative_tokens":3}' in words


@pytest.mark.parametrize(
    ("version", "devices", "expected"),
    [
        ("0.23.0", [GPU], "3"),
        ("0.24.0", [GPU], "GPU-1111"),
        ("0.19.1", [SLICE], "0"),
        ("0.32.0", [SLICE], "0"),
    ],
)
def test_visible_devices_have_the_form_the_release_accepts(version, devices, expected):
    assert arguments.visible_devices(TABLE.release(version), devices) == expected


def test_environment_is_quiet_and_local_by_default():
    release = TABLE.release("0.19.1")
    pair = normalise([{**GOOD, "gpus": 2}], "0.19.1")[0]
    found = arguments.environment(pair, release, [GPU, GPU])
    assert found["VLLM_NO_USAGE_STATS"] == found["HF_HUB_OFFLINE"] == found["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == "lo"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    single = normalise([{**GOOD, "environment": {"HF_HUB_OFFLINE": 0}}], "0.19.1")[0]
    assert arguments.environment(single, release, [GPU])["HF_HUB_OFFLINE"] == "0"
    assert "NCCL_SOCKET_IFNAME" not in arguments.environment(single, release, [GPU])


def test_mps_clients_get_a_limit_that_holds_the_planned_bytes():
    instance = normalise([{**GOOD, "isolation": "mps"}], "0.19.1")[0]
    found = arguments.environment(instance, TABLE.release("0.19.1"), [GPU], (10 << 30) + 1, "/run/mps")
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10241M"
    assert found["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
