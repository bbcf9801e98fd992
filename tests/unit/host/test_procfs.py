from __future__ import annotations

import os

import pytest
from fake_host import CLOSED, OPEN, FakeHost

from ansible_collections.gpufleet.inference.plugins.module_utils._host import procfs


@pytest.fixture
def host(tmp_path):
    return FakeHost(tmp_path)


def test_gpus_switches_and_other_vendors_are_told_apart(host):
    host.h100("0000:18:00.0").h100("0000:2a:00.0", driver=None)
    host.pci("0000:18:00.1", "0x10de", "0x22ba", "0x040300")  # its audio function
    host.pci("0000:85:00.0", "0x10de", "0x22a3", "0x068000", "nvidia-nvswitch")
    host.pci("0000:05:00.0", "0x1002", "0x74a1", "0x120000", "amdgpu")
    host.pci("0000:00:02.0", "0x8086", "0x4680", "0x030000", "i915")
    host.pci("0000:03:00.0", "0x1a03", "0x2000", "0x030000", "ast")
    ours, others, switches = procfs.pci_gpus(host.root)
    assert [(entry["address"], entry["driver"]) for entry in ours] == [
        ("0000:18:00.0", "nvidia"),
        ("0000:2a:00.0", None),
    ]
    assert ours[0]["device_id"] == "0x2330"
    assert ours[0]["class_id"] == "0x030200"
    assert [entry["device_id"] for entry in others] == ["0x74a1"]
    assert switches == 1


def test_a_host_without_anything_has_nothing(host):
    assert procfs.pci_gpus(host.root) == ([], [], 0)
    assert procfs.running_driver(host.root) == (None, None)
    assert procfs.driver_modules(host.root) == {}
    assert procfs.library_version(host.root, "libcuda.so.1") == (None, None)
    assert procfs.driver_gpus(host.root) == {}


@pytest.mark.parametrize(("text", "flavour"), [(OPEN, "open"), (CLOSED, "proprietary")])
@pytest.mark.parametrize("version", ["535.261.03", "580.82.07", "615.71"])
def test_the_running_driver_and_its_flavour_are_read_from_both_texts(host, text, flavour, version):
    assert procfs.running_driver(host.running(version, text).root) == (version, flavour)


def test_sysfs_alone_tells_the_version_but_not_the_flavour(host):
    assert procfs.running_driver(host.file("/sys/module/nvidia/version", "570.1.2\n").root) == ("570.1.2", None)


@pytest.mark.parametrize("name", ["nvidia.ko", "nvidia-current.ko", "nvidia-current-open.ko", "nvidia-tesla-535.ko"])
def test_the_module_on_disk_is_found_under_its_names_and_read(host, name):
    host.module("550.163.01", "6.1.0-1", name).module("535.261.03", "6.1.0-2", name, licence="NVIDIA")
    assert procfs.driver_modules(host.root) == {
        "6.1.0-1": {"path": f"/lib/modules/6.1.0-1/updates/dkms/{name}", "version": "550.163.01", "flavour": "open"},
        "6.1.0-2": {
            "path": f"/lib/modules/6.1.0-2/updates/dkms/{name}",
            "version": "535.261.03",
            "flavour": "proprietary",
        },
    }


@pytest.mark.parametrize(
    "name", ["nvidia-drm.ko", "nvidia-uvm.ko", "nvidia-current-modeset.ko", "nvidia-peermem.ko", "nvidiafb.ko"]
)
def test_the_other_modules_of_the_driver_are_not_taken_for_it(host, name):
    assert procfs.driver_modules(host.module("550.163.01", "6.1.0-1", name).root) == {}


def test_a_compressed_module_has_its_version_from_dkms_or_none(host):
    host.file("/lib/modules/6.8.0/modules.dep", "extra/nvidia.ko.xz: extra/other.ko.xz\n").file(
        "/lib/modules/6.8.0/extra/nvidia.ko.xz", b"\xfd7zXZ"
    )
    assert procfs.driver_modules(host.root)["6.8.0"]["version"] is None
    host.file("/var/lib/dkms/nvidia/580.82.07/6.8.0/x86_64/log")
    assert procfs.driver_modules(host.root)["6.8.0"] == {
        "path": "/lib/modules/6.8.0/extra/nvidia.ko.xz",
        "version": "580.82.07",
        "flavour": None,
    }


def test_a_truncated_module_is_no_error(host):
    whole = (host.module("550.163.01", "6.1.0-1").folder / "lib/modules/6.1.0-1/updates/dkms/nvidia.ko").read_bytes()
    for size in range(0, len(whole), 7):
        host.file("/cut.ko", whole[:size])
        assert procfs.module_info(host.root, "/cut.ko").get("version") in (None, "550.163.01")


def test_libraries_are_followed_through_debians_alternatives(host):
    folder = "/usr/lib/x86_64-linux-gnu"
    host.file(f"{folder}/nvidia/current/libnvidia-ml.so.535.261.03")
    host.link(f"{folder}/nvidia/current/libnvidia-ml.so.1", "libnvidia-ml.so.535.261.03")
    host.link("/etc/alternatives/libnvidia-ml", f"../../{folder[1:]}/nvidia/current/libnvidia-ml.so.1")
    host.link(f"{folder}/libnvidia-ml.so.1", "../../../etc/alternatives/libnvidia-ml")
    path, version = procfs.library_version(host.root, "libnvidia-ml.so.1")
    assert version == "535.261.03"
    assert path.endswith("nvidia/current/libnvidia-ml.so.535.261.03")


UNIT = "/system.slice/vllm-a.service"


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        (f"0::{UNIT}\n", "vllm-a.service"),
        (f"12:memory:/x\n1:name=systemd:{UNIT}\n", "vllm-a.service"),
        (f"4:memory:/\n1:name=systemd:{UNIT}\n0::/\n", "vllm-a.service"),
        (f"0::{UNIT}/payload/deep\n", "vllm-a.service"),
        ("0::/system.slice/docker-ab12.scope/system.slice/vllm-a.service\n", "docker-ab12.scope"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.service\n", "user@1000.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "session-3.scope"),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_unit_of_a_process_is_read_from_any_control_group_layout(host, cgroup, unit):
    assert procfs.unit_of(host.process(50, "vllm", cgroup).root, 50) == unit


def test_units_in_a_container_are_told_below_its_own_group(host):
    host.file("/proc/1/cgroup", "1:name=systemd:/machine.slice/h1.scope/payload/init.scope\n0::/\n")
    host.process(50, "vllm", f"1:name=systemd:/machine.slice/h1.scope/payload{UNIT}\n")
    prefix = procfs.manager_prefix(host.root)
    assert prefix == "/machine.slice/h1.scope/payload"
    assert procfs.unit_of(host.root, 50, prefix) == "vllm-a.service"


def test_listening_sockets_are_read_in_both_families(host):
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: {} 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 0 100 0 0 10 0\n"
    host.file("/proc/net/tcp", head + row.format("0100007F:1F40", "0A", 11) + row.format("0100007F:1F41", "01", 12))
    host.file("/proc/net/tcp6", head + row.format("00000000000000000000000000000000:0016", "0A", 13))
    assert list(procfs.listening(host.root)) == [("127.0.0.1", 8000, "11"), ("::", 22, "13")]


def test_the_own_process_is_seen_in_the_real_procfs():
    from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

    assert os.getpid() in procfs.pids(Root())
    assert procfs.owner(Root(), os.getpid()) == os.getuid()
    assert "PATH" in procfs.environment(Root(), os.getpid())
