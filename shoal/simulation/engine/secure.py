"""Sums only, simulated: rounds as a fleet with a keeper closes them, with the same fixed-point numbers, cells and rules.

`SecureRounds` turns a round's updates into the stand-ins of `aggregator.sums`. Pads are left out, since they cancel; the sums are
those of the ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aggregator.keeper.answer import figures_of
from aggregator.sums import chosen_cells, mean_limit, stand_in
from crypto.sums.ring import hidden, mean_of, unit_of
from shoal.digests import sha256
from shoal.errors import IntegrityError
from shoal.owner.runs.plan import check_keeper, most_summed
from shoal.protocol.sums import REMEMBERED, Figures

if TYPE_CHECKING:
    from aggregator.strategies.base import ClientUpdate
    from shoal.protocol.documents import RunPlan
    from shoal.simulation.engine.workforce import Workforce


class SecureRounds:
    """Closes the rounds of one simulated run on sums.

    Args:
        run: its plan.
        devices: of the fleet.

    Raises:
        ConfigError: the algorithm compares single updates.
    """

    def __init__(self, run: RunPlan, devices: int) -> None:
        check_keeper(run, devices)
        self._most = most_summed(devices)
        self._unit = unit_of(run.recipe.norm_limit, run.length, self._most)
        self._recent: list[list[frozenset[bytes]]] = []

    def __call__(self, given: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
        """Return the stand-ins of a round's updates; those in no sum are left out."""
        run, ids = workforce.run, {u.device: sha256(u.device.encode()) for u in given}
        nonce = sha256(b"".join(sorted(ids.values())) + len(self._recent).to_bytes(4, "big"))
        cells = chosen_cells(given, ids, self._recent, run, nonce, most=self._most)
        found: list[ClientUpdate] = []
        for cell in cells:
            figures = figures_of([Figures(loss=u.loss, correct=u.correct, tested=u.tested, norm=u.norm) for u in cell])
            mean = None
            if cell[0].vector is not None:
                words = sum(
                    (hidden(u.row, self._unit, self._most, ()) for u in cell), np.zeros(len(cell[0].row), np.uint32)
                )
                try:
                    mean = mean_of(words, len(cell), self._unit, mean_limit(run, figures.norm))
                except IntegrityError:
                    continue
            found += [stand_in(u, mean, figures, place) for place, u in enumerate(cell)]
        self._recent = [*self._recent, [frozenset(ids[u.device] for u in cell) for cell in cells]][-REMEMBERED:]
        return sorted(found, key=lambda u: u.device)
