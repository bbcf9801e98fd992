#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_report
short_description: Show and write a report about the fleet
version_added: 0.1.0
description:
  - Prints a report about all hosts of the play from the facts they have, and writes it as text and JSON, the facts as
    CSV and the baseline as JUnit XML too. Runs once, on the controller, without root; no host is contacted.
  - Hosts that left the run are listed with what is known about them. The report does not depend on the first host.
  - The report is written in check mode too. It is an output of the run and no part of any host.
author: The gpufleet.inference authors (@gpufleet)
options:
  kind:
    description:
      - V(facts) is the fleet inventory with driver, memory and instances of each host.
      - V(plan) shows, for each GPU, what the plan puts there, and the command line of each instance.
      - V(site) shows what a run left of each instance.
      - V(baseline) shows, for each host and component, what is wanted, installed, running and held, with a verdict.
    type: str
    choices: [baseline, facts, plan, site]
    default: facts
  dir:
    description: Folder for the files. The default is V(reports) in the folder in which the run was started.
    type: path
  hosts:
    description: The hosts to report on. The default is all that the play was started for.
    type: list
    elements: str
  show:
    description: Whether to print the report.
    type: bool
    default: true
  fail_on_unknown:
    description: Whether hosts and components that told nothing are errors in the JUnit XML. They are skipped otherwise.
    type: bool
    default: false
attributes:
  check_mode:
    description: Runs in check mode and does the same.
    support: full
  diff_mode:
    description: Shows what changes in diff mode. Nothing on a host ever changes.
    support: none
notes:
  - A result that was registered as C(gpufleet_read) tells why a host could not be read.
seealso:
  - module: gpufleet.inference.gpu_facts
  - module: gpufleet.inference.vllm_plan
"""

EXAMPLES = r"""
- name: Report on the fleet
  hosts: gpu_hosts
  gather_facts: false
  tasks:
    - name: Show the inventory
      gpufleet.inference.fleet_report:
        kind: facts
        dir: /srv/reports
"""

RETURN = r"""
files:
  description: The files that were written.
  returned: success
  type: list
  elements: str
  sample: [/srv/reports/facts.txt, /srv/reports/facts.json, /srv/reports/facts.csv]
status:
  description: For each host one of ok, unreachable, failed, unknown.
  returned: success
  type: dict
verdicts:
  description: With O(kind=baseline), for each host one of ok, drift, unknown, error; empty otherwise.
  returned: success
  type: dict
"""
