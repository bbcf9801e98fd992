"""`make demo`: two bare hosts with simulated GPUs become vLLM servers that answer. `make demo-down` takes them away.

Real systemd hosts, real playbooks, real vLLM (its build for the CPU), a model made on the spot. Only the GPUs are
simulated. `up` may be repeated; every step says what it does and how long it took; a failed step ends the run with
its reason, the end of its output and the name of its log.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".build" / "demo"
ENGINES = ROOT / "tests" / "testbed" / "engines"
TESTBED = ROOT / "tests" / "testbed" / "testbed"
INVENTORIES = (ROOT / ".build" / "testbed" / "demo" / "inventory.yml", ROOT / "inventories" / "demo")
COLLECTIONS = ROOT / ".build" / "collections"
QUESTION = "The quick brown fox"
ASK = """
import json, sys, urllib.request
url, model, prompt = sys.argv[1:]
body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}).encode()
request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
print(json.dumps(json.load(urllib.request.urlopen(request, timeout=120))))
"""


class StepFailed(Exception):
    """Why the demo cannot go on."""


def style(code: str, text: str) -> str:
    """Colour for a terminal whose user has not asked for none."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return text if plain else f"\033[{code}m{text}\033[0m"


def run(log: Path, argv: Sequence[str | Path], progress: str = "") -> str:
    """Run a program into a log; return its standard output. On a terminal, show lines that start with `progress`."""
    env = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_RETRY_FILES_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    live = bool(progress) and sys.stdout.isatty()
    lines = []
    with log.open("w", encoding="utf-8") as copy:
        words = [str(word) for word in argv]
        with subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=copy, text=True
        ) as child:
            assert child.stdout
            for line in child.stdout:
                lines.append(line)
                copy.write(line)
                copy.flush()
                if live and line.startswith(progress):
                    width = shutil.get_terminal_size().columns - 8
                    print(f"\r\033[K      {line.strip(' *[]' + chr(10))[:width]}", end="", flush=True)
    if live:
        print("\r\033[K", end="", flush=True)
    if child.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-40:])
        raise StepFailed(f"{Path(words[0]).name} ended with {child.returncode}; the end of {log}:\n{tail}")
    return "".join(lines)


def playbook(name: str, *arguments: str) -> str:
    """Run a playbook of the collection on the demo's hosts."""
    inventories = [word for path in INVENTORIES for word in ("-i", str(path))]
    reports = f"fleet_report_dir={WORK / 'reports'}"
    argv = ["ansible-playbook", *inventories, "-e", reports, *arguments, f"gpufleet.inference.{name}"]
    return run(WORK / f"{name}.log", argv, progress="TASK [")


def shelf(name: str, target: Path) -> None:
    """Let `.build/demo/NAME`, which the hosts mount, lead to what was built."""
    link = WORK / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink() or link.exists():
        if link.resolve() == target.resolve():
            return
        link.unlink() if link.is_symlink() else shutil.rmtree(link)
    link.symlink_to(target)


# ---- the steps -------------------------------------------------------------------------------------------------


def wheels() -> None:
    out = run(WORK / "wheelhouse.log", [sys.executable, ENGINES / "wheelhouse.py"])
    shelf("wheelhouse", Path(out.strip().splitlines()[-1]))


def model() -> None:
    folder = ROOT / ".build" / "engines" / "models"
    run(WORK / "model.log", [sys.executable, ENGINES / "tiny_model.py", folder / "tiny"])
    shelf("models", folder)


def hosts() -> None:
    run(WORK / "testbed.log", [TESTBED, "up", "--fleet", "demo"])


def plan() -> None:
    playbook("plan")
    show("plan")


def site() -> None:
    playbook("site")
    show("site")


def show(kind: str) -> None:
    """Print the report that a playbook wrote."""
    file = WORK / "reports" / f"{kind}.txt"
    if not file.exists():
        raise StepFailed(f"the playbook left no report {file}")
    print("".join(f"      {line}\n" for line in file.read_text(encoding="utf-8").splitlines()))


def answers() -> None:
    """One completion from each instance, asked on its host."""
    inventories = [word for path in INVENTORIES for word in ("-i", str(path))]
    listing = json.loads(run(WORK / "inventory.log", ["ansible-inventory", *inventories, "--list"]))
    for host, variables in sorted(listing["_meta"]["hostvars"].items()):
        for instance in variables["vllm_instances_list"]:
            answer = ask(host, instance)
            text = answer["choices"][0]["text"]
            tokens = answer["usage"]["completion_tokens"]
            if not tokens:
                raise StepFailed(f"{host}/{instance['name']} answered with no token: {answer}")
            print(f"      {host}/{instance['name']:<6} {tokens} tokens: {json.dumps(text, ensure_ascii=False)}")
    print("      The tiny model has random weights: its words are noise; what counts is that vLLM answers.")


def ask(host: str, instance: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{instance['port']}"
    argv = [TESTBED, "exec", "--fleet", "demo", host, "--", "python3", "-c", ASK, url, instance["name"], QUESTION]
    answer: dict[str, Any] = json.loads(run(WORK / f"ask-{host}-{instance['name']}.log", argv))
    return answer


STEPS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("Wheels of vLLM for the CPU", wheels),
    ("A tiny model", model),
    ("Two bare Debian hosts with simulated GPUs", hosts),
    ("Plan: what `site` would do", plan),
    ("Site: engines, models, instances", site),
    (f"A completion from each instance: {QUESTION!r}", answers),
)


def up() -> int:
    begun = time.monotonic()
    for number, (title, action) in enumerate(STEPS, 1):
        print(style("1", f"[{number}/{len(STEPS)}] {title}"), flush=True)
        start = time.monotonic()
        try:
            action()
        except StepFailed as failure:
            print(style("31", f"      failed after {time.monotonic() - start:.0f} s: {failure}"), flush=True)
            return 1
        print(style("2", f"      {time.monotonic() - start:.0f} s"), flush=True)
    print(style("32", f"The demo is up after {time.monotonic() - begun:.0f} s."))
    print(
        "Look around:  tests/testbed/testbed exec --fleet demo gpu1 -- systemctl status 'vllm-*'\n"
        "A playbook:   ANSIBLE_COLLECTIONS_PATH=.build/collections .venv/bin/ansible-playbook \\\n"
        "                -i .build/testbed/demo/inventory.yml -i inventories/demo gpufleet.inference.plan\n"
        "Take it away: make demo-down"
    )
    return 0


def down() -> int:
    try:
        run(ROOT / ".build" / "demo-down.log", [TESTBED, "down", "--fleet", "demo"])
    except StepFailed as failure:
        print(style("31", str(failure)))
        return 1
    shutil.rmtree(WORK, ignore_errors=True)
    print("The demo is gone; the caches stay.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["up", "down"])
    try:
        return up() if parser.parse_args().verb == "up" else down()
    except KeyboardInterrupt:
        print("\nInterrupted. `make demo` goes on where it was, `make demo-down` takes all away.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
