"""The stub engine takes one release's command line, answers like its server, and dies like it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import build
import pytest
import tiny_model
from stub_process import Server, free_port, until


@pytest.fixture
def refused(command):
    """Run a start that must fail: (exit code, stderr)."""

    def run(version: str, *arguments: str, **environment: str) -> tuple[int, str]:
        argv, settings = command(version, *arguments, **environment)
        done = subprocess.run(argv, env=settings, capture_output=True, text=True, timeout=20, check=False)
        return done.returncode, done.stderr

    return run


@pytest.fixture
def start(command, model, tmp_path) -> Iterator:
    started: list[Server] = []

    def run(version: str = "0.32.0", *arguments: str, port: int | None = None, path: Path | None = None, **environment):
        port = port or free_port()
        address = ["--host", "127.0.0.1", "--port", str(port)]
        argv, settings = command(version, "serve", str(path or model), *address, *arguments, **environment)
        log = tmp_path / f"log{len(started)}"
        with log.open("w", encoding="utf-8") as target:
            process = subprocess.Popen(argv, env=settings, stdout=target, stderr=target, start_new_session=True)
        started.append(Server(process, port, log))
        return started[-1]

    yield run
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_the_same_release_gives_the_same_wheel(tmp_path):
    first, second = build.build("0.32.0", tmp_path / "a"), build.build("0.32.0", tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert first.name == "vllm-0.32.0+stub-py3-none-any.whl"


def test_an_unknown_release_is_refused_with_the_known_range():
    with pytest.raises(SystemExit, match=r"0\.99\.0 is not in the stub's table \(0\.5\.4 to "):
        build.release("0.99.0")


@pytest.mark.parametrize("version", ["0.5.4", "0.8.5.post1", "0.9.2", "0.12.0", "0.20.2", "0.33.0"])
def test_the_parser_of_every_era_can_be_built(refused, version):
    assert refused(version, "serve", "--no-such-flag")[0] == 2


@pytest.mark.parametrize(
    ("version", "flag", "accepted"),
    [
        ("0.17.1", "--swap-space=4", True),
        ("0.18.0", "--swap-space=4", False),
        ("0.10.1", "--kv-cache-memory-bytes=1", False),
        ("0.10.2", "--kv-cache-memory-bytes=1", True),
        ("0.32.0", "--max_model_len=8K", True),
        ("0.32.0", "--dtype=fp12", False),
        ("0.32.0", "--no-enforce-eager", True),
        ("0.32.0", "--speculative-config.method=ngram", True),
    ],
)
def test_flags_follow_the_release(refused, version, flag, accepted):
    code, text = refused(version, "serve", "/nonexistent/model", flag)
    assert (code == 2) is not accepted
    assert ("error:" in text and "usage:" in text) is not accepted


def test_a_missing_model_folder_fails_the_start(refused):
    code, text = refused("0.32.0", "serve", "/nonexistent/model", "--port", str(free_port()))
    assert code == 1
    assert "/nonexistent/model" in text


def test_a_truncated_checkpoint_fails_in_the_engine_core(start, tmp_path):
    broken = tiny_model.write(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    server = start(path=broken)
    assert server.process.wait(15) == 1
    assert "incomplete metadata" in server.log.read_text(encoding="utf-8")


def test_a_model_that_pools_gives_vectors_and_no_tokens(start, tmp_path):
    folder = tiny_model.write(tmp_path / "embedder")
    (folder / "modules.json").write_text("[]", encoding="utf-8")
    server = start(path=folder).wait()
    status, body = server.get("/v1/embeddings", {"input": ["hello", "you"]})
    vectors = [entry["embedding"] for entry in json.loads(body)["data"]]
    assert status == 200 and [len(vector) for vector in vectors] == [tiny_model.HIDDEN] * 2 and vectors[0] != vectors[1]
    status, body = server.get("/v1/completions", {"prompt": "hello"})
    assert status == 400 and "does not support Completions API" in body


def test_a_model_that_generates_gives_no_vectors(start):
    status, body = start().wait().get("/v1/embeddings", {"input": "hello"})
    assert status == 400 and "does not support Embeddings API" in body


def test_it_answers_under_its_served_name_only(start):
    server = start("0.32.0", "--served-model-name", "small").wait()
    models = json.loads(server.get("/v1/models")[1])
    assert [entry["id"] for entry in models["data"]] == ["small"]
    status, body = server.get("/v1/completions", {"model": "small", "prompt": "hello", "max_tokens": 3})
    answer = json.loads(body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["text"].strip()
    status, body = server.get("/v1/completions", {"model": "other", "prompt": "hello"})
    assert status == 404
    assert "does not exist" in body


def test_the_answer_depends_on_the_prompt_only(start):
    server = start().wait()
    name = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
    texts = [
        json.loads(server.get("/v1/completions", {"model": name, "prompt": prompt, "max_tokens": 8})[1])["choices"][0]
        for prompt in ("one", "one", "two")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_chat_streams_events_and_ends_with_done(start):
    server = start("0.32.0", "--served-model-name", "small").wait()
    request = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    events = [line[6:] for line in server.get("/v1/chat/completions", request)[1].splitlines() if line]
    assert events[-1] == "[DONE]"
    assert [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "length"]


def test_a_request_counts_in_the_metrics(start):
    server = start("0.32.0", "--served-model-name", "small").wait()
    server.get("/v1/completions", {"model": "small", "prompt": "hello", "max_tokens": 3})
    lines = server.get("/metrics")[1].splitlines()
    assert 'vllm:generation_tokens_total{engine="0",model_name="small"} 3.0' in lines
    assert 'vllm:num_requests_running{engine="0",model_name="small"} 0.0' in lines


def test_a_key_guards_v1_and_leaves_health_open(start):
    server = start(VLLM_API_KEY="sesame").wait()
    assert server.get("/v1/models")[0] == 401
    assert server.get("/v1/models", key="wrong")[0] == 401
    assert server.get("/v1/models", key="sesame")[0] == 200
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(("version", "winner"), [("0.8.2", "from-env"), ("0.8.3", "from-flag")])
def test_which_key_wins_depends_on_the_release(start, version, winner):
    server = start(version, "--api-key", "from-flag", VLLM_API_KEY="from-env").wait()
    assert {key for key in ("from-env", "from-flag") if server.get("/v1/models", key=key)[0] == 200} == {winner}


def test_a_start_leaves_the_figures_in_its_log(start):
    text = start("0.32.0", "--max-model-len", "1024").wait().log.read_text(encoding="utf-8")
    for part in ("Model loading took", "Available KV cache memory:", "KV cache size:", "for 1,024 tokens per request:"):
        assert part in text


def test_the_port_is_closed_until_the_load_is_over(start):
    server = start(GPUFLEET_STUB_START_SECONDS="1")
    time.sleep(0.6)
    with pytest.raises(urllib.error.URLError):
        server.get("/health")
    assert server.wait().get("/health")[0] == 200


def test_sigterm_ends_an_idle_server_and_its_children_with_zero(start):
    server = start("0.32.0", "--tensor-parallel-size", "2").wait()
    family = server.family()
    assert sorted(family) == ["VLLM::EngineCor", "VLLM::Worker_TP"]
    server.process.terminate()
    assert server.process.wait(5) == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family.values()), 3)


def test_sigterm_during_the_load_is_lost(start):
    server = start(GPUFLEET_STUB_START_SECONDS="1.5")
    until(lambda: bool(server.family()))
    server.process.terminate()
    assert server.wait().get("/health")[0] == 200


def test_the_server_says_503_and_exits_with_zero_when_its_engine_dies(start):
    server = start(GPUFLEET_STUB_DEATH_SECONDS="1").wait()
    os.kill(server.family()["VLLM::EngineCor"], signal.SIGKILL)
    until(lambda: server.process.poll() is not None or server.get("/health")[0] == 503)
    assert server.process.wait(5) == 0


def test_children_outlive_a_killed_server(start):
    server = start("0.32.0", "--tensor-parallel-size", "2").wait()
    family = server.family()
    server.process.kill()
    server.process.wait()
    time.sleep(0.5)
    assert all(Path(f"/proc/{pid}").exists() for pid in family.values())


def test_a_second_server_on_the_port_is_refused_or_shares_it_by_release(start, command, model):
    first = start("0.32.0").wait()
    late = start("0.32.0", port=first.port)
    assert late.process.wait(10) == 1
    assert "[Errno 98] Address already in use" in late.log.read_text(encoding="utf-8")
    shared = start("0.20.2").wait()
    assert start("0.20.2", port=shared.port).wait().process.poll() is None


def test_failures_can_be_asked_for_beside_the_model(start, refused, tmp_path):
    path = tiny_model.write(tmp_path / "bad")
    switch = path / "gpufleet-stub.json"
    switch.write_text('{"fail": "start"}', encoding="utf-8")
    assert refused("0.32.0", "serve", str(path), "--port", str(free_port()))[0] == 1
    switch.write_text('{"fail": "empty"}', encoding="utf-8")
    server = start("0.32.0", "--served-model-name", "small", path=path).wait()
    ask = ("/v1/completions", {"model": "small", "prompt": "x"})
    assert json.loads(server.get(*ask)[1])["usage"]["completion_tokens"] == 0
    switch.write_text('{"fail": "error"}', encoding="utf-8")
    assert server.get(*ask)[0] == 500
    switch.unlink()
    assert json.loads(server.get(*ask)[1])["usage"]["completion_tokens"] == 16


def test_a_wrong_name_is_answered_when_asked_for(start):
    server = start("0.32.0", "--served-model-name", "small", GPUFLEET_STUB_FAIL="wrong_name").wait()
    assert "small" not in server.get("/v1/models")[1]


def test_a_length_that_does_not_fit_is_refused_with_the_longest_that_does(start):
    server = start("0.32.0", "--kv-cache-memory-bytes", "1m", "--max-model-len", "2048")
    assert server.process.wait(15) == 1
    assert "the estimated maximum model length is " in server.log.read_text(encoding="utf-8")


def test_a_request_that_is_not_declared_as_json_is_refused(start):
    server = start().wait()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", b'{"prompt": "x"}')
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=10)
