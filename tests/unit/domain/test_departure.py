"""A final plan that leaves the first one's error band is told with both figures."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from ansible_collections.gpufleet.inference.plugins.filter.plan_departure import plan_departure
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.departure import NEEDS, departures

GIB = 2**30
MIB = 2**20
ROOT = Path(__file__).resolve().parents[3]


def term(size, band=0):
    return {"bytes": size, "source": "modelled", "low": size - band, "high": size + band}


def a_plan(name="chat", total=79 * GIB, **sizes):
    terms = {"weights": 15 * GIB, "activation": GIB, "non_torch": GIB // 2, "cuda_graphs": GIB // 2, **sizes}
    budget = {key: term(size, GIB // 4) for key, size in terms.items()}
    budget.update(uuid="GPU-a", total=term(total), kv_cache=term(total - 20 * GIB))
    gpu = {"uuid": "GPU-a", "pci_address": "0000:18:00.0", "total": total, "margin": int(0.02 * total)}
    return {"fits": True, "instances": [{"name": name, "fits": True, "budget": [budget]}], "gpus": [gpu]}


def test_the_same_plan_and_one_inside_the_band_are_no_departure():
    assert departures(a_plan(), a_plan()) == []
    assert departures(a_plan(), a_plan(weights=15 * GIB + 250 * MIB, total=78 * GIB)) == []


@pytest.mark.parametrize("which", NEEDS)
@pytest.mark.parametrize("by", [-260 * MIB, 260 * MIB])
def test_a_term_outside_the_band_is_told_with_both_figures(which, by):
    first = a_plan()
    size = first["instances"][0]["budget"][0][which]["bytes"] + by
    (found,) = departures(first, a_plan(**{which: size}))
    assert found.code == "plan_left_band" and found.severity == "error" and found.subject == "chat" and found.remedy
    assert f"{size / GIB:.2f} GiB in the final plan" in found.text and "in the first" in found.text


def test_a_smaller_gpu_than_expected_is_told_and_a_larger_one_is_welcome():
    (found,) = departures(a_plan(), a_plan(total=70 * GIB))
    assert "70.00 GiB in the final plan, 79.00 GiB" in found.text
    assert departures(a_plan(), a_plan(total=95 * GIB)) == []


def test_the_expected_devices_of_a_bare_host_are_the_same_gpus_under_their_pci_address():
    first = a_plan()
    first["gpus"][0]["uuid"] = first["instances"][0]["budget"][0]["uuid"] = "0000:18:00.0"
    assert departures(first, a_plan()) == []
    assert departures(first, a_plan(total=60 * GIB))


def test_instances_of_one_plan_only_are_no_departure():
    both = copy.deepcopy(a_plan())
    both["instances"] += a_plan("new", weights=30 * GIB)["instances"]
    assert departures(a_plan(), both) == departures(both, a_plan()) == []


def test_the_message_names_the_instance_both_figures_and_the_next_step():
    text = plan_departure(a_plan(weights=17 * GIB), a_plan())
    assert text.startswith(
        "chat: weights 17.00 GiB in the final plan, 15.00 GiB (14.75 GiB to 15.25 GiB) in the first."
    )
    assert "next run" in text
    assert plan_departure(a_plan(), a_plan()) == ""


def test_site_compares_its_final_plan_with_its_first():
    plays = yaml.safe_load((ROOT / "playbooks/site.yml").read_text(encoding="utf-8"))
    tasks = next(play for play in plays if play["name"] == "Provision GPU hosts")["tasks"][-1]["block"]
    plans = [
        task for task in tasks if (task.get("ansible.builtin.import_role") or {}).get("name", "").endswith("_plan")
    ]
    assert [bool((task.get("vars") or {}).get("fleet_plan_final")) for task in plans] == [False, True]
