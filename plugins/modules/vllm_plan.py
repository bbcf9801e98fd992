# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_plan
short_description: Plan the vLLM instances of a host before anything is changed
version_added: 0.1.0
description:
  - Computes on the controller, from facts, which GPUs every instance gets, every byte of its GPU memory, and its exact
    command line and environment in the form its vLLM release takes.
  - Touches nothing and contacts nothing. Can be called alone on localhost with everything passed in.
  - A plan that does not fit is an answer (C(fits=false) with a reason and alternatives), not a failure. Malformed input
    fails the task with one message that names every problem.
author: The gpufleet.inference authors (@gpufleet)
options:
  gpu:
    description:
      - The GPU facts of the host, as M(gpufleet.inference.gpu_facts) returns them.
      - The host's C(ansible_facts.gpufleet_gpu) when not given.
    type: dict
  host:
    description:
      - The host facts, as M(gpufleet.inference.host_facts) returns them; used for ports and shared memory.
      - The host's C(ansible_facts.gpufleet_host) when not given.
    type: dict
  models:
    description:
      - Mapping of model names to model facts, as M(gpufleet.inference.model_facts) returns them.
      - "A model without files, C({config: {...}}), is planned from its configuration and marked C(estimated)."
    type: dict
    default: {}
  instances:
    description: The wanted instances. See the documentation of the role P(gpufleet.inference.vllm_instances#role).
    type: list
    elements: dict
    default: []
  engine_version:
    description: The vLLM release of instances that name none.
    type: str
  profiles:
    description: Figures read back from earlier starts; they are preferred for new and changed instances.
    type: list
    elements: dict
    default: []
  reserve:
    description: Bytes to keep free on each GPU, or a size such as V(2GiB).
    type: raw
    default: 0
  replan:
    description: Plan running instances anew instead of keeping their command lines.
    type: bool
    default: false
  placement:
    description: Whether instances that share GPUs are packed on as few as possible or spread over all.
    type: str
    choices: [pack, spread]
    default: pack
  models_dir:
    description: Where a model lies on the host when its facts do not say so yet.
    type: path
    default: /var/lib/vllm/models
attributes:
  check_mode:
    description: Whether the task can run in check mode.
    support: full
  diff_mode:
    description: Whether the task shows differences.
    support: none
"""

EXAMPLES = r"""
- name: Plan one instance on the host's GPUs
  gpufleet.inference.vllm_plan:
    engine_version: 0.32.0
    models: "{{ models_found.models }}"
    instances:
      - name: chat
        model: llama-3.1-8b
        port: 8000
  register: planned

# The playbook gpufleet.inference.facts writes reports/facts.json; gpu-01 is a host in it that has such GPUs.
- name: Plan for a host that does not exist yet
  gpufleet.inference.vllm_plan:
    gpu: "{{ (lookup('ansible.builtin.file', 'reports/facts.json') | from_json).hosts['gpu-01'].gpu }}"
    models:
      llama-3.1-8b:
        config: "{{ lookup('ansible.builtin.file', 'config.json') | from_json }}"
    engine_version: 0.32.0
    instances:
      - name: chat
        model: llama-3.1-8b
        port: 8000
  delegate_to: localhost
"""

RETURN = r"""
plan:
  description: The plan of the host.
  returned: success
  type: dict
  contains:
    fits:
      description: Whether every instance fits.
      type: bool
    findings:
      description: What a person should know, as mappings with code, severity, subject, text and remedy.
      type: list
      elements: dict
    instances:
      description: One entry for each wanted instance, sorted by name. Sizes are bytes, lengths tokens.
      type: list
      elements: dict
      contains:
        name:
          description: Its name.
          type: str
        fits:
          description: Whether it fits; C(reason) and C(alternatives) say more when it does not.
          type: bool
        state:
          description: The wanted state.
          type: str
        model:
          description: The model's name.
          type: str
        model_path:
          description: Where the model lies on the host, or will lie.
          type: str
        model_digest:
          description: The digest of the model's files, null when it was planned from its configuration alone.
          type: str
        task:
          description: V(generate), or V(pooling) where the engine gives vectors, classes or scores instead of tokens.
          type: str
        engine_version:
          description: The vLLM release.
          type: str
        port:
          description: The port.
          type: int
        listen_address:
          description: The address.
          type: str
        served_model_name:
          description: The name for clients; the instance answers to its own name as well.
          type: str
        api_key_file:
          description: The file with the key on the host, or null.
          type: str
        isolation:
          description: How it shares its GPUs.
          type: str
        settings:
          description: The wishes it was planned from. One whose record holds equal settings keeps its command line.
          type: dict
        devices:
          description: UUIDs of its GPUs or MIG slices, in the order of ranks.
          type: list
          elements: str
        budget:
          description:
            - One mapping for each device, with total, free, requested, weights, activation, non_torch, cuda_graphs,
              kv_cache and headroom.
            - Each is a mapping of bytes, source (exact, modelled, measured or expected), low and high.
          type: list
          elements: dict
        kv_cache_tokens:
          description: Tokens that the KV cache holds, counted as the release counts them.
          type: int
        kv_cache_blocks:
          description: Blocks of the KV cache.
          type: int
        max_concurrency:
          description: Requests of full length that fit at once.
          type: float
        max_model_len:
          description: The context length.
          type: int
        max_num_seqs:
          description: Requests the engine works on at once.
          type: int
        max_num_batched_tokens:
          description: Tokens of one step.
          type: int
        gpu_memory_utilization:
          description: The share of the device that the engine checks or sizes by.
          type: float
        kv_cache_memory_bytes:
          description: The KV cache on each GPU; null for releases that size it by the utilisation.
          type: int
        arguments:
          description: The words after the C(vllm) program, beginning with C(serve).
          type: list
          elements: str
        environment:
          description: The variables of its unit, without secrets.
          type: dict
        start_after:
          description: Instances on the same devices that start before it.
          type: list
          elements: str
        estimated:
          description: Whether the model's files or the effect of C(extra_args) were not known.
          type: bool
        kept:
          description: Whether the recorded plan of the running instance was kept.
          type: bool
        warnings:
          description: What to know about it.
          type: list
          elements: str
        reason:
          description: Why it does not fit, as a mapping of code and text; null when it does.
          type: dict
        alternatives:
          description: Changes with which it would fit, best first, each with its figures.
          type: list
          elements: dict
    gpus:
      description: One entry for each GPU or MIG slice with its total, free, foreign, margin and planned bytes.
      type: list
      elements: dict
"""
