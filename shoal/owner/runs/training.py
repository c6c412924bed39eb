"""Local training as the owner gives it: names and values on top of a task's defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shoal.errors import TaskError, UsageError
from shoal.task.manifest import LocalTraining
from shoal.util.wanted import wanted


def local_training(defaults: LocalTraining, pairs: Mapping[str, str]) -> LocalTraining:
    """Return ``defaults`` with the values of ``pairs``, text by the name of a field, in place of some.

    Raises:
        UsageError: a name is unknown, a value is out of range or of another type, or nothing would be trained.
    """
    fields = {f.name: f for f in dataclasses.fields(LocalTraining)}
    changes: dict[str, Any] = {}
    for name, text in pairs.items():
        if name not in fields:
            raise UsageError(f"local training has no {name!r}", hint=f"it has {', '.join(sorted(fields))}")
        number: type[Any] = type(fields[name].default)
        try:
            changes[name] = number(text)
        except ValueError as error:
            raise UsageError(f"{name} is {wanted(number)}, not {text!r}") from error
    try:
        local = dataclasses.replace(defaults, **changes)
    except TaskError as error:
        raise UsageError(str(error), hint=error.hint) from error
    if not local.steps and not local.batch_size:
        raise UsageError(
            "local training of batch_size=0 and steps=0 trains nothing", hint="with batch_size=0, give steps"
        )
    if not local.steps and not local.epochs:
        raise UsageError("local training of epochs=0 and steps=0 trains nothing", hint="give epochs or steps")
    return local
