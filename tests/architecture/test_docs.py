"""The pages match the code: every command with its options, every link, every file and every measured claim's place."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest
import typer.main

import aggregator.cli
import edge_client.cli
import shoal.owner.cli.main
from shoal import errors
from tests.helpers.trees import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])
APPS = {
    "shoal-fleet": shoal.owner.cli.main.app,
    "shoal-edge": edge_client.cli.app,
    "shoal-aggregator": aggregator.cli.app,
}
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
GLOSSED = ("architecture", "quickstart", "threat-model", "algorithms")
"""Pages that link to the glossary, besides the README."""


def commands(text):
    """Return every command line of our programs in a page's ``sh`` blocks, as words."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            for part in re.split(r"&&|;|\||&|\$\(|\)", line.split(" # ")[0]):
                words = ["", *shlex.split(part)]
                pairs = itertools.pairwise(words)
                starts = [i for i, (before, w) in enumerate(pairs, 1) if w.split("/")[-1] in APPS and before[:1] != "-"]
                found += [words[i:] for i in starts[:1]]
    return found


def check(words):
    """Fail unless the command and all its options exist."""
    name = words[0].split("/")[-1]
    command, rest = typer.main.get_command(APPS[name]), words[1:]
    while hasattr(command, "commands"):
        assert rest, words
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    assert {w.split("=")[0] for w in rest if w.startswith("--")} <= known, words


@pytest.mark.parametrize("name", NAMES)
def test_every_command_on_the_page_exists(name):
    """Its subcommand and each of its options."""
    for words in commands((ROOT / name).read_text()):
        check(words)


def test_the_first_fleet_is_checked():
    """The search finds the commands of the two pages that people copy from."""
    assert len(commands((ROOT / "README.md").read_text())) >= 10
    assert len(commands((ROOT / "docs/quickstart.md").read_text())) >= 12
    with pytest.raises(AssertionError):
        check(["shoal-edge", "run", "dev-1", "--no-such-option"])


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    """Relative links point to files, anchors to headings of the page that they lead to."""
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / name).parent / file if file else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def anchors(text):
    """Return the anchors of a page's headings."""
    return {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p}.md" for p in GLOSSED)])
def test_the_page_leads_to_the_glossary(name):
    assert "glossary.md#" in (ROOT / name).read_text()


def test_the_glossary_explains_each_term_once():
    """A term in bold opens each entry, and a sentence follows it."""
    entries = (ROOT / "docs/glossary.md").read_text().split("\n- ")[1:]
    terms = [term for entry in entries for term in re.findall(r"\*\*(.+?)\*\*", entry)]
    assert len(terms) > 50
    assert len(terms) == len(set(terms))
    assert all(re.match(r"\*\*.+?\*\*[^.]*: \S.*\.", entry, re.DOTALL) for entry in entries)


@pytest.mark.parametrize("name", NAMES)
def test_every_source_file_named_exists(name):
    """A path in backquotes that ends like one of our files is one."""
    for path in re.findall(
        r"`((?:shoal|crypto|edge_client|aggregator|tests|deploy|results)/[\w./-]*)`",
        (ROOT / name).read_text(),
    ):
        assert (ROOT / path).exists(), path


def test_the_table_of_exit_statuses_is_complete():
    """Every error class's status is in the quickstart's table."""
    table = {int(n) for n in re.findall(r"^\| (\d+) \|", (ROOT / "docs/quickstart.md").read_text(), re.MULTILINE)}
    used = {c.exit_code for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ShoalError)}
    assert used <= table
