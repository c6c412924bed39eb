"""No code that runs on a device names an algorithm or reads its settings: the plan's capabilities decide."""

import ast

import pytest

from aggregator.strategies.registry import STRATEGIES
from tests.helpers.trees import LAB, PACKAGES, ROOT, sources

ON_DEVICES = ("edge_client", "crypto", "shoal/protocol", "shoal/membership", "shoal/task", "shoal/transport")


OTHER_MEANINGS = {"shoal/task/data_declaration.py": {"local"}, "shoal/protocol/recipe.py": {"cfl"}}
"""Names of algorithms that mean something else in a module: a device's own figures, and the owner's default choice."""


def literals(source):
    """Return every string literal in the text of a module, in lower case."""
    nodes = ast.walk(ast.parse(source))
    return {n.value.lower() for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def attributes(source):
    """Return the names of all attributes in the text of a module."""
    return {n.attr for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)}


def compared(source):
    """Return the names of all attributes that are part of a comparison or the subject of a match."""
    nodes = list(ast.walk(ast.parse(source)))
    trees = [n for n in nodes if isinstance(n, ast.Compare)] + [n.subject for n in nodes if isinstance(n, ast.Match)]
    return {n.attr for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute)}


def found_in(packages, find):
    """Return module -> what ``find`` returns for its path, for the modules for which that is something."""
    found = {str(path.relative_to(ROOT)): find(path) for path in sources(*packages)}
    return {name: names for name, names in found.items() if names}


def test_no_device_literal_is_an_algorithm():
    """No literal on a device is the name of an algorithm."""
    found = found_in(ON_DEVICES, lambda path: literals(path.read_text()) & set(STRATEGIES))
    assert found == OTHER_MEANINGS


def test_device_reads_no_algorithm_settings():
    """A device reads no settings of an algorithm."""
    assert found_in(["edge_client"], lambda path: "settings" in attributes(path.read_text())) == {}


def test_nothing_compares_algorithm_of_plan():
    """It finds the strategy in the registry, and is shown to people."""

    def compares(path):
        source = path.read_text()
        return "algorithm" in source and "algorithm" in compared(source)

    assert found_in((*PACKAGES, LAB), compares) == {}


@pytest.mark.parametrize(
    "line",
    [
        'x = plan.recipe.algorithm == "cfl"',
        'x = "cfl" in (plan.recipe.algorithm, 1)',
        'match plan.recipe.algorithm:\n    case "cfl": pass',
    ],
)
def test_a_decision_by_name_is_found(line):
    assert "algorithm" in compared(line)
    assert "cfl" in literals(line)
    assert "settings" in attributes("x = [s for s in plan.recipe.settings]")
