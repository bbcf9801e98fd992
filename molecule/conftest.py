"""Checks of the scenarios: testinfra on each host of the fleet GPUFLEET_FLEET, as root and without SSH.

With `--unconfigured` the result is turned round: every single check must fail, on every host.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.backend.base import BaseBackend, CommandResult
from testinfra.host import Host

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "testbed"))
import hosts as bed


class Inside(BaseBackend):
    """Runs commands in the namespaces of a test-bed host."""

    NAME = "testbed"

    def __init__(self, fleet: bed.Fleet, name: str) -> None:
        super().__init__(name)
        self.enter = shlex.join(bed.inside(fleet, fleet.host(name)))

    def run(self, command: str, *args: str, **kwargs: Any) -> CommandResult:
        cmd = self.get_command(command, *args)
        result = self.run_local(self.enter + " sh -c %s", cmd)
        result.command = self.encode(cmd)
        return result


def fleet() -> bed.Fleet:
    return bed.load(os.environ["GPUFLEET_FLEET"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unconfigured", action="store_true", help="every check must fail: nothing was configured yet")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "host" in metafunc.fixturenames:
        metafunc.parametrize("host", [host.name for host in fleet().hosts], indirect=True, scope="session")


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest) -> Host:
    return Host(Inside(fleet(), request.param))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """With --unconfigured: failed becomes passed, passed becomes failed. Errors outside the check stay errors."""
    outcome: Any = yield
    report = outcome.get_result()
    if item.config.getoption("--unconfigured") and call.when == "call":
        if report.outcome == "passed":
            report.outcome = "failed"
            report.longrepr = f"{item.name} passes although nothing was configured: it checks nothing"
        elif report.outcome == "failed":
            report.outcome = "passed"
