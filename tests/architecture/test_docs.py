"""The documents match the programs, and each other: readers, commands, links, navigation, generated pages, the glossary."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys

import pytest
import typer.main

from docs import conf, write_reference, write_results
from tests.helpers.documents import NAMES, RUN, TUTORIAL, blocks, lines_to_run, text_of
from tests.helpers.trees import PROGRAMS, ROOT

APPS = {name: importlib.import_module(module).app for name, module in PROGRAMS.items()}
RECORDS = re.compile(r"docs/adr/\d")
"""Decision records open with their date and state."""
GUIDES = [name for name in NAMES if not RECORDS.match(name)]
SENTENCE = re.compile(r"(?!For [a-z ]+:)[A-Z`][^\n]*\w")
GLOSSED = (
    "README",
    "docs/architecture",
    "docs/tutorial",
    "docs/operator/enrol",
    "docs/threat-model",
    "docs/algorithms",
)
INLINE = re.compile(rf"(?<!`)`((?:{'|'.join(APPS)}) [a-z][^`|]*)`(?!`)")
OTHERS = ("systemctl ", "docker ", "/opt/shoal/.venv/bin/pip ")
"""Programs whose arguments may have the name of one of ours: a unit, an image, a folder."""
README_LINES = 80


# ------------------------------------------------------------------------------------------------------------- commands


def words_of(line):
    """Return the words of the command of ours in each part of a shell line."""
    found = []
    for part in re.split(r"&&|;|\||&|\$\(|\)", line.split(" # ")[0]):
        if part.strip().startswith(OTHERS):
            continue
        try:
            words = ["", *shlex.split(part)]
        except ValueError:
            continue  # a part of a quoted text, such as sed's
        pairs = itertools.pairwise(words)
        starts = [i for i, (before, w) in enumerate(pairs, 1) if w.split("/")[-1] in APPS and before[:1] != "-"]
        found += [words[i:] for i in starts[:1]]
    return found


def commands(name):
    """Return every command of our programs in a page's ``sh`` blocks, as words."""
    lines = [line for block in blocks(name, "sh") for line in "\n".join(block.lines).replace("\\\n", " ").splitlines()]
    return [words for line in lines for words in words_of(line)]


@functools.cache
def program(name):
    """Return a program's command, which takes as long to make as a page takes to check."""
    return typer.main.get_command(APPS[name])


def check(words):
    """Fail unless the command and all its options exist."""
    command, rest = program(words[0].split("/")[-1]), words[1:]
    while hasattr(command, "list_commands"):
        if rest and rest[0].startswith("-") and rest[0] in {"--version", "--help", "-h", "--debug"}:
            return
        if rest and rest[0] in {"--install-completion", "--show-completion"}:
            return
        assert rest, words
        found = command.get_command(command.make_context("", [], resilient_parsing=True), rest[0])
        assert found is not None, words
        command, rest = found, rest[1:]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    assert {w.split("=")[0] for w in rest if re.match(r"--?[a-z]", w)} <= known, words


def test_every_command_on_a_page_exists():
    """Its subcommand and each of its options."""
    for name in NAMES:
        for words in commands(name):
            check(words)


def test_every_command_in_the_text_exists():
    """Commands in backquotes; a program's name alone with a subcommand counts too."""
    for name in GUIDES:
        if name != "CHANGELOG.md":
            for found in INLINE.findall(re.sub(r"```.*?```", "", text_of(name), flags=re.DOTALL)):
                check([word for word in found.replace("...", "").split() if word])


def test_the_search_finds_commands():
    assert len(commands(TUTORIAL)) >= 12
    assert len(commands("docs/operator/run.md")) >= 10
    with pytest.raises(AssertionError):
        check(["shoal-edge", "run", "dev-1", "--no-such-option"])
    with pytest.raises(AssertionError):
        check(["shoal-edge", "walk"])


def test_every_command_is_run_or_says_why():
    """The tests of the documents' programs run the pages in RUN; elsewhere each block has a reason."""
    others = [name for name in NAMES if name not in RUN]
    assert [(name, block.lines) for name in others for block in blocks(name, "sh") if not block.reason] == []


def test_run_pages_have_something_to_run():
    """Only the installation needs root from its first line to its last."""
    assert [name for name in RUN if not lines_to_run(name)] == ["docs/operator/install.md"]


# ------------------------------------------------------------------------------------------------------------- pages


def test_pages_open_with_a_sentence():
    for name in GUIDES:
        title, blank, first, *_ = text_of(name).splitlines()
        assert title.startswith("# "), name
        assert not blank, name
        assert SENTENCE.match(first), (name, first)


def test_every_link_leads_somewhere():
    """Relative links point to files, anchors to headings of the page that they lead to."""
    for name in NAMES:
        for link in re.findall(r"\]\(([^)]+)\)", text_of(name)):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = (ROOT / name).parent / file if file else ROOT / name
            assert target.exists(), (name, link)
            assert not anchor or anchor in anchors(target.read_text()), (name, link)


def anchors(text):
    """Return the anchors of a page's headings."""
    return {re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}


def test_every_page_is_in_the_navigation():
    """The lists of docs/README.md are the navigation of the built documents."""
    listed = set(re.findall(r"^/(\S+)$", conf.navigation(text_of("docs/README.md")), re.MULTILINE))
    assert {f"{name}.md" for name in listed} == set(GUIDES) - {"docs/README.md"}


def test_the_first_page_fits_one_screen():
    text = text_of("README.md")
    assert len(text.splitlines()) <= README_LINES
    assert "![" in "".join(text.splitlines()[:15])
    threats = text_of("docs/threat-model.md")
    assert all(f"| `{mode}`" in threats for mode in ("rotation", "signed-permutation", "permutation", "none"))


def test_every_source_file_named_exists():
    """A path in backquotes that ends like one of our files is one."""
    path = r"`((?:shoal|crypto|edge_client|aggregator|tests|deploy|results)/[\w./-]*)`"
    named = [(name, found) for name in NAMES for found in re.findall(path, text_of(name))]
    assert [(name, found) for name, found in named if not (ROOT / found).exists()] == []


# --------------------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("name", write_reference.PAGES)
def test_reference_is_that_of_the_programs(name):
    written = (write_reference.FOLDER / name).read_text()
    assert written == write_reference.PAGES[name](), "run: python docs/write_reference.py --write"


def test_summary_of_results_is_the_tables():
    """The summary of results is that of the tables."""
    for path, text in write_results.pages().items():
        assert path.read_text() == text, "run: python docs/write_results.py --write"


def test_variables_are_those_programs_read():
    """Each SHOAL variable in the source is one of a setting, or listed."""
    found = set()
    for package in ("shoal", "edge_client", "aggregator"):
        for path in (ROOT / package).rglob("*.py"):
            found |= set(re.findall(r"\bSHOAL_[A-Z]+(?:_[A-Z]+)*\b", path.read_text()))
    listed = set(re.findall(r"`(SHOAL_[A-Z_]+)`", text_of("docs/reference/configuration.md")))
    assert found - listed == set()


# ---------------------------------------------------------------------------------------------------------- glossary


@pytest.mark.parametrize("name", GLOSSED)
def test_the_page_leads_to_the_glossary(name):
    assert "glossary.md#" in text_of(f"{name}.md")


def test_glossary_explains_each_term_once():
    """A term in bold opens each entry, and a sentence follows it."""
    entries = text_of("docs/glossary.md").split("\n- ")[1:]
    terms = [term for entry in entries for term in re.findall(r"\*\*(.+?)\*\*", entry)]
    assert len(terms) > 50
    assert len(terms) == len(set(terms))
    assert all(re.match(r"\*\*.+?\*\*[^.]*: \S.*\.", entry, re.DOTALL) for entry in entries)


# ---------------------------------------------------------------------------------------------------------- building


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="sphinx is not installed (the extra docs)")
def test_documents_build_without_a_warning(tmp_path):
    """`make docs`: a broken link or anchor, or a page without a place in the navigation, is an error."""
    arguments = [
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        "-c",
        "docs",
        "-d",
        tmp_path / "trees",
        ".",
        tmp_path / "html",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "docs" / "operator" / "troubleshoot.html").read_text()
    assert 'id="exit-statuses"' in page
    assert "mermaid" not in page, "only pages with a diagram load the script that draws it"
    drawn = (tmp_path / "html" / "docs" / "threat-model.html").read_text()
    assert '<pre class="mermaid"' in drawn
    assert len(re.findall(r'<script src="[^"]*mermaid\.min\.js[^"]*"></script>', drawn)) == 1
