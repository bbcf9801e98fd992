# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether a vLLM release can run on a host, decided before anything is downloaded. Private to gpufleet.inference.

The figures of a release come from the release table (read out of the published wheels); those of a host from its facts.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError

Numbers = Tuple[int, ...]

# The first release with a wheel for 64-bit Arm, by the list of published wheels of each release.
FIRST_AARCH64 = (0, 10, 2)
MACHINES = ("x86_64", "aarch64")

_CLAUSE = re.compile(r"^(<=|>=|==|!=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?$")


def numbers(text: str) -> Numbers:
    """The leading dotted numbers of a version as a tuple: "580.126.09" -> (580, 126, 9). Empty when there are none."""
    match = re.match(r"\d+(?:\.\d+)*", str(text).strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def release_numbers(version: str) -> Numbers:
    """A vLLM version for comparison: "0.8.5.post1" -> (0, 8, 5, 1); a local part does not count."""
    return numbers(version.split("+", maxsplit=1)[0].replace("post", ""))


def accepts(specifier: str, version: str) -> bool:
    """Whether a version fulfils a specifier such as "<3.15,>=3.11" (PEP 440 without the ~= and === forms).

    Only as many numbers as the clause has are compared for == and != with a trailing .*; shorter ones count as zeros.
    Raises FleetError `bad_specifier` for what it cannot read.
    """
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        match = _CLAUSE.match(clause)
        if not match:
            raise FleetError("bad_specifier", f'"{clause}" in "{specifier}" is not a version clause.')
        wanted, found = numbers(match.group(2)), numbers(version)
        if match.group(3):
            found = found[: len(wanted)]
        width = max(len(wanted), len(found))
        left, right = found + (0,) * (width - len(found)), wanted + (0,) * (width - len(wanted))
        holds = {
            "<": left < right,
            "<=": left <= right,
            ">": left > right,
            ">=": left >= right,
            "==": left == right,
            "!=": left != right,
        }[match.group(1)]
        if not holds:
            return False
    return True


def gpu_problems(release: Mapping[str, Any], driver: str, capabilities: Mapping[str, str]) -> List[Dict[str, str]]:
    """What stands between a release and the GPUs of a host.

    release: the entry of the release table. driver: version that runs or will run, "" when unknown (no check then).
    capabilities: GPU name to compute capability ("9.0"). Each problem is {severity, code, text}; sources of the rules:
    the driver ranges of the CUDA release notes and the kernels found in the wheels, both in the release table.
    """
    problems = []
    cuda = release["cuda"]
    if driver and numbers(driver) < numbers(release["driver_floor"]):
        floor = release["driver_floor"]
        text = f"it is built for CUDA {cuda}, which needs driver {floor} or newer; the driver is {driver}"
        problems.append({"severity": "error", "code": "driver_too_old", "text": text})
    elif driver and numbers(driver) < numbers(release["toolkit_driver"]):
        text = (
            f"driver {driver} is older than {release['toolkit_driver']}, which came with CUDA {cuda}: kernels that are "
            "compiled at run time may fail"
        )
        problems.append({"severity": "warning", "code": "driver_below_toolkit", "text": text})
    for name, capability in sorted(capabilities.items()):
        found = numbers(capability)
        if found < numbers(release["capability"]):
            text = (
                f"{name} has compute capability {capability}; its wheels hold kernels from {release['capability']} on"
            )
        elif (found[0] in (10, 11) and not release["blackwell"][0]) or (found[0] >= 12 and not release["blackwell"][1]):
            text = f"{name} has compute capability {capability}; its wheels hold no kernels for Blackwell"
        else:
            continue
        problems.append({"severity": "error", "code": "unsupported_by_device", "text": text})
    return problems


def check_gpu(
    table: Mapping[str, Any], version: str, driver: str, capabilities: Mapping[str, str]
) -> List[Dict[str, str]]:
    """The warnings of a release on these GPUs; FleetError when it cannot run, with the newest release that can.

    table: `versions` of the release table. An unknown release is FleetError `unknown_release`.
    """
    base = version.split("+", maxsplit=1)[0]
    if base not in table:
        known = sorted(table, key=release_numbers)
        raise FleetError(
            "unknown_release",
            f"vLLM {version} is not in the release table, which holds {known[0]} to {known[-1]}.",
            "Choose one of those, or add the release to the table first.",
        )
    problems = gpu_problems(table[base], driver, capabilities)
    errors = [problem for problem in problems if problem["severity"] == "error"]
    if errors:
        fitting = [name for name in table if not _errors(gpu_problems(table[name], driver, capabilities))]
        newest = max(fitting, key=release_numbers, default="")
        hint = f"The newest release that runs here is {newest}." if newest else "No release of the table runs here."
        reasons = "; ".join(problem["text"] for problem in errors)
        raise FleetError(errors[0]["code"], f"vLLM {version} cannot run on this host: {reasons}.", hint)
    return problems


def _errors(problems: Iterable[Mapping[str, str]]) -> bool:
    return any(problem["severity"] == "error" for problem in problems)


def check_host(version: str, release: Mapping[str, Any], machine: str, glibc: str) -> None:
    """Refuse a release whose wheels do not load on this processor or C library: FleetError `unsupported_host`."""
    if machine not in MACHINES or (machine == "aarch64" and release_numbers(version) < FIRST_AARCH64):
        raise FleetError(
            "unsupported_host",
            f"vLLM {version} has no wheel for {machine}; there are wheels for x86_64, and for aarch64 from 0.10.2 on.",
            "Choose a release with a wheel for this processor.",
        )
    needed: Optional[str] = release.get("glibc")
    if needed and glibc and numbers(glibc) < numbers(needed):
        raise FleetError(
            "unsupported_host",
            f"vLLM {version} needs glibc {needed} or newer; this host has {glibc}.",
            "Upgrade the distribution, or choose a release with an older C library (0.21.0 and later need 2.28).",
        )


def choose_python(version: str, specifier: str, found: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """The newest interpreter ({path, version}) that a release accepts. FleetError `no_python` names the three ways."""
    fitting = [entry for entry in found if accepts(specifier, entry["version"])]
    if not fitting:
        seen = ", ".join(f"{entry['path']} ({entry['version']})" for entry in found) or "no Python 3"
        raise FleetError(
            "no_python",
            f"vLLM {version} needs Python {specifier}; this host has {seen}.",
            "Set vllm_engine_python to one of: `path` (an interpreter on the host), `package` (an OS package that "
            "brings one), `archive` and `sha256` (a tar archive with one).",
        )
    return max(fitting, key=lambda entry: numbers(entry["version"]))
