"""What `site` leaves on a host."""

from __future__ import annotations

import json

import pytest
from testinfra.host import Host

INSTANCES = {"one": 8001, "pair": 8002}


def ask(host: Host, port: int, model: str) -> dict[str, object]:
    """One completion, asked on the host itself with nothing but Python."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 4})
    program = (
        "import sys, urllib.request as u; "
        "q = u.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'}); "
        "print(u.urlopen(q, timeout=20).read().decode())"
    )
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer: dict[str, object] = json.loads(host.check_output("python3 -c %s %s %s", program, url, body))
    return answer


@pytest.mark.parametrize("name", INSTANCES)
def test_instance_answers_under_its_own_name(host: Host, name: str) -> None:
    answer = ask(host, INSTANCES[name], name)
    assert answer["usage"]["completion_tokens"] == 4  # type: ignore[index]


@pytest.mark.parametrize("name", INSTANCES)
def test_unit_is_enabled_running_and_unprivileged(host: Host, name: str) -> None:
    unit = host.service(f"vllm-{name}")
    assert unit.is_running
    assert unit.is_enabled
    properties = unit.systemd_properties
    assert properties["User"] == "vllm"
    assert properties["Restart"] == "always"


@pytest.mark.parametrize("name", INSTANCES)
def test_unit_is_linked_to_the_current_generation(host: Host, name: str) -> None:
    link = host.file(f"/etc/systemd/system/vllm-{name}.service")
    assert link.is_symlink
    assert link.linked_to.startswith(f"/etc/vllm/{name}/")
    assert host.file(f"/etc/vllm/{name}/current").linked_to == link.linked_to.rsplit("/", 1)[0]


def test_engine_lies_complete_in_a_folder_of_its_version(host: Host) -> None:
    assert host.file("/opt/vllm/0.32.0/bin/vllm").is_executable
    manifest = json.loads(host.file("/opt/vllm/0.32.0/.gpufleet.json").content_string)
    assert manifest["version"].startswith("0.32.0")


def test_service_user_cannot_log_in(host: Host) -> None:
    assert host.user("vllm").shell.endswith("nologin")


def test_no_unit_has_failed_since_boot(host: Host) -> None:
    assert host.check_output("systemctl --failed --plain --no-legend") == ""
    assert host.service("vllm-one").is_running
