"""Descriptions of the algorithms and their settings, taken from the strategies' docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import sys

from aggregator.strategies.base import Strategy
from aggregator.strategies.registry import find_strategy, strategy_names
from aggregator.strategies.settings import AUTO, AUTO_TEXT


def describe() -> list[str]:
    """Return a text for each algorithm: name and paper, then its settings with defaults and meaning."""
    return [_describe(name, find_strategy(name)) for name in strategy_names()]


def _describe(name: str, strategy: type[Strategy]) -> str:
    kind = strategy.settings_type
    about = inspect.getdoc(sys.modules[strategy.__module__]) or ""
    lines = [f"{name}: {about.splitlines()[0]}"]
    defaults = [
        f"{f.name}={AUTO_TEXT if f.name == kind.clusters_setting and f.default == AUTO else _text(f.default)}"
        for f in dataclasses.fields(kind)
    ]
    if not defaults:
        return "\n".join([*lines, "    (no settings)"])
    lines.append(f"    {' '.join(defaults)}")
    _, _, meaning = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    return "\n".join([*lines, *meaning.replace("``", "").rstrip().splitlines()])


def _text(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
