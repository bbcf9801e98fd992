"""The real helper as a file, and a tiny engine, for tests with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp

ENGINE = textwrap.dedent(
    """
    import http.server, json, os, sys, time
    port, name, load, mode = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
    log = os.environ["ENGINE_LOG"]
    def note(word):
        with open(log, "a") as stream:
            stream.write(f"{name} {word} {time.monotonic()}\\n")
    note("load")
    time.sleep(load)
    if mode == "dies":
        sys.exit(0)
    note("loaded")
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def do_GET(self):
            key = os.environ.get("VLLM_API_KEY")
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                return self.answer(401, {"error": "Unauthorized"})
            self.answer(200, {"data": [{"id": "another" if mode == "other-name" else name}]})
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            asked = json.loads(self.rfile.read(size))
            if mode == "no-token":
                return self.answer(500, {"error": "EngineDeadError"})
            if mode in ("embeds", "scores", "nothing-pooled"):
                if self.path != {"embeds": "/v1/embeddings", "scores": "/score"}.get(mode):
                    return self.answer(400, {"error": "The model does not support this API"})
                return self.answer(200, {"data": [{"index": 0}]})
            self.answer(200, {"model": asked["model"], "choices": [{"text": " x"}], "usage": {"completion_tokens": 1}})
        def log_message(self, *args):
            pass
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


@pytest.fixture(scope="session")
def pyz(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("helper") / "gpufleet.pyz"
    path.write_bytes(_zipapp.build())
    return path


@pytest.fixture
def free_port() -> Callable[[], int]:
    import socket

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


class Instance:
    """What systemd does with one unit, without systemd: ExecStart, then ExecStartPost with the same environment."""

    def __init__(self, pyz: Path, base: Path, name: str, port: int, gpus: list[str], **options: Any) -> None:
        self.run_directory = base / f"run-{name}"
        self.run_directory.mkdir(exist_ok=True)
        self.log = base / "engine.log"
        self.environment = {
            "PATH": os.environ["PATH"],
            "RUNTIME_DIRECTORY": str(self.run_directory),
            "INVOCATION_ID": options.get("invocation", "1"),
            "ENGINE_LOG": str(self.log),
            **options.get("environment", {}),
        }
        locks = base / "start"
        locks.mkdir(exist_ok=True)
        engine = base / "engine.py"
        engine.write_text(ENGINE)
        command = [sys.executable, "-I", str(pyz), "start", "--instance", name, "--lock-directory", str(locks)]
        for gpu in gpus:
            command += ["--gpu", gpu]
        command += ["--deadline", str(options.get("lock_deadline", 30)), "--"]
        command += [sys.executable, str(engine), str(port), name, str(options.get("load", 0.5))]
        command += [options.get("mode", "serves")]
        self.main = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        self.pyz, self.port, self.name = pyz, port, name

    def ready(self, deadline: float = 20, name: str = "", pooling: bool = False) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", str(self.pyz), "ready", "--url", f"http://127.0.0.1:{self.port}"]
        command += ["--name", name or self.name, "--deadline", str(deadline), "--lock-deadline", "30"]
        command += ["--pooling"] if pooling else []
        environment = {**self.environment, "MAINPID": str(self.main.pid)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def start(pyz, tmp_path):
    instances: list[Instance] = []

    def make(name: str, port: int, gpus: list[str], **options: Any) -> Instance:
        instances.append(Instance(pyz, tmp_path, name, port, gpus, **options))
        return instances[-1]

    yield make
    for instance in instances:
        instance.main.kill()
        instance.main.communicate()
    time.sleep(0.3)  # the holders see that their main process is gone
