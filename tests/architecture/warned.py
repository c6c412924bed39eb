"""The warnings and logged errors of the programs, as their source declares them: texts with ``...`` for each part that varies."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass

from aggregator.run_log import DECLINE_REASONS, WARNED_OF
from aggregator.status.record import REVOKED
from tests.helpers.trees import ROOT, sources

KINDS = ("problem", "device", "log", "doubt", "command", "check")
PLACES = ("edge_client", "aggregator", "shoal/owner", "shoal/util", "shoal/membership", "shoal/transport", "shoal/page")
LEVELS = {"warning", "error"}
LOGGERS = {"LOG", "_log", "log", "_LOG"}
CHECKED = {"warning", "failure"}
MAKERS = {
    ("shoal/owner/runs/plan.py", "doubts"): "doubt",
    ("shoal/owner/runs/plan.py", "roster_doubts"): "doubt",
    ("edge_client/learning/data_doubts.py", "doubts"): "doubt",
    ("edge_client/learning/data_doubts.py", "no_better_doubt"): "doubt",
    ("edge_client/learning/data_doubts.py", "target_doubt"): "doubt",
    ("edge_client/learning/data_doubts.py", "class_doubt"): "doubt",
    ("edge_client/learning/data_doubts.py", "outlier_doubt"): "doubt",
    ("edge_client/learning/statistics.py", "scale_doubt"): "doubt",
    ("aggregator/status/record.py", "reason"): "device",
    ("aggregator/status/record.py", "_absence"): "device",
    ("aggregator/status/versions.py", "left_out"): "device",
    ("aggregator/run_log.py", "awaited_keys"): "problem",
    ("edge_client/learning/executor/trial.py", "failure"): "command",
    ("shoal/util/server_process.py", "raise_open_files_limit"): "log",
}
"""Functions that yield, append or return texts for warnings, alone or before the advice, and the kind of these texts."""


@dataclass(frozen=True, order=True)
class Warned:
    """One text.

    Attributes:
        kind: one of KINDS.
        text: the text; of a check its name.
        place: path and line, for messages of tests.
    """

    kind: str
    text: str
    place: str


def modules():
    return [p for p in sources("shoal", "edge_client", "aggregator") if str(p.relative_to(ROOT)).startswith(PLACES)]


def template(node, values):
    """Return an expression as text with ``...`` for parts that vary; None if it is no text.

    Args:
        node: the expression.
        values: name -> expressions assigned to it in the function around.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub("%[sd]", "...", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else "..." for v in node.values)
        return re.sub(r"\.{4,}", "...", "".join(parts)).strip()
    if isinstance(node, ast.Name) and node.id in values:
        return template(values[node.id], {})
    return None


def _values(function):
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    names = [t.id if isinstance(t, ast.Name) else "" for t in target.elts]
                    found.update(zip(names, node.value.elts, strict=False))
    return found


def _called(node):
    """Return the last part of a called name and the name before it: ("warning", "LOG")."""
    if isinstance(node.func, ast.Attribute):
        before = node.func.value
        return node.func.attr, getattr(before, "id", getattr(before, "attr", ""))
    return getattr(node.func, "id", ""), ""


def _kind(node, path):
    """Return the kind of a call that warns, and its argument with the text; None for another call."""
    name, before = _called(node)
    arguments = node.args
    first = getattr(arguments[0], "value", "") if arguments else ""
    if (name in LEVELS and before in LOGGERS) or name == "_say_once":
        return "log", arguments[0]
    if name == "Log" and first == "warning":
        return "log", arguments[1]
    if name == "Problem" and arguments:
        return "problem", arguments[0]
    if name == "Check" and len(arguments) > 1 and getattr(arguments[1], "value", "") in CHECKED:
        return "check", arguments[0]
    if name == "checked" and len(arguments) == 2 and isinstance(arguments[0], ast.Constant):
        return "check", arguments[0]
    if name in ("complain", "_complain") and "owner" in path:
        return "command", arguments[0]
    if name == "note" and arguments and _begins(arguments[0]).startswith("warning: "):
        return "command", arguments[0]
    return None


def _begins(node):
    """Return the constant text with which an expression begins."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _texts(function, path):
    """Yield the kind and the expression of each text that a function of MAKERS makes."""
    kind = MAKERS.get((path, function.name))
    for node in ast.walk(function) if kind else ():
        made = node.value if isinstance(node, (ast.Yield, ast.Return)) else None
        if isinstance(node, ast.Call) and _called(node)[0] == "append":
            made = node.args[0]
        if isinstance(made, ast.Tuple) and made.elts:
            yield kind, made.elts[0]
        elif isinstance(made, (ast.JoinedStr, ast.Constant)) or (kind == "device" and isinstance(made, ast.Call)):
            yield kind, made


@functools.cache
def declared():
    """Return (warnings, calls whose text is made elsewhere: as (path, expression))."""
    found = {Warned("log", kind, "aggregator/run_log.py") for kind in WARNED_OF}
    found |= {Warned("device", text, "aggregator/run_log.py") for text in (REVOKED, *DECLINE_REASONS.values())}
    elsewhere = set()
    for path in modules():
        name = str(path.relative_to(ROOT))
        functions = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))
        for function in functions:
            values = _values(function)
            calls = [_kind(node, name) for node in ast.walk(function) if isinstance(node, ast.Call)]
            for kind, node in (*filter(None, calls), *_texts(function, name)):
                text = template(node, values)
                if text is None or text.removeprefix("warning: ") == "...":
                    elsewhere.add((name, ast.unparse(node)))
                elif text:
                    found.add(Warned(kind, text, f"{name}:{node.lineno}"))
    return found, elsewhere
