# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verb `ready`: an instance is up when it has returned a token under its own name (private to this collection).

An engine that pools (embeddings, scores, classes) makes no tokens: it is up when it has answered with one vector or
score instead.

Run as ExecStartPost: the unit is not active before. It checks that the port's listener is a process of this unit (two
engines on one port both claim to have started), that the model list shows the served name, and that one token comes
back. Then it leaves the note on which `start` lets the GPUs' start locks go.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any, Optional
from urllib.parse import urlsplit

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._helper import unit
from ansible_collections.gpufleet.inference.plugins.module_utils._helper.start import read_credential

_POLL_S = 0.5
_REQUEST_S = 30.0
_LISTEN = "0A"
# From the widest to the narrowest: embeddings are in every release, the others came later and serve other models.
_POOLING_REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/embeddings", {"input": "Hello"}),
    ("/pooling", {"input": "Hello"}),
    ("/classify", {"input": "Hello"}),
    ("/score", {"text_1": "Hello", "text_2": "Hello"}),
)


@dataclass(frozen=True)
class Endpoint:
    """Where an instance listens, under which name, and the key it wants."""

    host: str
    port: int
    name: str
    key: Optional[str] = None
    pooling: bool = False

    @property
    def answer(self) -> str:
        """What shows that it is up."""
        return "pooled result" if self.pooling else "token"


class NotYet(Exception):
    """The instance does not answer yet; the text says how far it is."""


def register(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser("ready", help="wait until the engine has returned a token under its own name")
    parser.add_argument("--url", required=True, help="http://address:port")
    parser.add_argument("--name", required=True, help="served model name")
    parser.add_argument("--pooling", action="store_true", help="it pools: ask for an embedding or score, not a token")
    parser.add_argument("--deadline", type=float, required=True, help="seconds from the engine's start")
    parser.add_argument("--lock-deadline", type=float, default=0.0, help="seconds before that for the start locks")
    parser.set_defaults(work=run)


def run(arguments: argparse.Namespace) -> int:
    """Wait for the token. FleetError `engine_ended`, `not_ready`, `port_conflict`."""
    parts = urlsplit(arguments.url)
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    key = read_credential(directory, "api_key") if directory else None
    endpoint = Endpoint(parts.hostname or "127.0.0.1", parts.port or 80, arguments.name, key, arguments.pooling)
    main_pid = int(os.environ.get("MAINPID") or 0)
    begun = time.monotonic()
    _wait_for_locks(main_pid, arguments.lock_deadline)
    engine_begun = time.monotonic()
    wait_for_token(endpoint, main_pid, arguments.deadline)
    now = time.monotonic()
    sys.stdout.write(
        f"gpufleet ready: {endpoint.name} returned a {endpoint.answer} on port {endpoint.port}, "
        f"{now - engine_begun:.1f} s after the engine's start (start locks: {engine_begun - begun:.1f} s)\n"
    )
    sys.stdout.flush()
    unit.note(unit.READY, f"{now - engine_begun:.3f}\n")
    return 0


def wait_for_token(endpoint: Endpoint, main_pid: int, deadline: float) -> None:
    """Return when one token (or pooled result) came back from a process of this unit under the served name."""
    limit = time.monotonic() + deadline
    while True:
        try:
            check_listener(endpoint)
            check_name(endpoint)
            if endpoint.pooling:
                check_pooling(endpoint)
            else:
                check_token(endpoint)
            return
        except NotYet as exc:
            last = str(exc)
        if main_pid and not unit.alive(main_pid):
            raise FleetError(
                "engine_ended",
                f"The engine (process {main_pid}) ended before it returned a {endpoint.answer}; last seen: {last}.",
                hint="Its own last lines are above in this unit's journal.",
            )
        if time.monotonic() >= limit:
            raise FleetError(
                "not_ready",
                f"{endpoint.name} returned no {endpoint.answer} on port {endpoint.port} within {deadline:g} s; "
                f"last seen: {last}.",
                hint="Its own last lines are above in this unit's journal; a larger model may need a longer deadline.",
            )
        time.sleep(_POLL_S)


def check_listener(endpoint: Endpoint) -> None:
    """The port's listeners are processes of this unit. NotYet without a listener; FleetError `port_conflict`."""
    sockets = listeners(endpoint)
    if not sockets:
        raise NotYet(f"nothing listens on port {endpoint.port}")
    ours: set[int] = set()
    for pid in unit.pids_beside("self"):
        ours |= _socket_inodes(pid)
    foreign = sockets - ours
    if foreign:
        raise FleetError(
            "port_conflict",
            f"Port {endpoint.port} is served by {len(foreign)} listener(s) of a process outside this unit.",
            hint=f"Find it with `ss -ltnp sport = :{endpoint.port}`; stop it or give the instance another port.",
        )


def check_name(endpoint: Endpoint) -> None:
    """The model list shows the served name."""
    names = [str(entry.get("id")) for entry in _request(endpoint, "GET", "/v1/models").get("data", [])]
    if endpoint.name not in names:
        raise NotYet(f"the model list shows {', '.join(names) or 'nothing'}, not {endpoint.name}")


def check_token(endpoint: Endpoint) -> None:
    """One token comes back."""
    body = {"model": endpoint.name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    answer = _request(endpoint, "POST", "/v1/completions", body)
    made = (answer.get("usage") or {}).get("completion_tokens", len(answer.get("choices") or []))
    if not made:
        raise NotYet("the completion came back without a token")


def check_pooling(endpoint: Endpoint) -> None:
    """One input comes back as a vector, a class or a score: whichever this model and release can make of it."""
    refusals = []
    for path, wish in _POOLING_REQUESTS:
        try:
            answer = _request(endpoint, "POST", path, {"model": endpoint.name, **wish})
        except NotYet as exc:
            refusals.append(str(exc))
            continue
        if answer.get("data"):
            return
        refusals.append(f"POST {path} came back without data")
    raise NotYet("; ".join(refusals))


def listeners(endpoint: Endpoint) -> set[int]:
    """Inodes of the listening sockets that would answer on the endpoint."""
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table, encoding="ascii") as stream:
                rows = [line.split() for line in stream][1:]
        except OSError:
            continue
        for row in rows:
            address, _colon, port = row[1].partition(":")
            if row[3] == _LISTEN and int(port, 16) == endpoint.port and _answers(address, endpoint.host):
                found.add(int(row[9]))
    return found


def _answers(raw: str, host: str) -> bool:
    """True when a socket bound to the address as /proc/net/tcp writes it answers for host."""
    words = [raw[start : start + 8] for start in range(0, len(raw), 8)]
    packed = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    bound = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return bound in ("0.0.0.0", "::", host, f"::ffff:{host}") or host in ("0.0.0.0", "::")


def _socket_inodes(pid: int) -> set[int]:
    inodes: set[int] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return inodes
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[len("socket:[") : -1]))
    return inodes


def _request(endpoint: Endpoint, method: str, path: str, body: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(endpoint.host, endpoint.host)
    connection = http.client.HTTPConnection(host, endpoint.port, timeout=_REQUEST_S)
    headers = {"Content-Type": "application/json"}
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as exc:
        raise NotYet(f"{method} {path}: {exc or type(exc).__name__}") from exc
    finally:
        connection.close()
    if response.status != 200:
        raise NotYet(f"{method} {path} answered {response.status}: {text[:200]}")
    try:
        answer = json.loads(text)
    except ValueError as exc:
        raise NotYet(f"{method} {path} answered something that is not JSON") from exc
    if not isinstance(answer, dict):
        raise NotYet(f"{method} {path} answered something unexpected")
    return answer


def _wait_for_locks(main_pid: int, deadline: float) -> None:
    if not unit.has_notes():
        return
    limit = time.monotonic() + deadline
    while not unit.noted(unit.STARTED):
        if main_pid and not unit.alive(main_pid):
            raise FleetError("engine_ended", f"Process {main_pid} ended while it waited for the GPUs' start locks.")
        if time.monotonic() >= limit:
            raise FleetError("start_lock_timeout", f"The GPUs' start locks were not free within {deadline:g} s.")
        time.sleep(_POLL_S)
