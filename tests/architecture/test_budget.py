"""Each package has a budget of statements: whoever needs more takes something out, or argues for a larger one in the change."""

import ast
import tomllib

import pytest

from tests.helpers.trees import ROOT

BUDGETS = tomllib.loads((ROOT / "tests" / "architecture" / "statements.toml").read_text())
WITHIN = BUDGETS.pop("within")
"""Packages that are counted in another one's budget, and have none of their own."""


def statements(text):
    """Return the number of statements of a module, docstrings and other constants that stand alone left out."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)]
    return sum(not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)) for n in found)


def modules_of(package):
    """Return the files of a package, without those of packages that have a budget of their own."""
    others = [name for name in (*BUDGETS, *WITHIN) if name.startswith(f"{package}/")]
    files = (ROOT / package).rglob("*.py")
    return [p for p in files if not any(p.is_relative_to(ROOT / name) for name in others if name not in WITHIN)]


@pytest.mark.parametrize("package", BUDGETS)
def test_package_keeps_its_budget(package):
    files = modules_of(package)
    assert files, "the folder has moved"
    assert sum(statements(path.read_text()) for path in files) <= BUDGETS[package]


def test_each_package_has_a_budget():
    tops = {p.parent for p in ROOT.glob("*/__init__.py")} | {p.parent for p in ROOT.glob("shoal/*/__init__.py")}
    named = {*BUDGETS, *WITHIN}
    assert {str(p.relative_to(ROOT)) for p in tops} - named == set()


def test_statements_are_counted_without_docstrings():
    assert statements('"""Doc."""\nx = 1\n\n\ndef f():\n    """Doc."""\n    return x\n') == 3
