"""Names of tests are short enough to be scanned: the file carries the subject, and a docstring says the rest."""

import re

from tests.helpers.trees import ROOT

LONGEST = 40


def test_names_have_at_most_40_characters():
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    names = [
        (name, path) for path, text in texts.items() for name in re.findall(r"^ *def (test_\w+)\(", text, re.MULTILINE)
    ]
    assert len(names) > len(texts)
    assert [(name, path) for name, path in names if len(name) > LONGEST] == []
