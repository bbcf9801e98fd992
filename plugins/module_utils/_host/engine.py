# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""vLLM releases side by side, each in an environment of its own. Private to gpufleet.inference.

`plan` only reads; `apply` does what it says. A release counts as installed when its manifest is there, which the
installing job writes last; without it the environment is made anew, from the downloads that the cache has kept. A
complete release is never changed: instances run from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tarfile
import zipfile
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import engine_rules
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import download, packages
from ansible_collections.gpufleet.inference.plugins.module_utils._host.jobs import Jobs
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner

MANIFEST = ".gpufleet.json"
PASSED_ON = re.compile(r"^(https?_proxy|no_proxy|all_proxy|ssl_cert_(file|dir))$", re.IGNORECASE)

# $1 uv, $2 interpreter, $3 environment, $4 marker, $5 program for the manifest, $6 its fixed part, then options of uv.
_INSTALL = """set -eu
uv=$1 python=$2 folder=$3 marker=$4 program=$5 fixed=$6
shift 6
: > "$marker"
rm -rf "$folder"
"$uv" venv --no-progress --python "$python" "$folder"
"$uv" pip install --no-progress --python "$folder/bin/python" "$@"
chmod -R a+rX,go-w "$folder"
"$folder/bin/python" -c "$program" "$folder" "$fixed"
rm -f "$marker"
"""

_WRITE_MANIFEST = """
import importlib.metadata, json, os, sys
folder, fixed = sys.argv[1], json.loads(sys.argv[2])
wheels = {entry.metadata["Name"]: entry.version for entry in importlib.metadata.distributions()}
if wheels.get("vllm", "").split("+")[0] != fixed["version"].split("+")[0]:
    sys.exit("the environment holds vllm " + wheels.get("vllm", "(none)") + " instead of " + fixed["version"])
if not os.access(folder + "/bin/vllm", os.X_OK):
    sys.exit("the vllm distribution brought no bin/vllm")
with open(folder + "/.gpufleet.json.new", "w", encoding="utf-8") as stream:
    json.dump(dict(fixed, wheels=wheels), stream, indent=1, sort_keys=True)
    stream.flush()
    os.fsync(stream.fileno())
os.replace(folder + "/.gpufleet.json.new", folder + "/.gpufleet.json")
"""


@dataclass(frozen=True)
class Release:
    """One wanted release. `facts` is its entry of the release table; `requirements` a text with hashes, or ""."""

    version: str
    facts: Mapping[str, Any]
    constraints: Tuple[str, ...] = ()
    requirements: str = ""
    extra: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """Where wheels come from. Without an index: only find-links if there are any, else what pip is set up for."""

    index_url: str = ""
    extra_index_urls: Tuple[str, ...] = ()
    find_links: Tuple[str, ...] = ()
    require_hashes: bool = False
    uv_version: str = ""
    uv_sha256: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Python:
    """How the interpreter is found: `path`, or `package`, or `archive` with `sha256`; all empty: any that fits."""

    path: str = ""
    package: str = ""
    archive: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Plan:
    """What a run would do: OS packages to install, releases to install with their interpreters, notes for the user."""

    packages: Tuple[str, ...]
    install: Tuple[Release, ...]
    interpreters: Mapping[str, str]
    kept: Mapping[str, Mapping[str, Any]]
    notes: Tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.packages or self.install)


class Engines:
    """The releases below one folder (`/opt/vllm`) of a host."""

    def __init__(self, root: Root, runner: Runner, jobs: Jobs, folder: str, machine: str) -> None:
        self._root = root
        self._runner = runner
        self._jobs = jobs
        self._folder = folder
        self._machine = machine

    def path(self, version: str) -> str:
        """The environment of a release."""
        return f"{self._folder}/{version}"

    def manifest(self, version: str) -> Optional[Dict[str, Any]]:
        """What a complete release says about itself; None when it is not complete."""
        text = self._root.read_text(f"{self.path(version)}/{MANIFEST}")
        try:
            loaded: Dict[str, Any] = json.loads(text or "null")
        except ValueError:
            return None
        return loaded if isinstance(loaded, dict) else None

    def plan(
        self,
        releases: Sequence[Release],
        python: Python,
        sources: Sources,
        prerequisites: Sequence[str],
        *,
        min_free: int,
        glibc: str,
    ) -> Plan:
        """Compare with the host without changing it. FleetError for what cannot work, before anything is downloaded."""
        kept, todo, notes = {}, [], []
        for release in releases:
            manifest = self.manifest(release.version)
            if manifest is None:
                todo.append(release)
            else:
                kept[release.version] = manifest
                if manifest.get("digest") != _digest(release):
                    notes.append(
                        f"{self.path(release.version)} was installed with other constraints or requirements; it is "
                        "kept, because instances may run from it. Remove the folder to install it anew."
                    )
        for release in todo:
            engine_rules.check_host(release.version, release.facts, self._machine, glibc)
            self._refuse_foreign(release.version)
            if sources.require_hashes and not release.requirements:
                raise FleetError(
                    "no_hashes",
                    f"Hashes are required and there are no requirements with hashes for vLLM {release.version}.",
                    f"Give them in vllm_engine_requirements under '{release.version}'.",
                )
        interpreters, wanted = self._interpreters(todo, python)
        used = [entry["path"] for entry in interpreters.values()] + [
            str(entry.get("python")) for entry in kept.values()
        ]
        versions = {path[len("/usr/bin/python") :] for path in used if re.match(r"^/usr/bin/python3\.\d+$", path)}
        for name in prerequisites:
            if "{python}" in name:
                wanted += [name.replace("{python}", f"python{version}") for version in sorted(versions)]
            else:
                wanted.append(name)
        if todo and self._needs_pip(sources):
            wanted.append("python3-pip")
        absent = packages.missing(self._root, self._runner, list(dict.fromkeys(wanted)))
        if todo:
            self._refuse_file_system(min_free, len(todo))
        paths = {version: entry["path"] for version, entry in interpreters.items()}
        return Plan(tuple(absent), tuple(todo), paths, kept, tuple(notes))

    def apply(self, plan: Plan, python: Python, sources: Sources, *, deadline: float) -> None:
        """Do it: packages, interpreter, uv, then one job per release. Deadline in seconds, for each of these."""
        if plan.packages:
            packages.install(self._root, self._runner, self._jobs, plan.packages, deadline=deadline)
        if not plan.install:
            return
        os.makedirs(self._root.path(self._folder), mode=0o755, exist_ok=True)
        interpreters = dict(plan.interpreters)
        if python.archive:
            interpreters = dict.fromkeys(interpreters, self._unpack_python(python))
        elif python.package:
            interpreters = {v: entry["path"] for v, entry in self._interpreters(plan.install, python)[0].items()}
        os.makedirs(self._root.path(f"{self._folder}/.cache"), mode=0o700, exist_ok=True)
        sources = self._from_pip(sources)
        uv = self._uv(sources)
        for release in plan.install:
            self._install(release, interpreters[release.version], uv, sources, deadline)

    def _install(self, release: Release, interpreter: str, uv: str, sources: Sources, deadline: float) -> None:
        request = f"{self._folder}/.requests/{release.version}"
        os.makedirs(self._root.path(request), mode=0o755, exist_ok=True)
        options = ["--only-binary", "vllm", "--compile-bytecode"]
        for place in sources.find_links:
            options += ["--find-links", place]
        if sources.find_links and not sources.index_url:
            options.append("--no-index")
        for name, text in (("constraints", "\n".join(release.constraints)), ("requirements", release.requirements)):
            if text:
                with open(self._root.path(f"{request}/{name}.txt"), "w", encoding="utf-8") as stream:
                    stream.write(text + "\n")
        if release.constraints:
            options += ["--constraints", f"{request}/constraints.txt"]
        if release.requirements:
            options += ["--requirements", f"{request}/requirements.txt"]
            options += ["--require-hashes"] if sources.require_hashes else []
        else:
            options += [f"vllm=={release.version}", *release.extra]
        folder = self.path(release.version)
        fixed = {"version": release.version, "python": interpreter, "digest": _digest(release)}
        marker = f"{self._folder}/.installing-{release.version}"
        argv = [
            "/bin/sh",
            "-c",
            _INSTALL,
            "install",
            uv,
            interpreter,
            folder,
            marker,
            _WRITE_MANIFEST,
            json.dumps(fixed),
        ]
        self._jobs.run(
            f"engine-{release.version}",
            [*argv, *options],
            deadline=deadline,
            what=f"The installation of vLLM {release.version}",
            environment=self._environment(sources),
        )
        if self.manifest(release.version) is None:
            raise FleetError("not_applied", f"vLLM {release.version} was installed and left no manifest in {folder}.")

    def _environment(self, sources: Sources) -> Dict[str, str]:
        """For uv: its own settings, the proxies of this run, and index addresses, which may hold credentials."""
        values = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
        values.update(sources.environment)
        values.update(
            UV_CACHE_DIR=f"{self._folder}/.cache",
            UV_PYTHON_DOWNLOADS="never",
            UV_NATIVE_TLS="1",
            UV_SYSTEM_CERTS="1",
            UV_HTTP_TIMEOUT="120",
            HOME="/root",
        )
        if sources.index_url or sources.find_links:
            values["UV_NO_CONFIG"] = "1"  # exactly these places; without any, the host's own settings hold
        if sources.index_url:
            values["UV_DEFAULT_INDEX"] = sources.index_url
        if sources.extra_index_urls:
            values["UV_INDEX"] = " ".join(sources.extra_index_urls)
        return values

    def _refuse_foreign(self, version: str) -> None:
        folder = self.path(version)
        ours = self._root.exists(f"{self._folder}/.installing-{version}") or self._jobs.running(f"engine-{version}")
        if self._root.listdir(folder) and not ours:
            raise FleetError(
                "foreign_directory",
                f"{folder} exists and was not made by this collection (it has no {MANIFEST}).",
                "Move it away, or choose another vllm_engine_root.",
            )

    def _refuse_file_system(self, min_free: int, count: int) -> None:
        place = self._root.path(self._folder)
        while not os.path.exists(place):
            place = os.path.dirname(place)
        if os.statvfs(place).f_flag & os.ST_NOEXEC:
            raise FleetError(
                "noexec",
                f"{self._folder} lies on a file system that is mounted noexec; an engine could not start from there.",
                "Choose another vllm_engine_root, or mount it without noexec.",
            )
        download.need_space(self._root.path(self._folder), min_free * count, f"The installation of {count} release(s)")

    def _interpreters(
        self, releases: Sequence[Release], python: Python
    ) -> Tuple[Dict[str, Mapping[str, str]], List[str]]:
        """Release to interpreter {path, version}, and OS packages these need. A version is "" until it is there."""
        if python.archive:
            return {release.version: {"path": "", "version": ""} for release in releases}, []
        if python.package:
            path = f"/usr/bin/{python.package}"
            found = self._found([path])
            if not found and re.match(r"^python3\.\d+$", python.package):
                found = [{"path": path, "version": python.package.replace("python", "")}]
            chosen = {r.version: engine_rules.choose_python(r.version, r.facts["python"], found) for r in releases}
            return chosen, [python.package]
        found = self._found([python.path] if python.path else self._candidates())
        return {r.version: engine_rules.choose_python(r.version, r.facts["python"], found) for r in releases}, []

    def _candidates(self) -> List[str]:
        return [
            f"{folder}/{name}"
            for folder in ("/usr/bin", "/usr/local/bin")
            for name in self._root.listdir(folder)
            if re.match(r"^python3\.\d+$", name)
        ]

    def _found(self, paths: Sequence[str]) -> List[Dict[str, str]]:
        found = []
        for path in paths:
            program = "import platform; print(platform.python_version())"
            result = self._runner.run([path, "-I", "-c", program], timeout=20)
            if result.rc == 0 and engine_rules.numbers(result.out):
                found.append({"path": path, "version": result.out.strip()})
        return found

    def _unpack_python(self, python: Python) -> str:
        """The interpreter of the archive, unpacked once into a folder named after its checksum."""
        folder = f"{self._folder}/.python/{python.sha256[:12]}"
        if not self._root.exists(folder):
            real = self._root.path(folder)
            os.makedirs(os.path.dirname(real), mode=0o755, exist_ok=True)
            archive = f"{real}.tar"
            download.fetch(python.archive, archive, sha256=python.sha256)
            shutil.rmtree(f"{real}.new", ignore_errors=True)
            with tarfile.open(archive) as tar:
                _extract(tar, f"{real}.new")
            os.replace(f"{real}.new", real)
            os.unlink(archive)
        for path in ("bin/python3", "python/bin/python3", "python/install/bin/python3"):
            if self._root.exists(f"{folder}/{path}"):
                return f"{folder}/{path}"
        raise FleetError(
            "no_python",
            f"{download.shown(python.archive)} holds no bin/python3 at its top or below python/.",
            "Use an archive with an installed Python, not its source.",
        )

    def _needs_pip(self, sources: Sources) -> bool:
        """uv itself comes through the host's pip only when neither an index nor find-links is given."""
        return not (sources.index_url or sources.find_links or self._root.exists(self._uv_path(sources)))

    def _from_pip(self, sources: Sources) -> Sources:
        """Without addresses of our own: those that the host's pip is set up with."""
        if sources.index_url or sources.find_links:
            return sources
        listed = self._runner.run(["python3", "-m", "pip", "config", "list"], timeout=60).out
        values: Dict[str, str] = {}
        for line in listed.splitlines():
            key, _equals, value = line.partition("=")
            values[key.rpartition(".")[2]] = value.strip().strip("'\"")
        return Sources(
            index_url=values.get("index-url", ""),
            extra_index_urls=tuple(values.get("extra-index-url", "").split()),
            find_links=(),
            require_hashes=sources.require_hashes,
            uv_version=sources.uv_version,
            uv_sha256=sources.uv_sha256,
            environment=sources.environment,
        )

    def _uv_path(self, sources: Sources) -> str:
        return f"{self._folder}/.uv/{sources.uv_version}/uv"

    def _uv(self, sources: Sources) -> str:
        """The uv binary of the wanted version, taken out of its wheel once."""
        path = self._uv_path(sources)
        if self._root.exists(path):
            return path
        folder = self._root.path(os.path.dirname(path))
        os.makedirs(folder, mode=0o755, exist_ok=True)
        wheel = self._uv_wheel(sources, folder)
        if sources.uv_sha256 and download.sha256_of(wheel) != sources.uv_sha256.lower():
            raise FleetError(
                "wrong_content",
                f"The wheel of uv {sources.uv_version} has sha256 {download.sha256_of(wheel)}; "
                f"{sources.uv_sha256} is wanted.",
                "Correct vllm_engine_uv_sha256, or find out who changed the wheel.",
            )
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(f"uv-{sources.uv_version}.data/scripts/uv")
        with open(f"{folder}/.uv.new", "wb") as stream:
            stream.write(content)
        os.chmod(f"{folder}/.uv.new", 0o755)
        os.replace(f"{folder}/.uv.new", f"{folder}/uv")
        return path

    def _uv_wheel(self, sources: Sources, folder: str) -> str:
        def fits(name: str) -> bool:
            return name.startswith(f"uv-{sources.uv_version}-py3-none-manylinux") and self._machine in name

        places = list(sources.find_links)
        if sources.index_url:
            places.append(sources.index_url.rstrip("/") + "/uv/")
        for place in places:
            if "://" not in place:
                names = [name for name in self._root.listdir(place) if fits(name)]
                if names:
                    return self._root.path(f"{place}/{names[0]}")
                continue
            for link in download.page_links(place if place.endswith("/") else place + "/"):
                if fits(link.name):
                    target = f"{folder}/{link.name}"
                    download.fetch(link.url, target, sha256=link.sha256)
                    return target
        if not places:
            command = ["python3", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            result = self._runner.run([*command, "--dest", folder, f"uv=={sources.uv_version}"], timeout=300)
            for name in os.listdir(folder):
                if fits(name):
                    return f"{folder}/{name}"
            places.append("pip: " + result.err.strip()[-300:])
        raise FleetError(
            "no_uv",
            f"No wheel of uv {sources.uv_version} for {self._machine} in {', '.join(map(download.shown, places))}.",
            "Put it beside the other wheels, or set vllm_engine_uv_version to one that is there.",
        )


def _extract(tar: tarfile.TarFile, target: str) -> None:
    """Unpack; names that lead out of the target are refused."""
    filtered = hasattr(tarfile, "data_filter")
    for member in tar.getmembers():
        if member.name.startswith("/") or ".." in member.name.split("/"):
            raise FleetError("bad_archive", f"The archive holds the path {member.name}, which leads out of its folder.")
    with contextlib.suppress(FileExistsError):
        os.makedirs(target)
    if filtered:
        tar.extractall(target, filter="tar")
    else:
        tar.extractall(target)


def _digest(release: Release) -> str:
    """What the wish for a release comes down to; the interpreter and the addresses do not count."""
    wish = [release.version, sorted(release.constraints), release.requirements, sorted(release.extra)]
    return hashlib.sha256(json.dumps(wish).encode()).hexdigest()[:16]
