"""The plan of a host: proven sums, kept command lines, refusals in figures, alternatives that hold."""

from __future__ import annotations

import copy
import json
import math
import random
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import plan as plan_module
from ansible_collections.gpufleet.inference.plugins.module_utils._domain import profiles, releases
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import PARTS
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.plan import plan
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

GIB = 2**30
DATA = planner_data()
TABLE = releases.table(DATA["releases"])
PROPERTY = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


def config(*, hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336, vocab=128256, length=131072, **more):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **more,
    }


MODELS = {
    "tiny": {"config": config(hidden=512, layers=4, heads=8, kv_heads=4, inner=1024, vocab=32000, length=4096)},
    "8b": {"config": config()},
    "70b": {"config": config(hidden=8192, layers=80, heads=64, inner=28672)},
}


def gpu(index, total=79.0, used=0.0, **more):
    return {
        "index": index,
        "uuid": f"GPU-{index:04d}",
        "pci_address": f"0000:{index + 16:02x}:00.0",
        "name": "NVIDIA H100 80GB HBM3",
        "architecture": "hopper",
        "compute_capability": "9.0",
        "memory": {
            "total": int(total * GIB),
            "reserved": 0,
            "free": int((total - used) * GIB),
            "used": int(used * GIB),
        },
        "processes": [],
        "mig": {"mode": False, "devices": []},
        "numa_node": 0,
        **more,
    }


def request(*instances, gpus=1, version="0.19.1", devices=None, **more):
    return {
        "data": DATA,
        "gpu": {"devices": devices if devices is not None else [gpu(index) for index in range(gpus)]},
        "models": MODELS,
        "engine_version": version,
        "instances": [
            {"name": f"i{position}", "model": "8b", "port": 8000 + position, **instance}
            for position, instance in enumerate(instances)
        ],
        **more,
    }


def only(answer):
    assert len(answer["instances"]) == 1
    return answer["instances"][0]


def value(entry, flag):
    words = entry["arguments"]
    return words[words.index(flag) + 1] if flag in words else None


def assert_never_overcommits(answer, wanted):
    """The upper ends of all instances fit into what is free, less the margin, on every device."""
    for device in answer["gpus"]:
        parts = [
            sum(part[term]["high"] for term in PARTS)
            for entry in answer["instances"]
            if entry["fits"]
            for part in entry["budget"]
            if part["uuid"] == device["uuid"]
        ]
        proven = sum(part["bytes"] for part in device["instances"])
        assert proven <= max(0, device["free"] - device["margin"]), device
        if parts and all(
            entry["kv_cache_memory_bytes"] is not None for entry in answer["instances"] if entry["budget"]
        ):
            assert sum(parts) == proven
    assert len(answer["instances"]) == len(wanted["instances"])


def assert_admitted(answer):
    """In start order, the engine's own check (free >= total x utilisation) passes for every instance."""
    free = {device["uuid"]: device["free"] for device in answer["gpus"]}
    order = sorted(answer["instances"], key=lambda entry: (len(entry["start_after"]), entry["name"]))
    for entry in order:
        counts_all = (0, 8, 0) <= releases.parse_version(entry["engine_version"]) < (0, 9, 1)
        for part in entry["budget"]:
            left = part["total"]["bytes"] if counts_all else free[part["uuid"]]
            assert part["total"]["bytes"] * entry["gpu_memory_utilization"] <= left
            free[part["uuid"]] -= sum(part[term]["high"] for term in PARTS)


def test_an_instance_gets_the_whole_gpu_and_its_exact_command_line():
    entry = only(plan(request({})))
    assert entry["fits"] and entry["devices"] == ["GPU-0000"] and entry["reason"] is None
    assert entry["max_model_len"] == 131072
    assert entry["arguments"][:2] == ["serve", "/var/lib/vllm/models/8b"]
    assert value(entry, "--max-num-seqs") == "1024" and value(entry, "--max-num-batched-tokens") == "8192"
    assert int(value(entry, "--kv-cache-memory-bytes")) == entry["kv_cache_memory_bytes"]
    assert value(entry, "--gpu-memory-utilization") == f"{entry['gpu_memory_utilization']:.4f}"
    budget = entry["budget"][0]
    assert set(budget) == {"uuid", "total", "free", "requested", *PARTS, "headroom"}
    for term in set(budget) - {"uuid"}:
        assert budget[term]["source"] in ("exact", "modelled", "measured", "expected")
        assert budget[term]["low"] <= budget[term]["bytes"] <= budget[term]["high"]
    assert entry["kv_cache_memory_bytes"] == budget["kv_cache"]["bytes"] > 40 * GIB


def test_before_the_byte_lever_the_utilisation_alone_sizes_the_cache():
    entry = only(plan(request({}, version="0.10.1")))
    assert entry["fits"] and "--kv-cache-memory-bytes" not in entry["arguments"]
    budget = entry["budget"][0]
    assert budget["kv_cache"]["source"] == "modelled"
    assert budget["kv_cache"]["low"] < budget["kv_cache"]["high"]
    assert budget["requested"]["bytes"] <= budget["free"]["bytes"]


def test_two_instances_on_one_gpu_share_it_and_start_one_after_the_other():
    wanted = request({"isolation": "shared"}, {"isolation": "shared"})
    answer = plan(wanted)
    first, second = answer["instances"]
    assert answer["fits"] and first["devices"] == second["devices"]
    assert first["start_after"] == [] and second["start_after"] == ["i0"]
    assert abs(first["kv_cache_memory_bytes"] - second["kv_cache_memory_bytes"]) <= 2 * 2**21
    assert_never_overcommits(answer, wanted)
    assert_admitted(answer)


def test_releases_that_count_all_used_memory_get_a_cumulative_utilisation():
    together = plan(request({"isolation": "shared"}, {"isolation": "shared"}, version="0.8.5"))
    first, second = together["instances"]
    assert together["fits"]
    assert second["gpu_memory_utilization"] > 0.8 > first["gpu_memory_utilization"]
    later = plan(request({"isolation": "shared"}, {"isolation": "shared"}, version="0.9.2"))
    assert later["instances"][1]["gpu_memory_utilization"] < 0.6


def test_memory_wishes_are_met():
    fraction = only(plan(request({"memory": {"fraction": 0.5}})))
    assert 0.49 < fraction["gpu_memory_utilization"] <= 0.5
    fixed = only(plan(request({"memory": {"kv_cache_bytes": "4GiB"}})))
    assert 4 * GIB - 2**22 < fixed["kv_cache_memory_bytes"] <= 4 * GIB
    assert fixed["max_model_len"] < 131072
    several = only(plan(request({"memory": {"concurrency": 4}, "max_model_len": 8192})))
    assert 4.0 <= several["max_concurrency"] < 4.1


def test_auto_length_is_the_longest_that_serves_the_wanted_concurrency():
    free = only(plan(request({"memory": {"concurrency": 8}}, devices=[gpu(0, total=40)])))
    assert free["fits"] and 4096 < free["max_model_len"] < 131072
    assert free["max_concurrency"] >= 8.0
    longer = {"memory": {"concurrency": 8}, "max_model_len": free["max_model_len"] + 64}
    assert not only(plan(request(longer, devices=[gpu(0, total=40)])))["fits"]


def test_what_does_not_fit_is_refused_in_figures_with_alternatives_that_hold():
    wanted = request({"model": "70b", "max_model_len": 8192}, gpus=4)
    answer = plan(wanted)
    entry = only(answer)
    assert not answer["fits"] and not entry["fits"]
    assert entry["reason"]["code"] in ("refused_kv", "oom_risk", "refused_free_memory")
    assert "GiB" in entry["reason"]["text"] and "weights" in entry["reason"]["text"]
    assert entry["arguments"] == [] and entry["alternatives"]
    for alternative in entry["alternatives"]:
        again = copy.deepcopy(wanted)
        again["instances"][0].update(alternative["change"])
        found = only(plan(again))
        assert found["fits"]
        assert found["kv_cache_tokens"] == alternative["kv_cache_tokens"]
        assert found["max_model_len"] == alternative["max_model_len"]


def test_alternatives_do_not_take_from_those_that_fit():
    wanted = request({"isolation": "shared", "max_model_len": 32768}, {"isolation": "shared", "model": "70b"}, gpus=1)
    answer = plan(wanted)
    assert [entry["fits"] for entry in answer["instances"]] == [True, False]


def test_a_running_instance_keeps_its_command_line_though_its_surroundings_changed():
    wanted = request({"isolation": "shared"}, gpus=2)
    before = only(plan(wanted))
    facts = wanted["gpu"]
    held = 60 * GIB
    facts["devices"][0]["processes"] = [{"pid": 1, "used": held, "unit": "vllm-i0.service"}]
    facts["devices"][0]["memory"]["free"] -= held + 100 * 2**20
    record = json.loads(json.dumps({key: item for key, item in before.items() if key not in ("kept", "state")}))
    facts["instances"] = [{"name": "i0", "unit": "vllm-i0.service", "active_state": "active", "record": record or {}}]
    wanted["profiles"] = [{"key": "x", "model_digest": "y", "figures": {"weights": 1}}]
    wanted["instances"].append({"name": "new", "model": "8b", "port": 9000, "isolation": "shared"})
    after = plan(wanted)
    kept = next(entry for entry in after["instances"] if entry["name"] == "i0")
    assert kept == {**before, "kept": True}
    fresh = next(entry for entry in after["instances"] if entry["name"] == "new")
    assert fresh["fits"] and not fresh["kept"] and fresh["devices"] == ["GPU-0001"]
    assert after["gpus"][1]["headroom"] >= after["gpus"][1]["margin"]
    wanted["instances"][0]["max_model_len"] = 8192
    changed = next(entry for entry in plan(wanted)["instances"] if entry["name"] == "i0")
    assert not changed["kept"] and changed["max_model_len"] == 8192
    del wanted["instances"][0]["max_model_len"]
    again = next(entry for entry in plan({**wanted, "replan": True})["instances"] if entry["name"] == "i0")
    assert not again["kept"]


def test_a_changed_instance_never_waits_for_one_that_waits_for_it():
    wanted = request(*[{"isolation": "shared", "memory": {"kv_cache_bytes": "2GiB"}}] * 3)
    before = plan(wanted)["instances"]
    assert [entry["start_after"] for entry in before] == [[], ["i0"], ["i0", "i1"]]
    for entry in before:
        running(wanted, entry["name"], 20, entry)
    wanted["instances"][0]["max_model_len"] = 2048
    after = plan(wanted)["instances"]
    assert [entry["kept"] for entry in after] == [False, True, True]
    assert [entry["start_after"] for entry in after] == [[], ["i0"], ["i0", "i1"]]
    wanted["instances"][1]["max_model_len"] = 2048
    assert [entry["start_after"] for entry in plan(wanted)["instances"]] == [[], ["i0"], ["i0", "i1"]]


def test_a_stopped_instance_keeps_its_record_only_while_it_fits():
    wanted = request({}, gpus=1)
    record = only(plan(wanted))
    wanted["gpu"]["instances"] = [
        {"name": "i0", "unit": "vllm-i0.service", "active_state": "inactive", "record": record}
    ]
    assert only(plan(wanted))["kept"]
    wanted["gpu"]["devices"] = [gpu(0, used=30)]
    smaller = only(plan(wanted))
    assert not smaller["kept"] and smaller["fits"]
    assert smaller["kv_cache_memory_bytes"] < record["kv_cache_memory_bytes"]


def test_a_taken_port_is_refused_unless_the_instance_itself_listens():
    listener = {"address": "0.0.0.0", "port": 8000, "pid": 77, "process": "nginx", "unit": "nginx.service"}
    entry = only(plan(request({}, host={"ports": [listener]})))
    assert entry["reason"]["code"] == "port_conflict" and "nginx" in entry["reason"]["text"]
    listener["unit"] = "vllm-i0.service"
    assert only(plan(request({}, host={"ports": [listener]})))["fits"]
    listener.update(unit="other.service", address="10.0.0.1")
    assert only(plan(request({}, host={"ports": [listener]})))["fits"]


@pytest.mark.parametrize(
    ("instance", "version", "code", "text"),
    [
        ({"extra_args": ["--swap-space", "4"]}, "0.19.1", "unknown_argument", "0.5.4 to 0.17.1"),
        ({"environment": {"VLLM_CRASH_HANDLER": "1"}}, "0.19.1", "unknown_argument", "in no vLLM release"),
        ({"max_model_len": 200000}, "0.19.1", "unsupported_by_engine", "131072"),
        ({"tensor_parallel_size": 3}, "0.19.1", "bad_shape", "32 attention heads"),
        ({"quantization": "bitsandbytes"}, "0.33.0", "unsupported_by_engine", "bitsandbytes"),
        ({"kv_cache_dtype": "nvfp4"}, "0.20.0", "unsupported_by_device", "10.0"),
        ({"kv_cache_dtype": "nvfp4"}, "0.19.1", "unknown_argument", "none of auto"),
        ({"block_size": 48}, "0.17.1", "unknown_argument", "`block_size:`"),
        ({"gpus": 16}, "0.19.1", "unsupported_by_device", "several hosts"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "0.19.1", "unsupported_by_engine", "below max_num_seqs"),
        ({"enable_expert_parallel": True}, "0.7.3", "unknown_argument", "since 0.8.0"),
    ],
)
def test_what_engine_or_device_refuses_is_refused_with_a_code(instance, version, code, text):
    entry = only(plan(request(instance, gpus=8, version=version)))
    assert entry["reason"] and entry["reason"]["code"] == code, entry["reason"]
    assert text in entry["reason"]["text"]


@pytest.mark.parametrize(
    ("method", "version", "fits"),
    [
        ("auto-round", "0.14.1", True),
        ("auto-round", "0.33.0", True),
        ("compressed_tensors", "0.19.1", True),
        ("bitsandbytes", "0.33.0", False),
        ("homemade", "0.33.0", True),
    ],
)
def test_a_checkpoints_quantisation_is_looked_up_under_the_names_of_the_release(method, version, fits):
    wanted = request({"model": "q"}, version=version)
    scheme = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": True}
    wanted["models"] = {"q": {"config": config(quantization_config=scheme)}}
    entry = only(plan(wanted))
    assert entry["fits"] is fits, entry["reason"]
    assert any("homemade" in text for text in entry["warnings"]) == (method == "homemade")


ENCODER = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "vocab_size": 50368,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
}


def test_a_model_that_pools_says_so_and_takes_a_whole_prompt_in_one_step():
    wanted = request({"model": "encoder"}, {"model": "embedder"}, {}, gpus=3)
    embedder = {"config": config(length=32768), "files": [{"name": "modules.json", "bytes": 300}]}
    wanted["models"] = {**MODELS, "encoder": {"config": ENCODER}, "embedder": embedder}
    encoder, embedder, chat = plan(wanted)["instances"]
    assert [entry["task"] for entry in (encoder, embedder, chat)] == ["pooling", "pooling", "generate"]
    assert encoder["kv_cache_tokens"] == 0 and value(encoder, "--kv-cache-memory-bytes") is None
    assert value(encoder, "--max-num-batched-tokens") == "16384"
    assert value(embedder, "--max-num-batched-tokens") == "32768"
    assert value(chat, "--max-num-batched-tokens") == "8192"


def test_a_running_unit_that_waits_for_a_token_from_a_model_that_pools_is_not_kept():
    wanted = request({"model": "encoder"})
    wanted["models"] = {"encoder": {"config": ENCODER}}
    record = only(plan(wanted))
    running = {"name": "i0", "unit": "vllm-i0.service", "active_state": "activating"}
    wanted["gpu"]["instances"] = [{**running, "record": record}]
    assert only(plan(wanted))["kept"]
    wanted["gpu"]["instances"] = [{**running, "record": {**record, "task": "generate"}}]
    assert not only(plan(wanted))["kept"]


def test_old_gpus_and_new_releases_do_not_meet():
    volta = gpu(0, total=31, name="Tesla V100-SXM2-32GB", compute_capability="7.0")
    entry = only(plan(request({}, devices=[volta], version="0.20.0")))
    assert entry["reason"]["code"] == "unsupported_by_device" and "7.5" in entry["reason"]["text"]
    older = only(plan(request({}, devices=[volta], version="0.19.1")))
    assert older["fits"] and value(older, "--dtype") == "half" and any("bfloat16" in text for text in older["warnings"])


def test_a_bare_host_is_planned_from_the_catalogue_and_marked():
    wanted = request({})
    wanted["gpu"] = {
        "devices": [],
        "pci": [
            {"address": "0000:18:00.0", "vendor_id": "0x10de", "device_id": "0x2330"},
            {"address": "0000:2a:00.0", "vendor_id": "0x10de", "device_id": "0xdead"},
        ],
    }
    answer = plan(wanted)
    entry = only(answer)
    assert entry["fits"] and entry["budget"][0]["total"]["source"] == "expected"
    assert answer["gpus"][0]["expected"] and answer["findings"][0]["code"] == "unknown_gpu"


@pytest.mark.parametrize("named", [True, False])
def test_a_silent_nvml_is_refused_in_figures_and_never_planned_from_the_catalogue(named):
    mute = gpu(0, compute_capability=None, memory={"total": None, "reserved": None, "free": None, "used": None})
    wanted = request({}, {"gpus": 2}, devices=[{**mute, "index": None}, {**mute, "index": None}] if named else [])
    wanted["gpu"]["pci"] = [
        {"address": f"0000:{number}:00.0", "vendor_id": "0x10de", "device_id": "0x2330"} for number in (18, 19)
    ]
    wanted["gpu"]["driver"] = {"running": "580.95.05"}
    wanted["gpu"]["unavailable"] = {"nvml": "no answer within 20 s"}
    wanted["gpu"]["findings"] = [
        {"code": "nvml_unavailable", "text": "NVML tells nothing: no answer.", "remedy": "Look for Xid lines."}
    ]
    answer = plan(wanted)
    assert not answer["fits"] and [finding["code"] for finding in answer["findings"]] == ["nvml_silent"]
    assert not any(device["expected"] for device in answer["gpus"])
    for entry in answer["instances"]:
        assert entry["reason"]["code"] == "unsupported_by_device" and entry["budget"] == []
        text = entry["reason"]["text"]
        assert all(word in text for word in ("0 can be used", "0, 1:", "580.95.05", "2 GPU(s)", "20 s", "Xid lines"))


def test_a_gpu_of_unknown_capability_is_left_out_and_its_neighbour_serves():
    answer = plan(request({}, devices=[gpu(0, compute_capability=None), gpu(1)]))
    assert only(answer)["devices"] == ["GPU-0001"]
    both = only(plan(request({"gpus": 2}, devices=[gpu(0, compute_capability=None), gpu(1)])))
    assert "0: its compute capability is not known" in both["reason"]["text"]


def test_a_mig_slice_is_planned_with_its_own_memory():
    slices = [
        {
            "uuid": "MIG-1",
            "profile": "1g.10gb",
            "gi": 7,
            "ci": 0,
            "memory": {"total": int(9.75 * GIB), "free": int(9.7 * GIB)},
        }
    ]
    device = gpu(0, mig={"mode": True, "devices": slices})
    entry = only(plan(request({"model": "tiny", "gpus": {"mig": "1g.10gb"}}, devices=[device])))
    assert entry["fits"] and entry["devices"] == ["MIG-1"]
    assert entry["budget"][0]["total"]["bytes"] == int(9.75 * GIB)
    assert entry["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert any("experimental" in text for text in entry["warnings"])


def test_mps_limit_covers_what_the_engine_asks_for():
    entry = only(plan(request({"isolation": "mps", "memory": {"kv_cache_bytes": "8GiB"}})))
    limit = int(entry["environment"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].split("=")[1].rstrip("M")) * 2**20
    budget = entry["budget"][0]
    assert budget["requested"]["bytes"] <= limit < budget["free"]["bytes"]


def test_shared_memory_of_host_and_gpu_leaves_room_for_the_system():
    device = gpu(0, name="NVIDIA GB10", compute_capability="12.1", memory={"total": None, "free": None, "used": None})
    host = {"ram": {"total": 120 * GIB, "available": 110 * GIB}}
    answer = plan(request({}, devices=[device], host=host, version="0.32.0"))
    entry = only(answer)
    assert entry["fits"] and answer["gpus"][0]["margin"] > 6 * GIB
    assert any("shares the host's memory" in text for text in entry["warnings"])


def test_malformed_input_is_an_error_and_not_a_plan():
    with pytest.raises(FleetError) as refused:
        plan(request({"model": "unheard"}))
    assert refused.value.code == "unknown_model" and "8b" in refused.value.message
    with pytest.raises(FleetError) as refused:
        plan(request({}, version="0.19.7"))
    assert refused.value.code == "unknown_release"
    with pytest.raises(FleetError) as refused:
        plan(request({"colour": "red"}))
    assert refused.value.code == "bad_instances"


def test_a_broken_model_is_an_answer_that_names_the_problem():
    wanted = request({"model": "broken"})
    wanted["models"] = {"broken": {"config": {"model_type": "llama", "hidden_size": "wide"}}}
    entry = only(plan(wanted))
    assert entry["reason"]["code"] == "bad_shape" and "hidden_size" in entry["reason"]["text"]


def test_what_is_wrong_with_a_models_files_is_the_reason():
    wanted = request({"model": "gone"}, {"model": "cut"}, gpus=2)
    finding = {"code": "x", "severity": "error", "subject": "m"}
    wanted["models"] = {
        "gone": {"config": None, "findings": [{**finding, "text": "/m/gone does not exist.", "remedy": "Bring it."}]},
        "cut": {**MODELS["8b"], "findings": [{**finding, "text": "a.safetensors is cut off.", "remedy": ""}]},
    }
    gone, cut = plan(wanted)["instances"]
    assert gone["reason"] == {"code": "bad_shape", "text": "/m/gone does not exist. Bring it."}
    assert cut["reason"] == {"code": "bad_shape", "text": "a.safetensors is cut off."}
    assert gone["alternatives"] == []


def test_absent_instances_take_nothing():
    answer = plan(request({"state": "absent"}, {}))
    assert [entry["state"] for entry in answer["instances"]] == ["absent", "started"]
    assert answer["fits"] and answer["instances"][0]["devices"] == []


def test_listening_for_everybody_without_a_key_is_a_finding():
    answer = plan(request({"listen_address": "0.0.0.0"}))
    assert [finding["code"] for finding in answer["findings"]] == ["open_listener"]
    safe = plan(request({"listen_address": "0.0.0.0", "api_key_file": "/etc/key"}))
    assert safe["findings"] == []


def test_an_old_driver_is_a_finding():
    wanted = request({}, version="0.20.0")
    wanted["gpu"]["driver"] = {"running": "570.124.06"}
    assert plan(wanted)["findings"][0]["code"] == "driver_too_old"
    wanted["gpu"]["driver"] = {"running": "580.65.06"}
    assert plan(wanted)["findings"] == []


def running(wanted, name, held, record=None, device=0):
    """Let an instance of ours hold memory on a device."""
    fact = wanted["gpu"]["devices"][device]
    fact["processes"].append({"pid": 1000 + device, "used": int(held * GIB), "unit": f"vllm-{name}.service"})
    fact["memory"]["free"] -= int(held * GIB)
    wanted["gpu"].setdefault("instances", []).append(
        {"name": name, "unit": f"vllm-{name}.service", "active_state": "active", "record": record or {}}
    )


def test_a_new_instance_does_not_count_on_memory_that_a_due_one_still_holds():
    wanted = request({"isolation": "shared", "memory": {"kv_cache_bytes": "2GiB"}}, {"isolation": "shared"})
    running(wanted, "i0", 50, {"settings": {"other": "wishes"}})
    answer = plan(wanted)
    due, new = answer["instances"]
    assert answer["fits"] and not due["kept"]
    planned = sum(part["high"] for term, part in new["budget"][0].items() if term in PARTS)
    assert planned <= (79 - 50) * GIB
    replanned = plan({**wanted, "replan": True})["instances"][1]
    assert replanned["kv_cache_memory_bytes"] > new["kv_cache_memory_bytes"] + 20 * GIB


def test_memory_of_an_absent_instance_is_free_and_that_of_an_unlisted_one_is_not():
    wanted = request({}, {"name": "old", "state": "absent"})
    running(wanted, "old", 50)
    assert plan(wanted)["instances"][0]["kv_cache_memory_bytes"] > 50 * GIB
    wanted["instances"].pop()
    unlisted = plan(wanted)
    assert unlisted["gpus"][0]["foreign"] >= 50 * GIB
    assert unlisted["instances"][0]["kv_cache_memory_bytes"] < 20 * GIB


def test_a_process_whose_memory_is_not_told_counts_as_planned():
    wanted = request({"isolation": "shared", "memory": {"kv_cache_bytes": "2GiB"}}, {"isolation": "shared"})
    before = plan(wanted)["instances"][0]
    running(wanted, "i0", 20, before)
    wanted["gpu"]["devices"][0]["processes"][0]["used"] = None
    answer = plan(wanted)
    assert answer["instances"][0]["kept"] and answer["instances"][1]["fits"]
    assert answer["gpus"][0]["foreign"] < 3 * GIB


def test_a_measured_start_takes_the_place_of_the_model():
    wanted = request({"memory": {"kv_cache_bytes": "4GiB"}})
    wanted["models"] = {"8b": {**MODELS["8b"], "digest": "d1"}}
    before = only(plan(wanted))
    figures = {"weights": int(15.5 * GIB), "cuda_graphs": int(0.5 * GIB)}
    wanted["profiles"] = [profiles.make(before, "NVIDIA H100 80GB HBM3", figures)]
    after = only(plan(wanted))
    assert after["budget"][0]["weights"] == {
        "bytes": figures["weights"],
        "source": "measured",
        "low": figures["weights"] - 2**24,
        "high": figures["weights"] + 2**24,
    }
    assert after["budget"][0]["cuda_graphs"]["source"] == "measured"
    wanted["engine_version"] = "0.32.0"
    other = only(plan(wanted))
    assert other["budget"][0]["weights"]["source"] == "measured"
    assert other["budget"][0]["cuda_graphs"]["source"] == "modelled"


def test_adapters_drafts_and_offload_move_the_budget():
    plain = only(plan(request({"memory": {"kv_cache_bytes": "4GiB"}})))["budget"][0]["weights"]["bytes"]

    def weights_of(**more):
        wanted = request({"memory": {"kv_cache_bytes": "4GiB"}, **more})
        return only(plan(wanted))["budget"][0]["weights"]["bytes"]

    adapters = weights_of(lora={"max_loras": 4, "max_lora_rank": 64})
    assert 0.3 * GIB < adapters - plain < 2 * GIB
    draft = {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 3}
    assert plain < weights_of(speculative=draft) < plain + GIB
    assert weights_of(extra_args=["--cpu-offload-gb", "4"]) == plain - 4 * GIB


def test_a_draft_model_is_named_by_its_path():
    entry = only(plan(request({"speculative": {"method": "draft_model", "model": "tiny"}})))
    assert '"model":"/var/lib/vllm/models/tiny"' in value(entry, "--speculative-config")


def test_missing_peer_access_is_a_warning():
    wanted = request({"gpus": 2}, gpus=2)
    wanted["gpu"]["links"] = {"matrix": [["X", "SYS"], ["SYS", "X"]], "peer_access": [[True, False], [False, True]]}
    assert any("no peer access between GPU-0000 and GPU-0001" in text for text in only(plan(wanted))["warnings"])


def test_the_pipe_directory_is_that_of_the_one_daemon_that_runs():
    wanted = request({"isolation": "mps"})
    assert any("0 MPS control daemons" in text for text in only(plan(wanted))["warnings"])
    wanted["gpu"]["mps"] = [{"pid": 5, "pipe_directory": "/run/mps/0", "user": "root"}]
    entry = only(plan(wanted))
    assert entry["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps/0" and entry["warnings"] == []


def test_gpus_whose_memory_cannot_be_read_are_not_taken_for_shared_ones():
    wanted = request({}, devices=[gpu(0, memory={"total": None, "free": None})])
    wanted["host"] = {"ram": {"total": 500 * GIB, "available": 400 * GIB}}
    entry = only(plan(wanted))
    assert entry["reason"]["code"] == "unsupported_by_device" and "memory is not known" in entry["reason"]["text"]


def test_a_changed_instance_stays_on_its_gpus_when_they_still_serve():
    wanted = request({"isolation": "shared", "max_model_len": 8192}, devices=[gpu(0, used=40), gpu(1), gpu(2)])
    assert only(plan(wanted))["devices"] == ["GPU-0000"]
    running(wanted, "i0", 20, {"devices": ["GPU-0002"], "settings": {"max_model_len": 4096}}, device=2)
    moved = only(plan(wanted))
    assert not moved["kept"] and moved["devices"] == ["GPU-0002"]
    wanted["instances"][0].update(gpus=2)
    assert len(only(plan(wanted))["devices"]) == 2


@pytest.mark.parametrize(
    "damage",
    [
        {"budget": "?"},
        {"budget": [{"uuid": "GPU-0000"}]},
        {"budget": [{"uuid": "GPU-0000", **{part: {"bytes": 1, "source": "exact", "high": 1} for part in PARTS}}]},
        {"devices": ["GPU-9"]},
        {"devices": 7},
    ],
)
def test_a_damaged_record_is_planned_anew(damage):
    wanted = request({})
    record = only(plan(wanted))
    running(wanted, "i0", 60, {**record, **damage})
    entry = only(plan(wanted))
    assert entry["fits"] and not entry["kept"]


@pytest.mark.parametrize(
    "facts",
    [
        {"devices": [None]},
        {"devices": [gpu(0, memory={"total": "much"})]},
        {"devices": [gpu(0, mig={"mode": True, "devices": [1]})]},
        {"devices": [gpu(0)], "instances": [None]},
    ],
)
def test_facts_of_another_shape_are_malformed_input(facts):
    with pytest.raises(FleetError) as caught:
        plan(request({}, gpu=facts))
    assert caught.value.code == "bad_facts" and "gpu_facts" in caught.value.hint


@pytest.mark.parametrize("facts", ["a path", None, ["x"]])
def test_model_facts_of_another_shape_are_malformed_input(facts):
    wanted = request({"model": "odd"})
    wanted["models"] = {"odd": facts}
    with pytest.raises(FleetError) as refused:
        plan(wanted)
    assert refused.value.code == "bad_models"


def test_a_config_of_another_shape_is_a_bad_model():
    wanted = request({"model": "odd"})
    wanted["models"] = {"odd": {"config": ["x"]}}
    assert only(plan(wanted))["reason"]["code"] == "bad_shape"


def test_instances_are_packed_on_few_gpus_or_spread_over_all():
    wishes = [{"isolation": "shared", "max_model_len": 4096, "memory": {"concurrency": 1}}] * 3
    packed = plan(request(*wishes, gpus=3))
    assert {entry["devices"][0] for entry in packed["instances"]} == {"GPU-0000"}
    spread = plan(request(*wishes, gpus=3, placement="spread"))
    assert len({entry["devices"][0] for entry in spread["instances"]}) == 3


def test_no_instance_takes_a_long_context_at_the_cost_of_anothers_place():
    wanted = request(*[{"isolation": "shared"}] * 3, devices=[gpu(0)])
    answer = plan(wanted)
    assert answer["fits"]
    lengths = [entry["max_model_len"] for entry in answer["instances"]]
    assert max(lengths) - min(lengths) <= 16 and 10_000 < lengths[0] < 131072
    assert_never_overcommits(answer, wanted)
    assert_admitted(answer)


def test_the_old_engine_takes_a_prompt_in_one_step_unless_it_is_long():
    short = only(plan(request({"max_model_len": 16384}, version="0.7.3")))
    assert value(short, "--max-num-batched-tokens") == "16384"
    long = only(plan(request({"max_model_len": 65536}, version="0.7.3")))
    assert value(long, "--max-num-batched-tokens") == "2048"


def test_a_gpu_that_needs_a_reset_gets_nobody():
    sick = gpu(0, health={"recovery_action": "reset"})
    assert only(plan(request({}, devices=[sick, gpu(1)])))["devices"] == ["GPU-0001"]
    entry = only(plan(request({}, devices=[sick])))
    assert entry["reason"]["code"] == "unsupported_by_device" and "needs a reset" in entry["reason"]["text"]


def test_a_port_of_an_instance_that_is_removed_is_free():
    listener = {"address": "127.0.0.1", "port": 8000, "pid": 5, "process": "vllm", "unit": "vllm-old.service"}
    wanted = request({}, {"name": "old", "state": "absent", "port": 8000}, host={"ports": [listener]})
    assert plan(wanted)["instances"][0]["fits"]
    wanted["instances"].pop()
    assert only(plan(wanted))["reason"]["code"] == "port_conflict"


# -- properties --------------------------------------------------------------------------------------------------------

_versions = st.sampled_from(["0.6.3", "0.7.3", "0.8.5", "0.9.2", "0.10.2", "0.14.1", "0.19.1", "0.24.0", "0.33.0"])
_wishes = st.fixed_dictionaries(
    {"model": st.sampled_from(sorted(MODELS)), "isolation": st.sampled_from(["exclusive", "shared"])},
    optional={
        "gpus": st.sampled_from([1, 2, 4]),
        "max_model_len": st.sampled_from([512, 4096]),
        "memory": st.sampled_from(
            ["auto", {"fraction": 0.3}, {"fraction": 0.9}, {"kv_cache_bytes": "2GiB"}, {"concurrency": 4}]
        ),
        "enforce_eager": st.booleans(),
        "max_num_seqs": st.sampled_from([8, 256]),
        "engine_version": _versions,
    },
)
_sizes = st.lists(st.floats(4, 180), min_size=1, max_size=4)


def _random_request(wishes, sizes, used):
    devices = [gpu(index, total=size, used=min(used, size)) for index, size in enumerate(sizes)]
    return request(*wishes, devices=devices)


@PROPERTY
@given(st.lists(_wishes, min_size=1, max_size=4), _sizes, st.floats(0, 20))
def test_no_gpu_is_ever_overcommitted(wishes, sizes, used):
    wanted = _random_request(wishes, sizes, used)
    answer = plan(wanted)
    assert_never_overcommits(answer, wanted)
    for entry in answer["instances"]:
        assert entry["fits"] == (entry["reason"] is None) == bool(entry["arguments"])


@PROPERTY
@given(st.lists(_wishes, min_size=1, max_size=3), _sizes)
def test_every_start_is_admitted_by_the_engines_own_check(wishes, sizes):
    assert_admitted(plan(_random_request(wishes, sizes, 0)))


@PROPERTY
@given(_wishes, st.floats(4, 100), st.floats(0, 100))
def test_more_memory_never_turns_a_fit_into_a_refusal(wish, size, more):
    wish = {key: item for key, item in wish.items() if key != "memory" or "fraction" not in item}
    count = int(wish.get("gpus", 1))
    small = only(plan(_random_request([wish], [size] * count, 0)))
    large = only(plan(_random_request([wish], [size + more] * count, 0)))
    if small["fits"]:
        assert large["fits"], (small, large["reason"])
        assert large["max_model_len"] >= small["max_model_len"]


@PROPERTY
@given(
    st.lists(_wishes, min_size=2, max_size=6), st.integers(1, 4), _versions, st.lists(st.floats(10, 180), max_size=4)
)
def test_more_memory_on_every_gpu_never_turns_a_host_that_fits_into_one_that_does_not(wishes, count, version, sizes):
    wishes = [{key: item for key, item in wish.items() if key != "memory" or "fraction" not in item} for wish in wishes]
    fits = False
    for size in sorted({*sizes, 69.5, 70.5, 159.0, 161.0}):  # with the steps of the engines' own batches
        wanted = _random_request([{"engine_version": version, **wish} for wish in wishes], [size] * count, 0)
        with mock.patch.object(plan_module, "_alternatives", return_value=[]):  # not asked here, and slow
            answer = plan(wanted)
        assert answer["fits"] or not fits, (size, [entry["reason"] for entry in answer["instances"]])
        fits = fits or answer["fits"]


@pytest.mark.parametrize("version", ["0.9.2", "0.19.1"])
def test_a_larger_gpu_whose_own_batch_is_larger_holds_as_many_instances(version):
    wishes = [{"model": "tiny", "isolation": "shared", "max_model_len": 4096}] * 30
    for size in (69.9, 70.1):
        assert plan(request(*wishes, version=version, devices=[gpu(0, total=size)]))["fits"], size


def test_an_instance_of_the_old_engine_shortens_its_length_for_a_neighbour():
    wishes = {"isolation": "shared"}, {"model": "tiny", "isolation": "shared", "max_model_len": 2048}
    for size in (23.1, 28.2, 40.0):
        first, second = plan(request(*wishes, version="0.6.3", devices=[gpu(0, total=size)]))["instances"]
        assert first["fits"] and second["fits"], size


@PROPERTY
@given(st.lists(_wishes, min_size=1, max_size=4), _sizes, st.randoms())
def test_the_order_of_instances_and_devices_changes_nothing(wishes, sizes, shuffler):
    wanted = _random_request(wishes, sizes, 0)
    other = copy.deepcopy({key: item for key, item in wanted.items() if key != "data"})
    other["data"] = wanted["data"]
    shuffler.shuffle(other["instances"])
    shuffler.shuffle(other["gpu"]["devices"])
    assert plan(wanted) == plan(other)


@PROPERTY
@given(st.lists(_wishes, min_size=1, max_size=3), _sizes)
def test_every_emitted_flag_and_variable_exists_in_the_release(wishes, sizes):
    for entry in plan(_random_request(wishes, sizes, 0))["instances"]:
        release = TABLE.release(entry["engine_version"])
        for word in entry["arguments"]:
            assert not word.startswith("--") or release.has_flag(word), (entry["engine_version"], word)
        for name in entry["environment"]:
            assert not name.startswith("VLLM_") or name in release.environment


@PROPERTY
@given(st.lists(_wishes, min_size=1, max_size=3), _sizes)
def test_alternatives_hold_when_they_are_taken(wishes, sizes):
    wanted = _random_request(wishes, sizes, 0)
    for entry in plan(wanted)["instances"]:
        for alternative in entry["alternatives"]:
            again = copy.deepcopy({key: item for key, item in wanted.items() if key != "data"})
            again["data"] = DATA
            mine = next(item for item in again["instances"] if item["name"] == entry["name"])
            mine.update(alternative["change"])
            found = next(item for item in plan(again)["instances"] if item["name"] == entry["name"])
            assert found["fits"], (alternative, found["reason"])


@PROPERTY
@given(st.lists(_wishes, min_size=1, max_size=3), _sizes)
def test_the_plan_is_plain_data_and_the_same_every_time(wishes, sizes):
    wanted = _random_request(wishes, sizes, 1)
    answer = plan(wanted)
    assert json.loads(json.dumps(answer)) == answer == plan(wanted)
    assert all(math.isfinite(entry.get("max_concurrency", 0)) for entry in answer["instances"])


def test_names_decide_nothing_but_the_order():
    shuffler = random.Random(3)
    names = ["a", "b", "c"]
    shuffler.shuffle(names)
    wanted = request({}, {}, {}, gpus=3)
    for item, name in zip(wanted["instances"], names):
        item["name"] = name
    answer = plan(wanted)
    assert answer["fits"]
    assert sorted(entry["devices"][0] for entry in answer["instances"]) == ["GPU-0000", "GPU-0001", "GPU-0002"]
