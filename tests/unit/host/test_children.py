from __future__ import annotations

import os
import signal
import time

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._host import children


@pytest.fixture
def strays():
    """Process ids that a test left on purpose; they end with the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def collect(work, patience=5.0, **kwargs):
    got = []

    def receive(message):
        got.append(message)
        return patience

    return got, children.watch(work, receive, patience, **kwargs)


def test_messages_arrive_in_order_and_the_end_is_seen():
    def work(emit):
        emit(["a", 1], False)
        emit({"b": None}, True)

    got, outcome = collect(work)
    assert got == [["a", 1], {"b": None}]
    assert outcome.done
    assert not outcome.silent
    assert outcome.died == ""


def test_a_silent_child_is_left_and_what_it_said_before_is_kept():
    def work(emit):
        emit("before", True)
        time.sleep(60)

    started = time.monotonic()
    got, outcome = collect(work, patience=1.5)
    assert got == ["before"]
    assert outcome.silent
    assert not outcome.done
    assert time.monotonic() - started < 20


def test_a_child_that_ignores_the_kill_is_not_waited_for(strays):
    def work(emit):
        emit(os.getpid(), True)
        time.sleep(60)

    started = time.monotonic()
    got, outcome = collect(work, patience=1.5, kill=lambda pid, number: None)
    assert time.monotonic() - started < 20
    assert outcome.silent
    strays.extend(got)
    os.kill(got[0], 0)


def test_a_child_that_dies_says_of_which_signal():
    def work(emit):
        emit("hello", True)
        os.kill(os.getpid(), signal.SIGSEGV)

    got, outcome = collect(work)
    assert got == ["hello"]
    assert outcome.died == "the reading process died of signal 11"


def test_a_child_that_raises_ends_with_a_status_and_prints_nothing(capfd):
    def work(emit):
        raise ValueError("nobody should see this")

    _got, outcome = collect(work)
    assert outcome.died == "the reading process ended with status 70"
    assert capfd.readouterr() == ("", "")


def test_the_child_has_its_own_session_and_no_descriptor_but_null_and_its_pipe():
    keep = os.pipe()

    def work(emit):
        links = {name: os.readlink(f"/proc/self/fd/{name}") for name in ("0", "1", "2")}
        emit([os.getsid(0) == os.getpid(), links, sorted(int(n) for n in os.listdir("/proc/self/fd"))[:4]], True)

    got, _outcome = collect(work)
    for end in keep:
        os.close(end)
    own_session, links, descriptors = got[0]
    assert own_session
    assert set(links.values()) == {"/dev/null"}
    assert descriptors[:4] == [0, 1, 2, 3]


def test_an_answer_larger_than_a_pipe_arrives_whole():
    def work(emit):
        emit("x" * 300_000, True)

    got, outcome = collect(work)
    assert len(got[0]) == 300_000
    assert outcome.done
