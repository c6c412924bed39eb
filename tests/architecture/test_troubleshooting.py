"""The page of troubleshooting has an entry for each exit status and each warning of the programs, and for no other."""

from __future__ import annotations

import re

import pytest

from shoal import errors
from shoal.util import console
from tests.architecture.warned import KINDS, declared
from tests.helpers.documents import text_of

PAGE = "docs/operator/troubleshoot.md"
SECTIONS = {
    "problem": "Problems in `status`",
    "device": "Devices in `status`",
    "doubt": "Data and runs",
    "log": "Logs of aggregator and devices",
    "command": "Warnings of commands",
    "check": "Checks of `doctor`",
}
MADE_ELSEWHERE = {
    ("aggregator/daemon.py", "text"),
    ("aggregator/daemon.py", "too_few"),
    ("aggregator/status/record.py", "DECLINE_REASONS[declined]"),
    ("aggregator/status/record.py", "REVOKED"),
    ("aggregator/status/record.py", "self._absence(heard)"),
    ("aggregator/status/record.py", "served.obstacle"),
    ("aggregator/status/record.py", "versions.left_out(heard.version, heard.wire, run.wire)"),
    ("edge_client/cli.py", "f'warning: {fault}'"),
    ("edge_client/reporting.py", "'%s'"),
    ("shoal/owner/cli/models.py", "f'warning: {doubt}'"),
    ("shoal/owner/cli/runs.py", "f'warning: {doubt}'"),
    ("shoal/util/console.py", "name"),
}
"""Calls that pass on a text or a name of another function: of `_say_once`, of `checked`, of one of MAKERS, or a constant."""


def entries(section):
    """Return the first cells of the table in a section, as the programs print them."""
    body = text_of(PAGE).split(f"## {section}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.+?`+) \|", body, re.MULTILINE)
    return [re.sub(r"^(`+)(.*?)\1$", r"\2", cell).replace("``", "`") for cell in cells]


@pytest.mark.parametrize("kind", KINDS)
def test_each_warning_has_one_entry(kind):
    listed = entries(SECTIONS[kind])
    found = {w.text: w.place for w in declared()[0] if w.kind == kind}
    assert {text: place for text, place in found.items() if text not in listed} == {}, "write an entry"
    assert [text for text in listed if text not in found] == [], "no program prints this"
    assert len(listed) == len(set(listed))


def test_no_warning_escapes_the_search():
    """A warning whose text is made in another function needs that function in MAKERS."""
    assert declared()[1] == MADE_ELSEWHERE


def test_each_entry_has_a_cause():
    rows = [line for line in text_of(PAGE).splitlines() if line.startswith("| `")]
    assert len(rows) > 90
    assert [row for row in rows if not row.split("|")[2].strip()] == []


def test_each_exit_status_has_an_entry():
    table = text_of(PAGE).split("## Exit statuses\n")[1].split("\n## ")[0]
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    kinds = (c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ShoalError))
    own = {kind.exit_code for kind in kinds} | {console.EXIT_UNHEALTHY}
    assert listed == own | {0, console.EXIT_INTERRUPTED, console.EXIT_BROKEN_PIPE}
