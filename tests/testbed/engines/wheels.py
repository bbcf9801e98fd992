"""Write wheels: zip files with a RECORD, the same bytes for the same content."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

EPOCH = (1980, 1, 1, 0, 0, 0)


def record_line(name: str, content: bytes) -> str:
    """The RECORD entry of one member, as the wheel specification spells it."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def write_wheel(path: Path, members: dict[str, bytes], dist_info: str) -> Path:
    """Write a wheel of `members` (RECORD is added) under a temporary name, then publish it."""
    record = "".join(record_line(name, content) for name, content in members.items())
    record_name = f"{dist_info}/RECORD"
    members = {**members, record_name: (record + f"{record_name},,\n").encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr = 0o644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(info, content)
    partial.replace(path)
    return path
