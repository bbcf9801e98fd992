"""Jobs survive their caller: a later call attaches, the outcome comes from the job's own record."""

from __future__ import annotations

import os
import stat
import subprocess

import pytest
from support import ScriptedRunner

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import jobs
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root


class Systemd:
    """systemd-run and systemctl show, as far as jobs use them; a started command runs at once."""

    def __init__(self, root: Root, busy: int = 0) -> None:
        self.root, self.busy, self.started = root, busy, []
        self.runner = ScriptedRunner({("systemctl", "show"): self.show, ("systemd-run",): self.start})

    def start(self, argv):
        command = argv[argv.index("/bin/sh") :]
        command[3] = self.root.path(command[3])
        self.started.append(argv)
        log = next(word for word in argv if word.startswith("--property=StandardOutput=file:")).split("file:")[1]
        with open(self.root.path(log), "w", encoding="utf-8") as target:
            subprocess.run(command, stdout=target, stderr=target, check=False)
        return ""

    def show(self, argv):
        self.busy -= 1
        return "active\n" if self.busy >= 0 else "inactive\n"


@pytest.fixture
def make(tmp_path):
    def build(busy: int = 0):
        root = Root(str(tmp_path))
        systemd = Systemd(root, busy)
        clock = iter(range(1000))
        return jobs.Jobs(root, systemd.runner, sleep=lambda _s: None, monotonic=lambda: next(clock)), systemd

    return build


def test_a_job_runs_and_its_environment_is_in_a_private_file_only(make, tmp_path):
    job, systemd = make()
    job.run("demo", ["/bin/sh", "-c", "echo done"], deadline=5, what="The demo", environment={"KEY": 's3"cret'})
    path = tmp_path / "var/lib/gpufleet/jobs/demo"
    assert (path / "environment").read_text() == 'KEY="s3\\"cret"\n'
    assert stat.S_IMODE(os.stat(path / "environment").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert "s3" not in " ".join(systemd.started[0])
    assert job.tail("demo") == "done"


def test_a_failed_job_tells_its_last_lines_without_credentials(make):
    job, _ = make()
    with pytest.raises(FleetError) as caught:
        job.run("demo", ["/bin/sh", "-c", "echo https://u:p@x.invalid/simple; exit 3"], deadline=5, what="The demo")
    assert caught.value.code == "job_failed"
    assert "exit status 3" in caught.value.message
    assert "https://***@x.invalid/simple" in caught.value.message


def test_a_job_that_still_runs_is_attached_to_and_not_started_again(make, tmp_path):
    job, systemd = make(busy=3)
    folder = tmp_path / "var/lib/gpufleet/jobs/demo"
    folder.mkdir(parents=True)
    (folder / "rc").write_text("0\n")
    job.run("demo", ["/bin/false"], deadline=50, what="The demo")
    assert systemd.started == []


def test_a_job_over_its_deadline_goes_on(make):
    job, _ = make(busy=10_000)
    with pytest.raises(FleetError, match=r"is not over after 5 s; it goes on as gpufleet-demo\.service"):
        job.run("demo", ["/bin/true"], deadline=5, what="The demo")


def test_a_job_that_was_killed_is_not_taken_for_done(make):
    job, systemd = make()
    systemd.runner.answers[("systemd-run",)] = ""
    with pytest.raises(FleetError, match="ended before it was over"):
        job.run("demo", ["/bin/true"], deadline=5, what="The demo")


def test_without_systemd_the_refusal_says_what_jobs_need(make):
    job, systemd = make()
    systemd.runner.answers[("systemd-run",)] = (1, "", "Failed to connect to bus")
    with pytest.raises(FleetError, match="Failed to connect to bus") as caught:
        job.run("demo", ["/bin/true"], deadline=5, what="The demo")
    assert "become" in caught.value.hint
