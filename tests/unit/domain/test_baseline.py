"""A host against its baseline."""

from __future__ import annotations

import pytest
from version_hosts import NEXT, TODAY, gpu_facts, host_facts, with_switches

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import baseline, version_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import shipped_baselines, version_data

DATA = version_data()
SHIPPED = shipped_baselines()


def compare(gpu, host=None, number=3, own=()):
    wanted = baseline.choose(DATA, SHIPPED, own, number)
    result = baseline.compare(DATA, wanted, gpu, host_facts() if host is None else host, TODAY)
    return result, {row["component"]: row for row in result["components"]}


@pytest.mark.parametrize("item", SHIPPED, ids=lambda item: str(item["number"]))
def test_a_shipped_baseline_keeps_every_rule_and_names_its_sources(item):
    assert version_rules.contradictions(DATA, item) == []
    assert item["title"]
    assert item["source"]
    assert set(item) <= baseline.KEYS


def test_the_promised_sets_are_there():
    sets = {item["number"]: item for item in SHIPPED}
    assert len(sets) == len(SHIPPED)
    said = [(s["driver"], s["cuda"], s["vllm"], s["python"]) for s in sets.values()]
    assert ("550", "12.4", "0.6.3", "3.12") in said
    assert ("580", "12.8", "0.19.1", "3.12") in said
    assert sets[3]["driver"] == "580"
    assert sets[3]["cuda"] == "13.0"


def test_a_host_that_is_as_wanted_is_ok_in_every_component():
    result, rows = compare(gpu_facts())
    assert result["verdict"] == "ok"
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert {"driver", "driver libraries", "kernel modules", "module flavour", "vLLM", "torch"} <= set(rows)


def _without_module(gpu, host):
    del gpu["driver"]["modules_by_kernel"][NEXT]


def _flavour(gpu, host):
    gpu["driver"]["flavour"] = "proprietary"


def _wheel(gpu, host):
    host["engines"][0]["wheels"]["transformers"] = "5.19.0"


def _no_engine(gpu, host):
    host["engines"] = []


def _half_engine(gpu, host):
    host["engines"][0]["complete"] = False


def _other_release_runs(gpu, host):
    gpu["instances"] = [{"name": "chat", "active_state": "active", "record": {"engine_version": "0.31.0"}}]


def _fabric(gpu, host):
    gpu["fabric"].update(switches=4, manager="active")
    host["packages"]["nvidia-fabricmanager"] = {"version": "580.82.07-1", "held": True, "candidate": None}


def _no_fabric(gpu, host):
    gpu["fabric"].update(switches=4, manager="not-found")


def _dcgm(gpu, host):
    host["packages"]["datacenter-gpu-manager-4-cuda12"] = {"version": "1:4.6.0-1", "held": False, "candidate": None}


@pytest.mark.parametrize(
    ("spoil", "component"),
    [
        (lambda gpu, host: gpu["driver"].update(running="570.86.10", installed="570.86.10"), "driver"),
        (lambda gpu, host: gpu["driver"].update(running="580.82.07"), "driver"),
        (lambda gpu, host: gpu["driver"].update(running=None), "driver"),
        (lambda gpu, host: gpu["driver"].update(userland="580.126.09"), "driver libraries"),
        (_without_module, "kernel modules"),
        (_flavour, "module flavour"),
        (lambda gpu, host: gpu.update(cuda_driver_version="12.8"), "CUDA of the driver"),
        (_wheel, "transformers"),
        (_no_engine, "vLLM"),
        (_half_engine, "vLLM"),
        (_other_release_runs, "vLLM"),
        (_fabric, "fabric manager"),
        (_no_fabric, "fabric manager"),
        (_dcgm, "DCGM"),
    ],
)
def test_one_planted_drift_is_found_where_it_is(spoil, component):
    gpu, host = gpu_facts(), host_facts()
    spoil(gpu, host)
    result, rows = compare(gpu, host)
    assert rows[component]["verdict"] == "drift"
    assert result["verdict"] == "drift"


def test_what_could_not_be_read_is_unknown_and_not_drift():
    gpu = gpu_facts(installed=None)
    gpu["unavailable"]["driver.installed"] = "nvidia.ko.xz is compressed"
    gpu["cuda_driver_version"] = None
    result, rows = compare(with_switches(gpu), host_facts() | {"packages": None})
    assert result["verdict"] == "unknown"
    assert rows["driver"]["why"] == "nvidia.ko.xz is compressed"
    assert {rows[name]["verdict"] for name in ("driver", "CUDA of the driver", "DCGM", "fabric manager")} == {"unknown"}


def test_holds_and_candidates_are_shown():
    host = host_facts({"nvidia-driver": "580.95.05-1", "nvidia-smi": "580.95.05-1"})
    host["packages"]["nvidia-driver"].update(held=True, candidate="580.126.09-1")
    _result, rows = compare(gpu_facts(), host)
    assert rows["driver"]["held"] is False
    assert rows["driver"]["candidate"] == "580.126.09-1"
    host["packages"]["nvidia-smi"]["held"] = True
    assert compare(gpu_facts(), host)[1]["driver"]["held"] is True


def test_a_baseline_for_other_gpus_is_an_error_of_the_host():
    result, rows = compare(gpu_facts("v100", flavour="proprietary"))
    assert result["verdict"] == "error"
    assert "volta" in rows["gpu"]["why"]


@pytest.mark.parametrize(
    ("name", "version", "verdict"),
    [
        ("debian", "12", "ok"),
        ("rocky", "9.6", "ok"),
        ("ubuntu", "24.04", "ok"),
        ("rhel", "8.10", "error"),
        ("opensuse-leap", "15.6", "error"),
        (None, None, "ok"),
    ],
)
def test_a_baseline_for_other_systems_is_an_error_of_the_host(name, version, verdict):
    result, rows = compare(gpu_facts(), host_facts(distribution={"id": name, "version": version}))
    assert result["verdict"] == verdict
    assert ("system" in rows) is (verdict == "error")


def test_a_host_without_nvidia_gpu_is_an_error_and_no_drift():
    result, rows = compare(gpu_facts() | {"pci": [], "devices": []})
    assert result["verdict"] == "error"
    assert list(rows) == ["gpu"]


def test_a_release_that_the_system_cannot_run_is_an_error_even_where_versions_agree():
    result, rows = compare(gpu_facts(), host_facts(glibc="2.27"))
    assert result["verdict"] == "error"
    assert "glibc" in rows["rules"]["why"]


def test_a_driver_that_is_too_old_is_a_drift_because_the_baseline_mends_it():
    result, rows = compare(gpu_facts(driver="535.261.03"))
    assert result["verdict"] == "drift"
    assert "rules" not in rows


def test_own_sets_come_before_the_shipped_ones():
    own = [{"number": 3, "driver": "580.95.05", "title": "ours"}]
    result, rows = compare(gpu_facts(), own=own)
    assert result["title"] == "ours"
    assert set(rows) == {"driver", "driver libraries", "kernel modules"}


@pytest.mark.parametrize(
    ("own", "number", "code", "words"),
    [
        ([], 99, "unknown_baseline", "3: current"),
        ([], None, "unknown_baseline", "baseline_number"),
        ([{"driver": "580"}], 3, "bad_baseline", "number"),
        ([{"number": 9, "drvier": "580"}], 9, "bad_baseline", "drvier"),
        ([{"number": 9, "driver": "550", "vllm": "0.32.0"}], 9, "baseline_contradiction", "needs driver 580.65.06"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_refused_with_the_reason(own, number, code, words):
    with pytest.raises(FleetError) as caught:
        compare(gpu_facts(), own=own, number=number)
    assert caught.value.code == code
    assert words in f"{caught.value.message} {caught.value.hint}"
