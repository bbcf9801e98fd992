"""Generated pages show what the specification says, in Markdown."""

from __future__ import annotations

from pathlib import Path

import make_docs
import pytest


@pytest.mark.parametrize(
    ("markup", "wanted"),
    [
        ("Set O(state=started).", "Set `state=started`."),
        ("V(auto) or RV(plan.fits), see M(gpufleet.inference.vllm_plan).", None),
        ("I(not) that", "*not* that"),
        ("L(docs, https://docs.example.net/x)", "[docs](https://docs.example.net/x)"),
        ("a call f(x) stays", "a call f(x) stays"),
        ("two\n  lines", "two lines"),
    ],
)
def test_ansible_markup_becomes_markdown(markup: str, wanted: str | None) -> None:
    wanted = wanted or "`auto` or `plan.fits`, see `gpufleet.inference.vllm_plan`."
    assert make_docs.markdown(markup) == wanted


def test_a_suboption_has_a_row_under_its_parent() -> None:
    options = {"memory": {"type": "dict", "description": "How much.", "options": {"fraction": {"type": "float"}}}}
    rows = list(make_docs.option_rows(options, None))
    assert [row.split("|")[1].strip() for row in rows] == ["`memory`", "`memory.fraction`"]


def test_a_role_page_shows_the_real_default_and_what_is_required(tmp_path: Path) -> None:
    role = tmp_path / "fleet_thing"
    (role / "meta").mkdir(parents=True)
    (role / "defaults").mkdir()
    (role / "meta/argument_specs.yml").write_text(
        "argument_specs:\n  main:\n    short_description: Do a thing\n    description: [It does, well.]\n    options:\n"
        "      fleet_thing_dir: {type: path, description: Where a|b.}\n"
        "      fleet_thing_name: {type: str, required: true, description: [Which., Really.], choices: [a, b]}\n",
        encoding="utf-8",
    )
    (role / "defaults/main.yml").write_text("fleet_thing_dir: /srv/thing\n", encoding="utf-8")
    page = make_docs.role_page(role)
    assert "# gpufleet.inference.fleet_thing\n\nDo a thing.\n" in page
    assert '| `fleet_thing_dir` | path | `"/srv/thing"` | Where a\\|b. |' in page
    assert "| `fleet_thing_name` | str | **required** | Which. Really. One of `a`, `b`. |" in page
