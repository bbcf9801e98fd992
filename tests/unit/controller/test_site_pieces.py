"""Small controller plugins of the playbooks: addresses, model paths, the refusal of a plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError, AnsibleLookupError

from ansible_collections.gpufleet.inference.plugins.filter.engine_leftovers import engine_leftovers
from ansible_collections.gpufleet.inference.plugins.filter.model_paths import model_paths
from ansible_collections.gpufleet.inference.plugins.filter.plan_refusal import plan_refusal
from ansible_collections.gpufleet.inference.plugins.filter.plannable import plannable
from ansible_collections.gpufleet.inference.plugins.lookup.endpoint import LookupModule
from ansible_collections.gpufleet.inference.plugins.module_utils._host import files
from ansible_collections.gpufleet.inference.plugins.module_utils._host.root import Root
from ansible_collections.gpufleet.inference.plugins.plugin_utils._endpoints import endpoints

ROOT = Path(__file__).resolve().parents[3]


def test_every_endpoint_has_an_address_a_variable_and_a_use():
    for name, entry in endpoints().items():
        assert entry["url"].startswith("https://"), name
        assert re.fullmatch(r"[a-z][a-z0-9_]+", entry["variable"]), name
        assert entry["used_for"], name


def test_no_other_file_of_the_product_names_a_public_address():
    hosts = {entry["url"].split("/")[2] for entry in endpoints().values()}
    folders = ("plugins", "roles", "playbooks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yml", ".j2")]
    guilty = [
        str(path.relative_to(ROOT))
        for path in files
        if path.name != "endpoints.yml" and any(host in path.read_text(encoding="utf-8") for host in hosts)
    ]
    assert guilty == []


def test_an_endpoint_is_looked_up_by_name_and_an_unknown_one_lists_the_known():
    assert LookupModule().run(["huggingface_hub"]) == [endpoints()["huggingface_hub"]["url"]]
    with pytest.raises(AnsibleLookupError, match=r"`hub`.*huggingface_hub"):
        LookupModule().run(["hub"])


def test_a_model_lies_at_its_path_or_below_the_models_directory():
    models = {"a": {"path": "/srv/a"}, "b": {"repo": "x/b"}, "c": None}
    assert model_paths(models, "/models/") == {"a": "/srv/a", "b": "/models/b", "c": "/models/c"}
    assert model_paths(None, "/models") == {}
    with pytest.raises(AnsibleFilterError, match="mapping"):
        model_paths(["a"], "/models")


def test_a_refusal_has_the_code_the_figures_and_what_works():
    entry = {
        "name": "chat",
        "fits": False,
        "reason": {"code": "refused_kv", "text": "60 GiB are needed, 40 GiB are left"},
        "alternatives": [{"text": "max_model_len: 4096"}, {"max_num_seqs": 8}],
    }
    text = plan_refusal({"fits": False, "instances": [entry, {"name": "other", "fits": True}]})
    assert text == (
        "chat does not fit (refused_kv): 60 GiB are needed, 40 GiB are left. "
        "What works: max_model_len: 4096; or max_num_seqs: 8."
    )


def test_a_refusal_for_memory_without_a_way_out_says_what_is_left_to_do_and_another_does_not():
    entry = {"name": "big", "fits": False, "reason": {"code": "oom_risk", "text": "135 GiB"}, "alternatives": []}
    assert "smaller or more quantised model" in plan_refusal({"instances": [entry]})
    assert "smaller" not in plan_refusal({"instances": [{**entry, "reason": {"code": "bad_model", "text": "x"}}]})


def test_an_instance_waits_for_a_model_that_is_fetched_later_and_a_missing_path_stays_to_be_refused():
    missing = {"findings": [{"code": "model_missing"}]}
    broken = {"findings": [{"code": "model_broken"}]}
    models = {"local": {"path": "/srv/a"}, "hub": {"repo": "x/y"}, "bad": {"repo": "x/z"}, "here": {"repo": "x/h"}}
    facts = {"local": missing, "hub": missing, "bad": broken, "here": {"findings": []}}
    instances = [{"name": model, "model": model} for model in (*models, "unknown")]
    kept = [entry["name"] for entry in plannable(instances, models, facts)]
    assert kept == ["local", "bad", "here", "unknown"]
    assert plannable(["not a mapping"], models, facts) == ["not a mapping"]
    assert plannable("not a list", models, facts) == "not a list"


def remove_engines(folder: Path) -> None:
    """As the role does: the marks that `find` sees two levels deep, the filter, the module's core."""
    marks = [path for pattern in ("", "*/") for path in folder.glob(f"{pattern}.gpufleet.json")]
    marks += folder.glob(".installing-*")
    entries = engine_leftovers([str(path) for path in marks], f"{folder}/")
    files.converge(Root(), [files.parse(entry, None) for entry in entries], check_mode=False)


@pytest.fixture
def engine_root(tmp_path):
    root = tmp_path / "opt"
    for name in ("0.32.0/.gpufleet.json", "0.31.0/bin/half", ".installing-0.31.0", ".cache/wheel", ".uv/0.1/uv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("", encoding="utf-8")
    return root


def test_a_folder_of_releases_goes_with_all_that_was_made_in_it(engine_root):
    remove_engines(engine_root)
    assert not engine_root.exists()


def test_what_a_person_keeps_beside_the_releases_stays(engine_root):
    for name in ("jdk/bin/java", "0.30.0/bin/vllm"):
        (engine_root / name).parent.mkdir(parents=True)
        (engine_root / name).write_text("", encoding="utf-8")
    remove_engines(engine_root)
    assert sorted(path.name for path in engine_root.iterdir()) == ["0.30.0", "jdk"]


def test_a_folder_without_a_release_of_ours_is_left_as_it_is(tmp_path):
    for name in (".cache/other", "deep/er/.gpufleet.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    remove_engines(tmp_path)
    assert (tmp_path / ".cache/other").exists()
    assert (tmp_path / "deep/er/.gpufleet.json").exists()
    assert engine_leftovers(
        [str(tmp_path / "deep/er/.gpufleet.json"), str(tmp_path / ".gpufleet.json")], str(tmp_path)
    ) == [{"path": str(tmp_path), "state": "absent", "only_empty": True}]


def test_decommission_removes_releases_by_the_role_that_made_them():
    play = yaml.safe_load((ROOT / "playbooks/decommission.yml").read_text(encoding="utf-8"))[1]
    roles = [task["ansible.builtin.import_role"] for task in play["tasks"] if "ansible.builtin.import_role" in task]
    assert roles == [{"name": "gpufleet.inference.vllm_engine", "tasks_from": "remove"}]
    assert "/opt" not in yaml.safe_dump(play)
