from __future__ import annotations

from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root


def test_reads_happen_under_the_prefix(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/name").write_bytes(b"gpu\xff\n")
    (tmp_path / "etc/link").symlink_to("name")
    root = Root(str(tmp_path))
    assert root.read_text("/etc/name") == "gpu\ufffd\n"
    assert root.read_text("/etc/name", 3) == "gpu"
    assert root.listdir("/etc") == ["link", "name"]
    assert root.readlink("/etc/link") == "name"
    assert root.realpath("/etc/link") == "/etc/name"
    assert root.exists("/etc/link")
    assert root.isdir("/etc")


def test_what_is_missing_is_none_or_empty_and_never_an_error(tmp_path):
    root = Root(str(tmp_path))
    assert root.read_text("/nothing") is None
    assert root.readlink("/nothing") is None
    assert root.listdir("/nothing") == []
    assert not root.exists("/nothing")


def test_the_real_root_keeps_paths_as_they_are():
    assert Root("/").path("/proc/self") == "/proc/self"
    assert Root().realpath("/") == "/"
