#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_facts
short_description: Read a host's GPUs, driver, instances and their state
version_added: 0.1.0
description:
  - Reads in one round trip what PCI, the kernel, NVML and systemd tell about the NVIDIA GPUs of a host, and returns it
    as the fact C(gpufleet_gpu). Nothing is written on the host and nothing has to be installed there but the driver.
  - The bindings for NVML (the Python package C(nvidia-ml-py)) are taken from the controller and loaded in memory; they
    are not sent to a host that is known to have this controller's host helper.
  - NVML is asked in child processes. One that gets no answer is left behind at the deadline, never waited for. What was
    read until then is kept.
  - Whatever cannot be read is null and has its reason under RV(ansible_facts.gpufleet_gpu.unavailable).
author: The gpufleet.inference authors (@gpufleet)
options:
  deadline:
    description:
      - Seconds that reading may take as a whole.
      - One call on one device may take a quarter of it. The initialisation may take all of it, because it starts every
        GPU when persistence mode is off.
    type: float
    default: 20
  bindings:
    description: Set by the controller half; what is given here is not used.
    type: str
  helper_digest:
    description: Set by the controller half; what is given here is not used.
    type: str
attributes:
  check_mode:
    description: Runs in check mode and reads the same.
    support: full
  diff_mode:
    description: Shows what changes in diff mode. Nothing ever changes.
    support: none
  facts:
    description: Returns facts.
    support: full
requirements:
  - nvidia-ml-py (on the controller)
notes:
  - Without root, processes of other users have no name or unit, and some settings cannot be read.
seealso:
  - module: gpufleet.inference.host_facts
  - module: gpufleet.inference.vllm_plan
"""

EXAMPLES = r"""
- name: Read the GPUs
  gpufleet.inference.gpu_facts:

- name: Refuse to go on with a sick GPU
  ansible.builtin.assert:
    that: ansible_facts.gpufleet_gpu.findings | selectattr('severity', 'equalto', 'error') | length == 0
"""

RETURN = r"""
ansible_facts:
  description: The facts.
  returned: success
  type: dict
  contains:
    gpufleet_gpu:
      description: All sizes in bytes. A null has its reason under C(unavailable).
      type: dict
      contains:
        present:
          description: Whether an NVIDIA GPU is on the PCI bus.
          type: bool
        pci:
          description: NVIDIA GPUs on the PCI bus with address, vendor_id, device_id, class_id, name and kernel driver.
          type: list
          elements: dict
        other_gpus:
          description: GPUs of AMD and Intel in the same form. They are listed and not managed.
          type: list
          elements: dict
        driver:
          description:
            - Three versions. C(running) is the loaded kernel module, C(installed) the one on disk for the running
              kernel, C(userland) the library of NVML; C(libcuda) that of CUDA.
            - C(flavour) is C(open) or C(proprietary). C(modules_by_kernel) has path, version and flavour per kernel.
          type: dict
        cuda_driver_version:
          description: The CUDA version that the driver supports.
          type: str
          sample: "12.4"
        devices:
          description:
            - The GPUs in NVML's order with index, uuid, pci_address, name, architecture, compute_capability, minor,
              memory, persistence_mode, compute_mode, accounting_mode, power, clocks, ecc, mig, processes, health,
              numa_node and cpu_affinity.
            - When NVML does not answer, the GPUs that the kernel module knows, with null for what NVML alone can tell.
            - A process has pid, name, used (bytes), kind (compute, mps or graphics) and its systemd unit.
          type: list
          elements: dict
        links:
          description:
            - C(matrix) says in the words of C(nvidia-smi topo -m) how each pair of GPUs is connected, C(peer_access)
              whether it can reach each other's memory.
          type: dict
        fabric:
          description: State of the NVLink fabric per device, number of NVSwitches, state of the fabric manager's unit.
          type: dict
        mps:
          description: MPS control daemons with pid, pipe_directory, user and unit.
          type: list
          elements: dict
        instances:
          description:
            - Instances of this collection with name, unit, active_state, sub_state, main_pid, generation,
              staged_generation, port, devices, arguments and the planned record.
          type: list
          elements: dict
        helper:
          description: The sha256 of the host helper, null when it is not there.
          type: dict
        findings:
          description: What a person should know, worst first, each with code, severity, subject, text and remedy.
          type: list
          elements: dict
        unavailable:
          description:
            - Why a value is null, by its path. A path stands for everything below it, for example C(devices.3) for all
              that is null in the fourth device. C(nvml) says why NVML as a whole told nothing.
          type: dict
"""

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.errors import FleetError
from ansible_collections.gpufleet.inference.plugins.module_utils._host import gpu, nvml
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule

SPEC = {
    "deadline": {"type": "float", "default": 20.0},
    "bindings": {"type": "str", "no_log": True},
    "helper_digest": {"type": "str"},
}


def read(fleet: FleetModule) -> dict[str, object]:
    """The module's result."""
    deadline = fleet.params["deadline"]
    if deadline < 1:
        raise FleetError("bad_deadline", f"deadline must be at least 1 second, found {deadline:g}.")
    bindings = None
    if fleet.params["bindings"]:
        bindings = nvml.load_bindings(fleet.params["bindings"])
    elif fleet.params["helper_digest"]:
        bindings = nvml.load_bindings_from_helper(gpu.HELPER, fleet.params["helper_digest"])
        if bindings is None:
            raise FleetError("helper_changed", f"{gpu.HELPER} is not the artefact that earlier facts found there.")
    facts = gpu.gather(Root(), fleet.runner, bindings, deadline)
    return {"changed": False, "ansible_facts": {"gpufleet_gpu": facts}}


def main() -> None:
    """Entry point."""
    FleetModule(argument_spec=SPEC, supports_check_mode=True).run(read)


if __name__ == "__main__":
    main()
