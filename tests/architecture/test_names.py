"""Names of tests are short enough to be scanned: the file carries the subject, and a docstring says the rest."""

import ast

from tests.helpers.trees import ROOT

LONGEST = 40
LEFT = ROOT / "tests" / "architecture" / "files_with_longer_names.txt"
"""Files whose tests have longer names still, one a line. It only gets shorter."""


def longest_name(path):
    """Return the length of the longest name of a test in a file."""
    found = [n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    return max((len(name) for name in found if name.startswith("test_")), default=0)


def test_names_have_at_most_40_characters():
    left = set(LEFT.read_text().split())
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / "tests").rglob("test_*.py")}
    assert {name for name, path in files.items() if longest_name(path) > LONGEST} - left == set()
