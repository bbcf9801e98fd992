# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Many files as one change: plan, then apply, then read back (private to this collection).

`plan` compares without writing and is all that check mode runs. `apply` first writes every new content beside its
place, then moves all of them: a full disk leaves the host as it was. Reading back is planning again; the answer must
be empty.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root

STATES = ("file", "directory", "link", "absent")
_DEFAULT_MODE = {"file": 0o644, "directory": 0o755}
_TEXT_LIMIT = 256 * 1024


@dataclass(frozen=True)
class Wanted:
    """What one path should be. `content` may be missing when `sha256` says that the host already has it."""

    path: str
    state: str = "file"
    content: Optional[bytes] = None
    sha256: str = ""
    target: str = ""
    owner: str = "root"
    group: str = "root"
    mode: Optional[int] = None
    secret: bool = False
    purge: bool = False
    only_empty: bool = False
    besides: tuple[str, ...] = ()
    replace: bool = False


@dataclass(frozen=True)
class Change:
    """One difference between a host and what is wanted; before and after are texts for people."""

    wanted: Wanted
    action: str
    before: str
    after: str
    write: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_diff(self) -> dict[str, str]:
        """The entry of a diff."""
        return {"path": self.wanted.path, "before": self.before, "after": self.after}


def parse(entry: Mapping[str, Any], content: Optional[bytes]) -> Wanted:
    """One Wanted from plain data. FleetError `bad_file` names the path and what is wrong."""
    path = str(entry.get("path") or "")
    state = str(entry.get("state") or "file")
    if not path.startswith("/") or path != os.path.normpath(path) or path.count("/") < 2:
        raise FleetError("bad_file", f"`{path}` is not a plain absolute path below a top directory.")
    if state not in STATES:
        raise FleetError("bad_file", f"{path}: state `{state}` is not one of {', '.join(STATES)}.")
    if state == "link" and not entry.get("target"):
        raise FleetError("bad_file", f"{path}: a link needs a target.")
    if state == "file" and content is None and not entry.get("sha256"):
        raise FleetError("bad_file", f"{path}: a file needs content, src, template or secret.")
    mode = entry.get("mode")
    try:
        number = int(str(mode), 8) if mode not in (None, "") else _DEFAULT_MODE.get(state)
    except ValueError as exc:
        raise FleetError("bad_file", f"{path}: mode `{mode}` is not an octal number such as '0644'.") from exc
    return Wanted(
        path=path,
        state=state,
        content=content,
        sha256=hashlib.sha256(content).hexdigest() if content is not None else str(entry.get("sha256") or ""),
        target=str(entry.get("target") or ""),
        owner=str(entry.get("owner") or "root"),
        group=str(entry.get("group") or "root"),
        mode=number,
        secret=entry.get("secret") is not None,
        purge=bool(entry.get("purge")),
        only_empty=bool(entry.get("only_empty")),
        besides=tuple(str(name) for name in entry.get("besides") or ()),
        replace=bool(entry.get("replace")),
    )


def plan(root: Root, wanted: Sequence[Wanted]) -> list[Change]:
    """Everything that differs, in the order given. Writes nothing. FleetError `path_taken` for what is not ours."""
    seen: dict[str, Wanted] = {}
    changes: list[Change] = []
    going: set[str] = set()
    for item in wanted:
        if item.path in seen:
            raise FleetError("bad_file", f"{item.path} is given twice.")
        seen[item.path] = item
        change = _compare(root, item, going)
        if change is not None:
            changes.append(change)
            if item.state == "absent":
                going.add(item.path)
    return changes


def apply(root: Root, changes: Sequence[Change], *, chown: Callable[[int, int, int], None] = os.fchown) -> None:
    """Make all changes, or none when the first half (writing beside) fails. FleetError `write_failed`."""
    staged: dict[str, str] = {}
    try:
        for change in changes:
            item = change.wanted
            if item.state == "directory":
                _make_directory(root, item, chown)
            elif item.state == "file" and change.write:
                if item.content is None:
                    raise FleetError("content_missing", f"{item.path} differs and its content was not sent.")
                os.makedirs(os.path.dirname(root.path(item.path)), mode=0o755, exist_ok=True)
                staged[item.path] = _write_beside(root, item, item.content, chown)
        for change in changes:
            _commit(root, change, staged, chown)
    except OSError as exc:
        raise FleetError("write_failed", f"{exc.filename or 'A file'} could not be written: {exc.strerror}.") from exc
    finally:
        for path in staged.values():
            with contextlib.suppress(OSError):
                os.unlink(path)


def converge(root: Root, wanted: Sequence[Wanted], *, check_mode: bool) -> list[Change]:
    """Plan; outside check mode also apply and read back. FleetError `not_applied` when a change did not stay."""
    changes = plan(root, wanted)
    if check_mode or not changes:
        return changes
    apply(root, changes)
    left = plan(root, wanted)
    if left:
        names = ", ".join(f"{change.wanted.path} ({change.action})" for change in left)
        raise FleetError("not_applied", f"Written, but read back different: {names}.")
    return changes


def _compare(root: Root, item: Wanted, going: set[str]) -> Optional[Change]:
    real = root.path(item.path)
    try:
        info: Optional[os.stat_result] = os.lstat(real)
    except FileNotFoundError:
        info = None
    except NotADirectoryError as exc:
        raise FleetError("path_taken", f"A parent of {item.path} is a file, not a directory.") from exc
    if item.state == "absent":
        if info is None or (item.only_empty and not _may_go(root, info, item, going)):
            return None
        return Change(item, "remove", _describe(real, info, item), "")
    if item.state == "link":
        return _compare_link(real, info, item)
    if item.state == "directory":
        return _compare_directory(info, item)
    return _compare_file(real, info, item)


def _may_go(root: Root, info: os.stat_result, item: Wanted, going: set[str]) -> bool:
    """Whether `only_empty` lets it go. A link or a file in the place of a directory is of others: it stays."""
    return stat.S_ISDIR(info.st_mode) and not _filled(root, item, going)


def _filled(root: Root, item: Wanted, going: set[str]) -> bool:
    """True when a directory holds more than what this very change removes and what is said to be gone by then."""
    return any(name not in item.besides and f"{item.path}/{name}" not in going for name in root.listdir(item.path))


def _compare_link(real: str, info: Optional[os.stat_result], item: Wanted) -> Optional[Change]:
    after = f"link to {item.target}\n"
    if info is None:
        return Change(item, "create", "", after)
    if stat.S_ISLNK(info.st_mode):
        found = os.readlink(real)
        return None if found == item.target else Change(item, "update", f"link to {found}\n", after)
    if not item.replace or stat.S_ISDIR(info.st_mode):
        raise FleetError(
            "path_taken",
            f"{item.path} should be a link to {item.target}, but a {_kind(info)} is there that is not ours.",
            hint="Move it away first.",
        )
    return Change(item, "update", _describe(real, info, item), after)


def _compare_directory(info: Optional[os.stat_result], item: Wanted) -> Optional[Change]:
    after = f"directory, {_wanted_attributes(item)}\n"
    if info is None:
        return Change(item, "create", "", after)
    if not stat.S_ISDIR(info.st_mode):
        raise FleetError("path_taken", f"{item.path} should be a directory, but a {_kind(info)} is there.")
    if _attributes_match(info, item):
        return None
    return Change(item, "attributes", f"directory, {_found_attributes(info)}\n", after)


def _compare_file(real: str, info: Optional[os.stat_result], item: Wanted) -> Optional[Change]:
    if info is None:
        return Change(item, "create", "", _text(item.content, item.secret), write=True)
    if stat.S_ISDIR(info.st_mode):
        raise FleetError("path_taken", f"{item.path} should be a file, but a directory is there.")
    if stat.S_ISREG(info.st_mode):
        with open(real, "rb") as stream:
            found = stream.read()
        if hashlib.sha256(found).hexdigest() == item.sha256:
            if _attributes_match(info, item):
                return None
            return Change(item, "attributes", _found_attributes(info) + "\n", _wanted_attributes(item) + "\n")
        before = _text(found, item.secret)
    else:
        before = _describe(real, info, item)
    after = _text(item.content, item.secret)
    return Change(item, "update", before, after if after != before else f"{after}(changed)\n", write=True)


def _commit(root: Root, change: Change, staged: Mapping[str, str], chown: Callable[[int, int, int], None]) -> None:
    item = change.wanted
    real = root.path(item.path)
    if item.state == "absent":
        _remove(real, item)
    elif item.state == "link":
        os.makedirs(os.path.dirname(real), mode=0o755, exist_ok=True)
        beside = _beside(real)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        os.symlink(item.target, beside)
        os.rename(beside, real)
    elif item.state == "file" and change.write:
        os.rename(staged[item.path], real)
    elif item.state == "file":
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _set_attributes(fd, item, chown)
        finally:
            os.close(fd)
    if os.path.isdir(os.path.dirname(real)):
        _sync_directory(os.path.dirname(real))


def _remove(real: str, item: Wanted) -> None:
    if os.path.isdir(real) and not os.path.islink(real):
        if item.purge:
            shutil.rmtree(real)
            return
        try:
            os.rmdir(real)
        except OSError as exc:
            raise FleetError(
                "directory_not_empty",
                f"{item.path} should go, but it holds {len(os.listdir(real))} entries.",
                hint="Set purge: true to remove them too.",
            ) from exc
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(real)


def _make_directory(root: Root, item: Wanted, chown: Callable[[int, int, int], None]) -> None:
    real = root.path(item.path)
    os.makedirs(real, mode=0o755, exist_ok=True)
    fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _set_attributes(fd, item, chown)
    finally:
        os.close(fd)


def _write_beside(root: Root, item: Wanted, content: bytes, chown: Callable[[int, int, int], None]) -> str:
    beside = _beside(root.path(item.path))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        _set_attributes(fd, item, chown)
        os.fsync(fd)
    except BaseException:
        os.unlink(beside)
        raise
    finally:
        os.close(fd)
    return beside


def _beside(real: str) -> str:
    return os.path.join(os.path.dirname(real), f".{os.path.basename(real)}.gpufleet-new")


def _set_attributes(fd: int, item: Wanted, chown: Callable[[int, int, int], None]) -> None:
    uid, gid = _ids(item)
    if uid is None or gid is None:
        missing = f"user `{item.owner}`" if uid is None else f"group `{item.group}`"
        raise FleetError("no_such_owner", f"{item.path} should belong to the {missing}, which this host does not have.")
    chown(fd, uid, gid)
    if item.mode is not None:
        os.fchmod(fd, item.mode)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _ids(item: Wanted) -> tuple[Optional[int], Optional[int]]:
    try:
        uid: Optional[int] = int(item.owner) if item.owner.isdigit() else pwd.getpwnam(item.owner).pw_uid
    except KeyError:
        uid = None
    try:
        gid: Optional[int] = int(item.group) if item.group.isdigit() else grp.getgrnam(item.group).gr_gid
    except KeyError:
        gid = None
    return uid, gid


def _attributes_match(info: os.stat_result, item: Wanted) -> bool:
    same_mode = item.mode is None or stat.S_IMODE(info.st_mode) == item.mode
    return same_mode and (info.st_uid, info.st_gid) == _ids(item)


def _wanted_attributes(item: Wanted) -> str:
    return f"owner {item.owner}, group {item.group}, mode {item.mode or 0:04o}"


def _found_attributes(info: os.stat_result) -> str:
    try:
        owner = pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        owner = str(info.st_uid)
    try:
        group = grp.getgrgid(info.st_gid).gr_name
    except KeyError:
        group = str(info.st_gid)
    return f"owner {owner}, group {group}, mode {stat.S_IMODE(info.st_mode):04o}"


def _kind(info: os.stat_result) -> str:
    if stat.S_ISLNK(info.st_mode):
        return "link"
    return "directory" if stat.S_ISDIR(info.st_mode) else "file"


def _describe(real: str, info: os.stat_result, item: Wanted) -> str:
    if stat.S_ISLNK(info.st_mode):
        return f"link to {os.readlink(real)}\n"
    if stat.S_ISDIR(info.st_mode):
        return f"directory, {_found_attributes(info)}\n"
    if not stat.S_ISREG(info.st_mode):
        return "special file\n"
    with open(real, "rb") as stream:
        return _text(stream.read(), item.secret)


def _text(content: Optional[bytes], secret: bool) -> str:
    if content is None:
        return "(content not sent)\n"
    if secret:
        return "(secret)\n"
    if len(content) <= _TEXT_LIMIT and b"\0" not in content:
        with contextlib.suppress(UnicodeDecodeError):
            return content.decode("utf-8")
    return f"(binary, {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()})\n"
