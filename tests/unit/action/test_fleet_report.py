from __future__ import annotations

import csv
import json
import os
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
from version_hosts import gpu_facts, host_facts

from ansible_collections.gpufleet.inference.plugins.action import fleet_report
from ansible_collections.gpufleet.inference.plugins.action.version_check import versions

GPU = {
    "devices": [],
    "pci": [],
    "driver": {},
    "instances": [],
    "findings": [],
    "unavailable": {},
}


@pytest.fixture
def report(monkeypatch, tmp_path):
    printed = []
    plugin = fleet_report.ActionModule.__new__(fleet_report.ActionModule)
    monkeypatch.setattr(fleet_report.ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(fleet_report, "display", SimpleNamespace(display=printed.append, columns=100))

    def run(hostvars, alive=None, **given):
        given = {
            "kind": "facts",
            "dir": str(tmp_path / "reports"),
            "hosts": None,
            "show": True,
            "fail_on_unknown": False,
            **given,
        }
        plugin.validate_argument_spec = lambda argument_spec: (None, given)
        task_vars = {
            "ansible_play_hosts_all": list(hostvars),
            "ansible_play_hosts": list(hostvars) if alive is None else alive,
            "hostvars": hostvars,
        }
        return plugin.run(task_vars=task_vars), "".join(printed)

    return run


def test_hosts_that_did_not_answer_are_in_every_form_of_the_report(report, tmp_path):
    hostvars = {
        "dead": {"gpufleet_read": {"unreachable": True, "msg": "Task failed: no route"}},
        "good": {"ansible_facts": {"gpufleet_gpu": GPU}},
        "sick": {"gpufleet_read": {"failed": True, "msg": "no python"}},
        "gone": {"ansible_facts": {"gpufleet_gpu": GPU}},
        "late": {},
    }
    result, printed = report(hostvars, alive=["dead", "good", "sick", "late"])
    expected = {"dead": "unreachable", "good": "ok", "sick": "failed", "gone": "failed", "late": "unknown"}
    assert result["status"] == expected
    assert not result["changed"]
    assert "dead: unreachable: no route" in " ".join(printed.split())
    assert "sick: failed: no python" in " ".join((tmp_path / "reports/facts.txt").read_text().split())
    data = json.loads((tmp_path / "reports/facts.json").read_text())
    assert {name: host["status"] for name, host in data["hosts"].items()} == expected
    with (tmp_path / "reports/facts.csv").open() as stream:
        assert {row["host"]: row["status"] for row in csv.DictReader(stream)} == expected


def test_files_are_replaced_as_a_whole_and_readable_by_the_umask(report, tmp_path):
    report({"a": {}})
    before = os.stat(tmp_path / "reports/facts.txt")
    report({"a": {}, "b": {}})
    after = os.stat(tmp_path / "reports/facts.txt")
    assert before.st_ino != after.st_ino
    assert sorted(os.listdir(tmp_path / "reports")) == ["facts.csv", "facts.json", "facts.txt"]
    current = os.umask(0)
    os.umask(current)
    assert after.st_mode & 0o777 == 0o666 & ~current


def test_a_folder_that_cannot_be_written_is_named(report, tmp_path):
    (tmp_path / "file").write_text("")
    result, _printed = report({"a": {}}, dir=str(tmp_path / "file" / "reports"))
    assert result["failed"]
    assert f"could not be written to {tmp_path}/file/reports" in result["msg"]
    assert "fleet_report_dir" in result["msg"]


@pytest.mark.parametrize("kind", ["plan", "site"])
def test_other_reports_hold_their_own_part(report, tmp_path, kind):
    result, printed = report({"a": {"ansible_facts": {"gpufleet_gpu": GPU}}}, kind=kind)
    assert [os.path.basename(path) for path in result["files"]] == [f"{kind}.txt", f"{kind}.json"]
    assert set(json.loads((tmp_path / f"reports/{kind}.json").read_text())["hosts"]["a"]) == {
        "status",
        "reason",
        *({"plan"} if kind == "plan" else {"instances", "findings"}),
    }
    assert printed


def test_nothing_is_printed_when_not_asked(report):
    _result, printed = report({"a": {}}, show=False)
    assert printed == ""


def test_without_a_folder_the_reports_lie_where_the_run_started(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, _printed = report({"a": {}}, dir=None)
    assert result["files"][0] == str(tmp_path / "reports/facts.txt")


def test_the_report_runs_once_for_all_hosts_and_needs_no_connection():
    assert fleet_report.ActionModule.BYPASS_HOST_LOOP
    assert not fleet_report.ActionModule._requires_connection


@pytest.mark.parametrize("coloured", [True, False])
def test_colour_is_what_ansible_itself_uses(monkeypatch, coloured):
    monkeypatch.setattr(fleet_report.color, "ANSIBLE_COLOR", coloured)
    assert fleet_report.screen_style().colour is coloured


@pytest.mark.parametrize(("columns", "width"), [(20, 60), (100, 100), (500, 160)])
def test_the_report_is_as_wide_as_the_terminal_in_reason(monkeypatch, columns, width):
    monkeypatch.setattr(fleet_report, "display", SimpleNamespace(columns=columns))
    assert fleet_report.screen_style().width == width


@pytest.mark.parametrize(("encoding", "unicode"), [("UTF-8", True), ("ISO-8859-1", False), ("ANSI_X3.4-1968", False)])
def test_line_drawing_needs_a_terminal_that_knows_it(monkeypatch, encoding, unicode):
    monkeypatch.setattr(fleet_report.locale, "getpreferredencoding", lambda setlocale: encoding)
    assert fleet_report.screen_style().unicode is unicode


def _component(name, verdict, why=""):
    known = {"wanted": "580", "installed": "580.95.05", "running": "570.1", "held": False, "candidate": None}
    return {"component": name, "verdict": verdict, "why": why, **known}


def _compared(verdict, *components):
    found = {"number": 3, "title": "t", "verdict": verdict, "components": list(components)}
    return {"ansible_facts": {"gpufleet_gpu": GPU, "gpufleet_versions": {"baseline": found, "findings": []}}}


FLEET = {
    "good": _compared("ok", _component("driver", "ok"), _component("vLLM", "ok")),
    "off": _compared("drift", _component("driver", "drift", "\x1b & < reboot due"), _component("vLLM", "ok")),
    "dim": _compared("unknown", _component("driver", "unknown", "compressed")),
    "dead": {**_compared("ok", _component("driver", "ok")), "gpufleet_read": {"unreachable": True, "msg": "no route"}},
    "sick": {"gpufleet_read": {"failed": True, "msg": "Baseline 9 contradicts the version rules"}},
}


def test_the_baseline_is_counted_in_every_form_and_old_facts_of_a_dead_host_prove_nothing(report, tmp_path):
    result, printed = report(FLEET, kind="baseline")
    assert result["verdicts"] == {"good": "ok", "off": "drift", "dim": "unknown", "dead": "unknown", "sick": "error"}
    assert "Baseline of 5 hosts: 1 ok, 1 drift, 2 unknown, 1 error" in printed
    assert "contradicts the version rules" in " ".join(printed.split())
    data = json.loads((tmp_path / "reports/baseline.json").read_text())
    assert data["counts"] == {"ok": 1, "drift": 1, "unknown": 2, "error": 1}
    assert data["hosts"]["off"]["baseline"]["components"][0]["verdict"] == "drift"
    assert data["hosts"]["dead"]["baseline"] is None
    lines = (tmp_path / "reports/baseline.txt").read_text().splitlines()
    assert len([line for line in lines if "good" in line]) == 2, "the file shows components that are fine, too"
    assert len([line for line in printed.splitlines() if "good" in line]) == 1


@pytest.mark.parametrize(("strict", "tag"), [(False, "skipped"), (True, "error")])
def test_the_junit_xml_can_be_read_and_tells_drift_from_silence(report, tmp_path, strict, tag):
    report(FLEET, kind="baseline", fail_on_unknown=strict)
    root = ET.parse(tmp_path / "reports/baseline.xml").getroot()
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == list(FLEET)
    kinds = {name: [[child.tag for child in case] for case in suite] for name, suite in suites.items()}
    expected = {"good": [[], []], "off": [["failure"], []], "dim": [[tag]], "dead": [[tag]], "sick": [["error"]]}
    assert kinds == expected
    message = suites["off"].find("testcase/failure").get("message")
    assert message == "wanted 580, installed 580.95.05, running 570.1, ? & < reboot due"
    for suite in suites.values():
        for key, name in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.get(key)) == len(suite.findall(f"testcase/{name}"))


def test_a_fleet_with_twelve_planted_drifts_and_two_dead_hosts_shows_exactly_those(report):
    fleet = {}
    for number in range(20):
        gpu, host = gpu_facts(), host_facts()
        if number < 4:
            gpu["driver"]["running"] = "580.82.07"
        elif number < 8:
            gpu["driver"]["userland"] = "580.126.09"
        elif number < 12:
            host["engines"][0]["wheels"]["torch"] = "2.10.0"
        given = {"baseline": "3", "sets": [], "engine_versions": [], "required": True}
        fleet[f"gpu-{number:02}"] = {
            "ansible_facts": {"gpufleet_gpu": gpu, "gpufleet_versions": versions(given, gpu, host)}
        }
    for number in (18, 19):
        fleet[f"gpu-{number}"] = {"gpufleet_read": {"unreachable": True, "msg": "no route"}}
    result, printed = report(fleet, kind="baseline")
    off = [name for name, verdict in result["verdicts"].items() if verdict == "drift"]
    assert off == [f"gpu-{number:02}" for number in range(12)]
    assert [name for name, verdict in result["verdicts"].items() if verdict == "unknown"] == ["gpu-18", "gpu-19"]
    assert "6 ok, 12 drift, 2 unknown" in printed
