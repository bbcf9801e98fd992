# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files from HTTP: to a temporary name, verified, then published. Private to gpufleet.inference.

Credentials in an address and tokens never appear in a message.
"""

from __future__ import annotations

import base64
import hashlib
import html.parser
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.units import gib

CHUNK = 1024 * 1024
TIMEOUT_S = 60.0
Opener = Callable[[urllib.request.Request, float], Any]


def shown(url: str) -> str:
    """An address without its credentials and query, for messages."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


class _KeepTokenAtHome(urllib.request.HTTPRedirectHandler):
    """Redirects to another host go without the Authorization header: hubs redirect to stores that must not see it."""

    def redirect_request(self, req: Any, *rest: Any) -> Optional[urllib.request.Request]:
        """As the base class; `rest` ends with the new address."""
        new = super().redirect_request(req, *rest)
        if new is not None and urllib.parse.urlsplit(rest[-1]).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            new.remove_header("Authorization")
        return new


def open_url(request: urllib.request.Request, timeout: float) -> Any:
    """Open with the proxies and certificate files of the environment."""
    handlers = [urllib.request.HTTPSHandler(context=ssl.create_default_context()), _KeepTokenAtHome()]
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout)


def request(url: str, headers: Optional[Mapping[str, str]] = None) -> urllib.request.Request:
    """A request; credentials in the address become a header."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https", "file"):
        raise FleetError("bad_address", f"{shown(url) or url} is not an http, https or file address.")
    made = urllib.request.Request(url, headers={"User-Agent": "gpufleet", **(headers or {})})
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        bare = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        made = urllib.request.Request(bare, headers={"User-Agent": "gpufleet", **(headers or {})})
        made.add_header("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())
    return made


def get(url: str, headers: Optional[Mapping[str, str]] = None, opener: Opener = open_url, limit: int = -1) -> bytes:
    """The content of a small address, or its first ``limit`` bytes. FleetError `download_failed`."""
    try:
        with opener(request(url, headers), TIMEOUT_S) as answer:
            data: bytes = answer.read(limit)
            return data
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _failed(url, error) from None


def _failed(url: str, error: Exception) -> FleetError:
    if isinstance(error, urllib.error.HTTPError):
        hints = {401: "Check the token or the credentials.", 403: "Check the token and the access it grants."}
        hint = hints.get(error.code, "Check the address.")
        return FleetError("download_failed", f"{shown(url)} answered {error.code} {error.reason}.", hint)
    reason = getattr(error, "reason", error)
    return FleetError(
        "download_failed", f"{shown(url)} could not be read: {reason}.", "Check the address and the proxy settings."
    )


def fetch(
    url: str,
    target: str,
    *,
    sha256: str = "",
    size: Optional[int] = None,
    headers: Optional[Mapping[str, str]] = None,
    mode: int = 0o644,
    opener: Opener = open_url,
) -> str:
    """Download to `target` and give its sha256. A part left by an earlier try is continued.

    sha256 and size (bytes) are checked when given; a mismatch removes the part and is FleetError `wrong_content`.
    """
    partial = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.part")
    done = os.path.getsize(partial) if os.path.exists(partial) else 0
    if size is not None and done > size:
        os.unlink(partial)
        done = 0
    digest = hashlib.sha256()
    if done and done == size:
        _read_into(digest, partial)
    else:
        _receive(url, partial, done, headers=headers, opener=opener, digest=digest)
    found, length = digest.hexdigest(), os.path.getsize(partial)
    if (sha256 and found != sha256.lower()) or (size is not None and length != size):
        os.unlink(partial)
        wanted = f"sha256 {sha256}" if sha256 else f"{size} bytes"
        raise FleetError(
            "wrong_content",
            f"{shown(url)} should have {wanted}; it has sha256 {found} and {length} bytes.",
            "Correct the checksum, or find out who changed the file.",
        )
    os.chmod(partial, mode)
    os.replace(partial, target)
    return found


def _receive(
    url: str, partial: str, done: int, *, headers: Optional[Mapping[str, str]], opener: Opener, digest: Any
) -> None:
    wanted = {**(headers or {}), **({"Range": f"bytes={done}-"} if done else {})}
    try:
        with opener(request(url, wanted), TIMEOUT_S) as answer:
            continued = bool(done) and getattr(answer, "status", None) == http.client.PARTIAL_CONTENT
            if continued:
                _read_into(digest, partial)
            announced = int(answer.headers.get("Content-Length") or 0)
            received = 0
            with open(partial, "ab" if continued else "wb") as stream:
                while True:
                    chunk = answer.read(CHUNK)
                    if not chunk:
                        break
                    stream.write(chunk)
                    digest.update(chunk)
                    received += len(chunk)
                stream.flush()
                os.fsync(stream.fileno())
            if received < announced:
                raise OSError(f"the connection ended after {received} of {announced} bytes; another run goes on there")
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and done:
            os.unlink(partial)
            return _receive(url, partial, 0, headers=headers, opener=opener, digest=digest)
        raise _failed(url, error) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _failed(url, error) from None
    return None


def _read_into(digest: Any, path: str) -> None:
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            digest.update(chunk)


def sha256_of(path: str) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    _read_into(digest, path)
    return digest.hexdigest()


def need_space(path: str, needed: int, what: str) -> None:
    """FleetError `no_space` with both figures when the file system of `path` has less than `needed` bytes free."""
    place = path
    while not os.path.exists(place):
        place = os.path.dirname(place) or "/"
    info = os.statvfs(place)
    free = info.f_bavail * info.f_frsize
    if free < needed:
        raise FleetError(
            "no_space",
            f"{what} needs {gib(needed)} below {path}; {gib(free)} are free there.",
            "Free some space, or choose another directory.",
        )


class Link(NamedTuple):
    """A file offered by an index page: its name, address or path, and sha256 ("" when not given)."""

    name: str
    url: str
    sha256: str


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: List[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            self.found.append(address)


def page_links(url: str, opener: Opener = open_url) -> List[Link]:
    """The files behind one page of a package index (HTML or the JSON form) or a plain directory listing."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"}
    text = get(url, accept, opener).decode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        entries: List[Dict[str, Any]] = json.loads(text).get("files", [])
        return [
            Link(entry["filename"], urllib.parse.urljoin(url, entry["url"]), entry.get("hashes", {}).get("sha256", ""))
            for entry in entries
        ]
    parser = _Anchors()
    parser.feed(text)
    links = []
    for address in parser.found:
        full, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(url, address))
        name = urllib.parse.unquote(full.rpartition("/")[2])
        match = re.match(r"sha256=([0-9a-f]{64})$", fragment)
        links.append(Link(name, full, match.group(1) if match else ""))
    return links
