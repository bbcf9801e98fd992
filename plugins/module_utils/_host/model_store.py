# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Model folders on a host: from a path, an archive or a hub. Private to gpufleet.inference.

`Store.plan` only reads (for a hub also its file list); `Store.apply` fetches into a hidden folder beside and publishes
it in one move, the manifest inside. A complete folder is never changed, because instances read from it.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import stat
import tarfile
import urllib.parse
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import download
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

MANIFEST = ".gpufleet.json"
KEYS = ("path", "archive", "sha256", "repo", "revision", "token_file", "endpoint")
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
# Where a repository has safetensors, these hold the same weights for other programs.
DUPLICATES = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


@dataclass(frozen=True)
class Source:
    """Where one model comes from; exactly one of path, archive and repo is set."""

    name: str
    path: str = ""
    archive: str = ""
    sha256: str = ""
    repo: str = ""
    revision: str = "main"
    token_file: str = ""
    endpoint: str = ""

    @property
    def identity(self) -> str:
        """What the content depends on, for the manifest."""
        if self.archive:
            return f"sha256:{self.sha256.lower()}"
        return f"hub:{self.repo}@{self.revision}"


@dataclass(frozen=True)
class File:
    """One file of a hub repository; size in bytes, sha256 "" where the hub gives none."""

    name: str
    size: int
    sha256: str = ""


@dataclass(frozen=True)
class Step:
    """What a run does about one model: `fetch` or nothing; the files and the commit of a hub; a note for the user."""

    source: Source
    path: str
    fetch: bool = False
    commit: str = ""
    files: Tuple[File, ...] = ()
    size: int = 0
    note: str = ""


@dataclass(frozen=True)
class Reader:
    """The user that will read the models; None where it does not exist yet: then only what all may read counts."""

    name: str
    uid: Optional[int]
    groups: Tuple[int, ...]

    def may(self, info: os.stat_result, bits: int) -> bool:
        """Whether the mode bits of a file grant `bits` (4 read, 1 enter) to this user."""
        if self.uid == 0:
            return True
        if info.st_uid == self.uid:
            return bool((info.st_mode >> 6) & bits == bits)
        shift = 3 if info.st_gid in self.groups else 0
        return bool((info.st_mode >> shift) & bits == bits)


def reader(name: str) -> Reader:
    """The user by name, with all its groups."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return Reader(name, None, ())
    groups = [entry.pw_gid, *(group.gr_gid for group in grp.getgrall() if name in group.gr_mem)]
    return Reader(name, entry.pw_uid, tuple(groups))


def parse(models: Mapping[str, Any], *, endpoint: str, token_file: str) -> List[Source]:
    """The sources of a mapping name to source. FleetError `bad_model` names the model and the key."""
    sources = []
    for name, entry in sorted(models.items()):
        if not _NAME.match(str(name)):
            raise FleetError(
                "bad_model", f'Model "{name}": a name is made of letters, digits, dots, dashes, underscores.'
            )
        given = {key: str(value) for key, value in (entry or {}).items() if value not in (None, "")}
        unknown = sorted(set(given) - set(KEYS))
        if unknown:
            raise FleetError(
                "bad_model", f"Model {name} has the unknown key {unknown[0]}.", f"Keys: {', '.join(KEYS)}."
            )
        kinds = [key for key in ("path", "archive", "repo") if key in given]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none of them"
            raise FleetError("bad_model", f"Model {name} needs one of path, archive and repo; it has {found}.")
        if kinds == ["archive"] and not re.match(r"^[0-9a-fA-F]{64}$", given.get("sha256", "")):
            raise FleetError("bad_model", f"Model {name} has an archive without its sha256 (64 hexadecimal digits).")
        if kinds == ["repo"]:
            given.setdefault("endpoint", endpoint)
            if token_file:
                given.setdefault("token_file", token_file)
        sources.append(Source(name=str(name), **given))
    return sources


class Store:
    """The models of one host."""

    def __init__(self, root: Root, folder: str, user: Reader, opener: download.Opener = download.open_url) -> None:
        self._root = root
        self._folder = folder
        self._user = user
        self.opener = opener

    def path(self, source: Source) -> str:
        """Where a model lies."""
        return source.path or f"{self._folder}/{source.name}"

    def manifest(self, source: Source) -> Optional[Dict[str, Any]]:
        """What a fetched model says about itself; None when it is not complete."""
        try:
            loaded = json.loads(self._root.read_text(f"{self.path(source)}/{MANIFEST}") or "null")
        except ValueError:
            return None
        return loaded if isinstance(loaded, dict) else None

    def plan(self, sources: Sequence[Source]) -> List[Step]:
        """Compare with the host. All refusals come at once, before any download, as one FleetError."""
        steps, errors = [], []
        for source in sources:
            try:
                steps.append(self._step(source))
            except FleetError as error:
                errors.append(error)
        if errors:
            hints = list(dict.fromkeys(error.hint for error in errors if error.hint))
            raise FleetError(errors[0].code, " ".join(error.message for error in errors), " ".join(hints))
        needed = sum(step.size for step in steps if step.fetch)
        if needed:
            names = ", ".join(step.source.name for step in steps if step.fetch)
            download.need_space(self._root.path(self._folder), needed, f"Fetching {names}")
        return steps

    def apply(self, steps: Sequence[Step]) -> None:
        """Fetch what is to be fetched: metadata of all models first, then weights; publish each when it is whole."""
        todo = [step for step in steps if step.fetch]
        if not todo:
            return
        os.makedirs(self._root.path(self._folder), mode=0o755, exist_ok=True)
        for wanted in (False, True):
            for step in todo:
                if step.source.repo:
                    self._fetch_files(step, [file for file in step.files if _is_weight(file.name) is wanted])
                    if not wanted:
                        check_config(self._root.path(self._partial(step.source)), step.source.name)
        for step in todo:
            if step.source.archive:
                self._fetch_archive(step)
            self._publish(step)

    def check_readable(self, source: Source) -> None:
        """FleetError `model_unreadable` with the first path that the service user may not read, and why."""
        path = self.path(source)
        problem = first_unreadable(self._root.path(path), self._user)
        if problem:
            where, why = problem
            shown = where[len(self._root.prefix) :] if self._root.prefix else where
            raise FleetError(
                "model_unreadable",
                f"Model {source.name}: the user {self._user.name} cannot read {shown} ({why}).",
                f"Make it readable for {self._user.name}, for example: chmod -R a+rX {path}",
            )

    def _step(self, source: Source) -> Step:
        path = self.path(source)
        real = self._root.path(path)
        if source.path:
            if not os.path.lexists(real):
                raise FleetError(
                    "model_missing",
                    f"Model {source.name}: {path} does not exist on this host.",
                    "Correct the path, or put the model there.",
                )
            if not path.endswith(".gguf"):
                check_config(real, source.name)
            self.check_readable(source)
            return Step(source, path)
        manifest = self.manifest(source)
        if manifest is not None:
            note = ""
            if manifest.get("identity") != source.identity:
                note = (
                    f"{path} holds {manifest.get('identity')} and {source.identity} is wanted; it is kept, because "
                    "instances may read from it. Give the new content a name of its own."
                )
            self._refuse_damaged(source, manifest)
            self.check_readable(source)
            return Step(source, path, note=note)
        if self._root.exists(path):
            raise FleetError(
                "foreign_directory",
                f"Model {source.name}: {path} exists and was not made by this collection (it has no {MANIFEST}).",
                "Move it away, or refer to it with `path`.",
            )
        if source.archive:
            return Step(source, path, fetch=True, size=2 * self._length(source.archive))
        commit, files = self.listing(source)
        done = self._root.path(self._partial(source))
        left = sum(file.size for file in files if not os.path.exists(os.path.join(done, file.name)))
        return Step(source, path, fetch=True, commit=commit, files=files, size=left)

    def _refuse_damaged(self, source: Source, manifest: Mapping[str, Any]) -> None:
        """Files that are gone or have another size than when they were published."""
        for name, size in sorted((manifest.get("files") or {}).items()):
            path = f"{self.path(source)}/{name}"
            real = self._root.path(path)
            found = os.path.getsize(real) if os.path.exists(real) else None
            if found != size:
                has = "is gone" if found is None else f"has {found} bytes"
                raise FleetError(
                    "model_damaged",
                    f"Model {source.name}: {path} {has}; it had {size} bytes when it was fetched.",
                    f"Stop the instances of the model, remove {self.path(source)} and run again.",
                )

    def _partial(self, source: Source) -> str:
        return f"{self._folder}/.{source.name}.new"

    def _length(self, url: str) -> int:
        """Bytes behind an address by its headers; 0 when the server does not say."""
        head = download.request(url)
        head.get_method = lambda: "HEAD"  # type: ignore[method-assign]
        try:
            with self.opener(head, download.TIMEOUT_S) as answer:
                return int(answer.headers.get("Content-Length") or 0)
        except (OSError, ValueError):
            return 0

    def headers(self, source: Source) -> Dict[str, str]:
        """What the source's hub wants to see. FleetError `no_token`."""
        if not source.token_file:
            return {}
        text = self._root.read_text(source.token_file)
        if not (text or "").strip():
            raise FleetError(
                "no_token",
                f"Model {source.name}: the token file {source.token_file} is missing or empty on this host.",
                "Put the hub token there, readable by root only.",
            )
        return {"Authorization": f"Bearer {str(text).strip()}"}

    def listing(self, source: Source) -> Tuple[str, Tuple[File, ...]]:
        """(commit, files) of a hub repository at a revision."""
        where = urllib.parse.quote(source.repo)
        revision = urllib.parse.quote(source.revision, safe="")
        url = f"{source.endpoint.rstrip('/')}/api/models/{where}/revision/{revision}?blobs=true"
        try:
            answer = json.loads(download.get(url, self.headers(source), self.opener))
            files = tuple(
                File(entry["rfilename"], int(entry.get("size") or 0), (entry.get("lfs") or {}).get("sha256") or "")
                for entry in answer["siblings"]
            )
            commit = str(answer["sha"])
        except (ValueError, KeyError, TypeError):
            raise FleetError(
                "bad_hub",
                f"Model {source.name}: {download.shown(url)} did not answer like a hub.",
                "Check the endpoint.",
            ) from None
        if not _COMMIT.match(commit) or any(
            ".." in file.name.split("/") or file.name.startswith("/") for file in files
        ):
            raise FleetError(
                "bad_hub", f"Model {source.name}: {download.shown(url)} gave a commit or name that is none."
            )
        chosen = choose_files(files)
        if not any(_is_weight(file.name) for file in chosen):
            raise FleetError(
                "no_weights",
                f"Model {source.name}: {source.repo} at {commit} holds {len(files)} files and no weights among them.",
                "Check the repository and the revision.",
            )
        return commit, chosen

    def _fetch_files(self, step: Step, files: Sequence[File]) -> None:
        headers = self.headers(step.source)
        base = f"{step.source.endpoint.rstrip('/')}/{urllib.parse.quote(step.source.repo)}/resolve/{step.commit}"
        for file in files:
            target = os.path.join(self._root.path(self._partial(step.source)), file.name)
            if os.path.exists(target) and os.path.getsize(target) == file.size:
                continue
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            url = f"{base}/{urllib.parse.quote(file.name)}"
            size = file.size or None
            download.fetch(url, target, sha256=file.sha256, size=size, headers=headers, opener=self.opener)

    def _fetch_archive(self, step: Step) -> None:
        archive = self._root.path(f"{self._folder}/.{step.source.name}.tar")
        if not os.path.exists(archive) or download.sha256_of(archive) != step.source.sha256.lower():
            download.fetch(step.source.archive, archive, sha256=step.source.sha256, opener=self.opener)
        partial = self._root.path(self._partial(step.source))
        shutil.rmtree(partial, ignore_errors=True)
        unpack(archive, partial)
        check_config(partial, step.source.name)
        os.unlink(archive)

    def _publish(self, step: Step) -> None:
        partial = self._root.path(self._partial(step.source))
        files = {}
        for folder, _folders, names in os.walk(partial):
            os.chmod(folder, 0o755)
            for name in names:
                full = os.path.join(folder, name)
                os.chmod(full, 0o644)
                files[os.path.relpath(full, partial)] = os.path.getsize(full)
        manifest = {"name": step.source.name, "identity": step.source.identity, "commit": step.commit, "files": files}
        with open(os.path.join(partial, MANIFEST), "w", encoding="utf-8") as stream:
            json.dump(manifest, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(partial, self._root.path(step.path))
        self.check_readable(step.source)


def _is_weight(name: str) -> bool:
    return name.endswith(WEIGHTS)


def choose_files(files: Sequence[File]) -> Tuple[File, ...]:
    """What vLLM needs of a repository: the files of its top folder, with the weights in one format only."""
    top = [file for file in files if "/" not in file.name and not file.name.startswith(".")]
    skipped = DUPLICATES if any(file.name.endswith(".safetensors") for file in top) else (".h5", ".msgpack", ".onnx")
    return tuple(file for file in top if not file.name.endswith(skipped))


def check_config(folder: str, name: str) -> Dict[str, Any]:
    """The config.json of a model folder. FleetError `bad_config` says what is wrong and where."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, "rb") as stream:
            content = stream.read()
    except FileNotFoundError:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        has = f"it holds {', '.join(names[:5])}" if names else "it is not a folder or empty"
        raise FleetError(
            "bad_config",
            f"Model {name}: {folder} has no config.json; {has}.",
            "Give the folder that holds config.json and the weights.",
        ) from None
    except OSError as error:
        raise FleetError("bad_config", f"Model {name}: {path} cannot be read: {error.strerror}.") from None
    try:
        config = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is 0x{content[error.start]:02x}, which is not UTF-8"
    except ValueError as error:
        where = f"{error}"
    else:
        if isinstance(config, dict):
            return config
        where = "it holds no object"
    raise FleetError(
        "bad_config", f"Model {name}: {path} ({len(content)} bytes) is broken: {where}.", "Fetch the file anew."
    )


def first_unreadable(path: str, user: Reader) -> Optional[Tuple[str, str]]:
    """(path, reason) of the first thing below a path that the user cannot read; None when all is well.

    Mode bits are compared, also those of the folders above, links followed; access control lists are not looked at.
    """
    for parent in _parents(os.path.realpath(path)):
        if not user.may(os.stat(parent), 1):
            return parent, f"mode {_mode(parent)}, no right to enter"
    if not os.path.isdir(path):
        return None if user.may(os.stat(path), 4) else (path, f"mode {_mode(path)}")
    for folder, folders, names in os.walk(path):
        folders.sort()
        if not user.may(os.stat(folder), 5):
            return folder, f"mode {_mode(folder)}, no right to read and enter"
        for name in sorted(names):
            full = os.path.join(folder, name)
            try:
                info = os.stat(full)
            except OSError as error:
                return full, str(error.strerror)
            if not user.may(info, 4):
                return full, f"mode {_mode(full)}"
            if os.path.islink(full):
                real = os.path.realpath(full)
                for parent in _parents(real):
                    if not user.may(os.stat(parent), 1):
                        return full, f"it leads to {real}, and {parent} has mode {_mode(parent)}"
    return None


def _parents(path: str) -> List[str]:
    found = []
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        found.append(path)
    return found[::-1]


def _mode(path: str) -> str:
    info = os.stat(path)
    return f"{stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid}, group {info.st_gid}"


def unpack(archive: str, target: str) -> None:
    """Unpack a tar archive of a model; its one top folder, if any, is left out. FleetError `bad_archive`."""
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar.getmembers() if member.name.strip("./")]
            for member in members:
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.isdir()):
                    raise FleetError(
                        "bad_archive", f"The archive holds {member.name}, which is not a plain file below its top."
                    )
            tops = {member.name.lstrip("./").split("/")[0] for member in members}
            folders = {member.name.lstrip("./") for member in members if member.isdir()}
            nested = any("/" in member.name.lstrip("./") for member in members)
            strip = len(tops) == 1 and (bool(folders & tops) or nested)
            for member in members:
                name = member.name.lstrip("./")
                name = name.partition("/")[2] if strip else name
                if not member.isfile() or not name:
                    continue
                full = os.path.join(target, name)
                os.makedirs(os.path.dirname(full), mode=0o755, exist_ok=True)
                stream = tar.extractfile(member)
                if stream is not None:
                    with open(full, "wb") as output:
                        shutil.copyfileobj(stream, output, download.CHUNK)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FleetError(
            "bad_archive", f"{archive} cannot be unpacked: {error}.", "Use a tar archive (plain, gz, bz2 or xz)."
        ) from None
