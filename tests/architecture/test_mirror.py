"""Tests mirror the source: a module with logic has a test file of its name in tests/unit, or is listed as without.

Of the lab it is enough that a test file in tests/lab imports it: such a file may hold the tests of several modules. The list,
modules_without_unit_tests.txt, names modules that other tests cover: scenarios, the command line, attacks. It may only shrink: a
listed module that has a unit file fails here, and so does a new module that has none.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.trees import LAB, ROOT, sources

WITHOUT = set((Path(__file__).parent / "modules_without_unit_tests.txt").read_text().split())
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.Match, ast.IfExp, ast.comprehension)


def has_logic(source):
    """Return whether any function of a module branches or loops."""
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return any(isinstance(node, BRANCHES) for function in functions for node in ast.walk(function))


def has_unit_file(module):
    """Return whether a module, a path in the repository, has a test file of its name, or one of the lab's imports it."""
    ours = module.parent.is_relative_to(LAB)
    folder = ROOT / "tests" / ("lab" / module.parent.relative_to(LAB) if ours else "unit" / module.parent)
    if any((*folder.glob(f"test_{module.stem}.py"), *folder.glob(f"test_{module.stem}_*.py"))):
        return True
    return ours and ".".join(module.relative_to(Path(LAB).parent).with_suffix("").parts) in imported_in_lab()


@cache
def imported_in_lab():
    """Return the names that test files of the lab import, with their modules."""
    found = set()
    for path in (ROOT / "tests" / "lab").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_modules_have_a_unit_file():
    """Modules with logic have a unit file or are listed."""
    modules = [path.relative_to(ROOT) for path in sources() if has_logic(path.read_text())]
    assert {m.as_posix() for m in modules if not has_unit_file(m)} == WITHOUT


@pytest.mark.parametrize(
    ("source", "expected"),
    [("X = 1", False), ("def f():\n    return 1", False), ("def f(x):\n    return 1 if x else 2", True)],
)
def test_the_search_for_logic_finds_it(source, expected):
    """The test above can fail."""
    assert has_logic(source) is expected
