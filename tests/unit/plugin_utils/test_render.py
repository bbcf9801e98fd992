from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.gpufleet.inference.plugins.plugin_utils import _render as render
from ansible_collections.gpufleet.inference.plugins.plugin_utils._render import Style, plain

GIB = 1024**3
ASCII = Style(width=80, unicode=False)
BOX = Style(width=80)
COLOUR = Style(width=80, colour=True)
STYLES = [ASCII, BOX, COLOUR, Style(width=60), Style(width=200, unicode=False)]


def term(gibibytes, spread=0.0):
    size = int(gibibytes * GIB)
    return {"bytes": size, "source": "modelled", "low": int(size - spread * GIB), "high": int(size + spread * GIB)}


def device(index, free=70, total=80, **changes):
    memory = {"total": total * GIB, "reserved": GIB, "free": free * GIB, "used": (total - free - 1) * GIB}
    values = {
        "index": index,
        "uuid": f"GPU-{index}",
        "pci_address": f"0000:{index:02x}:00.0",
        "name": "NVIDIA H100",
        "memory": memory,
    }
    return {**values, "mig": {"mode": False}, "processes": [], **changes}


def gpu_facts(**changes):
    facts = {
        "devices": [device(0), device(1)],
        "pci": [],
        "driver": {"running": "580.95.05", "installed": "580.95.05", "userland": "580.95.05", "flavour": "open"},
        "cuda_driver_version": "13.0",
        "instances": [{"name": "chat", "unit": "vllm-chat.service", "active_state": "active", "devices": ["GPU-0"]}],
        "findings": [],
        "unavailable": {},
    }
    return {**facts, **changes}


def ok(**changes):
    host = {"distribution": {"id": "debian", "version": "12"}, "findings": []}
    return {"status": "ok", "reason": "", "gpu": gpu_facts(**changes), "host": host}


FINDING = {
    "code": "gpu_lost",
    "severity": "error",
    "subject": "GPU 1",
    "text": "The GPU is lost.",
    "remedy": "Drain the host.",
}


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_a_plain_table_has_nothing_but_ascii():
    text = render.table(("host", "n"), [["a", "1"], ["bb", "22"]], ASCII, right=(1,))
    assert text.splitlines() == ["host   n", "----  --", "a      1", "bb    22"]


def test_a_boxed_table_closes_its_box():
    lines = render.table(("host", "n"), [["a", ("x", "red")]], BOX).splitlines()
    assert lines[0][0] == "┌"
    assert lines[-1][-1] == "┘"
    assert len({len(line) for line in lines}) == 1


def test_colour_changes_nothing_but_colour():
    rows = [["a", ("failed", "red")], ["b", ("ok", "green")]]
    coloured = render.table(("host", "state"), rows, COLOUR)
    assert "\x1b[31mfailed\x1b[0m" in coloured
    assert plain(coloured) == render.table(("host", "state"), rows, BOX)


def test_columns_without_text_are_left_out():
    assert "nothing" not in render.table(("a", "nothing"), [["x", ""], ["y", ("", "")]], ASCII)


def test_columns_that_can_be_spared_go_before_anything_is_shortened():
    row = ["gpu-01", "x" * 40, "spare one", "y" * 20]
    text = render.table(("host", "a", "s", "b"), [row], BOX, spare=(2,))
    assert "spare one" not in text
    assert "y" * 20 in text


def test_a_table_too_wide_shortens_its_widest_column_and_not_the_name():
    text = render.table(("host", "text"), [["gpu-01.example", "word " * 50]], BOX)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "gpu-01.example" in text
    assert "…" in text


@given(
    st.lists(
        st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=60), min_size=4, max_size=4),
        min_size=1,
        max_size=5,
    ),
    st.integers(60, 160),
    st.booleans(),
)
def test_a_table_of_any_texts_stays_inside_its_width(rows, width, unicode):
    text = render.table(("host", "state", "reason", "more"), rows, Style(width, unicode=unicode))
    assert all(len(line) <= width for line in text.splitlines())


@given(
    st.dictionaries(st.sampled_from([part.key for part in render.PLAN_PARTS]), st.integers(0, 200 * GIB)),
    st.integers(1, 200 * GIB),
    st.integers(10, 80),
    st.booleans(),
)
def test_a_bar_is_as_wide_as_asked_and_shows_every_part(amounts, total, width, colour):
    drawn = plain(render.memory_bar(amounts, total, width, render.PLAN_PARTS, Style(colour=colour)))
    assert len(drawn) == width + 2
    shown = [part for part in render.PLAN_PARTS[:-1] if amounts.get(part.key)]
    assert all(part.block in drawn for part in shown)


def test_a_bar_is_in_proportion():
    drawn = render.memory_bar({"weights": 20, "kv_cache": 60}, 100, 50, render.PLAN_PARTS, ASCII)
    assert drawn == "[" + "W" * 10 + "K" * 30 + "." * 10 + "]"


def test_more_than_there_is_fills_the_bar_and_no_more():
    assert (
        render.memory_bar({"weights": 150, "foreign": 50}, 100, 20, render.PLAN_PARTS, ASCII)
        == "[" + "W" * 15 + "X" * 5 + "]"
    )


def test_findings_end_with_the_worst_and_name_equal_ones_once():
    info = {**FINDING, "severity": "info", "text": "Fine.", "remedy": ""}
    text = render.findings([("a", FINDING), ("b", FINDING), ("a", info), *((f"n{x}", info) for x in range(5))], ASCII)
    assert text.index("INFO") < text.index("ERROR")
    assert text.count("The GPU is lost") == 1
    assert "a, b: GPU 1" in text
    assert "a, n0 and 4 more" in text
    assert "-> Drain the host." in text


def test_a_count_agrees_with_its_word():
    assert (render.count(1, "GPU"), render.count(0, "GPU"), render.count(8, "GPU")) == ("1 GPU", "0 GPUs", "8 GPUs")


# -- facts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_the_inventory_names_every_host_with_its_state(style):
    hosts = {
        "gpu-01": ok(findings=[FINDING]),
        "dead-01": {"status": "unreachable", "reason": "Connection refused", "gpu": {}, "host": {}},
    }
    text = plain(render.facts_view(hosts, style))
    assert "2 hosts, 2 GPUs, 1 unreachable" in text
    assert "580.95.05" in text or style.width < 80
    assert "dead-01: unreachable: Connection refused" in text
    assert "1 of 1 up" in text
    assert "gpu-01: GPU 1: The GPU is lost." in " ".join(text.split())
    assert all(len(line) <= style.width for line in text.splitlines())
    assert style.unicode or text.isascii()


@pytest.mark.parametrize(("state", "severity"), [("failed", "ERROR"), ("activating", "INFO"), ("active", None)])
def test_an_instance_that_does_not_serve_is_named(state, severity):
    instance = {"name": "chat", "unit": "vllm-chat.service", "active_state": state, "sub_state": "sub"}
    host = ok()
    host["gpu"]["instances"] = [instance]
    text = plain(render.facts_view({"gpu-01": host}, Style(120)))
    line = next((line for line in text.splitlines() if "vllm-chat.service is" in line), None)
    assert (line is None) == (severity is None)
    if severity:
        assert line.startswith(severity)
        assert f"gpu-01: chat: vllm-chat.service is {state} (sub)" in line
    assert ("journalctl -u vllm-chat.service" in text) == (state == "failed")


def test_memory_is_split_into_ours_and_others():
    processes = [
        {"pid": 1, "used": 40 * GIB, "unit": "vllm-chat.service", "name": "vllm"},
        {"pid": 2, "used": 8 * GIB, "unit": None, "name": "python"},
    ]
    text = render.facts_view(
        {"gpu-01": ok(devices=[device(0, free=29, processes=processes)])}, Style(100, unicode=False)
    )
    line = next(line for line in text.splitlines() if "GPU 0" in line)
    assert "50.0 of   79.0 GiB" in line
    assert 3 < line.count("W") / line.count("X") < 5


def test_a_gpu_that_does_not_answer_says_why_instead_of_a_bar():
    silent = device(0)
    silent["memory"] = dict.fromkeys(silent["memory"])
    text = render.facts_view({"gpu-01": ok(devices=[silent], unavailable={"devices.0": "lost (NVML 15)"})}, BOX)
    assert "gpu-01 GPU 0  no answer: lost (NVML 15)" in text
    assert "?" in text


def test_gpus_that_look_alike_share_a_line():
    devices = [device(0, free=10), *(device(index) for index in range(1, 8))]
    text = render.facts_view({"gpu-01": ok(devices=devices)}, BOX)
    lines = [line for line in text.splitlines() if line.startswith("  gpu-01 GPU")]
    assert [line.split()[2] for line in lines] == ["0", "1-7"]
    assert len({line.index("▕") for line in lines}) == 1


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        ({"running": "570.1", "installed": "580.1"}, "570.1 (580.1 due)"),
        ({"running": None, "installed": "580.1"}, "580.1 not loaded"),
        ({"running": None, "installed": None}, "none"),
    ],
)
def test_the_driver_shows_what_runs_and_what_waits(driver, text):
    assert text in render.facts_view({"h": ok(driver=driver)}, Style(160))


def test_a_bare_host_shows_its_pci_ids():
    pci = [{"address": "0000:18:00.0", "device_id": "0x2330", "name": None}]
    assert "1 × NVIDIA 0x2330" in render.facts_view({"h": ok(devices=[], pci=pci)}, Style(140))


def test_the_spreadsheet_has_a_row_per_gpu_and_one_per_silent_host():
    rows = render.facts_rows({"a": ok(), "b": {"status": "unreachable", "gpu": {}}})
    assert [(row["host"], row["gpu"], row["status"]) for row in rows] == [
        ("a", 0, "ok"),
        ("a", 1, "ok"),
        ("b", None, "unreachable"),
    ]
    assert rows[0]["instances"] == "chat"
    assert rows[0]["memory_total"] == 80 * GIB
    assert len({tuple(row) for row in rows}) == 1


# -- plan --------------------------------------------------------------------------------------------------------------

PLAN = {
    "fits": False,
    "findings": [],
    "gpus": [
        {
            "uuid": "GPU-0",
            "index": 0,
            "name": "NVIDIA H100 80GB HBM3",
            "total": 79 * GIB,
            "free": 75 * GIB,
            "foreign": 4 * GIB,
            "expected": False,
        }
    ],
    "instances": [
        {
            "name": "chat",
            "fits": True,
            "state": "started",
            "model": "llama",
            "engine_version": "0.32.0",
            "devices": ["GPU-0"],
            "listen_address": "127.0.0.1",
            "port": 8000,
            "max_model_len": 8192,
            "kv_cache_tokens": 123456,
            "max_concurrency": 15.07,
            "arguments": [
                "/opt/vllm/0.32.0/bin/vllm",
                "serve",
                "/srv/my model",
                "--port",
                "8000",
                "--gpu-memory-utilization",
                "0.8512",
            ],
            "budget": [
                {
                    "uuid": "GPU-0",
                    "weights": term(15),
                    "activation": term(2, 0.5),
                    "non_torch": term(1),
                    "cuda_graphs": term(1, 0.25),
                    "kv_cache": term(40),
                }
            ],
            "kept": False,
        },
        {
            "name": "big",
            "fits": False,
            "state": "started",
            "reason": {"code": "refused_kv", "text": "needs 90.0 GiB, 16.0 GiB are free"},
            "alternatives": [
                {"text": "max_model_len: 4096"},
                {"change": {"tensor_parallel_size": 2}},
                "fewer sequences",
            ],
        },
        {"name": "old", "fits": True, "state": "absent"},
    ],
}


@pytest.mark.parametrize("style", STYLES)
def test_the_plan_shows_every_byte_every_command_and_every_refusal(style):
    text = plain(render.plan_view({"gpu-01": {"status": "ok", "plan": PLAN}}, style))
    words = " ".join(text.split())
    assert "gpu-01: 1 of 2 instances fit" in words
    assert "63.0 of 79.0 GiB" in words
    assert "weights 15.0" in words
    assert "'/srv/my model'" in words
    assert "big does not fit: needs 90.0 GiB, 16.0 GiB are free (refused_kv)" in words
    assert "max_model_len: 4096" in words
    assert "tensor_parallel_size: 2" in words
    assert "old" not in words
    assert words.index("REFUSED") > words.index("$ /opt/vllm")
    assert style.unicode or text.isascii()


def test_the_plan_says_which_instance_would_wait_for_a_restart():
    def shown(results):
        return plain(render.plan_view({"gpu-01": {"status": "ok", "plan": PLAN, "instances": results}}, Style(120)))

    (name,) = [instance["name"] for instance in PLAN["instances"] if instance["fits"] and instance["state"] != "absent"]
    assert " due " in shown([{"name": name, "due": True}])
    assert " due " not in shown([{"name": name, "due": False}, {"name": "other", "due": True}])
    assert " due " not in shown([])


def test_a_model_too_large_for_every_setting_has_a_next_step():
    big = {"name": "big", "fits": False, "reason": {"code": "oom_risk", "text": "needs 135 GiB"}, "alternatives": []}
    text = plain(render.plan_view({"gpu-01": {"status": "ok", "plan": {"instances": [big]}}}, Style(120)))
    assert "smaller or more quantised model" in text


def test_the_bar_of_a_plan_holds_all_kinds_and_the_band_is_named():
    text = render.plan_view({"gpu-01": {"status": "ok", "plan": PLAN}}, Style(120, unicode=False))
    drawn = next(line for line in text.splitlines() if line.startswith("  GPU 0"))
    assert all(letter in drawn for letter in "WKAGRX.")
    assert "GiB +- 0.8" in text


def test_a_command_can_be_pasted_into_a_shell():
    text = render.plan_view({"h": {"status": "ok", "plan": PLAN}}, Style(60, unicode=False))
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if "$" in line)
    command = [lines[start].partition("$")[2]]
    while command[-1].endswith("\\"):
        start += 1
        command.append(lines[start])
    script = "printf '%s\\n' " + "\n".join(command)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == PLAN["instances"][0]["arguments"]


def test_idle_gpus_of_a_plan_share_a_line_and_used_ones_do_not():
    plan = copy.deepcopy(PLAN)
    idle = {"name": "NVIDIA H100 80GB HBM3", "total": 79 * GIB, "free": 79 * GIB, "foreign": 0, "expected": False}
    plan["gpus"] += [{**idle, "index": index, "uuid": f"GPU-{index}"} for index in range(1, 8)]
    text = render.plan_view({"h": {"status": "ok", "plan": plan}}, BOX)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  GPU")] == ["0", "1-7"]


def test_arguments_without_their_program_are_shown_as_those_of_vllm():
    plan = copy.deepcopy(PLAN)
    plan["instances"][0]["arguments"] = ["serve", "/srv/m"]
    assert "chat $ vllm serve /srv/m" in render.plan_view({"h": {"status": "ok", "plan": plan}}, BOX)


def tiny(**sizes):
    plan = copy.deepcopy(PLAN)
    plan["instances"] = plan["instances"][:1]
    plan["gpus"] = plan["gpus"][:1]
    plan["gpus"][0]["foreign"] = 0
    plan["instances"][0]["budget"] = [{"uuid": plan["gpus"][0]["uuid"], **sizes}]
    return " ".join(plain(render.plan_view({"h": {"status": "ok", "plan": plan}}, Style(120))).split())


def test_one_instance_fits():
    assert "h: 1 of 1 instance fits" in tiny()


def test_what_would_show_as_nothing_in_gib_is_shown_in_mib():
    mib = 2**20
    words = tiny(weights=12 * mib, kv_cache=3 * mib, cuda_graphs=1)
    assert "weights 12 MiB, KV cache 3 MiB, activation 0.0 GiB, graphs <1 MiB, runtime 0.0 GiB" in words
    assert "15 MiB of 79.0 GiB" in words
    assert "weights 12 MiB, KV cache 40.0 GiB" in tiny(weights=12 * mib, kv_cache=40960 * mib)
    assert "weights 0.1, KV cache 0.0, activation 0.0, graphs 0.0, runtime 0.0 GiB" in tiny(weights=52 * mib)


def test_a_plan_on_expected_memory_says_so():
    plan = copy.deepcopy(PLAN)
    plan["gpus"][0]["expected"] = True
    assert "as expected of these GPUs" in render.plan_view({"h": {"status": "ok", "plan": plan}}, Style(120))


def test_a_host_that_does_not_answer_has_one_next_step():
    for reason in ("Connection refused", f"It does not answer. {render.REACH_IT}"):
        dead = {"status": "unreachable", "reason": reason, "gpu": {}, "host": {}, "plan": None}
        for view in (render.facts_view, render.plan_view):
            words = " ".join(plain(view({"h": dead}, Style(120))).split())
            assert words.count(render.REACH_IT) == 1, words
    sick = {"status": "failed", "reason": "no sudo", "gpu": {}, "host": {}}
    assert render.REACH_IT not in " ".join(plain(render.facts_view({"h": sick}, Style(120))).split())


def test_the_playbooks_say_the_same_about_a_host_that_does_not_answer():
    for name in ("playbooks/facts.yml", "roles/fleet_host/tasks/preflight.yml"):
        assert render.REACH_IT in (Path(__file__).resolve().parents[3] / name).read_text(encoding="utf-8"), name


def test_a_host_without_a_plan_is_named():
    text = render.plan_view({"h": {"status": "unreachable", "reason": "no route", "plan": None}}, BOX)
    assert "h: unreachable: no route" in text


# -- site --------------------------------------------------------------------------------------------------------------


def test_what_a_run_left_names_due_upgrades_and_dead_hosts():
    results = [
        {"name": "chat", "state": "active", "changed": False, "due": True, "reason": "port differs"},
        {"name": "code", "state": "failed", "changed": True, "due": False, "reason": "no token in 600 s"},
    ]
    hosts = {
        "a": {"status": "ok", "reason": "", "instances": results, "findings": [FINDING]},
        "b": {"status": "failed", "reason": "no sudo", "instances": [], "findings": []},
        "c": {"status": "ok", "reason": "", "instances": [], "findings": []},
    }
    text = plain(render.site_view(hosts, Style(100, colour=True)))
    assert "due: run upgrade" in text
    assert "no token in 600 s" in text
    assert "b: failed: no sudo" in text
    assert "no instance" in text
