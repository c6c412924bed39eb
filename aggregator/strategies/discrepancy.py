"""The discrepancy of fedgroup Eq. 4: the distance of the devices' trained models from the model they were given.

Discrepancy(t) is the mean over the round's devices of |w_i - w_t|. With w_t the model that the round began with this
is the mean norm of the updates. The paper's text calls w_t "the latest global model", which can also be read as the
model after the round: this is the second pair of figures, |w_i - w_(t+1)|, which needs single updates.
For several groups each device is measured against its own group's model (fedgroup Fig. 3, bottom).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aggregator.numerics.rows import read_once
from aggregator.strategies.base import ClientUpdate, ClusterModel, Event, norms_of


def discrepancy(
    given: list[ClientUpdate],
    before: Mapping[int, ClusterModel],
    after: Mapping[int, ClusterModel] | None,
    round_: int,
) -> tuple[Event, ...]:
    """Return the round's discrepancy as an event; no event without single updates.

    Args:
        given: updates of the round.
        before: the models by id, when the round began.
        after: the same when it is closed; None leaves out the second pair of figures.
        round_: its number.
    """
    if not given or any(c.summed for c in given):
        return ()
    figures: dict[str, Any] = _figures([c.norm for c in given], "")
    if after is not None and all(c.vector is not None for c in given):
        steps = {model: _step(before[model], after[model]) for model in {c.model for c in given}}
        differences = (
            row if steps[c.model] is None else row - steps[c.model]
            for c, row in zip(given, read_once([c.row for c in given]), strict=True)
        )
        apart = norms_of(differences)
        figures |= _figures(apart, "_after")
    return (Event(round_, "discrepancy", figures),)


def _step(before: ClusterModel, after: ClusterModel) -> Any:
    if after.offset is None or before.offset is None:
        return after.offset
    return after.offset - before.offset


def _figures(norms: list[float], suffix: str) -> dict[str, float]:
    return {f"mean{suffix}": float(np.mean(norms)), f"variance{suffix}": float(np.var(norms))}
