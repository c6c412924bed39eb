"""Names of tests are short enough to be scanned: the file carries the subject, and a docstring says the rest."""

import ast

from tests.helpers.trees import ROOT

LONGEST = 40


def test_names_have_at_most_40_characters():
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")}
    names = [(n.name, path) for path, tree in trees.items() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    assert [(name, path) for name, path in names if name.startswith("test_") and len(name) > LONGEST] == []
