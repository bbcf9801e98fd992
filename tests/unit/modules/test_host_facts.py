from __future__ import annotations

import json
import os

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.gpufleet.inference.plugins.modules import host_facts


@pytest.mark.parametrize("check", [False, True])
def test_the_machine_it_runs_on_is_described_and_nothing_changes(capsys, check):
    with patch_module_args({"paths": ["/nowhere/at/all"], "_ansible_check_mode": check}), pytest.raises(SystemExit):
        host_facts.main()
    result = json.loads(capsys.readouterr().out)
    facts = result["ansible_facts"]["gpufleet_host"]
    assert not result["changed"]
    assert facts["kernel"] == os.uname().release
    assert facts["user"]["uid"] == os.geteuid()
    assert facts["disk"]["/nowhere/at/all"] > 0
    assert facts["ram"]["total"] > facts["ram"]["available"] > 0
