"""Run the project's suites: `check` (before each commit), `test` (before each merge) and `long` (everything).

A step is one function. The runner prints each step's seconds, keeps its full output in .build/suite/<step>.log,
shows the end of that output when the step fails, and closes with a time table and one line "N passed, N failed",
which counts every test of the steps that run pytest and 1 for each other step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / ".build"
CACHE = Path(os.environ.get("GPUFLEET_CACHE", ROOT / ".cache"))
LOGS = BUILD / "suite"
PYTHON = "3.11"
"""The controller Python of the suites; ansible-test is asked for the same one."""

TEST_MINUTES = 60
"""`make test` stops itself here and prints its time table."""

CLEAN_UP_SECONDS = 120
"""What cleaning up may take although the suite's time is over."""

TAIL_LINES = 60
HEARTBEAT_SECONDS = 60


class StepFailed(Exception):
    """A step went wrong; the text says what was expected and what was found."""


class OutOfTime(Exception):
    """The suite's deadline passed while a step was running."""


@dataclass
class Row:
    name: str
    seconds: float
    passed: int
    failed: int
    verdict: str


@dataclass
class Context:
    """What a step may use: run a command into the step's log, and count tests."""

    deadline: float
    log: Path = LOGS / "none.log"
    passed: int = 0
    failed: int = 0
    notes: list[str] = field(default_factory=list)

    def run(self, *argv: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
        """Run argv into the log and return its output; a non-zero exit raises StepFailed.

        The command gets a session of its own, so that at the deadline everything it started is ended with it.
        """
        words = [str(word) for word in argv]
        with self.log.open("a", encoding="utf-8") as out:
            out.write(f"$ {' '.join(words)}\n")
            out.flush()
            start = out.tell()
            child = subprocess.Popen(
                words,
                cwd=cwd,
                env={**os.environ, "NO_COLOR": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._wait(child, words[0])
            except BaseException:
                _end_session(child)
                raise
        with self.log.open("rb") as done:
            done.seek(start)
            text = done.read().decode("utf-8", "replace")
        if child.returncode:
            raise StepFailed(f"{' '.join(words)[:200]}: exit {child.returncode}")
        return text

    def _wait(self, child: subprocess.Popen[bytes], name: str) -> None:
        begun = time.monotonic()
        beat = begun + HEARTBEAT_SECONDS
        while True:
            try:
                child.wait(timeout=1)
                return
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if now > self.deadline:
                    raise OutOfTime(f"{Path(name).name} was still running at the suite's deadline") from None
                if now > beat:
                    beat = now + HEARTBEAT_SECONDS
                    print(f"      … {Path(name).name} {now - begun:.0f} s: {_last_line(self.log)}", flush=True)

    def pytest(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        """Run pytest and add its counts; no test collected is a failure, not a success."""
        report = self.log.with_suffix(".xml")
        report.unlink(missing_ok=True)
        failure: StepFailed | None = None
        try:
            self.run(sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments, env=env)
        except StepFailed as exc:
            failure = exc
        if report.exists():
            passed, failed = _junit_counts(report)
            self.passed += passed
            self.failed += failed
        if failure:
            self.failed = max(self.failed, 1)
            raise failure


StepFunction = Callable[[Context], None]
STEPS: dict[str, tuple[frozenset[str], StepFunction]] = {}


def step(*suites: str) -> Callable[[StepFunction], StepFunction]:
    """Register a function as a step of the named suites, in the order of this file."""

    def register(function: StepFunction) -> StepFunction:
        STEPS[function.__name__.replace("_", "-")] = (frozenset(suites), function)
        return function

    return register


# ---- check -----------------------------------------------------------------------------------------------------


@step("check", "test")
def format_(ctx: Context) -> None:
    ctx.run("ruff", "format", "--check", ".")


@step("check", "test")
def ruff(ctx: Context) -> None:
    ctx.run("ruff", "check", ".")


@step("check", "test")
def types(ctx: Context) -> None:
    """The core is strict; the rest has every function typed."""
    package = "ansible_collections.gpufleet.inference.plugins"
    base = BUILD / "collections"
    env = {"MYPYPATH": str(base)}
    ctx.run("mypy", "--strict", "-p", f"{package}.module_utils._domain", env=env, cwd=base)
    ctx.run("mypy", "--config-file", ROOT / "scripts/mypy-plugins.ini", "-p", package, env=env, cwd=base)
    ctx.run("mypy", "--config-file", ROOT / "scripts/mypy-plugins.ini", *sorted((ROOT / "scripts").glob("*.py")))


@step("check", "test")
def unit(ctx: Context) -> None:
    ctx.pytest("-n", "2", "-m", "not long", "tests/unit")


@step("check", "test")
def yaml(ctx: Context) -> None:
    ctx.run("yamllint", "--strict", ".")


@step("check", "test")
def ansible_lint(ctx: Context) -> None:
    ctx.run("ansible-lint", "--offline", "--strict")


@step("check", "test")
def changelog(ctx: Context) -> None:
    ctx.run("antsibull-changelog", "lint")


@step("check", "test")
def docs(ctx: Context) -> None:
    """Generated pages are those of today's specifications."""
    ctx.run(sys.executable, "scripts/make_docs.py", "--check")


# ---- test ------------------------------------------------------------------------------------------------------


@step("test")
def shell(ctx: Context) -> None:
    scripts = [path for path in tracked() if path.suffix == ".sh" or _has_shell_line(path)]
    ctx.run("shellcheck", "--severity=warning", *scripts)


@step("test")
def sanity(ctx: Context) -> None:
    """ansible-test sanity on a copy of everything that is shipped, with no ignore list."""
    place = BUILD / "sanity/ansible_collections/gpufleet/inference"
    copy_tracked(place, lambda name: name in SANITY_ALSO or bool(SHIPPED.match(name)))
    # A repository of its own: ansible-test asks git for the files, and the one around it ignores .build.
    subprocess.run(["git", "init", "--quiet", str(place)], check=True)
    home = CACHE / "ansible-test"
    # ansible-test wants to fetch pip's bootstrap script; Python carries the same thing in ensurepip.
    bootstrap = home / ".ansible/test/cache/get_pip_24_2.py"
    bootstrap.parent.mkdir(parents=True, exist_ok=True)
    bootstrap.write_text("import ensurepip\nensurepip.bootstrap()\n", encoding="utf-8")
    env = {"HOME": str(home), "ANSIBLE_COLLECTIONS_PATH": str(BUILD / "sanity")}
    text = ctx.run("ansible-test", "sanity", "--color", "no", "--python", PYTHON, cwd=place, env=env)
    skipped = [line for line in text.splitlines() if "Required program" in line or "All targets skipped" in line]
    if skipped:
        raise StepFailed(f"sanity left something out: {'; '.join(skipped)}")
    ignored = [str(path) for path in (place / "tests/sanity").glob("ignore-*.txt") if path.read_text().strip()]
    if ignored:
        raise StepFailed(f"sanity findings are hidden by {', '.join(ignored)}")


@step("test")
def build(ctx: Context) -> None:
    """The tarball installs elsewhere, its plugins are found by name from there, and it holds only what users need."""
    clone = BUILD / "dist/source"
    copy_tracked(clone)
    dist, home = BUILD / "dist", BUILD / "dist/installed"
    for old in dist.glob("*.tar.gz"):
        old.unlink()
    shutil.rmtree(home, ignore_errors=True)
    ctx.run("ansible-galaxy", "collection", "build", "--force", "--output-path", dist, cwd=clone)
    (tarball,) = dist.glob("*.tar.gz")
    stray = sorted(unwanted(tarball))
    if stray:
        raise StepFailed(f"the tarball holds files no user needs (see build_ignore in galaxy.yml): {', '.join(stray)}")
    elsewhere = {"ANSIBLE_COLLECTIONS_PATH": str(home)}
    install = ("ansible-galaxy", "collection", "install", "--offline", "--no-deps", "-p", home, tarball)
    ctx.run(*install, cwd=Path("/"), env=elsewhere)
    names = [f"gpufleet.inference.{path.stem}" for path in sorted((ROOT / "plugins/modules").glob("[!_]*.py"))]
    if names:
        ctx.run("ansible-doc", "--json", "-t", "module", *names, cwd=Path("/"), env=elsewhere)
    roles = [f"gpufleet.inference.{path.name}" for path in sorted((ROOT / "roles").iterdir()) if path.is_dir()]
    if roles:
        text = ctx.run("ansible-doc", "--json", "-t", "role", *roles, cwd=Path("/"), env=elsewhere)
        missing = [role for role in roles if f'"{role}"' not in text]
        if missing:
            raise StepFailed(f"ansible-doc does not find {', '.join(missing)} in the installed collection")
    books = [f"gpufleet.inference.{path.stem}" for path in sorted((ROOT / "playbooks").glob("*.yml"))]
    for book in books:
        check = ("ansible-playbook", "--syntax-check", "-i", ROOT / "inventories/example/hosts.yml", book)
        ctx.run(*check, cwd=Path("/"), env=elsewhere)


@step("test")
def galaxy_import(ctx: Context) -> None:
    """The rules of Galaxy's importer, which refuses for instance a role without a README."""
    (tarball,) = (BUILD / "dist").glob("*.tar.gz")
    place = BUILD / "dist/import"
    place.mkdir(parents=True, exist_ok=True)
    config = place / "galaxy-importer.cfg"
    config.write_text("[galaxy-importer]\nRUN_ANSIBLE_LINT = False\nRUN_ANSIBLE_TEST = False\n", encoding="utf-8")
    env = {"GALAXY_IMPORTER_CONFIG": str(config)}
    text = ctx.run(sys.executable, "-m", "galaxy_importer.main", tarball, cwd=place, env=env)
    findings = [line for line in text.splitlines() if re.match(r"(WARNING|ERROR)", line)]
    if findings:
        raise StepFailed("the importer found: " + "; ".join(findings))


@step("test")
def machines(ctx: Context) -> None:
    """The test bed's own tests, the memory model against vLLM's code, and what needs several processes."""
    ctx.pytest("-m", "not long", "tests/testbed", "tests/oracle", "tests/bench")


@step("test")
def molecule(ctx: Context) -> None:
    """Every scenario on real systemd hosts, one after the other on one shared test bed."""
    names = molecule_scenarios()
    if not names:
        raise StepFailed("molecule/ holds no scenario: expected molecule/<name>/molecule.yml")
    for name in names:
        begun = time.monotonic()
        try:
            ctx.run("molecule", "test", "--scenario-name", name)
        except StepFailed as failure:
            ctx.failed += 1
            ctx.notes.append(f"molecule {name}: {failure}")
            print(f"      molecule {name}: FAILED after {time.monotonic() - begun:.0f} s", flush=True)
        else:
            ctx.passed += 1
            print(f"      molecule {name}: ok, {time.monotonic() - begun:.0f} s", flush=True)
    if ctx.failed:
        raise StepFailed("; ".join(ctx.notes))


@step("test")
def demo(ctx: Context) -> None:
    """What a newcomer types first, and that it goes away again."""
    try:
        ctx.run(sys.executable, "scripts/demo.py", "up")
    finally:
        ctx.deadline = max(ctx.deadline, time.monotonic() + CLEAN_UP_SECONDS)
        ctx.run(sys.executable, "scripts/demo.py", "down")


# ---- long ------------------------------------------------------------------------------------------------------


def long_scenarios() -> dict[str, Sequence[str | Path]]:
    """Name → command: every test file with a `long` test and every Molecule scenario."""
    found: dict[str, Sequence[str | Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.long" in path.read_text(encoding="utf-8"):
            name = path.relative_to(ROOT / "tests").with_suffix("").as_posix()
            found[name] = (sys.executable, "-m", "pytest", "-m", "long", path)
    for name in molecule_scenarios():
        found[f"molecule/{name}"] = ("molecule", "test", "--scenario-name", name)
    return found


def run_long(only: Sequence[str]) -> int:
    """Run what has not passed on this commit yet; one line for each in docs/tested.md."""
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/tested.md").strip():
        commit += "+"
    state_file = BUILD / "long" / f"{commit}.json"
    state: dict[str, str] = json.loads(state_file.read_text()) if state_file.exists() else {}
    rows: list[Row] = []
    for name, argv in long_scenarios().items():
        if only and name not in only:
            continue
        if state.get(name) == "passed" and not commit.endswith("+"):
            print(f"[long] {name}: passed on {commit} before", flush=True)
            continue

        def scenario(ctx: Context, words: Sequence[str | Path] = argv) -> None:
            ctx.run(*words)

        row = run_step(f"long-{name.replace('/', '-')}", scenario, deadline=float("inf"))
        row.name = name
        rows.append(row)
        state[name] = "failed" if row.failed else "passed"
        state_file.parent.mkdir(parents=True, exist_ok=True)
        state_file.write_text(json.dumps(state, indent=1), encoding="utf-8")
        append_tested(name, commit, row.seconds / 60, state[name])
    return close(rows, time.monotonic())


def append_tested(scenario: str, commit: str, minutes: float, result: str) -> None:
    """Add one row to the table at the end of docs/tested.md."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    with (ROOT / "docs/tested.md").open("a", encoding="utf-8") as page:
        page.write(f"| {scenario} | {commit} | {day} | {minutes:.1f} | {result} |\n")


# ---- what steps stand on ---------------------------------------------------------------------------------------


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def tracked() -> list[Path]:
    """Tracked files that exist in the work tree, relative to the root."""
    return [Path(name) for name in git("ls-files", "-z").split("\0") if name and (ROOT / name).is_file()]


def copy_tracked(place: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Make `place` a copy of the wanted tracked files, and of nothing else (a .git of its own stays)."""
    place.mkdir(parents=True, exist_ok=True)
    files = [path for path in tracked() if wanted(path.as_posix())]
    with _scratch("\0".join(map(str, files)).encode()) as listing:
        command = ["rsync", "-a", "--from0", f"--files-from={listing}", f"{ROOT}/", f"{place}/"]
        subprocess.run(command, check=True)
    keep = {place / path for path in files}
    for path in sorted(place.rglob("*"), reverse=True):
        if path.relative_to(place).parts[0] == ".git":
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in keep:
            path.unlink()


@contextmanager
def _scratch(content: bytes) -> Iterator[Path]:
    path = BUILD / f"files.{os.getpid()}"
    path.write_bytes(content)
    try:
        yield path
    finally:
        path.unlink()


SHIPPED = re.compile(
    r"^(FILES\.json|MANIFEST\.json|README\.md|LICENSE|CHANGELOG\.md|CONTRIBUTING\.md|ansible\.cfg"
    r"|(changelogs|docs|meta|playbooks|plugins|roles|inventories/example)/.*)$"
)
"""What a user of the installed collection may find in it."""

SANITY_ALSO = {"galaxy.yml", "tests/config.yml", ".gitignore"}


def unwanted(tarball: Path) -> Iterator[str]:
    """Names of files in the tarball that are not for users."""
    with tarfile.open(tarball) as archive:
        for member in archive.getmembers():
            if member.isfile() and (not SHIPPED.match(member.name) or "__pycache__" in member.name):
                yield member.name


def molecule_scenarios() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))


def _has_shell_line(path: Path) -> bool:
    if path.suffix:
        return False
    with (ROOT / path).open("rb") as file:
        return bool(re.match(rb"#!.*\b(ba|da)?sh\b", file.readline(80)))


def _junit_counts(report: Path) -> tuple[int, int]:
    passed = failed = 0
    for suite in ET.parse(report).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
    return passed, failed


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-400:].decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:110] if lines else ""


def _end_session(child: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(timeout=10)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


# ---- the runner ------------------------------------------------------------------------------------------------


def run_step(name: str, function: StepFunction, deadline: float) -> Row:
    LOGS.mkdir(parents=True, exist_ok=True)
    ctx = Context(deadline=deadline, log=LOGS / f"{name}.log")
    ctx.log.write_text("", encoding="utf-8")
    begun = time.monotonic()
    verdict, error = "ok", ""
    try:
        function(ctx)
    except (StepFailed, OutOfTime) as exc:
        verdict, error = ("out of time" if isinstance(exc, OutOfTime) else "FAILED"), str(exc)
    except KeyboardInterrupt:
        raise
    except Exception as exc:
        verdict, error = "FAILED", f"{type(exc).__name__}: {exc}"
    seconds = time.monotonic() - begun
    if error:
        ctx.failed = max(ctx.failed, 1)
        lines = ctx.log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = "\n".join("      | " + line for line in lines[-TAIL_LINES:])
        print(f"{shown}\n      {error}\n      whole output: {ctx.log.relative_to(ROOT)}", flush=True)
    elif not ctx.passed:
        ctx.passed = 1
    return Row(name, seconds, ctx.passed, ctx.failed, verdict)


def close(rows: Sequence[Row], begun: float) -> int:
    """Print the time table and the closing line; 1 when anything failed or nothing ran."""
    print(f"\n{'step':<28} {'seconds':>8} {'passed':>7} {'failed':>7}")
    for row in rows:
        print(f"{row.name:<28} {row.seconds:>8.1f} {row.passed:>7} {row.failed:>7}  {row.verdict}")
    print(f"{'all':<28} {sum(row.seconds for row in rows):>8.1f}")
    passed, failed = sum(row.passed for row in rows), sum(row.failed for row in rows)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 0 if passed and not failed else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("suite", choices=["check", "test", "long"])
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help="run this step or scenario alone")
    parser.add_argument("--list", action="store_true", help="name the steps and stop")
    options = parser.parse_args(arguments)
    BUILD.mkdir(exist_ok=True)
    # The same tools whether `make` or a person starts this.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.setdefault("ANSIBLE_COLLECTIONS_PATH", str(BUILD / "collections"))
    os.environ.setdefault("GPUFLEET_CACHE", str(CACHE))
    chosen = {
        name.rstrip("-"): function
        for name, (suites, function) in STEPS.items()
        if options.suite in suites and (not options.only or name.rstrip("-") in options.only)
    }
    if options.list:
        print("\n".join(long_scenarios() if options.suite == "long" else chosen))
        return 0
    if options.suite == "long":
        return run_long(options.only)
    begun = time.monotonic()
    deadline = begun + TEST_MINUTES * 60
    rows: list[Row] = []
    for number, (name, function) in enumerate(chosen.items(), 1):
        print(f"[{number:>2}/{len(chosen)}] {name} …", flush=True)
        row = run_step(name, function, deadline)
        print(f"[{number:>2}/{len(chosen)}] {name}: {row.verdict}, {row.seconds:.1f} s", flush=True)
        rows.append(row)
        if row.verdict == "out of time":
            left = list(chosen)[number:]
            print(f"stopped after {TEST_MINUTES} minutes; not run: {', '.join(left) or 'nothing'}", flush=True)
            rows += [Row(later, 0.0, 0, 1, "not run") for later in left]
            break
    return close(rows, begun)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
