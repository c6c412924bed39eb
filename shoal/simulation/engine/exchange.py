"""Uploads of devices that other ranks have trained: their figures as rows of float64, their updates as rows of float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.strategies.base import ClientUpdate

if TYPE_CHECKING:
    from shoal.simulation.engine.ranks import Ranks

FIGURES: Final = ("model", "samples", "loss", "correct", "tested", "norm", "model_norm", "nearest")
"""Figures of an upload, which float64 holds exactly."""
WHOLE: Final = frozenset({"model", "samples", "correct", "tested", "nearest"})


def exchange(
    ranks: Ranks,
    own: Sequence[ClientUpdate],
    names: Sequence[str],
    parts: Sequence[NDArray[np.int64]],
    template: ClientUpdate,
    *,
    margins: int,
    length: int,
) -> list[ClientUpdate]:
    """Return the uploads of all devices of an assignment, in the order of ``names``.

    Args:
        ranks: who have divided the devices.
        own: this rank's uploads, in the order of ``parts[ranks.rank]``.
        names: of all devices.
        parts: the places of each rank's devices among ``names``.
        template: an upload whose other fields are the same for all devices.
        margins: most margins of an upload.
        length: coordinates of an update; 0 if there are none.
    """
    figures = np.full((len(own), len(FIGURES) + margins), np.nan)
    for row, update in zip(figures, own, strict=True):
        row[: len(FIGURES)] = [getattr(update, name) for name in FIGURES]
        row[len(FIGURES) : len(FIGURES) + len(update.margins)] = update.margins
    vectors = np.empty((len(own), length), np.float32)
    if length:
        for row, update in zip(vectors, own, strict=True):
            row[:] = update.row
    table, rows = ranks.rows(figures, parts), ranks.rows(vectors, parts) if length else None
    found = []
    for i, (name, values) in enumerate(zip(names, table, strict=True)):
        known = {field: int(v) if field in WHOLE else float(v) for field, v in zip(FIGURES, values, strict=False)}
        # A margin is never NaN, so NaN stands for those that an upload does not have.
        given = tuple(float(v) for v in values[len(FIGURES) :] if not np.isnan(v))
        vector = None if rows is None else rows[i]
        found.append(dataclasses.replace(template, device=name, margins=given, vector=vector, **known))  # type: ignore[arg-type]
    return found
