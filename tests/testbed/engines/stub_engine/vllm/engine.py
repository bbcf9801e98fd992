"""Engine core and workers behind the API server: they load, hold GPU memory, and outlive a killed parent."""

import ctypes
import json
import os
import signal
import time

from vllm import VERSION, gpu
from vllm.model import OVERHEAD, Model

GIB = 1 << 30
CONTEXT = GIB // 2


def log(process, source, text, level="INFO"):
    """One log line in vLLM's shape."""
    prefix = f"({process} pid={os.getpid()}) " if process else ""
    print(f"{prefix}{level} {time.strftime('%m-%d %H:%M:%S')} [{source}] {text}", flush=True)


class Fake:
    """A device for runs without any GPU (GPUFLEET_STUB_DEVICE=cpu)."""

    def __init__(self, ordinal):
        self.ordinal, self.uuid, self.minor = ordinal, f"GPU-{ordinal:08d}", ordinal

    def memory(self):
        return 16 * GIB, 16 * GIB


def name_process(name):
    """Set the process name as vLLM's do, cut at 15 bytes by the kernel."""
    prefix = os.environ.get("VLLM_PROCESS_NAME_PREFIX", "VLLM") if VERSION >= (0, 10, 1) else "VLLM"
    ctypes.CDLL(None).prctl(15, f"{prefix}::{name}".encode(), 0, 0, 0)


def load(options, switches, device, simulate):
    """Load one rank on one GPU: figures of the rank, and what it keeps open. Raises with vLLM's text."""
    tp = options.tensor_parallel_size
    model = Model(options.model, options.load_format)
    keep = gpu.open_nodes([device]) if simulate else []
    utilization = options.gpu_memory_utilization
    kv_bytes = getattr(options, "kv_cache_memory_bytes", None)
    requested = gpu.refuse_if_short(device, utilization)
    free_before, total = device.memory()
    if switches.get("fail") == "oom":
        raise RuntimeError("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.")
    pp = options.pipeline_parallel_size
    weights = model.weights(tp) // pp
    small = total < 70 * GIB
    tokens = options.max_num_batched_tokens or (2048 if small else 8192)
    sequences = options.max_num_seqs or (256 if small else 1024)
    own = weights + model.activation(tokens, sequences, tp) + OVERHEAD
    if simulate:
        gpu.hold(device, CONTEXT + own)
    seconds = float(switches.get("start_seconds", os.environ.get("GPUFLEET_STUB_START_SECONDS", "1")))
    time.sleep(seconds)
    free_after, _ = device.memory()
    if VERSION >= (0, 9, 1) and free_after > free_before:
        raise AssertionError(
            f"Error in memory profiling. Initial free memory {free_before / GIB} GiB, current free memory "
            f"{free_after / GIB} GiB. This happens when other processes sharing the same container release GPU memory "
            "while vLLM is profiling during initialization. To fix this, ensure consistent GPU memory allocation or "
            "isolate vLLM in its own container."
        )
    available = kv_bytes or requested - max(own, free_before - free_after - CONTEXT)
    per_token = max(1, model.kv_bytes_per_token(tp, options.kv_cache_dtype) // pp)
    limit = options.max_model_len if options.max_model_len not in (None, -1) else model.max_length()
    if available <= 0:
        raise ValueError(
            "No available memory for the cache blocks. "
            "Try increasing `gpu_memory_utilization` when initializing the engine."
        )
    fits = available // (per_token * 16) * 16
    if options.max_model_len == -1:
        limit = min(limit, fits)
    if fits < limit:
        raise ValueError(
            f"To serve at least one request with the model's max seq len ({limit}), ({limit * per_token / GIB:.2f} GiB "
            f"KV cache is needed, which is larger than the available KV cache memory ({available / GIB:.2f} GiB). "
            f"Based on the available memory, the estimated maximum model length is {fits}. Try increasing "
            "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
        )
    graphs = 0 if options.enforce_eager else int(0.37 * GIB)
    if simulate:
        gpu.hold(device, CONTEXT + own + available + graphs)
    return {
        "weights": weights,
        "seconds": seconds,
        "kv": available,
        "tokens": fits,
        "length": limit,
        "graphs": graphs,
    }, keep


def report(process, figures):
    """The log lines a start of this release leaves, from which its figures can be read back."""
    weights, length = figures["weights"] / GIB, figures["length"]
    if VERSION >= (0, 8, 3):
        text = f"Model loading took {weights:.2f} GiB memory and {figures['seconds']:.6f} seconds"
    else:
        text = f"{'Model loading took' if VERSION >= (0, 8, 0) else 'Loading model weights took'} {weights:.4f} GB"
    log(process, "gpu_model_runner.py:5087", text)
    if VERSION >= (0, 9, 1):
        log(process, "gpu_worker.py:441", f"Available KV cache memory: {figures['kv'] / GIB:.2f} GiB")
    number = f"{length:,}" if VERSION >= (0, 9, 1) else str(length)
    size = f"GPU KV cache size: {figures['tokens']:,} tokens"
    concurrency = f"Maximum concurrency for {number} tokens per request: {figures['tokens'] / length:.2f}x"
    if VERSION < (0, 8, 0):
        log(process, "executor_base.py:111", f"# GPU blocks: {figures['tokens'] // 16}, # CPU blocks: 0")
        if VERSION >= (0, 7, 1):
            log(process, "executor_base.py:116", concurrency)
    elif VERSION < (0, 30, 0):
        log(process, "kv_cache_utils.py:1316", size)
        log(process, "kv_cache_utils.py:1321", concurrency)
    else:
        log(process, "kv_cache_utils.py:2327", f"{size}, {concurrency}")
    if figures["graphs"]:
        took = figures["graphs"] / GIB
        log(process, "gpu_model_runner.py:5998", f"Graph capturing finished in 1 secs, took {took:.2f} GiB")


def start_core(options, switches, devices, simulate, close_first):
    """Fork one engine core over `devices`, with workers when there are several: (pid, end of its answer's pipe)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    close_first()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name_process("EngineCore")
    code = 1
    try:
        answers, workers, _keep = [], [], []
        if len(devices) == 1:
            figures, _keep = load(options, switches, devices[0], simulate)
            answers.append(figures)
        else:
            workers = [start_worker(options, switches, device, rank, simulate) for rank, device in enumerate(devices)]
            for _, end in workers:
                answers.append(read_answer(end))
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        figures = min(answers, key=lambda answer: answer["kv"])
        report("EngineCore", figures)
        os.write(writing, json.dumps(figures).encode())
        os.close(writing)
        signal.signal(signal.SIGTERM, lambda *_: stop([worker for worker, _ in workers]))
        while True:
            signal.pause()
    except SystemExit as leave:
        code = leave.code or 0
    except BaseException as error:
        log("EngineCore", "core.py:1063", f"EngineCore failed to start. {type(error).__name__}: {error}", "ERROR")
        os.write(writing, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(code)


def start_worker(options, switches, device, rank, simulate):
    """Fork one tensor-parallel worker, which loads and holds its GPU."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    name_process(f"Worker_TP{rank}")
    code = 1
    try:
        figures, keep = load(options, switches, device, simulate)
        os.write(writing, json.dumps(figures).encode())
        os.close(writing)
        while keep is not None:
            signal.pause()
    except BaseException as error:
        log(f"Worker_TP{rank}", "multiproc_executor.py:815", f"WorkerProc failed to start. {error}", "ERROR")
        os.write(writing, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(code)


def stop(pids):
    """Terminate and reap children, then leave."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
    os._exit(0)


def read_answer(end):
    """What a child wrote before it closed its end; a silent death is an error."""
    data = b""
    while True:
        chunk = os.read(end, 65536)
        if not chunk:
            break
        data += chunk
        if data.endswith(b"}"):
            break
    os.close(end)
    return json.loads(data) if data else {"error": "RuntimeError: process died during start"}
