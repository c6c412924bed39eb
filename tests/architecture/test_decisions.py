"""Every decision record has a status, and the index lists all of them."""

from __future__ import annotations

import re

import pytest

from tests.helpers.trees import ROOT

FOLDER = ROOT / "docs" / "adr"
RECORDS = {int(p.name[:4]): p for p in sorted(FOLDER.glob("[0-9]*.md"))}
STATUS = re.compile(r"^# (\d+)\. (.+)\n\nStatus: (accepted|(amended|superseded) by \[ADR (\d+)\]\(([\w-]+\.md)\))[.,:]")


def test_numbers_have_no_gap():
    assert list(RECORDS) == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("number", RECORDS)
def test_a_record_has_its_number_and_a_status(number):
    """A later record that changes this one names it."""
    match = STATUS.match(RECORDS[number].read_text())
    assert match, f"{RECORDS[number].name} begins with its title and a status"
    assert int(match[1]) == number
    if match[5]:
        later = RECORDS[int(match[5])]
        assert later.name == match[6]
        assert int(match[5]) > number
        assert re.search(rf"\bADR {number}\b", later.read_text())


def test_the_index_lists_every_record_with_its_title_and_status():
    rows = re.findall(r"^\| \[(\d+)\]\(([\w-]+\.md)\) \| (.+) \| (.+) \|$", (FOLDER / "README.md").read_text(), re.M)
    expected = []
    for number, path in RECORDS.items():
        match = STATUS.match(path.read_text())
        status = f"{match[4]} by {match[5]}" if match[5] else "accepted"
        expected.append((str(number), path.name, match[2], status))
    assert rows == expected
