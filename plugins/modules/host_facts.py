#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: host_facts
short_description: Read what matters of a host for serving models, besides its GPUs
version_added: 0.1.0
description:
  - Reads in one round trip the system, file systems, memory, processors, listening ports, vLLM engines and units of a
    host, and returns them as the fact C(gpufleet_host). Nothing is written on the host.
  - A file system that does not answer is named and not waited for.
author: The gpufleet.inference authors (@gpufleet)
options:
  paths:
    description: Paths whose free space and mount options matter. They need not exist.
    type: list
    elements: path
    default: [/opt/vllm, /var/lib/vllm, /var/cache/vllm]
  packages:
    description:
      - Names of OS packages to list, with wildcards as in V(nvidia*). Without any, no package manager is asked.
      - No repository is contacted.
    type: list
    elements: str
    default: []
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
notes:
  - Without root, the processes behind ports and containers of other users are not known.
seealso:
  - module: gpufleet.inference.gpu_facts
"""

EXAMPLES = r"""
- name: Read the host
  gpufleet.inference.host_facts:
    paths: [/opt/vllm, /srv/models]

- name: Show what listens
  ansible.builtin.debug:
    var: ansible_facts.gpufleet_host.ports
"""

RETURN = r"""
ansible_facts:
  description: The facts.
  returned: success
  type: dict
  contains:
    gpufleet_host:
      description: All sizes in bytes.
      type: dict
      contains:
        distribution:
          description: The system's id, version and codename.
          type: dict
          sample: {"id": "debian", "version": "12", "codename": "bookworm"}
        arch:
          description: The processor architecture.
          type: str
          sample: x86_64
        kernel:
          description: The running kernel.
          type: str
        glibc:
          description: The version of the C library, null for another one.
          type: str
          sample: "2.36"
        systemd:
          description: The version of systemd, null when it does not run.
          type: int
          sample: 252
        python:
          description: Python interpreters with path and minor version.
          type: list
          elements: dict
          sample: [{"path": "/usr/bin/python3.11", "version": "3.11"}]
        user:
          description: Name and uid of who reads, and whether it is or can become root (C(become_ok)).
          type: dict
        selinux:
          description: One of enforcing, permissive, disabled.
          type: str
        fapolicyd:
          description: Whether the file access policy daemon runs.
          type: bool
        firewall:
          description: firewalld, ufw or null.
          type: str
        mounts:
          description: File systems with path, fstype, options, size and free.
          type: list
          elements: dict
        noexec_paths:
          description: Those of O(paths) from which nothing can be started.
          type: list
          elements: str
        disk:
          description: Free space for each of O(paths).
          type: dict
        ram:
          description: Memory, total and available.
          type: dict
        cpus:
          description: The count, and the CPU list of each NUMA node.
          type: dict
          sample: {"count": 64, "numa": {"0": "0-31", "1": "32-63"}}
        ports:
          description: Listening TCP ports with address, port, pid, process and unit.
          type: list
          elements: dict
        vllm_units:
          description: systemd units that run vLLM or are named after it, and whether they are ours.
          type: list
          elements: dict
        containers_with_gpu:
          description: Containers that have a GPU device open, with id, runtime and processes.
          type: list
          elements: dict
        engines:
          description:
            - vLLM releases under /opt/vllm and whether each is complete, with the version of its interpreter and of the
              wheels that it stands on.
          type: list
          elements: dict
        kernels:
          description: Installed kernels that the machine can boot.
          type: list
          elements: str
        packages:
          description:
            - Installed packages of O(packages) with C(version), C(held) and C(candidate), the version that the
              lists on the host offer (null with dnf). Null when no package manager told.
          type: dict
          sample: {"nvidia-smi": {"version": "550.163.01-2", "held": false, "candidate": "550.163.01-2"}}
        proxies:
          description: Proxies of the environment, without user names and passwords.
          type: dict
        unavailable:
          description: Why a value is null, by its path.
          type: dict
        findings:
          description: What a person should know, worst first, each with code, severity, subject, text and remedy.
          type: list
          elements: dict
"""

import os
import pwd

from ansible_collections.gpufleet.inference.plugins.module_utils._host import host
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.module_utils._module import FleetModule

SPEC = {
    "paths": {"type": "list", "elements": "path", "default": ["/opt/vllm", "/var/lib/vllm", "/var/cache/vllm"]},
    "packages": {"type": "list", "elements": "str", "default": []},
}


def read(fleet: FleetModule) -> dict[str, object]:
    """The module's result."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    facts = host.gather(
        Root(),
        fleet.runner,
        fleet.params["paths"],
        os.environ,
        user=(name, uid),
        package_patterns=fleet.params["packages"],
    )
    return {"changed": False, "ansible_facts": {"gpufleet_host": facts}}


def main() -> None:
    """Entry point."""
    FleetModule(argument_spec=SPEC, supports_check_mode=True).run(read)


if __name__ == "__main__":
    main()
