"""An engine and the compilers it calls write below the unit's own cache directory, never to / or a shared folder."""

from __future__ import annotations

import re

import pytest

from ansible_collections.gpufleet.inference.plugins.module_utils._domain import unitfile


def rendered(name: str) -> str:
    return unitfile.render(
        unitfile.Unit(
            name=name,
            description="vLLM",
            user="vllm",
            group="vllm",
            program="/bin/true",
            arguments=["serve", "/models/tiny"],
            environment={},
            gpus=["GPU-1"],
            served_name=name,
            address="127.0.0.1",
            port=8000,
        )
    )


def setting(unit: str, variable: str) -> str:
    found = re.search(rf'^Environment="?{variable}=([^"\n]*)', unit, re.MULTILINE)
    assert found, f"the unit does not set {variable}"
    return found[1]


VARIABLES = ("HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_variable_points_below_the_cache_directory_of_the_unit(variable: str) -> None:
    unit = rendered("chat")
    assert "CacheDirectory=vllm/chat\n" in unit
    assert (setting(unit, variable) + "/").startswith("/var/cache/vllm/chat/")


@pytest.mark.parametrize("variable", VARIABLES)
def test_two_instances_share_no_cache(variable: str) -> None:
    assert setting(rendered("one"), variable) != setting(rendered("two"), variable)
