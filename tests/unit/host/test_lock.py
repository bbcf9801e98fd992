"""The host lock: exclusive between processes, freed by the kernel, and its refusal says who holds it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host.lock import HostLock


def hold(path: str, ready: multiprocessing.synchronize.Event) -> None:
    with HostLock(label="gpufleet.inference.host_files", run_id="run-7", deadline=1, path=path):
        ready.set()
        time.sleep(60)


@pytest.fixture
def held(tmp_path):
    path = str(tmp_path / "run" / "lock")
    ready = multiprocessing.Event()
    process = multiprocessing.Process(target=hold, args=(path, ready))
    process.start()
    assert ready.wait(10)
    yield path, process
    process.kill()
    process.join()


def test_the_refusal_names_holder_start_and_run_id_and_keeps_its_deadline(held):
    path, process = held
    begun = time.monotonic()
    with pytest.raises(FleetError) as caught, HostLock(label="x", deadline=0.5, path=path):
        pass
    assert 0.4 < time.monotonic() - begun < 5
    assert caught.value.code == "host_locked"
    for part in (str(process.pid), "host_files", "run-7", "since 20", "0.5 s", path):
        assert part in caught.value.message


def test_a_killed_holder_frees_the_lock(held):
    path, process = held
    os.kill(process.pid, signal.SIGKILL)
    with HostLock(label="next", run_id="run-8", deadline=5, path=path), open(path, encoding="utf-8") as stream:
        content = json.load(stream)
    assert (content["pid"], content["run_id"], content["what"]) == (os.getpid(), "run-8", "next")


def test_a_failure_inside_frees_the_lock_and_leaves_no_name(tmp_path):
    path = str(tmp_path / "lock")
    with pytest.raises(ValueError, match="inside"), HostLock(label="a", deadline=1, path=path):
        raise ValueError("inside")
    with open(path, encoding="utf-8") as stream:
        assert stream.read() == ""
    with HostLock(label="b", deadline=0, path=path):
        pass


def test_a_lock_that_cannot_be_opened_says_that_root_is_needed(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FleetError, match="cannot be opened") as caught,
        HostLock(label="a", deadline=1, path=str(tmp_path / "file" / "lock")),
    ):
        pass
    assert "become" in caught.value.hint
