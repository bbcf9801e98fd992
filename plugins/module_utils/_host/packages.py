# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""OS packages that must be there, with apt or dnf, on hosts without Python bindings. Private to gpufleet.inference."""

from __future__ import annotations

from typing import List, Sequence

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host.jobs import Jobs
from ansible_collections.gpufleet.inference.plugins.module_utils._host.package_versions import family
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._host.runner import Runner

_APT = "export DEBIAN_FRONTEND=noninteractive; set -e; apt-get -q update; " + (
    'apt-get -q -y -o DPkg::Lock::Timeout=120 --no-install-recommends install "$@"'
)


def missing(root: Root, runner: Runner, names: Sequence[str]) -> List[str]:
    """Those packages that are not installed, in the order given."""
    if not names:
        return []
    if family(root) == "debian":
        query = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\\n", *names]
        present = {
            line.split(" ")[1]
            for line in runner.run(query, timeout=60).out.splitlines()
            if line.startswith("installed ")
        }
        return [name for name in names if name not in present]
    return [name for name in names if runner.run(["rpm", "--query", "--whatprovides", name], timeout=60).rc != 0]


def install(root: Root, runner: Runner, jobs: Jobs, names: Sequence[str], *, deadline: float) -> None:
    """Install packages in one transaction and read them back. FleetError `packages_missing` or the job's failure."""
    kind = family(root)
    if not kind:
        raise FleetError(
            "no_package_manager",
            f"The packages {', '.join(names)} are missing and this host has neither apt-get nor dnf.",
            "Install them by other means.",
        )
    argv = ["/bin/sh", "-c", _APT, "apt", *names] if kind == "debian" else ["dnf", "-q", "-y", "install", *names]
    jobs.run("packages", argv, deadline=deadline, what=f"The installation of {', '.join(names)}")
    left = missing(root, runner, names)
    if left:
        raise FleetError("packages_missing", f"After their installation {', '.join(left)} are still missing.")
