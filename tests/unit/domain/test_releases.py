"""The release table and its reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import releases
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.plugin_utils._data_files import planner_data

DATA = planner_data()["releases"]
TABLE = releases.table(DATA)
PATH = Path(__file__).parents[3] / "plugins" / "plugin_utils" / "_data" / "releases.json"


def test_table_is_small_enough_to_load_in_every_run():
    assert PATH.stat().st_size <= 200_000


def test_every_section_names_a_source_that_the_table_explains():
    facts = set(DATA) - {"generated", "newest", "sources", "section_sources"}
    assert set(DATA["section_sources"]) == facts
    for sources in DATA["section_sources"].values():
        assert sources
        assert all(len(DATA["sources"][source]) > 20 for source in sources)


def test_every_release_can_be_read_and_knows_its_platform():
    assert len(TABLE.names) == 68
    for name in TABLE.names:
        release = TABLE.release(name)
        assert release.torch and release.cuda and release.driver_floor and release.capability >= (7, 0)
        assert release.has_flag("--max-model-len")
        tokens, seqs = release.batch_defaults(80 * 2**30, "NVIDIA H100 80GB HBM3")
        assert tokens >= 2048 and seqs >= 256


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.9.1", (0, 9, 1)),
        ("0.8.5.post1", (0, 8, 5, 1)),
        ("0.10.1.1", (0, 10, 1, 1)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("v0.19.0", (0, 19, 0)),
    ],
)
def test_versions_are_parsed(text, expected):
    assert releases.parse_version(text) == expected


@pytest.mark.parametrize("text", ["", "main", "0.20.0rc1", "0.29.1rc1.dev339", "1", "0.x.1", None])
def test_what_is_no_release_is_refused(text):
    with pytest.raises(FleetError) as refused:
        releases.parse_version(text)
    assert refused.value.code == "unknown_release"


def test_versions_order_like_releases():
    keys = [releases.parse_version(name) for name in DATA["versions"]]
    assert releases.parse_version("0.8.5.post1") > releases.parse_version("0.8.5")
    assert sorted(keys) == [releases.parse_version(name) for name in TABLE.names]


def test_unknown_release_names_the_nearest_and_what_to_do():
    with pytest.raises(FleetError) as refused:
        TABLE.release("0.19.7")
    assert "Use 0.19.1 or 0.20.0" in refused.value.hint
    assert refused.value.details["nearest"] == ["0.19.1", "0.20.0"]
    with pytest.raises(FleetError) as refused:
        TABLE.release("9.9.9")
    assert refused.value.details["nearest"] == ["0.33.0"]


def test_a_local_build_is_the_release_it_was_built_from():
    assert TABLE.release("0.32.0+cpu").flags == TABLE.release("0.32.0").flags


@pytest.mark.parametrize(
    ("flag", "release", "there"),
    [
        ("--swap-space", "0.17.1", True),
        ("--swap-space", "0.18.0", False),
        ("--kv-cache-memory-bytes", "0.10.1.1", False),
        ("--kv-cache-memory-bytes", "0.10.2", True),
        ("--device-ids", "0.23.0", False),
        ("--device-ids", "0.24.0", True),
        ("-tp", "0.19.0", True),
    ],
)
def test_flags_come_and_go_with_the_release(flag, release, there):
    assert TABLE.release(release).has_flag(flag) is there


def test_defaults_choices_and_types_follow_the_release():
    assert TABLE.release("0.19.1").utilization == 0.9
    assert TABLE.release("0.20.0").utilization == 0.92
    assert "fp8_ds_mla" not in TABLE.release("0.11.0").flags["--kv-cache-dtype"].choices
    assert "fp8_ds_mla" in TABLE.release("0.11.1").flags["--kv-cache-dtype"].choices
    assert TABLE.release("0.33.0").flags["--kv-cache-dtype"].choices == ()
    assert not TABLE.release("0.8.5").flags["--enforce-eager"].negatable
    assert TABLE.release("0.9.0").flags["--enforce-eager"].negatable


@pytest.mark.parametrize(
    ("release", "gib", "name", "expected"),
    [
        ("0.8.3", 40, "NVIDIA A100", (2048, 1024)),
        ("0.8.3", 80, "NVIDIA H100", (8192, 1024)),
        ("0.8.4", 80, "NVIDIA A100", (2048, 256)),
        ("0.8.5", 80, "NVIDIA A100-SXM4-80GB", (8192, 1024)),
        ("0.19.1", 80, "NVIDIA A100-SXM4-80GB", (2048, 256)),
        ("0.19.1", 80, "NVIDIA H100 80GB HBM3", (8192, 1024)),
        ("0.27.1", 180, "NVIDIA B200", (8192, 1024)),
        ("0.28.0", 180, "NVIDIA B200", (16384, 1024)),
        ("0.32.0", 121, "NVIDIA GB10", (8192, 1024)),
        ("0.33.0", 121, "NVIDIA GB10", (2048, 256)),
        ("0.33.0", 24, "NVIDIA L4", (2048, 256)),
    ],
)
def test_batch_defaults_follow_release_and_device(release, gib, name, expected):
    assert TABLE.release(release).batch_defaults(gib * 2**30, name) == expected


def test_ranges_are_told_in_words():
    assert TABLE.range_of("--swap-space") == "0.5.4 to 0.17.1"
    assert TABLE.range_of("--device-ids") == "since 0.24.0"
    assert TABLE.range_of("VLLM_CRASH_HANDLER") == "in no release"
    assert TABLE.range_of("VLLM_USE_V1") == "0.6.4 to 0.11.0"
    assert TABLE.range_of("--no-such-thing") == ""


def test_a_table_is_built_once_per_data():
    assert releases.table(DATA) is releases.table(DATA)
    other = json.loads(PATH.read_text(encoding="utf-8"))
    assert releases.table(other) is not TABLE
    releases.table(DATA)
