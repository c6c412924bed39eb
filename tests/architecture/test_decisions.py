"""Every decision record has its number and title, and the index lists all of them."""

from __future__ import annotations

import re

import pytest

from tests.helpers.trees import ROOT

FOLDER = ROOT / "docs" / "adr"
RECORDS = {int(p.name[:4]): p for p in sorted(FOLDER.glob("[0-9]*.md"))}
TITLE = re.compile(r"# (\d+)\. (.+)\n\n")


@pytest.mark.parametrize("number", RECORDS)
def test_a_record_has_its_number(number):
    match = TITLE.match(RECORDS[number].read_text())
    assert match, f"{RECORDS[number].name} begins with its number and title"
    assert int(match[1]) == number


def test_index_lists_every_record():
    """The index lists every record with its title."""
    rows = re.findall(r"^\| \[(\d+)\]\(([\w-]+\.md)\) \| ([^|]+) \|$", (FOLDER / "README.md").read_text(), re.M)
    titles = {number: TITLE.match(path.read_text()) for number, path in RECORDS.items()}
    assert rows == [(str(n), path.name, titles[n] and titles[n][2]) for n, path in RECORDS.items()]
