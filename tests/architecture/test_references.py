"""Docstrings, comments and pages point to files, modules, names, headings and decisions that exist."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from pathlib import Path

import pytest

from tests.helpers.trees import NAMES, ROOT, sources

FOLDERS = ("shoal", "crypto", "edge_client", "aggregator", "lab", "tests", "deploy", "docs", "results")
FILE = re.compile(
    rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/(?!v1\b)[\w./*-]*\w"
)  # shoal/v1 begins the topics and the labels
FILE_NAME = re.compile(
    r"(?<![\w./*-])(?:\.\./)*((?:[\w-]+/)*[\w-]+\.(?:py|md))\b(?!:\w)"
)  # file.py:function stands for any file
NO_MODULES = "conf|acl|card|grant|strategies|splits|tasks|commands"
"""Last parts of files, and of groups of entry points."""
MODULE = re.compile(rf"(?<![\w./-])(?:{'|'.join(NAMES)}|tests)(?!\.(?:{NO_MODULES})\b)(?:\.\w+)+")
NAME = re.compile(r"(?<!`)`(\w+(?:\.\w+)*)(?:\(\))?`(?!`)")
HEADING = re.compile(r'([\w-]+\.md)`?(?:\]\([^)]*\))?, "([^"]+)"')
COMMENT = re.compile(r"(?:^|  )# .*$", re.MULTILINE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DECISION = re.compile(r"\bADRs?\s(\d+)(?:(?:,| and) (\d+))*")


@functools.cache
def facts(path):
    """Return a module's docstrings and comments as one text, and every name that it defines, imports or assigns."""
    text = path.read_text()
    found, names = COMMENT.findall(text), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED):
            found += [s.value.value for s in node.body if _is_text(s)]  # its own, and those below its attributes
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return "\n".join(found), names


def _is_text(statement):
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def prose(path):
    """Return the docstrings and comments of a module, or a page's text."""
    return path.read_text() if path.suffix == ".md" else facts(path)[0]


def names_in(path):
    """Return the functions, classes, methods and attributes of a module."""
    return facts(path)[1]


@functools.cache
def all_names():
    """Return every name of our modules and of the tests, and Python's own."""
    places = [*sources(), *(ROOT / "tests").rglob("*.py")]
    folders_and_modules = {part for path in places for part in path.with_suffix("").parts}
    return {name for path in places for name in names_in(path)} | set(dir(builtins)) | folders_and_modules


@functools.cache
def file_names():
    """Return the paths of the repository's modules and pages."""
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md")]
    return {str(p.relative_to(ROOT)) for p in [*found, *ROOT.glob("*.md")]}


def is_module(name):
    """Whether a dotted name is a module, or a module and a name in it."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        path = (ROOT / "lab" if parts[0] == "shoal_lab" else ROOT).joinpath(*parts[:n])
        if path.with_suffix(".py").exists():
            return set(parts[n:]) <= names_in(path.with_suffix(".py"))
        if path.is_dir():
            init = path / "__init__.py"
            return n == len(parts) or (init.exists() and set(parts[n:]) <= names_in(init))
    return False


def headings(page):
    """Return the headings, and the words in bold that open a paragraph, of a page."""
    found = [p for p in [ROOT / page, *(ROOT / "docs").rglob(page), *(ROOT / "deploy").rglob(page)] if p.is_file()]
    lines = re.findall(r"^(?:#+ (.*)|\*\*(.*?)[.:]?\*\*.*)$", found[0].read_text() if found else "", re.MULTILINE)
    return {heading or bold for heading, bold in lines}


def broken(text, *, is_page=False):
    """Return the references in a text that lead nowhere; a page may name options and variables besides our names."""
    paths = [p.rstrip(".") for p in FILE.findall(text)]
    found = [
        p
        for p in paths
        if not (list(ROOT.glob(p)) if "*" in p else (ROOT / p).exists()) and not ROOT.joinpath(f"{p}.py").exists()
    ]
    found += [n for n in FILE_NAME.findall(text) if not any(f"/{path}".endswith(f"/{n}") for path in file_names())]
    found += [m for m in MODULE.findall(text) if not is_module(m)]
    names = [] if is_page else [n for n in NAME.findall(text) if not MODULE.fullmatch(n)]
    found += [n for n in names if not set(n.split(".")) <= all_names()]
    found += [f'{page}, "{h}"' for page, h in HEADING.findall(text) if h not in headings(page)]
    decisions = [number for match in DECISION.finditer(text) for number in re.findall(r"\d+", match.group())]
    return found + [f"ADR {n}" for n in decisions if not list((ROOT / "docs/adr").glob(f"{int(n):04}-*.md"))]


def steps(page):
    """Return the ``module.function`` pairs of the page's picture of a round."""
    section = page.split("## The path of a round")[1].split("**")[0]
    return re.findall(r"^ {4}[a-z ]{12}(\w+)\.(\w+)", section, re.MULTILINE)


def test_path_of_a_round_names_functions():
    """The path of a round names functions that exist."""
    pairs = steps((ROOT / "docs" / "architecture.md").read_text())
    assert len(pairs) > 10
    for module, function in pairs:
        names = {name for path in sources() if path.stem == module for name in names_in(path)}
        assert any(name.startswith(function) if function.endswith("_") else name == function for name in names), (
            function
        )


def places():
    """Return all modules, tests and pages; the changelog speaks of versions in which other files existed."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    modules = [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
    return sorted({*modules, *pages} - {ROOT / "CHANGELOG.md"})


def test_every_reference_leads_somewhere():
    found = {
        str(p.relative_to(ROOT)): broken(prose(p), is_page=p.suffix == ".md") for p in places() if p != Path(__file__)
    }
    assert {name: references for name, references in found.items() if references} == {}


@pytest.mark.parametrize(
    "text",
    [
        "see shoal/no/such.py",
        "`nosuch.py`",
        "strategies/nosuch.py",
        "`shoal.util.nosuch`",
        "`shoal.util.files.nosuch`",
        "a `NoSuchClass`",
        'architecture.md, "No such heading"',
        "ADR 99",
    ],
)
def test_broken_reference_is_found(text):
    """A reference that leads nowhere is found."""
    assert broken(text)


def test_references_that_lead_somewhere_pass():
    assert (
        broken(
            '`shoal.util.files.write_atomic`, `shoal/util`, `DeviceRuntime.tick`, architecture.md, "Folders", ADR 25'
        )
        == []
    )
