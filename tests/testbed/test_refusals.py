"""Bad input, dead hosts and the way back: what `site` and `decommission` promise when things are not as they should be.

Three machines with the stub engine: one to be provisioned, one on which every bad input is refused (each under an
inventory name of its own, so that one run meets all of them), one with an AMD GPU behind sudo with a password. The
tests follow one another on the same machines: refusals, a cut network, `decommission`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path.insert(0, str(HERE))
import hosts as bed
import shelves
import snapshot
from controller import Fleet, Run

SHELVES = {"/srv/wheelhouse": ".build/engines/stub", "/srv/models": ".build/engines/models"}
MACHINES: list[dict[str, Any]] = [
    {"name": "good", "suite": "trixie", "gpus": "l40sx2", "binds": SHELVES, "groups": ["machines"]},
    {"name": "bad", "suite": "trixie", "gpus": "h100x8", "binds": SHELVES, "groups": ["machines"]},
    {"name": "other", "suite": "bookworm", "gpus": "amd-only", "sudo_password": True, "groups": ["machines"]},
]
PLACES = ("/etc", "/usr", "/opt", "/var/lib", "/home", "/root")
# Written by the host itself while nobody changes it: the clock's stamp, and sudo's note that it lectured a user.
OWN_WRITES = ("/var/lib/systemd", "/var/lib/sudo")
# What stays after users came and went: the tools' own backup copies and lock.
USER_BACKUPS = ("/etc/passwd-", "/etc/shadow-", "/etc/group-", "/etc/gshadow-", "/etc/.pwd.lock", "/etc/subuid-")
TAKEN, FREE = 8001, 8101
ONE = {"name": "one", "model": "tiny", "port": 8001, "gpus": 1}


def wish(**keys: Any) -> dict[str, Any]:
    return {"name": "one", "model": "tiny", "port": FREE, "gpus": 1, **keys}


def model(case: str) -> dict[str, Any]:
    return {"vllm_models_list": {"tiny": {"path": f"/srv/broken/{case}"}}}


@dataclass(frozen=True)
class Case:
    """A bad input by its host variables, and the figures and the next step that its refusal must hold."""

    variables: dict[str, Any]
    says: tuple[str, ...]
    machine: str = "bad"


CASES = {
    "unknown-key": Case(
        {"vllm_instances_list": [wish(gpu=1)]}, ('instance "one": unknown key "gpu"', 'did you mean "gpus"?')
    ),
    "same-name-and-port": Case(
        {"vllm_instances_list": [wish(), wish(port=8102), wish(name="two", port=8102)]},
        ('name "one" is used 2 times', "port 8102 is used by one, two", "Correct the list"),
    ),
    "no-config": Case(model("no-config"), ("/srv/broken/no-config has no config.json", "Fetch the model again")),
    "broken-config": Case(
        model("broken-config"), ("/srv/broken/broken-config/config.json is not JSON", "column", "Fetch the file again")
    ),
    "latin-config": Case(
        model("latin-config"), ("/srv/broken/latin-config/config.json is not UTF-8", "Fetch the file again")
    ),
    "cut-weights": Case(
        model("cut-weights"),
        (
            r"/srv/broken/cut-weights/model.safetensors: .* take \d+ bytes, the file holds \d+: it is cut off",
            "Fetch the file again",
        ),
    ),
    "no-model": Case(model("no-model"), ("/srv/broken/no-model does not exist", "correct its path")),
    "closed-model": Case(
        model("closed-model"), ("user vllm may not read /srv/broken/closed-model", "Give vllm read access")
    ),
    "no-such-engine": Case({"vllm_engine_version": "99.1.0"}, ("99.1.0", r"0\.\d+\.\d+")),
    "taken-port": Case(
        {"vllm_instances_list": [wish(port=TAKEN)]},
        (rf"port {TAKEN} is taken by python3 \(process \d+ of squatter.service\)", "give the instance another `port:`"),
    ),
    "no-password": Case({"ansible_become_password": ""}, ("[Mm]issing sudo password", "--ask-become-pass"), "other"),
    "dead": Case({}, ("it does not answer", "port 22", "run again"), "nowhere"),
}


def break_models(srv: Path) -> None:
    """Copies of the tiny model, each with one fault."""
    names = ("no-config", "broken-config", "latin-config", "cut-weights", "closed-model")
    folders = {name: srv / "broken" / name for name in names}
    for folder in folders.values():
        shutil.copytree(shelves.BUILD / "models" / "tiny", folder)
    (folders["no-config"] / "config.json").unlink()
    (folders["broken-config"] / "config.json").write_text('{"architectures": ["LlamaForCausalLM",')
    (folders["latin-config"] / "config.json").write_bytes('{"name": "Größe"}'.encode("latin-1"))
    weights = next(folders["cut-weights"].glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    folders["closed-model"].chmod(0o700)


def inventory(fleet: bed.Fleet, made: Path) -> dict[str, Any]:
    """Each case is a host of the group, most of them the same machine; the dead one comes first."""
    machines = yaml.safe_load(made.read_text())["all"]["children"]["machines"]["hosts"]
    base = machines["bad"]["ansible_host"].rsplit(".", 1)[0]
    machines["nowhere"] = {"ansible_host": f"{base}.250", "ansible_user": "root"}
    hosts = {name: {**machines[case.machine], **case.variables} for name, case in CASES.items()}
    hosts = {"dead": hosts.pop("dead"), **hosts}
    hosts["good"] = {**machines["good"], "vllm_instances_list": [ONE]}
    hosts["amd"] = machines["other"]
    common = yaml.safe_load((REPO / "molecule/default/inventory/group_vars/gpu_hosts.yml").read_text())
    keepalive = "-o ControlMaster=auto -o ControlPersist=60s -o ServerAliveInterval=2 -o ServerAliveCountMax=3"
    common |= {"vllm_instances_list": [wish()], "ansible_ssh_args": keepalive, "ansible_ssh_timeout": 4}
    return {"gpu_hosts": {"vars": common, "hosts": hosts}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    shelves.fill()
    work = tmp_path_factory.mktemp("refusals")
    (work / "fleet.yml").write_text(yaml.safe_dump({"name": "refusals", "hosts": MACHINES}))
    loaded = bed.load(str(work / "fleet.yml"))
    try:
        made = bed.up(loaded)
        (work / "hosts.yml").write_text(yaml.safe_dump(inventory(loaded, made), sort_keys=False))
        found = Fleet(loaded, [made, work / "hosts.yml"], work)
        break_models(loaded.root("bad") / "srv")
        serve = f"/usr/bin/python3 -m http.server --bind 127.0.0.1 {TAKEN}"
        found.inside("bad", f"systemd-run --quiet --unit=squatter --working-directory=/run {serve}")
        # sudo makes this file when a user succeeds for the first time.
        found.inside("other", "install -o ops /dev/null /home/ops/.sudo_as_admin_successful")
        yield found
    finally:
        bed.down(loaded)


def touched(fleet: Fleet, machine: str) -> snapshot.Snapshot:
    return snapshot.touched(fleet.fleet.root(machine), PLACES, OWN_WRITES)


@dataclass
class Bare:
    """The machine to be provisioned while it was bare: what check mode said, and what lay on its disk."""

    rehearsal: Run
    content: snapshot.Snapshot
    written: list[str]


@pytest.fixture(scope="module")
def bare(fleet: Fleet) -> Bare:
    before = touched(fleet, "good")
    run = fleet.play("site", "--check", "--diff", "--limit", "good")
    written = snapshot.differences(before, touched(fleet, "good"))
    return Bare(run, snapshot.content(fleet.fleet.root("good"), PLACES, OWN_WRITES), written)


@dataclass
class Refusals:
    """The one run that meets all cases, and the paths that it wrote on the machines of the refused."""

    run: Run
    written: dict[str, list[str]]


@pytest.fixture(scope="module")
def refusals(fleet: Fleet, bare: Bare) -> Refusals:
    before = {name: touched(fleet, name) for name in ("bad", "other")}
    run = fleet.play("site", "--diff", "--forks", "8")
    return Refusals(run, {name: snapshot.differences(before[name], touched(fleet, name)) for name in before})


@pytest.mark.parametrize("host", CASES)
def test_bad_input_gets_one_message_with_figures_and_the_next_step(refusals: Refusals, host: str) -> None:
    report = refusals.run.report[host]
    print(f"{host}: {report['reason']}")
    assert report["status"] == ("unreachable" if host == "dead" else "failed")
    for pattern in CASES[host].says:
        assert re.search(pattern, report["reason"]), f"{pattern} is not in: {report['reason']}"
    recap = refusals.run.recap(host)
    assert (recap["changed"], recap["failed"]) == (0, 1)
    for message in refusals.run.counts[host]["failed"]:
        said = message.removeprefix("Task failed: ")
        assert said in report["reason"] or report["reason"] in said, "there is one message, not several"


def test_the_run_fails_and_shows_no_traceback(refusals: Refusals) -> None:
    assert refusals.run.status == 2
    assert "Traceback" not in refusals.run.output


def test_nothing_is_written_on_the_machines_of_the_refused(refusals: Refusals) -> None:
    assert refusals.written == {"bad": [], "other": []}


def test_a_host_with_gpus_of_another_vendor_is_left_out_with_a_word(refusals: Refusals) -> None:
    recap = refusals.run.recap("amd")
    assert (recap["changed"], recap["failed"]) == (0, 0)
    assert "1 GPU(s) of AMD and none of NVIDIA" in refusals.run.findings("amd")
    assert "1 GPU(s) of AMD and none of NVIDIA" in refusals.run.output


def test_the_good_host_among_the_bad_ones_serves(fleet: Fleet, refusals: Refusals) -> None:
    assert refusals.run.report["good"]["status"] == "ok"
    assert fleet.answers("good", "one", 8001)


def test_check_mode_on_the_bare_host_wrote_nothing_and_named_every_change(bare: Bare, refusals: Refusals) -> None:
    assert bare.rehearsal.status == 0, bare.rehearsal.output[-5000:]
    assert bare.written == []
    predicted, done = bare.rehearsal.counts["good"]["changed"], refusals.run.counts["good"]["changed"]
    assert len(done) >= 5, "the real run had something to do"
    assert predicted == done


def test_an_inventory_without_the_group_is_refused_before_any_contact(fleet: Fleet) -> None:
    lone = Fleet(fleet.fleet, fleet.inventories[:1], fleet.work)
    run = lone.play("site")
    assert run.status != 0
    (message,) = [message for row in run.counts.values() for message in row["failed"]]
    assert "The inventory has no hosts in the group gpu_hosts" in message
    assert "inventories/example/hosts.yml" in message
    assert sum(row["remote"] for row in run.counts.values()) == 0


def test_a_dead_first_host_in_a_batch_of_its_own_ends_neither_the_run_nor_the_report(
    fleet: Fleet, refusals: Refusals
) -> None:
    run = fleet.play("site", "--limit", "dead,good", site_allow_disruption=True)
    assert run.status == 2
    assert {host: entry["status"] for host, entry in run.report.items()} == {"dead": "unreachable", "good": "ok"}
    assert run.recap("good")["changed"] == 0


def test_a_host_that_dies_in_the_middle_is_named_and_the_next_run_finishes_it(fleet: Fleet, refusals: Refusals) -> None:
    """`taken-port` becomes a proper host here: the foreign process goes."""
    fleet.inside("bad", "systemctl stop squatter")
    two = {**ONE, "name": "two", "port": 8002}
    arguments = ("site", "--limit", "taken-port,good")
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(fleet.play, *arguments, vllm_instances_list=[ONE, two])
        helper = fleet.fleet.root("bad") / "usr/local/lib/gpufleet/gpufleet.pyz"
        wait_for(helper.exists, 120)
        with cable_out(fleet, "bad"):
            run = begun.result()
    assert run.status != 0
    assert run.recap("taken-port")["unreachable"] == 1
    assert run.report["taken-port"]["status"] == "failed"
    assert "stopped answering" in run.report["taken-port"]["reason"]
    assert run.report["good"]["status"] == "ok"
    assert fleet.answers("good", "two", 8002)
    again = fleet.play(*arguments, vllm_instances_list=[ONE, two])
    assert again.status == 0, again.output[-5000:]
    assert fleet.answers("bad", "two", 8002)
    assert again.recap("good")["changed"] == 0


class cable_out:
    """While it is entered, a machine's network cable is out; afterwards it answers again."""

    def __init__(self, fleet: Fleet, machine: str) -> None:
        index = fleet.inside(machine, "cat /sys/class/net/host0/iflink")
        links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True).stdout)
        self.link = next(link["ifname"] for link in links if link["ifindex"] == int(index))
        self.fleet = fleet

    def __enter__(self) -> None:
        subprocess.run(["ip", "link", "set", self.link, "down"], check=True)

    def __exit__(self, *_exception: object) -> None:
        subprocess.run(["ip", "link", "set", self.link, "up"], check=True)
        bed.up(self.fleet.fleet)  # what is up stays; returns when all answer


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def test_decommission_refuses_a_serving_host(fleet: Fleet, refusals: Refusals) -> None:
    before = touched(fleet, "good")
    run = fleet.play("decommission", "--limit", "good")
    assert run.status == 2
    (message,) = run.counts["good"]["failed"]
    assert "Nothing was changed on this host: it serves with one, two" in message
    assert "-e decommission_allow_serving=true" in message
    assert snapshot.differences(before, touched(fleet, "good")) == []
    assert fleet.answers("good", "one", 8001)


def test_decommission_with_consent_leaves_the_host_as_it_was_before_and_check_mode_says_so(
    fleet: Fleet, bare: Bare, refusals: Refusals
) -> None:
    before = touched(fleet, "good")
    arguments = ("decommission", "--limit", "good", "--diff")
    rehearsal = fleet.play(*arguments, "--check", decommission_allow_serving=True)
    assert rehearsal.status == 0, rehearsal.output[-5000:]
    assert snapshot.differences(before, touched(fleet, "good")) == []
    run = fleet.play(*arguments, decommission_allow_serving=True)
    assert run.status == 0, run.output[-5000:]
    assert rehearsal.counts["good"]["changed"] == run.counts["good"]["changed"]
    left = snapshot.differences(bare.content, snapshot.content(fleet.fleet.root("good"), PLACES, OWN_WRITES))
    assert [path for path in left if path not in USER_BACKUPS] == []
    assert fleet.inside("good", "getent passwd vllm; getent group vllm; true") == ""
    assert fleet.inside("good", "systemctl list-units --all --plain --no-legend 'vllm-*' '*gpufleet*'") == ""
    assert fleet.inside("good", "systemctl --failed --plain --no-legend") == ""
    assert fleet.play(*arguments).recap("good")["changed"] == 0
