"""The index of failures from the field names, for each row, what we do about it and a test that exists."""

from __future__ import annotations

import re

import pytest
from repository import ROOT, load

VERDICTS = {"prevented", "detected", "repaired", "refused", "out of scope"}
INDEX = load(ROOT / "tests/field/index.yml")


def test_every_row_has_an_id_of_its_own() -> None:
    assert all(re.fullmatch(r"FF-\d{3}", name) for name in INDEX)


@pytest.mark.parametrize("name", sorted(INDEX))
def test_a_row_says_who_does_what_and_which_test_shows_it(name: str) -> None:
    row = INDEX[name]
    assert row["verdict"] in VERDICTS
    if row["verdict"] == "out of scope":
        assert set(row) == {"verdict", "why"}
        return
    assert set(row) == {"owner", "verdict", "mechanism", "test"}
    assert (ROOT / row["owner"]).exists(), f"owner {row['owner']} is no path of the collection"
    path, _separator, test = row["test"].partition("::")
    assert re.search(rf"^\s*def {re.escape(test)}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
