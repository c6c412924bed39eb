"""Docstring of each package: description, rules and an example. Examples that are doctests run here."""

from __future__ import annotations

import ast
import doctest
import importlib
import re

import pytest

from tests.helpers.trees import ROOT, sources

INITS = sorted(path for path in sources() if path.name == "__init__.py")


def package_of(path):
    """Return the folder of a package as a repository path."""
    return path.parent.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", INITS, ids=package_of)
def test_docstring_has_rules_and_example(path):
    """A package opens with a sentence, names rules as a list, and ends with an example."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert 2 <= len(re.findall(r"^(?:-|\d+\.) ", text, re.MULTILINE)) <= 6, text
    assert "\n\n" in text
    assert any(word in text for word in ("Example", "A round", "A run", "Joining", "Stages")), text


@pytest.mark.parametrize("path", [path for path in INITS if ">>>" in path.read_text()], ids=package_of)
def test_package_examples_are_true(path):
    """Every doctest in a package's docstring gives the printed result."""
    module = importlib.import_module(package_of(path).replace("/", "."))
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
