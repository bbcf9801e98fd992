"""Which versions go together, by the shipped rules."""

from __future__ import annotations

import pytest
from version_hosts import KERNEL, NEXT, TODAY, gpu_facts, host_facts, with_switches

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import version_rules
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import version_data

DATA = version_data()
SURE = {"document", "seen", "likely"}


def found(gpu, host=None, vllm="", today=TODAY):
    items = version_rules.findings(DATA, gpu, host or host_facts(), {"vllm": vllm}, today)
    return {item.code: item for item in items}


@pytest.mark.parametrize("section", sorted(set(DATA.rules) - {"sources"}))
def test_every_rule_names_its_source_and_how_sure_it_is(section):
    facts = DATA.rules[section]
    facts = {section: facts} if "source" in facts else facts
    assert facts
    for name, fact in facts.items():
        assert fact["sure"] in SURE, name
        assert fact["source"], name
        assert set(fact["source"]) <= set(DATA.rules["sources"]), name


def test_every_architecture_of_the_catalogue_has_a_rule():
    kinds = {entry["architecture"] for entry in DATA.gpus["devices"].values()}
    assert kinds <= set(DATA.rules["architectures"])
    assert kinds <= set(version_rules.CAPABILITIES)


def test_every_cuda_of_a_release_has_the_floor_of_the_release_table():
    for version, release in DATA.releases.items():
        floor = DATA.rules["cuda"][release["cuda"].split(".")[0]]["floor"]
        assert floor == release["driver_floor"], version


def test_a_host_on_which_everything_agrees_has_no_finding():
    assert found(gpu_facts(), vllm="0.32.0") == {}


# -- three versions of the driver --------------------------------------------------------------------------------------


def test_an_update_without_reboot_is_told_to_reload():
    item = found(gpu_facts(installed="580.126.09", userland="580.126.09"))["driver_library_mismatch"]
    assert "580.95.05" in item.text
    assert "580.126.09" in item.text
    assert item.remedy == "Stop the GPU's users and reload the driver, or reboot."


def test_two_versions_of_one_branch_are_a_mismatch():
    gpu = gpu_facts(driver="570.124.06", userland="570.124.04")
    assert found(gpu)["driver_library_mismatch"].severity == "error"


def test_the_short_version_in_the_message_of_nvml_is_the_same_version():
    assert "driver_library_mismatch" not in found(gpu_facts(driver="580.178.04", userland="580.178"))


@pytest.mark.parametrize(
    ("installed", "word"),
    [("580.95.05", "the module on disk is 580.95.05 too"), ("575.1.1", "Neither a reload nor a reboot would help")],
)
def test_a_mismatch_that_a_reboot_does_not_mend_says_so(installed, word):
    item = found(gpu_facts(installed=installed, userland="580.126.09"))["driver_library_mismatch"]
    assert word in item.remedy
    assert "reboot would help" in item.remedy or "reload would not help" in item.remedy


def test_without_a_module_for_the_running_kernel_a_reboot_is_no_remedy():
    item = found(gpu_facts(installed=None, userland="580.126.09"))["driver_library_mismatch"]
    assert item.remedy.startswith("Build the module for the running kernel first")


def test_a_kernel_without_module_is_found_before_it_is_booted():
    gpu = gpu_facts()
    del gpu["driver"]["modules_by_kernel"][NEXT]
    item = found(gpu)["kernel_without_module"]
    assert NEXT in item.text
    assert KERNEL not in item.text


def test_a_kernel_with_a_module_of_another_version_is_found():
    gpu = gpu_facts()
    gpu["driver"]["modules_by_kernel"][NEXT]["version"] = "580.126.09"
    assert "580.126.09" in found(gpu)["kernel_with_other_module"].text


# -- branch, flavour, GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["550.163.01", "570.195.03", "535.261.03", "525.60.13"])
def test_a_branch_without_fixes_is_named_with_one_that_has_them(driver):
    item = found(gpu_facts(driver=driver))["branch_ended"]
    assert item.severity == "warning"
    assert item.remedy == "Move to branch 580."


def test_the_end_of_a_branch_comes_with_its_date():
    assert "branch_ended" not in found(gpu_facts(), today="2028-06-30")
    assert "branch_ended" in found(gpu_facts(), today="2028-07-01")


def test_a_new_feature_branch_is_a_note():
    assert found(gpu_facts(driver="590.48.01"))["branch_short_lived"].severity == "info"


def test_a_branch_that_drops_the_gpu_is_found_with_its_last_one():
    gpu = gpu_facts("v100", driver="595.71.05", flavour="proprietary")
    item = found(gpu)["branch_drops_gpu"]
    assert item.severity == "error"
    assert "580 is the last branch" in item.text


@pytest.mark.parametrize(
    ("kind", "flavour", "wrong"),
    [
        ("v100", "open", True),
        ("v100", "proprietary", False),
        ("b200", "proprietary", True),
        ("b200", "open", False),
        ("gh200", "proprietary", True),
        ("h100", "proprietary", False),
        ("h100", "open", False),
    ],
)
def test_the_flavour_must_be_one_that_drives_the_gpu(kind, flavour, wrong):
    items = found(gpu_facts(kind, flavour=flavour))
    assert ("wrong_flavour" in items) is wrong


def test_a_gpu_that_nvml_does_not_show_is_known_by_its_pci_id():
    gpu = gpu_facts("v100")
    gpu["devices"] = []
    assert "needs the proprietary one" in found(gpu)["wrong_flavour"].text


def test_a_driver_older_than_the_gpu_is_found():
    assert "550.90.07" in found(gpu_facts("h200", driver="535.261.03"))["driver_older_than_gpu"].text
    assert "driver_older_than_gpu" not in found(gpu_facts("h200", driver="550.163.01"))


# -- companions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvidia-fabricmanager", "nvidia-fabricmanager-580", "nvidia-fabric-manager"])
@pytest.mark.parametrize("version", ["580.95.05-1", "3:580.95.05-1.el9", "580.95.05-0ubuntu0.22.04.1"])
def test_a_fabric_manager_of_the_drivers_version_is_fine(name, version):
    assert found(with_switches(gpu_facts()), host_facts({name: version})) == {}


def test_a_fabric_manager_of_another_version_of_the_branch_is_found():
    items = found(with_switches(gpu_facts()), host_facts({"nvidia-fabricmanager": "580.82.07-1"}))
    assert "580.82.07" in items["fabric_manager_mismatch"].text
    assert "580.95.05" in items["fabric_manager_mismatch"].remedy


def test_nvswitches_without_a_fabric_manager_are_found():
    item = found(with_switches(gpu_facts(), "not-found"))["fabric_manager_missing"]
    assert "802" in item.text


def test_a_package_manager_that_did_not_answer_proves_nothing_missing():
    assert "fabric_manager_missing" not in found(with_switches(gpu_facts()), host_facts() | {"packages": None})


def test_a_fabric_manager_that_is_down_is_found():
    items = found(with_switches(gpu_facts(), "failed"), host_facts({"nvidia-fabricmanager": "580.95.05-1"}))
    assert set(items) == {"fabric_manager_down"}


def test_a_fabric_manager_without_nvswitch_is_a_note_except_where_switches_do_not_show():
    host = host_facts({"nvidia-fabricmanager": "580.95.05-1"})
    assert found(gpu_facts("rtx4090"), host)["fabric_manager_not_needed"].severity == "info"
    assert found(gpu_facts("b200"), host) == {}


@pytest.mark.parametrize(("package", "wrong"), [("12", True), ("13", False)])
def test_dcgm_belongs_to_the_cuda_of_the_driver(package, wrong):
    items = found(gpu_facts(), host_facts({f"datacenter-gpu-manager-4-cuda{package}": "1:4.6.0-1"}))
    assert ("dcgm_of_other_cuda" in items) is wrong


@pytest.mark.parametrize(("kind", "refused"), [("rtx4090", True), ("h100", False)])
def test_forward_compatibility_is_refused_on_geforce(kind, refused):
    items = found(gpu_facts(kind), host_facts({"cuda-compat-13-0": "580.95.05-1"}))
    assert ("compat_on_refused_gpu" in items) is refused
    if refused:
        assert "804" in items["compat_on_refused_gpu"].text


# -- vLLM --------------------------------------------------------------------------------------------------------------


def test_a_release_for_a_newer_cuda_is_refused_with_one_that_runs():
    item = found(gpu_facts(driver="535.261.03"), vllm="0.20.2")["driver_too_old"]
    assert item.severity == "error"
    assert "580.65.06" in item.text
    assert "0.19.1" in item.remedy


def test_a_release_without_kernels_for_the_gpu_is_refused():
    assert "unsupported_by_device" in found(gpu_facts("v100", flavour="proprietary"), vllm="0.32.0")
    assert "unsupported_by_device" in found(gpu_facts("b200"), vllm="0.9.2")


def test_a_c_library_that_is_too_old_is_refused_and_a_python_can_be_brought():
    assert found(gpu_facts(), host_facts(glibc="2.31"), vllm="0.20.2")["unsupported_host"].severity == "error"
    host = host_facts(python=[{"path": "/usr/bin/python3.10", "version": "3.10"}], engines=[])
    assert found(gpu_facts(), host, vllm="0.32.0")["no_python"].severity == "warning"


def test_the_worst_comes_first():
    gpu = gpu_facts("v100", driver="595.71.05", installed="595.71.06", userland="595.71.05")
    items = version_rules.findings(DATA, gpu, host_facts(), {}, TODAY)
    assert [item.severity for item in items] == sorted(
        (i.severity for i in items), key=["error", "warning", "info"].index
    )


# -- sets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"driver": "570", "cuda": "13.0"}, "CUDA 13.0 needs driver 580.65.06 or newer, the set has 570"),
        ({"driver": "580.50", "cuda": "13.0"}, "the set has 580.50"),
        ({"driver": "590", "architectures": ["volta"]}, "580 is their last branch"),
        ({"flavour": "open", "architectures": ["pascal"]}, "flavour open does not drive pascal"),
        ({"flavour": "proprietary", "architectures": ["blackwell"]}, "flavour proprietary does not drive blackwell"),
        ({"flavour": "proprietary", "driver": "620"}, "615 is the last branch with one"),
        ({"driver": "580.95.05", "fabric_manager": "580.82.07"}, "is not the driver's version 580.95.05"),
        ({"driver": "580", "dcgm": "4-cuda12"}, "4-cuda13"),
        ({"vllm": "0.32.0", "driver": "575"}, "needs driver 580.65.06, the set has 575"),
        ({"vllm": "0.32.0", "cuda": "12.8"}, "is built for CUDA 13.0, the set has 12.8"),
        ({"vllm": "0.32.0", "architectures": ["volta"]}, "a volta GPU has compute capability 7.0"),
        ({"vllm": "0.32.0", "python": "3.10"}, "needs Python <3.15,>=3.11, the set has 3.10"),
        ({"vllm": "0.32.0", "torch": "2.10.0"}, "is built with torch 2.13.0"),
        ({"vllm": "0.32.0", "transformers": "4.57.1"}, "needs transformers"),
        ({"vllm": "0.20.2", "systems": ["el-9"]}, "needs glibc 2.35, el-9 has 2.34"),
        ({"vllm": "9.9.9"}, "not in the release table"),
        ({"architectures": ["kepler"]}, "architecture kepler is none of"),
    ],
)
def test_a_set_that_cannot_go_together_is_told_which_rule_it_breaks(wanted, words):
    said = version_rules.contradictions(DATA, wanted)
    assert any(words in text for text in said), said


def test_a_branch_written_without_its_patch_passes_a_floor_inside_it():
    assert version_rules.contradictions(DATA, {"driver": "580", "cuda": "13.0", "vllm": "0.32.0"}) == []


@pytest.mark.parametrize(
    ("wanted", "version", "same"),
    [("580", "580.95.05", True), ("580.95", "580.9", False), ("580.95.05", "580.95", False), ("58", "580.1", False)],
)
def test_a_version_matches_as_far_as_it_is_written(wanted, version, same):
    assert version_rules.matches(wanted, version) is same
