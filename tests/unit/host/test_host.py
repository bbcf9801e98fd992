from __future__ import annotations

import json
import os
import time

import pytest
from fake_host import FakeHost
from support import ScriptedRunner

from ansible_collections.gpufleet.inference.plugins.module_utils._host import host as host_reader

SYSTEMD = {("systemctl", "--version"): "systemd 252 (252.39-1~deb12u1)\n+PAM\n"}
TCP_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TCP_ROW = "   0: {} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 {} 1 0 100 0 0 10 0\n"


@pytest.fixture
def fake(tmp_path):
    host = FakeHost(tmp_path)
    host.file("/etc/os-release", 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n')
    host.file("/proc/self/mounts", "/dev/sda1 / ext4 rw,relatime 0 0\nproc /proc proc rw 0 0\n")
    host.file("/proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n")
    return host


def gather(host, runner=None, paths=("/opt/vllm",), environment=None, user=("root", 0)):
    return host_reader.gather(host.root, runner or ScriptedRunner(SYSTEMD), paths, environment or {}, user=user)


def codes(facts):
    return [finding["code"] for finding in facts["findings"]]


def test_a_plain_host_is_described_and_has_no_finding(fake):
    fake.file("/sys/devices/system/node/node0/cpulist", "0-15\n").file(
        "/sys/devices/system/node/node1/cpulist", "16-31\n"
    )
    facts = gather(fake)
    assert facts["distribution"] == {"id": "debian", "version": "12", "codename": "bookworm"}
    assert facts["systemd"] == 252
    assert facts["ram"] == {"total": 1000 * 1024, "available": 600 * 1024}
    assert facts["cpus"] == {"count": os.cpu_count(), "numa": {"0": "0-15", "1": "16-31"}}
    assert facts["selinux"] == "disabled"
    assert [mount["path"] for mount in facts["mounts"]] == ["/"]
    assert facts["disk"]["/opt/vllm"] > 0
    assert facts["findings"] == []


def test_interpreters_are_listed_once_in_order(fake):
    fake.file("/usr/bin/python3.11").file("/usr/local/bin/python3.9").link("/usr/bin/python3", "python3.11")
    fake.link("/usr/local/bin/python3.11", "../../bin/python3.11").file("/usr/bin/python3.11-config")
    assert gather(fake)["python"] == [
        {"path": "/usr/local/bin/python3.9", "version": "3.9"},
        {"path": "/usr/bin/python3.11", "version": "3.11"},
    ]


def test_a_path_on_a_noexec_file_system_is_refused_before_anything_is_installed(fake):
    fake.file("/proc/self/mounts", "/dev/sda1 / ext4 rw 0 0\n/dev/sdb1 /opt ext4 rw,nosuid,noexec 0 0\n")
    facts = gather(fake, paths=["/opt/vllm", "/optional", "/var/lib/vllm"])
    assert facts["noexec_paths"] == ["/opt/vllm"]
    assert codes(facts) == ["noexec"]


def test_a_file_system_that_does_not_answer_is_named_and_the_others_are_read(fake, monkeypatch):
    dead = fake.root.path("/mnt/dead")
    real = os.statvfs
    (fake.folder / "mnt/dead").mkdir(parents=True)
    monkeypatch.setattr(host_reader, "_PATIENCE_S", 1.5)
    monkeypatch.setattr(os, "statvfs", lambda path: time.sleep(60) if path == dead else real(path))
    started = time.monotonic()
    facts = gather(fake, paths=["/mnt/dead", "/opt/vllm"])
    assert time.monotonic() - started < 20
    assert facts["disk"]["/mnt/dead"] is None
    assert facts["disk"]["/opt/vllm"] > 0
    assert facts["unavailable"] == {"disk./mnt/dead": "gives no answer within 1.5 s"}
    assert codes(facts) == ["mount_silent"]


def test_listening_ports_are_joined_with_process_and_unit(fake):
    fake.file("/proc/net/tcp", TCP_HEAD + TCP_ROW.format("0100007F:1F40", 11) + TCP_ROW.format("00000000:0050", 99))
    fake.process(40, "vllm", "0::/system.slice/vllm-a.service\n").link("/proc/40/fd/3", "socket:[11]")
    assert gather(fake)["ports"] == [
        {"address": "0.0.0.0", "port": 80, "pid": None, "process": None, "unit": None},
        {"address": "127.0.0.1", "port": 8000, "pid": 40, "process": "vllm", "unit": "vllm-a.service"},
    ]


def test_vllm_units_that_are_not_ours_are_found_by_name_and_by_process(fake):
    fake.link("/etc/systemd/system/vllm-a.service", "/etc/vllm/a/current/vllm-a.service")
    fake.file("/etc/systemd/system/vllm.service").process(41, "VLLM::EngineCore", "0::/system.slice/llm.service\n")
    facts = gather(fake)
    assert facts["vllm_units"] == [
        {"unit": "llm.service", "ours": False},
        {"unit": "vllm-a.service", "ours": True},
        {"unit": "vllm.service", "ours": False},
    ]
    assert codes(facts) == ["foreign_vllm", "foreign_vllm"]


@pytest.mark.parametrize(
    ("cgroup", "runtime"),
    [
        ("0::/system.slice/docker-0123456789abcdef.scope\n", "docker"),
        ("0::/machine.slice/libpod-0123456789abcdef.scope\n", "libpod"),
        ("0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-0123456789abcdef.scope\n", "cri-containerd"),
        ("0::/kubepods/besteffort/pod1/0123456789abcdef\n", "kubernetes"),
    ],
)
def test_containers_that_hold_a_gpu_are_found(fake, cgroup, runtime):
    fake.process(50, "python3", cgroup).link("/proc/50/fd/7", "/dev/nvidia0").process(51, "sh", cgroup)
    facts = gather(fake)
    assert facts["containers_with_gpu"] == [
        {"id": "0123456789abcdef", "runtime": runtime, "processes": ["python3 (pid 50)"]}
    ]
    assert codes(facts) == ["container_with_gpu"]


def test_a_process_of_the_host_that_holds_a_gpu_is_no_container(fake):
    fake.process(50, "python3", "0::/system.slice/x.service\n").link("/proc/50/fd/7", "/dev/nvidia0")
    assert gather(fake)["containers_with_gpu"] == []


def test_only_engines_with_their_manifest_are_complete(fake):
    fake.file("/opt/vllm/0.32.0/.gpufleet.json", "{}").file("/opt/vllm/0.33.0/bin/python").file("/opt/vllm/notes")
    assert gather(fake)["engines"] == [
        {"version": "0.32.0", "complete": True, "python": None, "wheels": {}},
        {"version": "0.33.0", "complete": False, "python": None, "wheels": {}},
    ]


def test_an_engine_tells_its_interpreter_and_the_wheels_it_stands_on(fake):
    wheels = {"vllm": "0.32.0", "torch": "2.13.0", "nvidia_nccl_cu13": "2.28.9", "Transformers": "5.16.1", "pip": "24"}
    fake.file("/opt/vllm/0.32.0/.gpufleet.json", json.dumps({"version": "0.32.0", "wheels": wheels}))
    fake.file("/opt/vllm/0.32.0/pyvenv.cfg", "home = /usr/bin\nversion_info = 3.12.4\n")
    (engine,) = gather(fake)["engines"]
    assert engine["python"] == "3.12.4"
    kept = {"vllm": "0.32.0", "torch": "2.13.0", "nvidia-nccl-cu13": "2.28.9", "transformers": "5.16.1"}
    assert engine["wheels"] == kept


def test_kernels_are_those_that_can_be_booted(fake):
    for kernel in ("6.1.0-40-amd64", "6.1.0-41-amd64", "5.10.0-left-over"):
        fake.file(f"/lib/modules/{kernel}/modules.dep")
    fake.file("/boot/vmlinuz-6.1.0-40-amd64").file("/lib/modules/6.1.0-41-amd64/vmlinuz")
    assert gather(fake)["kernels"] == ["6.1.0-40-amd64", "6.1.0-41-amd64"]


def test_packages_are_listed_with_hold_and_candidate_in_two_commands(fake):
    fake.file("/usr/bin/apt-get")
    said = (
        "hold\tinstalled\tnvidia-smi\t550.163.01-2\n"
        "install\tinstalled\tlibcuda1\t550.163.01-2\n"
        "deinstall\tconfig-files\tnvidia-kernel-dkms\t535.1-1\n"
    )
    policy = "nvidia-smi:\n  Installed: 550.163.01-2\n  Candidate: 550.163.02-1\nlibcuda1:\n  Candidate: (none)\n"
    runner = ScriptedRunner({**SYSTEMD, ("dpkg-query",): (1, said, "no match"), ("apt-cache", "policy"): policy})
    facts = host_reader.gather(fake.root, runner, [], {}, user=("root", 0), package_patterns=["*nvidia*", "libcuda1"])
    assert facts["packages"] == {
        "nvidia-smi": {"version": "550.163.01-2", "held": True, "candidate": "550.163.02-1"},
        "libcuda1": {"version": "550.163.01-2", "held": False, "candidate": None},
    }
    assert [argv[0] for argv, _given in runner.calls if argv[0].startswith(("dpkg", "apt"))] == [
        "dpkg-query",
        "apt-cache",
    ]


def test_versions_that_dnf_keeps_are_held(fake):
    fake.file("/usr/bin/dnf").file(
        "/etc/dnf/plugins/versionlock.list", "# by hand\nnvidia-driver-3:580.95.05-1.el9.*\n"
    )
    fake.file("/etc/dnf/versionlock.toml", '[[packages]]\nname = "nvidia-persistenced"\n')
    said = (
        "nvidia-driver\t580.95.05-1.el9\nnvidia-persistenced\t580.95.05-1.el9\nkmod-nvidia-open-dkms\t580.95.05-1.el9\n"
    )
    runner = ScriptedRunner({**SYSTEMD, ("rpm", "--query", "--all"): said})
    facts = host_reader.gather(fake.root, runner, [], {}, user=("root", 0), package_patterns=["*nvidia*"])
    held = {name: item["held"] for name, item in facts["packages"].items()}
    assert held == {"nvidia-driver": True, "nvidia-persistenced": True, "kmod-nvidia-open-dkms": False}


def test_no_package_manager_is_asked_without_a_name_and_none_is_no_answer(fake):
    runner = ScriptedRunner(SYSTEMD)
    assert gather(fake, runner)["packages"] == {}
    facts = host_reader.gather(fake.root, runner, [], {}, user=("root", 0), package_patterns=["*nvidia*"])
    assert facts["packages"] is None


def test_proxies_come_without_their_password(fake):
    fake.file("/etc/environment", 'no_proxy="localhost"\nHTTP_PROXY=http://other:3128\n')
    proxies = gather(fake, environment={"https_proxy": "http://user:secret@proxy:3128/"})["proxies"]
    assert proxies == {
        "http_proxy": "http://other:3128",
        "https_proxy": "http://proxy:3128/",
        "no_proxy": "localhost",
    }


@pytest.mark.parametrize(("rc", "expected"), [(0, True), (1, False)])
def test_a_user_that_is_not_root_must_be_able_to_become_it(fake, rc, expected):
    runner = ScriptedRunner({**SYSTEMD, ("sudo",): (rc, "", "sudo: a password is required")})
    facts = gather(fake, runner, user=("deploy", 1000))
    assert facts["user"] == {"name": "deploy", "uid": 1000, "become_ok": expected}
    assert ("no_become" in codes(facts)) is not expected


def test_what_stands_in_the_way_is_found(fake):
    fake.file("/sys/fs/selinux/enforce", "1").process(60, "fapolicyd", "0::/system.slice/fapolicyd.service\n")
    fake.process(61, "firewalld", "0::/system.slice/firewalld.service\n")
    facts = gather(fake, ScriptedRunner())
    assert facts["selinux"] == "enforcing"
    assert facts["systemd"] is None
    assert codes(facts) == ["no_systemd", "fapolicyd", "firewall"]
