"""Long constructors are called with keywords: a reader can't tell which of seven positional arguments is which."""

from __future__ import annotations

import ast

from tests.helpers.trees import NAMES, ROOT, sources

MOST_POSITIONAL = 5


def module_of(path):
    """Return the import name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def classes_of(tree):
    """Return the names of the classes that a module defines."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def names_of_ours(tree):
    """Return the names that a module imports from our packages, and those of its own classes."""
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    ours = [n for n in imported if n.module.split(".")[0] in NAMES]
    return {alias.asname or alias.name for node in ours for alias in node.names} | classes_of(tree)


def long_calls(tree):
    """Return (name, line) of the calls of a module with too many positional arguments to a name of ours."""
    ours, found = names_of_ours(tree), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) <= MOST_POSITIONAL:
            continue
        called = node.func
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in ours:
            found.append((called.attr, node.lineno))  # module.Class(...)
        elif isinstance(called, ast.Name) and called.id in {*ours, "cls"}:
            found.append((called.id, node.lineno))
    return found


def test_few_positional_arguments():
    """No constructor of ours is called with many positional arguments."""
    classes, calls = {"cls"}, []
    for path in sources():
        tree = ast.parse(path.read_text())
        classes |= classes_of(tree)
        calls += [(name, f"{module_of(path)}:{line}") for name, line in long_calls(tree)]
    assert [call for call in calls if call[0] in classes] == []
    assert len(classes) > 100


def test_a_long_call_is_found():
    source = (
        "from shoal.a import B\nfrom shoal import a\nB(1, 2, 3, 4, 5, 6)\na.B(1, 2, 3, 4, 5, 6)\nB(1, 2, 3, 4, 5, x=6)"
    )
    assert long_calls(ast.parse(source)) == [("B", 3), ("B", 4)]
    assert long_calls(ast.parse("class B:\n    def f(cls):\n        return cls(1, 2, 3, 4, 5, 6)")) == [("cls", 3)]
