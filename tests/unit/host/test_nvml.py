from __future__ import annotations

import base64
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path

import pynvml
import pytest
from fake_nvml import CRASH, GIB, HANG, FakeNvml, device

from ansible_collections.gpufleet.inference.plugins.module_utils._host import nvml
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _bindings


def fake(count=2, faults=None, **changes):
    return FakeNvml([device(index, **changes) for index in range(count)], faults)


def test_every_field_of_a_device_is_read():
    reading = nvml.read(fake(1, mig=2, processes=[(42, 3 * GIB)]), 10)
    values = reading.values
    assert reading.fatal is None
    assert values["count"] == 1
    assert values["cuda_driver_version"] == "12.4"
    assert values["driver.userland"] == "550.163.01"
    assert values["devices.0.pci_address"] == "0000:18:00.0"
    assert values["devices.0.architecture"] == "hopper"
    assert values["devices.0.compute_capability"] == "9.0"
    assert values["devices.0.memory"] == {"total": 80 * GIB, "reserved": GIB, "free": 78 * GIB, "used": GIB}
    assert values["devices.0.persistence_mode"] is True
    assert values["devices.0.compute_mode"] == "default"
    assert values["devices.0.power.max_mw"] == 700_000
    assert values["devices.0.processes"] == [{"pid": 42, "used": 3 * GIB, "kind": "compute"}]
    assert [entry["profile"] for entry in values["devices.0.mig"]["devices"]] == ["1g.10gb", "1g.10gb"]
    assert [entry["gi"] for entry in values["devices.0.mig"]["devices"]] == [7, 8]
    assert values["devices.0.health.recovery_action"] == "none"
    assert values["fabric.devices.0"]["state"] == "completed"
    assert {path: failure.code for path, failure in reading.failures.items()} == {
        "devices.0.health.retired_pages_pending": nvml.NOT_SUPPORTED
    }


def test_nvswitch_hosts_show_their_links_and_others_their_path():
    assert nvml.read(fake(2, nvlinks=18), 10).values["links.matrix"] == [["X", "NV18"], ["NV18", "X"]]
    assert nvml.read(fake(2), 10).values["links.matrix"] == [["X", "SYS"], ["SYS", "X"]]
    assert nvml.read(fake(2), 10).values["links.peer_access"] == [[True, True], [True, True]]


def test_a_driver_without_the_second_memory_call_leaves_reserved_open():
    class Old(FakeNvml):
        def _nvmlDeviceGetMemoryInfo(self, gpu, version=None):
            if version:
                raise self.NVMLError(nvml.FUNCTION_MISSING)
            return super()._nvmlDeviceGetMemoryInfo(gpu)

    memory = nvml.read(Old([device(0)]), 10).values["devices.0.memory"]
    assert memory["reserved"] is None
    assert memory["total"] == 80 * GIB


def test_older_structures_and_process_lists_are_tried():
    faults = {("nvmlDeviceGetComputeRunningProcesses_v3", None): nvml.FUNCTION_MISSING}
    reading = nvml.read(fake(1, faults, processes=[(7, GIB)]), 10)
    assert reading.values["devices.0.processes"][0]["pid"] == 7


@pytest.mark.parametrize("code", [3, 4, 13, 16, 17, 999, 12345])
def test_a_failing_call_costs_its_own_field_only(code):
    reading = nvml.read(fake(2, {("nvmlDeviceGetPersistenceMode", 1): code}), 10)
    assert "devices.1.persistence_mode" not in reading.values
    assert reading.values["devices.0.persistence_mode"] is True
    assert reading.values["devices.1.compute_mode"] == "default"
    failure = reading.failures["devices.1.persistence_mode"]
    assert str(failure).startswith("nvmlDeviceGetPersistenceMode on GPU 1: ")
    assert str(failure).endswith(f"(NVML {code})")


def test_a_lost_gpu_costs_itself_only_and_is_asked_nothing_more():
    reading = nvml.read(fake(3, {("nvmlDeviceGetMemoryInfo", 1): nvml.GPU_LOST}), 10)
    assert "GPU 1: the GPU is lost (NVML 15)" in str(reading.failures["devices.1"])
    assert reading.values["devices.1.name"] == "NVIDIA H100 80GB HBM3"
    assert "devices.1.persistence_mode" not in reading.values
    assert "devices.1.persistence_mode" not in reading.failures
    assert reading.values["devices.2.health.temperature_c"] == 31
    assert reading.values["links.matrix"][0][2] == "SYS"
    assert reading.values["links.matrix"][0][1] is None


def test_a_hang_in_the_initialisation_ends_all_reading_at_the_deadline():
    started = time.monotonic()
    reading = nvml.read(fake(2, {("nvmlInit", None): HANG}), 1)
    assert time.monotonic() - started < 20
    assert reading.values == {}
    assert re.fullmatch(r"nvmlInit_v2: no answer within (0\.\d|1) s", str(reading.fatal))


def test_an_initialisation_slower_than_a_call_may_be_is_waited_for():
    reading = nvml.read(fake(1, {("nvmlInit", None): 2.5}), 20, stall=2)
    assert reading.fatal is None
    assert reading.values["devices.0.name"]


def test_a_device_that_hangs_is_named_and_the_others_are_read():
    started = time.monotonic()
    reading = nvml.read(fake(3, {("nvmlDeviceGetComputeMode", 1): HANG}), 20, stall=1.5)
    assert time.monotonic() - started < 20
    assert str(reading.failures["devices.1"]) == "nvmlDeviceGetComputeMode on GPU 1: no answer within 1.5 s"
    assert reading.values["devices.1.persistence_mode"] is True
    assert reading.values["devices.2.compute_mode"] == "default"
    assert reading.values["links.matrix"][0] == ["X", None, "SYS"]


def test_devices_not_reached_before_the_deadline_say_so():
    faults = {("nvmlDeviceGetUUID", index): HANG for index in range(8)}
    started = time.monotonic()
    reading = nvml.read(fake(8, faults), 1, stall=0.3)
    assert time.monotonic() - started < 20
    assert all(f"devices.{index}" in reading.failures for index in range(8))
    assert str(reading.failures["devices.7"]).startswith("NVML on GPU 7: not read: ")


def test_slow_calls_end_at_the_deadline_with_what_they_gave():
    reading = nvml.read(fake(2, {("nvmlDeviceGetName", None): 1.2, ("nvmlDeviceGetPowerUsage", None): 1.2}), 3, stall=9)
    assert reading.seconds < 20
    assert reading.values["devices.0.name"]
    assert "devices.1" in reading.failures


def test_a_hang_between_devices_costs_the_links_only():
    reading = nvml.read(fake(2, {("nvmlDeviceGetP2PStatus", None): HANG}), 20, stall=1.5)
    assert reading.values["devices.1.health.temperature_c"] == 31
    assert str(reading.failures["links"]) == "nvmlDeviceGetP2PStatus on links: no answer within 1.5 s"


def test_a_crash_of_the_library_is_told_with_its_signal_and_the_others_are_read():
    reading = nvml.read(fake(2, {("nvmlDeviceGetEccMode", 0): CRASH}), 10)
    assert str(reading.failures["devices.0"]) == (
        "nvmlDeviceGetEccMode on GPU 0: the reading process died of signal 11"
    )
    assert reading.values["devices.1.ecc"] == {"current": True, "pending": True}


def test_a_child_that_no_signal_ends_does_not_keep_the_reader():
    kept = []
    started = time.monotonic()
    reading = nvml.read(fake(1, {("nvmlInit", None): HANG}), 1, kill=lambda pid, number: kept.append(pid))
    assert time.monotonic() - started < 20
    assert "no answer" in str(reading.fatal)
    os.kill(kept[0], 0)
    os.kill(kept[0], signal.SIGKILL)
    os.waitpid(kept[0], 0)


def test_an_answer_that_the_bindings_cannot_read_costs_its_field_only():
    class Garbled(FakeNvml):
        def _nvmlDeviceGetUUID(self, gpu):
            return b"\xff".decode()

    reading = nvml.read(Garbled([device(0)]), 10)
    assert str(reading.failures["devices.0.uuid"]) == "nvmlDeviceGetUUID on GPU 0: the answer cannot be read"
    assert reading.values["devices.0.name"]


def asked_names():
    source = Path(nvml.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'"(nvml[A-Z]\w+[a-z0-9])"', source)) - {"nvmlInit_v2", "nvmlDeviceGetMemoryInfo_v2"}
    names = {name for name in names if not name.endswith("_v")}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        names |= {f"nvmlDeviceGet{kind}RunningProcesses_v{version}" for version in (2, 3)}
    names |= set(re.findall(r"nvml\.((?:NVML_|c_nvml|nvml[A-Z])\w+)", source))
    assert len(names) > 40
    return sorted(names)


@pytest.mark.parametrize("name", asked_names())
def test_the_bindings_have_every_name_that_is_asked_of_them_whole_and_trimmed(name):
    assert hasattr(pynvml, name)
    assert hasattr(nvml.load_bindings(_bindings.packed()), name)


def test_trimmed_bindings_refer_to_nothing_that_was_left_out():
    trimmed = nvml.load_bindings(_bindings.packed())
    missing = set()
    for value in vars(trimmed).values():
        code = getattr(value, "__wrapped__", value)
        if isinstance(code, types.FunctionType) and code.__module__ == trimmed.__name__:
            missing |= {name for name in code.__code__.co_names if hasattr(pynvml, name) and not hasattr(trimmed, name)}
    assert missing == set()


def test_the_bindings_travel_with_their_licence():
    text = zlib.decompress(base64.b64decode(_bindings.packed())).decode()
    assert "Redistribution and use in source and binary forms" in text
    assert "nvmlDeviceSetPowerManagementLimit" not in text


def test_the_bindings_load_from_memory_with_nothing_but_python(tmp_path):
    packed = tmp_path / "packed"
    packed.write_text(_bindings.packed())
    program = (
        "import sys, types, pathlib\n"
        "top = 'ansible_collections'\n"
        "for name in (top, f'{top}.gpufleet', f'{top}.gpufleet.inference'):\n"
        "    module = types.ModuleType(name); module.__path__ = [sys.argv[2]]; sys.modules[name] = module\n"
        "from ansible_collections.gpufleet.inference.plugins.module_utils._host import nvml\n"
        "module = nvml.load_bindings(pathlib.Path(sys.argv[1]).read_text())\n"
        "reading = nvml.read(module, 5)\n"
        "print(reading.fatal)\n"
    )
    root = Path(nvml.__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(packed), str(root)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "nvmlInit_v2: libnvidia-ml.so.1 is missing (NVML 12)"
    assert len(packed.read_text()) < 15_000


@pytest.mark.parametrize(
    ("bus", "address"),
    [("00000000:18:00.0", "0000:18:00.0"), ("00010000:AF:00.0", "10000:af:00.0"), ("0000:01:00.0", "0000:01:00.0")],
)
def test_pci_addresses_are_those_of_sysfs(bus, address):
    assert nvml.pci_address(bus) == address


FUNCTIONS = [name[1:] for name in dir(FakeNvml) if name.startswith("_nvml")]


def random_state(seed):
    rng = random.Random(seed)
    count = rng.choice([0, 1, 2, 4, 8])
    devices = [
        device(
            index,
            mig=rng.choice([None, None, 0, 3]),
            nvlinks=rng.choice([0, 18]),
            processes=[(rng.randrange(2, 99999), rng.choice([None, GIB])) for _ in range(rng.randrange(3))],
        )
        for index in range(count)
    ]
    faults = {}
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        where = rng.choice([None, rng.randrange(max(count, 1))])
        code = rng.choice([*(code for code in nvml.CODES if code > 0), 4242, CRASH, 0.001])
        faults[(rng.choice(FUNCTIONS), where)] = code
    if rng.random() < 0.05:
        faults[(rng.choice(FUNCTIONS), rng.choice([None, 0]))] = HANG
    return FakeNvml(devices, faults)


def check_state(seed):
    state = random_state(seed)
    started = time.monotonic()
    reading = nvml.read(state, 1.0, stall=0.2)
    assert time.monotonic() - started < 20, seed
    count = reading.device_count()
    if count is None:
        assert reading.fatal is not None or "devices" in reading.failures, seed
    for index in range(count or 0):
        for field in nvml.DEVICE_FIELDS:
            at = f"devices.{index}.{field}"
            known = [path for path in (*reading.values, *reading.failures) if path == at or path.startswith(at + ".")]
            assert known or f"devices.{index}" in reading.failures, (seed, at)


@pytest.mark.parametrize("seed", range(60))
def test_in_any_state_every_field_has_a_value_or_a_reason_inside_the_deadline(seed):
    check_state(seed)


@pytest.mark.long
def test_in_ten_thousand_states_every_field_has_a_value_or_a_reason():
    for seed in range(10_000):
        check_state(seed)
