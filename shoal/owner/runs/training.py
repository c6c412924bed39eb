"""Local training as the owner gives it, on top of a task's defaults, and descriptions of the algorithms for the help."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from aggregator.strategies.base import AUTO, AUTO_TEXT, Strategy
from aggregator.strategies.registry import find_strategy, strategy_names
from shoal.errors import OutOfRangeError, UsageError
from shoal.protocol.recipe import LocalTraining, knobs


def local_training(defaults: LocalTraining, pairs: Mapping[str, str]) -> LocalTraining:
    """Return ``defaults`` with the values of ``pairs``, text by the name of a field, in place of some.

    Raises:
        UsageError: a name is unknown, a value is out of range or of another type, or nothing would be trained.
    """
    allowed = knobs(LocalTraining)
    changes: dict[str, Any] = {}
    for name, text in pairs.items():
        if name not in allowed:
            raise UsageError(f"local training has no {name!r}", hint=f"it has {', '.join(sorted(allowed))}")
        try:
            changes[name] = allowed[name].kind(text)
        except ValueError as error:
            raise OutOfRangeError(f"{name} is {allowed[name].words}, not {text!r}") from error
    local = dataclasses.replace(defaults, **changes)
    if not local.steps and not local.batch_size:
        raise UsageError(
            "local training of batch_size=0 and steps=0 trains nothing", hint="with batch_size=0, give steps"
        )
    if not local.steps and not local.epochs:
        raise UsageError("local training of epochs=0 and steps=0 trains nothing", hint="give epochs or steps")
    return local


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
