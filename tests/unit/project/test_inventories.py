"""The inventories that people copy are ones the collection accepts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, load, roles

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import normalise

EXAMPLE = ROOT / "inventories/example"
OURS = re.compile(r"^(fleet|gpu|gpufleet|site|vllm)_")


@lru_cache
def host_variables(inventory: Path) -> dict[str, dict[str, Any]]:
    """Variables by host, as Ansible merges them."""
    tool = Path(sys.executable).with_name("ansible-inventory")
    done = subprocess.run(
        [str(tool), "-i", str(inventory), "--list"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_CONFIG": str(EXAMPLE / "ansible.cfg")},
    )
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["_meta"]["hostvars"]
    return found


def role_variables() -> set[str]:
    names: set[str] = set()
    for role in roles():
        for spec in load(role / "meta/argument_specs.yml")["argument_specs"].values():
            names |= set(spec.get("options") or {})
    return names


HOSTS = sorted(host_variables(EXAMPLE / "hosts.yml"))


def test_the_example_has_three_classes_of_gpu() -> None:
    classes = load(EXAMPLE / "hosts.yml")["all"]["children"]["gpu_hosts"]["children"]
    assert len(classes) == 3
    assert sorted(host for group in classes.values() for host in group["hosts"]) == HOSTS


@pytest.mark.parametrize("host", HOSTS)
def test_the_instances_of_an_example_host_are_accepted(host: str) -> None:
    values = host_variables(EXAMPLE / "hosts.yml")[host]
    instances = normalise(values["vllm_instances_list"], values["vllm_engine_version"])
    assert instances
    assert {instance.model for instance in instances} <= set(values["vllm_models_list"])


@pytest.mark.parametrize("host", HOSTS)
def test_an_example_host_sets_only_variables_that_a_role_has(host: str) -> None:
    used = {name for name in host_variables(EXAMPLE / "hosts.yml")[host] if OURS.match(name)}
    assert sorted(used - role_variables()) == []
