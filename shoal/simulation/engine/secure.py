"""Sums only, simulated: rounds as a fleet with a keeper closes them, with the same fixed-point numbers, cells and rules.

`SecureRounds` turns a round's updates into the stand-ins of `aggregator.sums`. Pads are left out, since they cancel; the sums are
those of the ring.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from aggregator.keeper.answer import figures_of, longest_norm
from aggregator.rounds.summed import short_unit
from aggregator.strategies.base import Groups, Looking, inner_of, parts_of
from aggregator.sums import chosen_cells, mean_limit, stand_in
from crypto.sums.looks import LENGTH, sketch
from crypto.sums.ring import mean_of, numbers_in, step_in
from shoal.digests import sha256
from shoal.errors import IntegrityError
from shoal.limits import MOST_LOOKED
from shoal.owner.runs.plan import LOOKS, check_keeper, most_summed
from shoal.protocol.cells import REMEMBERED
from shoal.protocol.sums import Figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aggregator.rounds.screening import Levels
    from aggregator.strategies.base import ClientUpdate, RoundPlan, Strategy
    from shoal.protocol.documents import RunPlan
    from shoal.protocol.messages import Phase


def figures_in(update: ClientUpdate) -> Figures:
    """Return what a device seals to the keeper."""
    return Figures(**{f.name: getattr(update, f.name) for f in dataclasses.fields(Figures)})


class SecureRounds:
    """Closes the rounds of one simulated run on sums.

    Args:
        run: its plan.
        devices: of the fleet.
        strategy: its algorithm, which gets its looks here.

    Raises:
        ConfigError: the algorithm compares single updates.
    """

    def __init__(self, run: RunPlan, devices: int, strategy: Strategy) -> None:
        check_keeper(run)
        self._run = dataclasses.replace(run.without_statistics, most_summed=most_summed(devices))
        self._unit = 0.0
        self._recent: list[list[frozenset[bytes]]] = []
        self._parts, self._inner = parts_of(strategy), inner_of(strategy)
        self._nonce = b""
        self._given: dict[str, ClientUpdate] = {}
        self._looked: dict[tuple[Phase, int], Groups] = {}
        self._looks = 0
        if isinstance(self._inner, Looking):
            self._inner.look = self._look

    def begin(self, plan: RoundPlan, levels: Levels) -> str:
        """Begin a round after one with these `levels`, and return the encoding of its updates."""
        self._unit = short_unit(self._run, plan, levels)
        return self._run.recipe.precision_up if self._unit else "float32"

    def _look(self, stand_ins: Sequence[ClientUpdate]) -> Groups:
        """Return the groups of a cell's updates by the cosines of their sketches, as `aggregator.looks` does."""
        key = stand_ins[0].phase, stand_ins[0].model
        if key not in self._looked:
            drawn = sorted(stand_ins, key=lambda u: sha256(self._nonce + u.device.encode()))[:MOST_LOOKED]
            given = [self._given[device] for device in sorted(u.device for u in drawn)]
            if self._looks == LOOKS:
                return Groups((), used=LOOKS)
            self._looks += 1
            words = np.stack([sketch(u.row) for u in given]).view(np.int32).astype(np.float64)
            lengths = np.array([u.norm for u in given]) / LENGTH
            partitions = self._inner.partitions(self._run, words @ words.T * np.outer(lengths, lengths))
            self._looked[key] = Groups(tuple(u.device for u in given), partitions, self._looks)
        return self._looked[key]

    def __call__(self, given: list[ClientUpdate], plan: RoundPlan) -> list[ClientUpdate]:
        """Return the stand-ins of a round's updates; those in no sum are left out."""
        # As devices do: the choice would be the sign of a margin.
        given = [dataclasses.replace(u, model=plan.assignments[u.device].scored[0]) if u.margins else u for u in given]
        run, ids = self._run, {u.device: sha256(u.device.encode()) for u in given}
        nonce = sha256(b"".join(sorted(ids.values())) + len(self._recent).to_bytes(4, "big"))
        self._given, self._looked, self._nonce = {u.device: u for u in given}, {}, nonce
        while True:
            cells = chosen_cells(given, ids, self._recent, run, nonce, self._parts(given))
            long = {u.device for cell in cells for u in cell if u.norm > longest_norm([other.norm for other in cell])}
            if not long:
                break
            given = [u for u in given if u.device not in long]
        found: list[ClientUpdate] = []
        for cell in cells:
            figures = figures_of([figures_in(u) for u in cell])
            mean = None
            if cell[0].vector is not None:
                unit = step_in(run, self._unit)
                try:
                    words = sum(
                        (numbers_in(run, self._unit, u.row) for u in cell), np.zeros(len(cell[0].row), np.uint32)
                    )
                    mean = mean_of(words, len(cell), unit, mean_limit(run, figures.norm, unit))
                except IntegrityError:
                    continue
            found += [stand_in(u, mean, figures, place) for place, u in enumerate(cell)]
        self._recent = [*self._recent, [frozenset(ids[u.device] for u in cell) for cell in cells]][-REMEMBERED:]
        return sorted(found, key=lambda u: u.device)
