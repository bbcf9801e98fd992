#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_state
short_description: Set persistence, compute mode, power limit, clocks, ECC and accounting of a host's GPUs
version_added: 0.1.0
description:
  - Reads all GPUs, compares them with what is wanted, sets what differs and reads each setting back, in one call.
  - Nothing is changed when any wish is refused. Limits are checked against the GPU's own before.
  - A setting that a GPU does not have is a finding, not a failure.
  - A GPU that an instance of this collection uses is left alone, and what it lacks is reported as due, unless
    O(allow_in_use). Processes of others are named; a compute mode that would disturb them is refused.
  - What is wanted is recorded at C(/var/lib/gpufleet/gpu_state.json), for C(gpufleet.pyz restore) at boot. A GPU or
    setting that is no longer named keeps its value until the driver forgets it.
  - Persistence is the mode that NVML sets. The daemon nvidia-persistenced is neither needed nor managed.
  - MIG and MPS are not handled.
author: The gpufleet.inference authors (@gpufleet)
options:
  devices:
    description:
      - What is wanted, entry by entry. Each selects GPUs in one way and has at least one setting.
      - A later entry overrides an earlier one, setting by setting. Two entries whose selectors are equally narrow must
        not want different values of one GPU.
    type: list
    elements: dict
    required: true
    suboptions:
      all:
        description: V(true) selects every GPU.
        type: bool
      model:
        description: Selects the GPUs with this name, as the driver gives it. There may be none.
        type: str
      uuid:
        description: Selects one GPU.
        type: str
      pci_address:
        description: Selects one GPU, for example V(0000:18:00.0).
        type: str
      index:
        description: Selects one GPU by its number in NVML's order.
        type: int
      persistence_mode:
        description: Whether the driver keeps the GPU initialised without users.
        type: bool
      compute_mode:
        description: Which processes may use the GPU.
        type: str
        choices: [default, exclusive_process, prohibited]
      power_limit:
        description: Watts, or V(default) for the GPU's own default.
        type: raw
      locked_clocks:
        description:
          - The range of the SM clock in MHz as C(min_mhz) and C(max_mhz), or V(reset).
          - NVML cannot read a lock back. What was set is remembered until the kernel module is loaded anew, and a GPU
            that runs faster than its lock allows is locked again.
        type: raw
      ecc:
        description: Whether memory errors are corrected. It takes effect at the next reset or reboot.
        type: bool
      accounting:
        description: Whether the driver keeps figures of ended processes.
        type: bool
  allow_in_use:
    description: Whether a GPU is changed while an instance of this collection uses it.
    type: bool
    default: false
  deadline:
    description: Seconds that reading may take, and again that setting may take. One call may take a quarter of it.
    type: float
    default: 60
  instances:
    description:
      - Instances that are about to run, with name and devices (UUIDs). The controller half takes them from the fact
        C(gpufleet_plan). A compute mode that they cannot run with is refused.
    type: list
    elements: dict
    default: []
  bindings:
    description: Set by the controller half; what is given here is not used.
    type: str
  helper_digest:
    description: Set by the controller half; what is given here is not used.
    type: str
attributes:
  check_mode:
    description: Reports exactly what a run would change.
    support: full
  diff_mode:
    description: Shows the settings of each GPU that differs, and the record.
    support: full
requirements:
  - nvidia-ml-py (on the controller)
notes:
  - Settings need root.
seealso:
  - module: gpufleet.inference.gpu_facts
"""

EXAMPLES = r"""
- name: Keep all GPUs initialised, and one of them cooler
  gpufleet.inference.gpu_state:
    devices:
      - all: true
        persistence_mode: true
      - pci_address: "0000:18:00.0"
        power_limit: 500
        locked_clocks:
          min_mhz: 1200
          max_mhz: 1600
"""

RETURN = r"""
changes:
  description:
    - What was changed and read back, or would be in check mode, in order, with uuid, index, pci_address, setting,
      before and after.
  returned: always
  type: list
  elements: dict
findings:
  description: What a person should know, each with code, severity, subject, text and remedy.
  returned: always
  type: list
  elements: dict
due:
  description: Whether a GPU was left alone because an instance uses it.
  returned: always
  type: bool
"""

from typing import Any

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import gpu_state as domain
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import files, gpu, gpu_state, nvml
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule, diff_entries

ENTRY_SPEC = {
    "all": {"type": "bool"},
    "model": {"type": "str"},
    "uuid": {"type": "str"},
    "pci_address": {"type": "str"},
    "index": {"type": "int"},
    "persistence_mode": {"type": "bool"},
    "compute_mode": {"type": "str", "choices": list(domain.COMPUTE_MODES)},
    "power_limit": {"type": "raw"},
    "locked_clocks": {"type": "raw"},
    "ecc": {"type": "bool"},
    "accounting": {"type": "bool"},
}
SPEC = {
    "devices": {"type": "list", "elements": "dict", "required": True, "options": ENTRY_SPEC},
    "allow_in_use": {"type": "bool", "default": False},
    "deadline": {"type": "float", "default": 60.0},
    "instances": {"type": "list", "elements": "dict", "default": []},
    "bindings": {"type": "str", "no_log": True},
    "helper_digest": {"type": "str"},
}


def bindings_of(params: dict[str, Any]) -> Any:
    """pynvml as the controller half chose it. FleetError `helper_changed`, `no_bindings`."""
    if params["bindings"]:
        return nvml.load_bindings(params["bindings"])
    if not params["helper_digest"]:
        raise FleetError("no_bindings", "No NVML bindings came with the task, so no GPU can be set.")
    bindings = nvml.load_bindings_from_helper(gpu.HELPER, params["helper_digest"])
    if bindings is None:
        raise FleetError("helper_changed", f"{gpu.HELPER} is not the artefact that earlier facts found there.")
    return bindings


def converge(fleet: FleetModule) -> dict[str, Any]:
    """Read, compare, apply, read back."""
    params, root = fleet.params, Root()
    deadline = params["deadline"]
    if deadline < 1:
        raise FleetError("bad_deadline", f"deadline must be at least 1 second, found {deadline:g}.")
    bindings = bindings_of(params)
    facts = gpu_state.read(root, fleet.runner, bindings, deadline)
    wanted = domain.resolve(params["devices"], facts["devices"])
    plan = domain.compare(
        wanted, facts, gpu_state.locks(root), allow_in_use=params["allow_in_use"], planned=params["instances"]
    )
    refusal = plan.refusal()
    if refusal is not None:
        raise refusal
    record = files.parse({"path": gpu_state.RECORD}, gpu_state.record_text(wanted).encode())
    recorded = files.plan(root, [record])
    result = {
        "changed": bool(plan.changes or recorded),
        "changes": [change.to_dict() for change in plan.changes],
        "findings": [finding.to_dict() for finding in plan.findings],
        "due": any(finding.code == "gpu_state_due" for finding in plan.findings),
        "diff": diff_entries([*plan.diff(), *(change.as_diff() for change in recorded)]),
    }
    if fleet.check_mode:
        return result
    outcomes = gpu_state.apply(bindings, plan.changes, deadline)
    failed = [outcome for outcome in outcomes if outcome.error]
    if failed:
        done = [outcome for outcome in outcomes if not outcome.error]
        gpu_state.remember_locks(root, done)
        lines = [
            f"{o.change.subject}: {o.change.setting} to {domain.words(o.change.setting, o.change.after)}: {o.error}."
            for o in failed
        ]
        raise FleetError(
            "gpu_state_failed",
            f"{len(done)} of {len(outcomes)} settings were made and read back. {' '.join(lines)}",
            hint="The record for the next boot was left as it was. Run again once the cause is gone.",
            done=[outcome.change.to_dict() for outcome in done],
            failed=[outcome.to_dict() for outcome in failed],
        )
    gpu_state.write_result(root, plan, outcomes, list(wanted))
    files.converge(root, [record], check_mode=False)
    return result


def main() -> None:
    """Entry point."""
    FleetModule(argument_spec=SPEC, supports_check_mode=True).run(converge, lock=True)


if __name__ == "__main__":
    main()
