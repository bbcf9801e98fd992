"""The API server: binds before the load, listens after it, answers as vLLM's does, exits 0 when the engine dies."""

import errno
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm import RELEASE, VERSION, __version__, engine, gpu
from vllm.metrics import Metrics
from vllm.model import Model

CORE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"]


def fail(text):
    """A start that failed: the traceback's last line and exit code 1."""
    print(text, file=sys.stderr, flush=True)
    return 1


class Server(ThreadingHTTPServer):
    """Bound at once, listening only after `server_activate`."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, options):
        self.reuse_port = (0, 7, 3) <= VERSION <= (0, 24, 0) or (getattr(options, "api_server_count", None) or 1) > 1
        host = options.host or "0.0.0.0"
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, options.port), Handler, bind_and_activate=False)

    def server_bind(self):
        if self.reuse_port:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()

    def server_activate(self):
        """Listen; where another start won the same port, stay silent beside it as vLLM does."""
        try:
            super().server_activate()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serve(options):
    """Run `vllm serve` to its end; the return value is the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # lost during the load, as in the real server
    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    engine.log("APIServer", "api_server.py:1977", f"vLLM API server version {__version__}")
    switches, problem = {}, None
    try:
        model = Model(options.model, "dummy")
        switches = {**model.switches(), **_environment()}
    except (OSError, ValueError) as error:
        problem = error
    if getattr(options, "uds", None) or options.ssl_keyfile:
        return fail("the stub serves plain TCP only: --uds and --ssl-keyfile are not simulated")
    server = Server(options)
    try:
        server.server_bind()
    except OSError as error:
        return fail(f"OSError: [Errno {error.errno}] {error.strerror}")
    if problem is not None:
        return fail(f"{type(problem).__name__}: {problem}")
    if switches.get("fail") == "start":
        return fail(CORE_FAILED)
    while switches.get("fail") == "hang":
        time.sleep(1)
    cores, answers, problem = launch(options, switches, server)
    if problem:
        end_cores(cores)
        return fail(f"{problem}\n{CORE_FAILED}")
    service = Service(options, model, switches, min(answers, key=lambda answer: answer["kv"]))
    server.service = service
    server.server_activate()
    if interrupted:
        end_cores(cores)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    signal.signal(signal.SIGINT, lambda *_: done.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.log("APIServer", "launcher.py:46", f"Available routes: {', '.join(RELEASE['endpoints'])}")
    print(f"(APIServer pid={os.getpid()}) INFO:     Application startup complete.", flush=True)
    while not done.wait(0.2):
        if any(_ended(pid) for pid in cores):
            service.dead = True
            engine.log("APIServer", "async_llm.py:701", "AsyncLLM output_handler failed. EngineDeadError", "ERROR")
            done.wait(float(os.environ.get("GPUFLEET_STUB_DEATH_SECONDS", "2")))
            break
    print(f"(APIServer pid={os.getpid()}) INFO:     Shutting down", flush=True)
    end_cores(cores)
    os._exit(0)


def _environment():
    names = {"fail": "GPUFLEET_STUB_FAIL", "start_seconds": "GPUFLEET_STUB_START_SECONDS"}
    return {key: os.environ[name] for key, name in names.items() if name in os.environ}


def launch(options, switches, server):
    """Start one engine core per data-parallel rank: (pids, their figures, the first problem)."""
    width = options.tensor_parallel_size * options.pipeline_parallel_size
    replicas = getattr(options, "data_parallel_size", None) or 1
    simulate = os.environ.get("GPUFLEET_STUB_DEVICE") != "cpu"
    try:
        if simulate:
            devices = gpu.visible(getattr(options, "device_ids", None))
        else:
            devices = [engine.Fake(ordinal) for ordinal in range(width * replicas)]
    except (gpu.DeviceError, ValueError) as error:
        return [], [], f"{type(error).__name__}: {error}"
    if len(devices) < width * replicas:
        return (
            [],
            [],
            (
                f"ValueError: World size ({width * replicas}) is larger than the number of available GPUs "
                f"({len(devices)}) in this node."
            ),
        )
    started = [
        engine.start_core(options, switches, devices[rank * width : (rank + 1) * width], simulate, server.socket.close)
        for rank in range(replicas)
    ]
    answers = [engine.read_answer(end) for _, end in started]
    problem = next((answer["error"] for answer in answers if "error" in answer), None)
    return [pid for pid, _ in started], answers, problem


def _ended(pid):
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def end_cores(pids):
    """Ask the engine cores to stop and wait for them; one that does not within 2 s is killed."""
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, wanted)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 2
        while pids and time.monotonic() < deadline:
            pids = [pid for pid in pids if not _ended(pid)]
            time.sleep(0.02)


MAKES_TOKENS = {"/v1/completions": "Completions", "/v1/chat/completions": "Chat Completions"}
POOLS = {"/v1/embeddings": "Embeddings"}


class Service:
    """What the requests need: names, keys, limits, counters."""

    def __init__(self, options, model, switches, figures):
        self.model, self.figures, self.started = model, figures, int(time.time())
        self.names = options.served_model_name or [options.model]
        if switches.get("fail") == "wrong_name":
            self.names = ["another-model"]
        self.keys, self.dead, self.options = _keys(options), False, options
        self.metrics = Metrics(self.names[0], figures)
        self.pools = model.pools()
        self.delay = float(os.environ.get("GPUFLEET_STUB_TOKEN_SECONDS", "0"))

    def switch(self):
        """The failure asked for now: the file may change while the server runs."""
        return {**self.model.switches(), **_environment()}.get("fail")

    def words(self, prompt, count):
        """`count` words that depend on the model and the prompt only."""
        seed = hashlib.sha256((self.model.seed + prompt).encode()).digest()
        return [" " + WORDS[(seed[i % 32] + i) % len(WORDS)] for i in range(count)]


def _keys(options):
    given = options.api_key
    given = [given] if isinstance(given, str) else given or []
    variable = [os.environ["VLLM_API_KEY"]] if os.environ.get("VLLM_API_KEY") else []
    first, second = (variable, given) if RELEASE["key_precedence"] == "env" else (given, variable)
    return first or second


class Handler(BaseHTTPRequestHandler):
    """The HTTP interface."""

    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    sys_version = ""

    def log_message(self, format, *args):
        if not getattr(self.server.service.options, "disable_uvicorn_access_log", False):
            print(f"INFO:     {self.client_address[0]}:{self.client_address[1]} - {format % args}", flush=True)

    def reply(self, status, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status, text, kind, parameter=None):
        body = {"message": text, "type": kind, "param": parameter, "code": status}
        nested = VERSION >= (0, 10, 1)
        self.reply(status, {"error": body} if nested else {"object": "error", **body})

    def route(self):
        """The path, after the key check; None when the request was answered already."""
        path = self.path.split("?")[0]
        guarded = any(path.startswith(prefix) for prefix in RELEASE["guarded"])
        if guarded and self.service.keys:
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token not in self.service.keys:
                self.reply(401, {"error": "Unauthorized"})
                return None
        if path not in RELEASE["endpoints"]:
            self.reply(404, {"detail": "Not Found"})
            return None
        return path

    @property
    def service(self):
        return self.server.service

    def do_GET(self):
        path = self.route()
        if path is None:
            return
        if path in ("/health", "/ping"):
            dead = 503 if VERSION >= (0, 11, 0) else 500
            self.reply(dead if self.service.dead else 200, b"")
        elif path == "/version":
            self.reply(200, {"version": __version__})
        elif path == "/load":
            self.reply(200, {"server_load": self.service.metrics.running})
        elif path == "/metrics":
            self.reply(200, self.service.metrics.text().encode(), "text/plain; version=1.0.0; charset=utf-8")
        elif path == "/v1/models":
            entry = {"object": "model", "created": self.service.started, "owned_by": "vllm", "parent": None}
            entry.update(root=self.service.options.model, max_model_len=self.service.figures["length"], permission=[])
            self.reply(200, {"object": "list", "data": [{"id": name, **entry} for name in self.service.names]})
        else:
            self.reply(405, {"detail": "Method Not Allowed"})

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.route()
        if path is None:
            return
        if path not in (*MAKES_TOKENS, *POOLS, "/tokenize", "/detokenize", "/ping"):
            self.reply(405, {"detail": "Method Not Allowed"})
            return
        try:
            if not self.headers.get("Content-Type", "").startswith("application/json"):
                raise ValueError("not declared as JSON")
            request = json.loads(content or b"{}")
        except ValueError:
            self.refuse(400, "There was an error parsing the body", "Bad Request")
            return
        if path == "/ping":
            self.do_GET()
        elif request.get("model", self.service.names[0]) not in self.service.names:
            self.refuse(404, f"The model `{request['model']}` does not exist.", "NotFoundError", "model")
        elif self.service.dead:
            self.refuse(
                500,
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                "InternalServerError",
            )
        elif path in (MAKES_TOKENS if self.service.pools else POOLS):
            self.refuse(400, f"The model does not support {(MAKES_TOKENS | POOLS)[path]} API", "BadRequestError")
        elif path in POOLS:
            self.pool(request)
        elif path == "/tokenize":
            tokens = list(str(request.get("prompt", "")).encode())
            self.reply(200, {"count": len(tokens), "max_model_len": self.service.figures["length"], "tokens": tokens})
        elif path == "/detokenize":
            self.reply(200, {"prompt": bytes(t % 256 for t in request.get("tokens", [])).decode(errors="replace")})
        else:
            self.generate(path, request)

    def pool(self, request):
        """One vector for each input, of the model's width, that depends on model and input only."""
        inputs = request.get("input", "")
        data, count = [], 0
        for index, text in enumerate(inputs if isinstance(inputs, list) else [inputs]):
            seed = hashlib.sha256((self.service.model.seed + str(text)).encode()).digest()
            vector = [seed[i % 32] / 255 for i in range(self.service.model.get("hidden_size"))]
            data.append({"index": index, "object": "embedding", "embedding": vector})
            count += len(str(text)) // 4 + 1
        usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
        answer = {"id": "embd-" + uuid.uuid4().hex, "object": "list", "created": int(time.time())}
        with self.service.metrics.request(count, 0):
            self.reply(200, {**answer, "model": self.service.names[0], "data": data, "usage": usage})

    def generate(self, path, request):
        """Completions and chat, streamed or whole."""
        chat = path.endswith("chat/completions")
        prompt = json.dumps(request.get("messages")) if chat else str(request.get("prompt", ""))
        length = len(prompt) // 4 + 1
        count = request.get("max_completion_tokens") or request.get("max_tokens") or 16
        limit = self.service.figures["length"]
        if count > limit:
            text = (
                f"max_tokens={count} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
            )
            self.refuse(400, text, "BadRequestError", "max_tokens")
            return
        if length + count > limit:
            text = f"This model's maximum context length is {limit} tokens. You requested {length + count} tokens."
            self.refuse(400, text, "BadRequestError")
            return
        failure = self.service.switch()
        while failure == "wedge":
            time.sleep(0.2)
            failure = self.service.switch()
        if failure == "error":
            self.refuse(500, "Internal Server Error", "InternalServerError")
            return
        words = [] if failure == "empty" else self.service.words(prompt, count)
        base = {"id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, "created": int(time.time())}
        base["model"] = request.get("model", self.service.names[0])
        usage = {"prompt_tokens": length, "total_tokens": length + len(words), "completion_tokens": len(words)}
        with self.service.metrics.request(length, len(words)):
            if request.get("stream"):
                self.stream(chat, base, words, usage, request.get("stream_options") or {})
                return
            time.sleep(self.service.delay * len(words))
        text = "".join(words)
        if chat:
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": "length",
            }
            self.reply(200, {**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
            self.reply(200, {**base, "object": "text_completion", "choices": [choice], "usage": usage})

    def stream(self, chat, base, words, usage, settings):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        base = {**base, "object": "chat.completion.chunk" if chat else "text_completion"}
        for position, word in enumerate(words):
            last = "length" if position == len(words) - 1 else None
            choice = {"index": 0, "logprobs": None, "finish_reason": last}
            choice.update({"delta": {"content": word}} if chat else {"text": word})
            self.event({**base, "choices": [choice]})
            time.sleep(self.service.delay)
        if settings.get("include_usage"):
            self.event({**base, "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body):
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()
