"""A model hub for tests: repositories by name, what was asked for, and answers that break off."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hub-s3cret-token"


class Hub(http.server.ThreadingHTTPServer):
    """A model hub and a file store: `files` by path; remembers what was asked, by whom, and can break off answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.break_after: int | None = None
        self.token = ""
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def repository(self, repo: str, folder: Path, extra: dict[str, bytes] | None = None) -> None:
        contents = {path.name: path.read_bytes() for path in folder.iterdir()} | (extra or {})
        siblings = []
        for name, content in contents.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content)}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            siblings.append(entry)
            self.files[f"/{repo}/resolve/{COMMIT}/{name}"] = content
        listing = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
        self.files[f"/api/models/{repo}/revision/main"] = listing
        self.files[f"/api/models/{repo}/revision/{COMMIT}"] = listing


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append((self.command, path, self.headers.get("Range", "")))
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.send_error(401)
            return
        if path not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[path]
        start = int(self.headers.get("Range", "bytes=0-").split("=")[1].split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.server.break_after if path.endswith((".safetensors", ".tar")) else None
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[start:][:limit])

    do_HEAD = do_GET
