"""GPUs known by their PCI device id."""

from __future__ import annotations

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import catalogue
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

DATA = planner_data()["gpus"]
GIB = 2**30


def test_every_entry_names_sources_that_the_file_explains():
    for device_id, entry in DATA["devices"].items():
        assert len(device_id) == 4 and int(device_id, 16)
        source = set(entry["source"])
        assert source <= set(DATA["sources"]) and "pci" in source
        assert ("torch_gib" in entry) == (len(source & {"torch", "torch_sibling"}) == 1), device_id
        assert (entry["nvml_mib"] is not None) == (len(source & {"smi", "smi_one", "unverified"}) == 1), device_id
        assert len(source & {"capability", "capability_chip"}) == 1, device_id
    assert set(DATA["torch_rule"]["source"]) <= set(DATA["sources"])


def test_a_total_taken_from_a_sibling_has_one_of_the_same_architecture_and_size():
    entries = DATA["devices"].values()
    recorded = {
        (entry["architecture"], entry["nvml_mib"], entry["torch_gib"])
        for entry in entries
        if "torch" in entry["source"]
    }
    for device_id, entry in DATA["devices"].items():
        if "torch_sibling" in entry["source"]:
            assert (entry["architecture"], entry["nvml_mib"], entry["torch_gib"]) in recorded, device_id


def test_torch_never_sees_more_than_nvml():
    for device_id, entry in DATA["devices"].items():
        if entry["nvml_mib"]:
            nvml = entry["nvml_mib"] * 2**20
            assert 0.95 * nvml < catalogue.torch_total(DATA, entry) < nvml, device_id


def test_the_rule_for_unrecorded_gpus_never_promises_more_than_the_recorded_ones_got():
    for device_id, entry in DATA["devices"].items():
        if "torch_gib" in entry:
            derived = catalogue.torch_total(DATA, {key: value for key, value in entry.items() if key != "torch_gib"})
            assert derived <= entry["torch_gib"] * GIB * 1.004, device_id


def test_ids_are_found_with_and_without_prefix():
    assert catalogue.entry(DATA, "0x2330")["name"] == catalogue.entry(DATA, "2330")["name"] == "NVIDIA H100 80GB HBM3"
    assert catalogue.entry(DATA, "0x1234") is None


def test_a_bare_host_gets_expected_devices_in_pci_order():
    pci = [
        {"address": "0000:2a:00.0", "vendor_id": "0x10de", "device_id": "0x2330"},
        {"address": "0000:18:00.0", "vendor_id": "0x10de", "device_id": "0x2330"},
        {"address": "0000:03:00.0", "vendor_id": "0x1a03", "device_id": "0x2000"},
        {"address": "0000:3b:00.0", "vendor_id": "0x10de", "device_id": "0xffff"},
    ]
    devices, unknown = catalogue.expected_devices(DATA, pci)
    assert [device["pci_address"] for device in devices] == ["0000:18:00.0", "0000:2a:00.0"]
    assert unknown == ["0000:3b:00.0"]
    assert devices[0]["expected"] and devices[0]["compute_capability"] == "9.0"
    assert devices[0]["memory"]["total"] == int(79.18 * GIB)


def test_a_gpu_that_shares_the_hosts_memory_has_none_of_its_own():
    devices, _unknown = catalogue.expected_devices(
        DATA, [{"address": "000f:01:00.0", "vendor_id": "0x10de", "device_id": "0x2e12"}]
    )
    assert devices[0]["memory"]["total"] is None
