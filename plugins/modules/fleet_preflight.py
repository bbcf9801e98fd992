#!/usr/bin/python
# Copyright (c) The gpufleet.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_preflight
short_description: Refuse a host before the first change
version_added: 0.1.0
author:
  - The gpufleet.inference authors (@gpufleet)
description:
  - Compares the facts of a host with what is wanted of it, and fails with all refusals in one message, each with its
    figures and its next step.
  - A host whose GPUs are all of other vendors is marked as skipped.
  - Runs on the controller; the host is not contacted. Needs the facts of P(gpufleet.inference.gpu_facts#module) and
    P(gpufleet.inference.host_facts#module).
attributes:
  check_mode:
    support: full
    description: Changes nothing in either mode.
  diff_mode:
    support: none
    description: There is nothing to show.
options:
  instances:
    description: The wanted instances.
    type: list
    elements: raw
    default: []
  models:
    description: The models, by name.
    type: dict
    default: {}
  engine_version:
    description: The vLLM release of instances that name none.
    type: str
  paths:
    description: Directories from which programs or libraries are run; none may be mounted noexec.
    type: list
    elements: path
    default: []
  disk_needed:
    description: Free bytes that a path must have, by path.
    type: dict
    default: {}
  driver_required:
    description: Whether a host without a running driver is refused. When it is false, that is a warning.
    type: bool
    default: true
"""

EXAMPLES = r"""
- name: Refuse early
  gpufleet.inference.fleet_preflight:
    instances: "{{ vllm_instances_list }}"
    models: "{{ vllm_models_list }}"
"""

RETURN = r"""
ansible_facts:
  description: Facts to add.
  returned: always
  type: dict
  contains:
    gpufleet_preflight:
      description: Findings, and whether the host was refused or is to be left out.
      type: dict
"""
