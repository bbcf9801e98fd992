#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: version_check
short_description: Compare the versions on a host with the rules and with its baseline
version_added: 0.1.0
description:
  - Says from the facts of a host which versions do not go together. It knows driver branches and their end, module
    flavours, GPUs, CUDA, fabric manager, DCGM and what each vLLM release needs.
  - With the number of a baseline it also compares each component with that set. A baseline that contradicts the rules
    is refused.
  - Runs on the controller; the host is not contacted. Needs the facts of P(gpufleet.inference.gpu_facts#module), and of
    P(gpufleet.inference.host_facts#module) with the packages of the example.
author: The gpufleet.inference authors (@gpufleet)
options:
  baseline:
    description: The number of the baseline. Without one, only the rules are asked.
    type: str
  sets:
    description:
      - Own baselines, each a mapping with C(number). One of a number that is shipped takes its place.
      - The other keys are C(title), C(architectures), C(systems), C(driver), C(flavour), C(cuda), C(fabric_manager),
        C(dcgm), C(vllm), C(python), C(torch), C(transformers), C(numpy), C(nccl). Only components that are named are
        compared, as far as their version is written.
    type: list
    elements: dict
    default: []
  engine_versions:
    description: vLLM releases that must run on the host. Not used with a baseline, which names its own.
    type: list
    elements: str
    default: []
  required:
    description: Whether a missing number is an error, which lists the known baselines.
    type: bool
    default: false
attributes:
  check_mode:
    description: Changes nothing in either mode.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
  facts:
    description: Returns facts.
    support: full
seealso:
  - module: gpufleet.inference.fleet_report
"""

EXAMPLES = r"""
- name: Read the GPUs
  gpufleet.inference.gpu_facts:

- name: Read the host
  gpufleet.inference.host_facts:
    packages: ["*nvidia*", libcuda1, "cuda-compat-*", "cuda-drivers*", "datacenter-gpu-manager*"]

- name: Compare with the baseline of this host
  gpufleet.inference.version_check:
    baseline: 3
"""

RETURN = r"""
ansible_facts:
  description: The facts.
  returned: success
  type: dict
  contains:
    gpufleet_versions:
      description: What was compared.
      type: dict
      contains:
        findings:
          description: What the rules say, worst first, each with code, severity, subject, text and remedy.
          type: list
          elements: dict
        baseline:
          description:
            - Null without a number, else C(number), C(title), C(verdict) and C(components).
            - A component has component, wanted, installed, running, held, candidate, verdict and why.
            - A verdict is V(ok), V(drift), V(unknown) or V(error); that of the host is the worst.
          type: dict
"""
