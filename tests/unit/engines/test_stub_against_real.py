"""The stub is what it stands for: its flags, answers, metrics and log lines are those of real vLLM on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import build
import pytest
import wheelhouse
from stub_process import Server, free_port, until

pytestmark = pytest.mark.long
VERSION = "0.32.0"
CACHE = Path(os.environ.get("GPUFLEET_CACHE") or wheelhouse.ROOT / ".cache")
FLAGS = """
import argparse
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
names = [o for a in make_arg_parser(FlexibleArgumentParser())._actions for o in a.option_strings if o[:2] == "--"]
print(" ".join(names))
"""
LOG = (r"version 0\.32\.0", r"KV cache size: [\d,]+ tokens, Maximum concurrency for 512 tokens per request: [\d.]+x")
READY = r"Application startup complete\."


@pytest.fixture(scope="module")
def real() -> Path:
    """An environment with the real engine, made once."""
    wheels = wheelhouse.fill(VERSION, CACHE, os.environ.get("GPUFLEET_TORCH_CPU_INDEX"))
    target = wheels.with_name(wheels.name.replace("wheelhouse", "environment"))
    if not (target / "bin/vllm").exists():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, target], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", target / "bin/python", "--no-index"]
        subprocess.run([*install, "--find-links", wheels, f"vllm=={VERSION}"], check=True)
    return target


@pytest.fixture(scope="module")
def servers(real, model, command, tmp_path_factory):
    """(real, stub) with the same command line, both ready."""
    folder, started = tmp_path_factory.mktemp("servers"), []
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    for kind in ("real", "stub"):
        port = free_port()
        options = ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "tiny", "--max-model-len", "512"]
        options += ["--api-key", "sesame"]
        argv, environment = command(VERSION, "serve", str(model), *options)
        if kind == "real":
            argv = [str(real / "bin/vllm"), "serve", str(model), *options]
            environment = {**os.environ, **cpu, "VLLM_HOST_IP": "127.0.0.1"}
        log = folder / f"{kind}.log"
        with log.open("w", encoding="utf-8") as target:
            process = subprocess.Popen(argv, env=environment, stdout=target, stderr=target, start_new_session=True)
        started.append(Server(process, port, log))
        until(lambda log=log: re.search(READY, log.read_text(encoding="utf-8")), 300)
    yield tuple(started)
    for server in started:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_the_stub_knows_exactly_the_flags_of_the_release(real):
    text = subprocess.run([real / "bin/python", "-c", FLAGS], capture_output=True, text=True, check=True).stdout
    theirs = {name for name in text.split() if not name.startswith("--no-")} - {"--help"}
    flags = build.release(VERSION)["flags"]
    ours = {*flags, *(alias for flag in flags.values() for alias in flag.get("aliases", []) if alias[:2] == "--")}
    assert sorted(ours ^ theirs) == []


ASK = {
    "completion": ("/v1/completions", {"model": "tiny", "prompt": "the and", "max_tokens": 3}),
    "chat": ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    "unknown model": ("/v1/completions", {"model": "other", "prompt": "x"}),
    "too long": ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 5000}),
    "models": ("/v1/models", None),
    "version": ("/version", None),
}


def shape(value: object) -> object:
    """Keys and kinds of a JSON value."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def less(ours: object, theirs: object, path: str = "") -> list[str]:
    """Where ours has something that theirs has not, or of another kind."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [line for key in ours for line in less(ours[key], theirs.get(key), f"{path}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and ours and theirs:
        return less(ours[0], theirs[0], f"{path}[]")
    return [] if type(ours) is type(theirs) and (isinstance(ours, (list, dict)) or ours == theirs) else [path]


@pytest.mark.parametrize("question", ASK)
def test_an_answer_has_the_status_and_the_shape_of_the_real_one(servers, question):
    path, body = ASK[question]
    (status, text), (stub_status, stub_text) = [server.get(path, body, key="sesame") for server in servers]
    assert stub_status == status
    assert less(shape(json.loads(stub_text)), shape(json.loads(text))) == []


def test_the_key_is_asked_for_in_the_same_places(servers):
    for path in ("/v1/models", "/health", "/metrics", "/version", "/ping", "/no/such/path"):
        statuses = [server.get(path)[0] for server in servers]
        assert statuses[0] == statuses[1], path


def test_the_stub_has_no_metric_of_its_own(servers):
    names = [set(re.findall(r"^# TYPE (vllm:\S+) (\S+)", server.get("/metrics")[1], re.M)) for server in servers]
    assert sorted(names[1] - names[0]) == []
    assert ("vllm:num_requests_running", "gauge") in names[1]


def test_the_log_lines_that_are_read_back_look_alike(servers):
    for server in servers:
        text = server.log.read_text(encoding="utf-8")
        assert [pattern for pattern in LOG if not re.search(pattern, text)] == []


def test_both_end_with_zero_when_told_to(servers):
    for server in servers:
        server.process.terminate()
        assert server.process.wait(60) == 0
