"""The controller half of host_files: one remote execution, sources rendered here, the helper sent only when needed."""

from __future__ import annotations

import base64
import zlib
from typing import Any
from unittest import mock

import pytest
from ansible.errors import AnsibleActionFail
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from ansible_collections.gpufleet.inference.plugins.action import host_files
from ansible_collections.gpufleet.inference.plugins.plugin_utils import _zipapp

HELPER = _zipapp.build()


@pytest.fixture
def act(tmp_path):
    """Run the action; answers (result, arguments of every remote execution)."""
    sent: list[list[dict[str, Any]]] = []
    answers: list[dict[str, Any]] = []

    def run(args: dict[str, Any], variables: dict[str, Any] | None = None) -> Any:
        loader = DataLoader()
        loader.set_basedir(str(tmp_path))
        task = mock.Mock(args=args, async_val=0, check_mode=False, diff=False)
        task.get_search_path.return_value = [str(tmp_path)]
        action = host_files.ActionModule(
            task=task,
            connection=mock.Mock(),
            play_context=mock.Mock(),
            loader=loader,
            templar=Templar(loader=loader, variables=variables or {}),
            shared_loader_obj=None,
        )

        def execute(module_name: str, module_args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
            assert module_name == "gpufleet.inference.host_files"
            sent.append(list(module_args["files"]))
            return answers.pop(0) if answers else {"changed": False}

        action._execute_module = execute
        return action.run(task_vars=variables or {})

    run.sent, run.answers = sent, answers
    return run


def test_templates_are_rendered_with_the_variables_of_the_host_in_one_execution(act, tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "a.j2").write_text("{% for x in names %}\nname {{ x }}\n{% endfor %}\n")
    act(
        {"files": [{"path": "/etc/x/a", "template": "a.j2"}, {"path": "/etc/x/b", "content": "{{ b }}"}]},
        {"names": ["q"]},
    )
    assert len(act.sent) == 1
    assert act.sent[0][0]["content"] == "name q\n"
    assert "template" not in act.sent[0][0]


def test_a_source_file_goes_as_it_is_in_a_compressed_form(act, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "blob").write_bytes(b"\0{{ not_a_template }}")
    act({"files": [{"path": "/etc/x/a", "src": "blob"}]})
    assert zlib.decompress(base64.b64decode(act.sent[0][0]["content_z"])) == b"\0{{ not_a_template }}"


def test_a_missing_source_is_named(act):
    with pytest.raises(AnsibleActionFail, match=r"nosuch\.j2"):
        act({"files": [{"path": "/etc/x/a", "template": "nosuch.j2"}]})


def test_two_sources_for_one_file_are_refused(act):
    result = act({"files": [{"path": "/etc/x/a", "template": "a", "src": "b"}]})
    assert (result["failed"], result["error_code"], act.sent) == (True, "bad_file", [])


def test_the_helper_is_sent_to_a_host_without_it_and_only_its_digest_to_one_that_has_it(act):
    result = act({"helper": True})
    assert result["helper_digest"] == _zipapp.digest(HELPER)
    assert zlib.decompress(base64.b64decode(act.sent[0][1]["content_z"])) == HELPER
    act({"helper": True}, {"ansible_facts": {"gpufleet_gpu": {"helper": {"digest": _zipapp.digest(HELPER)}}}})
    assert act.sent[1][1] == {"path": _zipapp.HOST_PATH, "sha256": _zipapp.digest(HELPER)}


def test_a_helper_that_changed_since_the_facts_is_sent_after_all(act):
    act.answers.append({"failed": True, "error_code": "content_missing"})
    facts = {"ansible_facts": {"gpufleet_gpu": {"helper": {"digest": _zipapp.digest(HELPER)}}}}
    result = act({"helper": True}, facts)
    assert result.get("failed") is not True
    assert ["content_z" in files[1] for files in act.sent] == [False, True]
