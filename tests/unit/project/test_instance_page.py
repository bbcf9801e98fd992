"""The page about instances describes every key that an instance may have, and no other."""

from __future__ import annotations

import re

from repository import ROOT

from ansible_collections.gpufleet.inference.plugins.module_utils._domain.instances import KEYS


def test_the_page_has_a_row_for_every_key_and_no_other() -> None:
    page = (ROOT / "docs/instances.md").read_text(encoding="utf-8")
    table = page.split("## Keys", 1)[1].split("## Memory", 1)[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(KEYS)
