"""The documentation of version_check describes the arguments of its action."""

from __future__ import annotations

import pytest
import yaml
from repository import ROOT, load

from ansible_collections.gpufleet.inference.plugins.action import version_check as action
from ansible_collections.gpufleet.inference.plugins.module_utils._domain.version_rules import PACKAGES
from ansible_collections.gpufleet.inference.plugins.modules import version_check as module

OPTIONS = yaml.safe_load(module.DOCUMENTATION)["options"]


def test_every_argument_is_documented_with_its_type_and_default():
    assert set(OPTIONS) == set(action.ARGUMENTS)
    for name, argument in action.ARGUMENTS.items():
        assert {key: OPTIONS[name].get(key) for key in argument} == argument, name


@pytest.mark.parametrize("path", ["playbooks/baseline.yml", "roles/gpu_driver/tasks/main.yml"])
def test_whoever_asks_the_rules_lists_the_packages_they_look_at(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert load(ROOT / path)
    assert all(pattern in text for pattern in PACKAGES)
