"""Each package has a budget of statements: whoever needs more takes something out, or argues for a larger one in the change."""

import ast
import tomllib

import pytest

from tests.helpers.trees import ROOT

BUDGETS = tomllib.loads((ROOT / "tests" / "architecture" / "statements.toml").read_text())


def statements(text):
    """Return the number of statements of a module, docstrings and other constants that stand alone left out."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)]
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in found)


def package_of(path):
    """Return the package in whose budget a file counts: a part of ``shoal`` has one of its own."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "shoal" and len(parts) > 2 else parts[0]


def sizes():
    """Return package -> statements."""
    found = {}
    for top in ("shoal", "crypto", "edge_client", "aggregator", "lab", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            found[package_of(path)] = found.get(package_of(path), 0) + statements(path.read_text())
    return found


@pytest.fixture(scope="module")
def measured():
    return sizes()


def test_each_package_has_a_budget(measured):
    assert measured.keys() == BUDGETS.keys()


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_keeps_its_budget(measured, package):
    assert measured[package] <= BUDGETS[package]


def test_docstrings_are_no_statements():
    assert statements('"""Doc."""\nx = 1\n\n\ndef f():\n    """Doc."""\n    return x\n') == 3
