"""Which GPUs an instance gets."""

from __future__ import annotations

import random

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import placement
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import normalise
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.placement import Ledger, choose, host_of

GIB = 2**30


def gpu(index, total=80, used=0, **more):
    return {
        "index": index,
        "uuid": f"GPU-{index:04d}",
        "pci_address": f"0000:{index + 16:02x}:00.0",
        "name": "NVIDIA H100 80GB HBM3",
        "architecture": "hopper",
        "compute_capability": "9.0",
        "memory": {"total": total * GIB, "reserved": 0, "free": (total - used) * GIB, "used": used * GIB},
        "processes": [],
        "mig": {"mode": False, "devices": []},
        "numa_node": index // 4,
        **more,
    }


def instance(**more):
    return normalise([{"name": "a", "model": "m", "port": 8000, **more}], "0.19.1")[0]


def chosen(host, wanted, need=10, ledger=None, spread=False):
    devices, refusal = choose(host, wanted, ledger or Ledger(), lambda device: need * GIB, spread)
    return refusal or [device.index for device in devices]


def test_the_fullest_gpu_that_still_fits_is_taken_and_spread_takes_the_emptiest():
    host = host_of({"devices": [gpu(0), gpu(1, used=40), gpu(2, used=75)]})
    assert chosen(host, instance()) == [1]
    assert chosen(host, instance(), spread=True) == [0]


def test_tensor_parallel_work_stays_inside_an_nvlink_island():
    matrix = [["NV4" if a // 2 == b // 2 else "SYS" for b in range(4)] for a in range(4)]
    host = host_of({"devices": [gpu(0, used=75), gpu(1), gpu(2), gpu(3)], "links": {"matrix": matrix}})
    assert chosen(host, instance(gpus=2)) == [2, 3]


def test_without_nvlink_the_pci_path_decides():
    matrix = [["NODE" if a // 2 == b // 2 else "SYS" for b in range(4)] for a in range(4)]
    host = host_of({"devices": [gpu(0), gpu(1, used=75), gpu(2), gpu(3)], "links": {"matrix": matrix}})
    assert chosen(host, instance(gpus=2)) == [2, 3]


def test_gpus_of_different_kinds_are_not_mixed():
    host = host_of({"devices": [gpu(0), gpu(1, name="NVIDIA L40S", compute_capability="8.9", total=44)]})
    refusal = chosen(host, instance(gpus=2))
    assert refusal.code == "unsupported_by_device" and "of one kind" in refusal.text


def test_named_gpus_are_found_by_uuid_address_and_index():
    host = host_of({"devices": [gpu(0), gpu(1), gpu(2)]})
    for name in ("GPU-0002", "gpu-0002", "0000:12:00.0", "00000000:12:00.0", "2"):
        assert chosen(host, instance(gpus=[name])) == [2]
    assert '"GPU-9" is not on this host' in chosen(host, instance(gpus=["GPU-9"])).text


def test_an_exclusive_gpu_is_given_once():
    host = host_of({"devices": [gpu(0)]})
    ledger = Ledger()
    ledger.add("first", host.devices, [GIB], exclusive=True)
    assert chosen(host, instance(), ledger=ledger).code == "refused_free_memory"
    assert chosen(host, instance(isolation="shared"), ledger=ledger).code == "refused_free_memory"
    shared = Ledger()
    shared.add("first", host.devices, [GIB], exclusive=False)
    assert chosen(host, instance(isolation="shared"), ledger=shared) == [0]
    assert chosen(host, instance(), ledger=shared).code == "refused_free_memory"


def test_what_is_taken_counts():
    host = host_of({"devices": [gpu(0), gpu(1)]})
    ledger = Ledger()
    ledger.add("first", host.devices[:1], [75 * GIB], exclusive=False)
    assert chosen(host, instance(isolation="shared"), ledger=ledger) == [1]
    refusal = chosen(host, instance(isolation="shared"), need=81, ledger=ledger)
    assert refusal.code == "refused_free_memory" and "81.00 GiB" in refusal.text and "78.40 GiB" in refusal.text


def test_foreign_use_is_rounded_up_and_our_own_units_count_as_free():
    ours = [{"pid": 1, "used": 30 * GIB, "unit": "vllm-a.service"}]
    facts = {"devices": [gpu(0, used=31, processes=ours)], "instances": [{"name": "a", "unit": "vllm-a.service"}]}
    device = host_of(facts).devices[0]
    assert device.foreign == GIB and device.available == 79 * GIB
    grown = gpu(0, used=31, processes=ours)
    grown["memory"]["free"] -= 100 * 2**20
    facts["devices"] = [grown]
    later = host_of(facts).devices[0]
    assert later.foreign == GIB + 256 * 2**20


def test_a_little_foreign_growth_inside_the_step_changes_nothing():
    base = gpu(0, used=1)
    base["memory"]["free"] -= 10 * 2**20
    grown = gpu(0, used=1)
    grown["memory"]["free"] -= 110 * 2**20
    assert host_of({"devices": [base]}).devices[0] == host_of({"devices": [grown]}).devices[0]


def test_reserved_memory_is_no_part_of_what_torch_sees():
    fact = gpu(0)
    fact["memory"] = {"total": 80 * GIB, "reserved": GIB, "free": 79 * GIB, "used": 0}
    assert host_of({"devices": [fact]}).devices[0].total == 79 * GIB
    fact["memory"] = {"total": 79 * GIB, "reserved": None, "free": 79 * GIB, "used": 0}
    assert host_of({"devices": [fact]}).devices[0].total == 79 * GIB


def test_reserve_is_kept_free():
    assert host_of({"devices": [gpu(0)]}, reserve=2 * GIB).devices[0].available == 78 * GIB


def mig_gpu(index):
    parts = [
        {
            "uuid": f"MIG-{index}-{gi}",
            "profile": "1g.10gb",
            "gi": gi,
            "ci": 0,
            "memory": {"total": 10 * GIB, "free": (10 - gi % 2) * GIB},
        }
        for gi in (7, 8)
    ]
    return gpu(index, mig={"mode": True, "devices": parts})


def test_slices_stand_in_for_their_gpu_and_only_for_those_who_ask():
    host = host_of({"devices": [mig_gpu(0), gpu(1)]})
    assert chosen(host, instance()) == [1]
    devices, refusal = choose(host, instance(gpus={"mig": "1g.10gb"}), Ledger(), lambda device: int(9.5 * GIB))
    assert not refusal and devices[0].uuid == "MIG-0-8"
    assert "MIG slices 2g.20gb" in chosen(host, instance(gpus={"mig": "2g.20gb"})).text


def test_prohibited_and_unreadable_gpus_are_not_used_and_named():
    host = host_of({"devices": [gpu(0, compute_mode="prohibited"), gpu(1, memory={"total": None, "free": None})]})
    text = chosen(host, instance()).text
    assert "compute mode is prohibited" in text and "memory is not known" in text


def test_more_gpus_than_the_host_has_is_said_to_be_multi_host():
    assert (
        "over several hosts is not supported" in chosen(host_of({"devices": [gpu(0), gpu(1)]}), instance(gpus=16)).text
    )


def test_shared_memory_of_host_and_gpu_comes_from_the_hosts_facts():
    fact = gpu(0, name="NVIDIA GB10", compute_capability="12.1", memory={"total": None, "free": None})
    device = host_of({"devices": [fact]}, ram={"total": 120 * GIB, "available": 100 * GIB}).devices[0]
    assert device.unified and device.total == 120 * GIB and device.available == 100 * GIB


def test_no_devices_is_an_error_that_says_what_to_do():
    with pytest.raises(FleetError) as refused:
        host_of({"devices": []})
    assert refused.value.code == "no_gpu_facts"


def test_the_order_of_the_facts_changes_nothing():
    shuffler = random.Random(7)
    matrix = [["NV18"] * 8 for _ in range(8)]
    facts = [gpu(index, used=index % 3 * 10) for index in range(8)]
    expected = chosen(host_of({"devices": facts, "links": {"matrix": matrix}}), instance(gpus=2))
    for _ in range(20):
        shuffled = facts[:]
        shuffler.shuffle(shuffled)
        assert chosen(host_of({"devices": shuffled, "links": {"matrix": matrix}}), instance(gpus=2)) == expected


def test_distance_without_links_is_the_farthest():
    host = host_of({"devices": [gpu(0), gpu(1)]})
    assert host.between("GPU-0000", "GPU-0001") == placement.UNKNOWN_DISTANCE
    facts = {
        "devices": [gpu(0), gpu(1)],
        "links": {"matrix": [["X", "NV4"], ["NV4", "X"]], "peer_access": [[True, False], [False, True]]},
    }
    host = host_of(facts)
    assert host.between("GPU-0001", "GPU-0000") == placement.NO_PEER_ACCESS
    assert host.no_p2p == {("GPU-0000", "GPU-0001")}


def test_pairs_without_peer_access_are_chosen_last():
    peer = [[True] * 4 for _row in range(4)]
    peer[0][1] = peer[1][0] = False
    matrix = [["PHB"] * 4 for _row in range(4)]
    host = host_of({"devices": [gpu(index) for index in range(4)], "links": {"matrix": matrix, "peer_access": peer}})
    assert chosen(host, instance(gpus=2)) == [0, 2]
