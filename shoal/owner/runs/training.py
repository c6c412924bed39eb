"""Local training as the owner gives it: names and values on top of a task's defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
