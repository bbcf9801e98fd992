"""Start locks and token readiness, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._helper import ready, unit
from ansible_collections.gpufleet.inference.plugins.module_utils._helper import start as start_verb

GPU = "GPU-6d0a2b1c-0000-4000-8000-000000000001"
OTHER = "GPU-6d0a2b1c-0000-4000-8000-000000000002"


def events(path) -> dict[str, float]:
    if not path.exists():
        return {}
    rows = [line.split() for line in path.read_text().splitlines()]
    return {f"{name} {word}": float(moment) for name, word, moment in rows}


def wait_for(condition, seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "the awaited state did not come"
        time.sleep(0.05)


def test_two_starts_on_one_gpu_do_not_overlap(start, free_port):
    first = start("one", free_port(), [GPU], load=1.0)
    wait_for(lambda: "one load" in events(first.log))
    second = start("two", free_port(), [OTHER, GPU], load=0.1)
    probes = [first.ready(), second.ready()]
    assert [probe.wait(30) for probe in probes] == [0, 0]
    seen = events(first.log)
    assert seen["two load"] > seen["one loaded"]


def test_starts_on_different_gpus_run_at_the_same_time(start, free_port):
    first = start("one", free_port(), [GPU], load=2.0)
    second = start("two", free_port(), [OTHER], load=2.0)
    wait_for(lambda: {"one load", "two load"} <= set(events(first.log)), 1.9)
    assert "one loaded" not in events(first.log)
    assert second.main.poll() is None


def test_the_lock_is_held_until_a_token_was_seen_not_until_the_engine_listens(start, free_port):
    first = start("one", free_port(), [GPU], load=0.1)
    wait_for(lambda: "one loaded" in events(first.log))
    second = start("two", free_port(), [GPU], load=0.1)
    time.sleep(1.0)
    assert "two load" not in events(first.log)
    assert first.ready().wait(20) == 0
    wait_for(lambda: "two load" in events(first.log))
    assert second.main.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_is_killed_while_it_loads_frees_its_gpu(start, free_port, number):
    first = start("one", free_port(), [GPU], load=60)
    wait_for(lambda: "one load" in events(first.log))
    second = start("two", free_port(), [GPU], load=0.1)
    os.kill(first.main.pid, number)
    first.main.wait(10)
    wait_for(lambda: "two load" in events(first.log), 5)
    assert second.main.poll() is None


def test_a_killed_lock_holder_frees_the_gpu(start, free_port, tmp_path):
    first = start("one", free_port(), [GPU], load=0.1)
    wait_for(lambda: "one load" in events(first.log))
    lock = str(tmp_path / "start" / GPU)
    holders = [pid for pid in os.listdir("/proc") if pid.isdigit() and lock in open_files(pid)]
    assert len(holders) == 1
    assert int(holders[0]) != first.main.pid, "the engine itself must not inherit the lock"
    os.kill(int(holders[0]), signal.SIGKILL)
    descriptors = start_verb.take(str(tmp_path / "start"), [GPU], "three", 2)
    os.close(descriptors[0])


def open_files(pid: str) -> set[str]:
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        pass
    return found


def test_waiting_too_long_for_a_gpu_names_the_instance_that_has_it(start, free_port):
    first = start("one", free_port(), [GPU], load=60)
    wait_for(lambda: "one load" in events(first.log))
    second = start("two", free_port(), [GPU], lock_deadline=0.5)
    _, text = second.main.communicate(timeout=10)
    assert second.main.returncode == 1
    for part in ("two", "0.5 s", GPU, "instance one"):
        assert part in text
    assert "Traceback" not in text


def test_missing_lock_directory_says_who_makes_it(tmp_path):
    with pytest.raises(FleetError, match="cannot be opened") as caught:
        start_verb.take(str(tmp_path / "missing"), [GPU], "one", 1)
    assert "tmpfiles" in caught.value.hint


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("other-name", ["shows another, not one", "within 1.5 s"]),
        ("no-token", ["answered 500", "EngineDeadError", "within 1.5 s"]),
        ("dies", ["ended before it returned a token", "nothing listens on port"]),
    ],
)
def test_an_engine_that_does_not_answer_as_itself_is_not_ready(start, free_port, mode, words):
    instance = start("one", free_port(), [GPU], load=0.1, mode=mode)
    probe = instance.ready(deadline=1.5)
    _, text = probe.communicate(timeout=20)
    assert probe.returncode == 1
    for word in words:
        assert word in text
    assert "Traceback" not in text
    assert not (instance.run_directory / "ready-1").exists()


@pytest.mark.parametrize("mode", ["embeds", "scores"])
def test_an_engine_that_pools_is_ready_with_a_vector_or_a_score_and_never_with_a_token(start, free_port, mode):
    instance = start("one", free_port(), [GPU], load=0.1, mode=mode)
    as_generator = instance.ready(deadline=1.5)
    assert as_generator.wait(20) == 1
    out, err = instance.ready(pooling=True).communicate(timeout=20)
    assert "returned a pooled result" in out and err == ""
    assert (instance.run_directory / "ready-1").exists()


def test_an_engine_that_pools_nothing_is_not_ready_and_every_refusal_is_told(start, free_port):
    probe = start("one", free_port(), [GPU], load=0.1, mode="nothing-pooled").ready(deadline=1.5, pooling=True)
    _, text = probe.communicate(timeout=20)
    assert probe.returncode == 1
    for word in ("no pooled result", "/v1/embeddings", "/pooling", "/classify", "/score", "answered 400"):
        assert word in text


def test_ready_leaves_a_note_of_this_invocation_only(start, free_port):
    instance = start("one", free_port(), [GPU], load=0.1, invocation="abc")
    assert instance.ready().wait(20) == 0
    assert sorted(os.listdir(instance.run_directory)) == ["ready-abc", "started-abc"]


def test_a_credential_reaches_the_engine_by_environment_and_the_probe_by_header(start, free_port, tmp_path):
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "api_key").write_text("key-42\n")
    instance = start("one", free_port(), [GPU], load=0.1, environment={"CREDENTIALS_DIRECTORY": str(credentials)})
    probe = instance.ready()
    out, err = probe.communicate(timeout=20)
    assert (probe.returncode, err) == (0, "")
    with open(f"/proc/{instance.main.pid}/cmdline", "rb") as stream:
        assert b"key-42" not in stream.read()
    assert "key-42" not in out


@pytest.mark.parametrize("content", ["", "\n", "two\nlines\n"])
def test_a_credential_that_is_no_single_line_is_refused_without_showing_it(tmp_path, content):
    (tmp_path / "api_key").write_text(content)
    with pytest.raises(FleetError, match="one line") as caught:
        start_verb.add_credentials({}, {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert "two" not in caught.value.message


def test_a_listener_outside_the_unit_is_a_port_conflict(start, free_port, monkeypatch):
    instance = start("one", free_port(), [GPU], load=0)
    endpoint = ready.Endpoint("127.0.0.1", instance.port, "one")
    wait_for(lambda: ready.listeners(endpoint))
    ready.check_listener(endpoint)
    monkeypatch.setattr(unit, "pids_beside", lambda pid: [os.getpid()])
    with pytest.raises(FleetError, match=f"Port {instance.port} is served by 1 listener"):
        ready.check_listener(endpoint)


def test_an_engine_that_cannot_be_run_is_named(pyz):
    command = [sys.executable, "-I", str(pyz), "start", "--instance", "x", "--deadline", "1", "--", "/nowhere/vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/nowhere/vllm" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_helper_says_its_version_and_its_digest(pyz):
    import hashlib

    def answer(verb: str) -> str:
        return subprocess.run(
            [sys.executable, "-I", str(pyz), verb], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert answer("digest") == hashlib.sha256(pyz.read_bytes()).hexdigest()
    assert answer("version").count(".") == 2


def test_processes_beside_this_one_include_its_children_while_they_live():
    child = subprocess.Popen(["sleep", "20"])
    try:
        beside = unit.pids_beside("self")
        assert {os.getpid(), child.pid} <= set(beside)
    finally:
        child.kill()
        child.wait()
    assert child.pid not in unit.pids_beside("self")
