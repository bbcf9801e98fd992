"""On simulated GPUs the stub sees, holds and refuses memory as the release does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stub_process import Server, free_port, until

ROOT = Path(__file__).resolve().parents[3]
GPUSIM = ROOT / "tests/testbed/gpusim"


class Gpus:
    """Two simulated L40S: their environment, and what NVML says of them."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            "GPUSIM_STATE": str(folder / "state"),
            "LD_LIBRARY_PATH": str(ROOT / ".build/gpusim"),
            "GPUFLEET_STUB_DEV": str(folder / "dev"),
            "GPUFLEET_STUB_DEVICE": "",
        }
        self.tool("init", "--profile", "l40sx2", "--state-only")
        (folder / "dev").mkdir()
        for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
            (folder / "dev" / name).write_text("")

    def tool(self, *arguments: str) -> str:
        run = [sys.executable, str(GPUSIM / "gpusim.py"), *arguments]
        environment = {**os.environ, **self.environment}
        return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout

    def ask(self, expression: str) -> str:
        program = "import pynvml as n; n.nvmlInit(); h = [n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1)]; "
        run = [sys.executable, "-c", f"{program}print({expression})"]
        environment = {**os.environ, **self.environment}
        return subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    def holders(self, index: int) -> int:
        return int(self.ask(f"len(n.nvmlDeviceGetComputeRunningProcesses(h[{index}]))"))

    def used(self, index: int) -> int:
        return int(self.ask(f"n.nvmlDeviceGetMemoryInfo(h[{index}], version=n.nvmlMemory_v2).used"))


@pytest.fixture
def gpus(tmp_path) -> Gpus:
    subprocess.run(["make", "--quiet", "-C", GPUSIM], check=True)
    return Gpus(tmp_path)


@pytest.fixture
def start(command, model, tmp_path, gpus):
    started: list[Server] = []

    def run(version: str, *arguments: str, **environment: str) -> Server:
        port = free_port()
        address = ["--host", "127.0.0.1", "--port", str(port)]
        settings = {**gpus.environment, "GPUFLEET_STUB_START_SECONDS": "0", **environment}
        argv, settings = command(version, "serve", str(model), *address, *arguments, **settings)
        log = tmp_path / f"log{len(started)}"
        with log.open("w", encoding="utf-8") as target:
            process = subprocess.Popen(argv, env=settings, stdout=target, stderr=target, start_new_session=True)
        started.append(Server(process, port, log))
        return started[-1]

    yield run
    for server in started:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_an_engine_holds_what_it_asked_for_and_gives_it_back(start, gpus):
    before, total = gpus.used(0), int(gpus.ask("n.nvmlDeviceGetMemoryInfo(h[0]).total"))
    server = start("0.32.0", "--gpu-memory-utilization", "0.5").wait()
    assert gpus.holders(0) == 1
    assert 0.5 < (gpus.used(0) - before) / total < 0.55
    server.process.terminate()
    server.process.wait(5)
    assert gpus.used(0) == before


def test_tensor_parallel_workers_hold_one_gpu_each(start, gpus):
    start("0.32.0", "--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.3").wait()
    assert (gpus.holders(0), gpus.holders(1)) == (1, 1)


def test_a_gpu_without_enough_free_memory_is_refused_from_0_9_1_on(start, gpus):
    gpus.tool("set", "gpu.0.memory.foreign", "30G")
    late = start("0.32.0")
    assert late.process.wait(15) == 1
    assert "is less than desired GPU memory utilization (0.92," in late.log.read_text(encoding="utf-8")
    assert start("0.9.0", "--gpu-memory-utilization", "0.9").wait().process.poll() is None


@pytest.mark.parametrize(("version", "served"), [("0.23.0", False), ("0.24.0", True)])
def test_a_uuid_in_cuda_visible_devices_works_from_0_24_on(start, gpus, version, served):
    second = gpus.ask("n.nvmlDeviceGetUUID(h[1])")
    server = start(version, "--gpu-memory-utilization", "0.3", CUDA_VISIBLE_DEVICES=second)
    if not served:
        assert server.process.wait(15) == 1
        assert "invalid literal for int()" in server.log.read_text(encoding="utf-8")
        return
    server.wait()
    assert (gpus.holders(0), gpus.holders(1)) == (0, 1)


def test_a_device_node_that_cannot_be_opened_fails_the_start(start, gpus):
    Path(gpus.environment["GPUFLEET_STUB_DEV"], "nvidia-uvm").unlink()
    server = start("0.32.0")
    assert server.process.wait(15) == 1
    assert "nvidia-uvm" in server.log.read_text(encoding="utf-8")


def test_more_ranks_than_gpus_are_refused(start):
    server = start("0.32.0", "--tensor-parallel-size", "4")
    assert server.process.wait(15) == 1
    assert "World size (4) is larger than the number of available GPUs (2)" in server.log.read_text(encoding="utf-8")


def test_two_starts_at_once_on_one_gpu_leave_the_later_one_too_little(start, gpus):
    alone = start("0.32.0", "--gpu-memory-utilization", "0.4", GPUFLEET_STUB_START_SECONDS="1").wait()
    text = alone.log.read_text(encoding="utf-8")
    alone.process.terminate()
    alone.process.wait(5)
    pair = [start("0.32.0", "--gpu-memory-utilization", "0.4", GPUFLEET_STUB_START_SECONDS="1") for _ in range(2)]
    until(lambda: all("KV cache" in p.log.read_text() or p.process.poll() is not None for p in pair))

    def tokens(log: str) -> int:
        line = next(line for line in log.splitlines() if "KV cache size:" in line)
        return int(line.split("size: ")[1].split(" tokens")[0].replace(",", ""))

    logs = [server.log.read_text(encoding="utf-8") for server in pair]
    assert any("KV cache size:" not in log or tokens(log) < tokens(text) for log in logs)
