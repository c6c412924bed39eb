"""The search for who spoils a sum, in a run with a keeper: nobody sees a single update, so sums of fewer devices are compared.

A cell is *spoilt* if its mean is longer than the norms that its devices report allow, or if devices find that its codes are wrong
(`crypto.sums.codes`). Its devices are then suspects, and in each following round half of them are left out of the sums. A round
whose sum is good clears those that were in it, one whose sum is spoilt clears those that were not. What is left when fewer than
`SEARCHED` are is a group of at least three: it is left out for the rest of the run and named to the owner, never one device.
A cell of fewer than `SEARCHED` can't be searched.

Example: of twenty devices one adds a wrong pad. Ten, then five of them are suspects; these are left out, the liar among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aggregator.strategies.base import Event
from shoal.digests import sha256
from shoal.limits import LEAST_CELL

SEARCHED: Final = 2 * LEAST_CELL
"""Fewest suspects that are divided."""
SPOILT: Final = "spoilt"
"""Kind of the event about a cell whose sum is not used."""
GROUP_OUT: Final = "group-left-out"
"""Kind of the event that names the devices of which one spoils sums."""

Cells = Mapping[int, tuple[str, ...]]
"""Devices of each model's cells."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """What is known of who spoils sums.

    Attributes:
        suspects: groups of devices of which one spoils sums, whatever model it trains.
        opened: model -> devices in its last sum, which others have not yet trained from.
        out: devices that are left out.
    """

    suspects: tuple[tuple[str, ...], ...] = ()
    opened: Cells = field(default_factory=dict)
    out: tuple[str, ...] = ()

    def left_out(self, nonce: bytes) -> frozenset[str]:
        """Return the devices whose updates are in no sum of the round with this nonce."""
        return frozenset(self.out).union(*(set(some) - _half(some, nonce) for some in self.suspects))


def _half(devices: Iterable[str], nonce: bytes) -> set[str]:
    ordered = sorted(devices, key=lambda device: sha256(nonce + device.encode()))
    return set(ordered[: len(ordered) // 2])


def judged(
    known: Suspects, round_: int, *, spoilt: Cells, opened: Cells, refused: Iterable[int], used: Iterable[int]
) -> tuple[Suspects, tuple[Event, ...]]:
    """Return what is known after a round, and events for the owner.

    Args:
        known: before it.
        round_: the round.
        spoilt: cells of the round whose sum is not used.
        opened: cells of the round whose sum is used.
        refused: models of which devices have refused the last sum in this round.
        used: models from which devices have trained in this round, so that their last sum was good.
    """
    suspects, events, out = list(known.suspects), list[Event](), set(known.out)
    good = {d for model in set(used) - set(refused) for d in known.opened.get(model, ())}
    suspects = [_narrowed(group, tuple(d for d in group if d not in good)) for group in suspects]
    last = {model: known.opened[model] for model in refused if model in known.opened}
    # That sum was opened before the one who spoils it was found.
    last = {model: cell for model, cell in last.items() if not out.intersection(cell)}
    for model, cell in (*last.items(), *spoilt.items()):
        near = max(range(len(suspects)), key=lambda at: len(set(suspects[at]) & set(cell)), default=None)
        both = () if near is None else tuple(d for d in suspects[near] if d in cell)
        reason = ""
        if near is not None and both:
            suspects[near] = _narrowed(suspects[near], both)
        elif len(cell) >= SEARCHED:
            suspects.append(tuple(sorted(cell)))
        else:
            reason = f"one of its devices spoils it; a cell of fewer than {SEARCHED} can't be searched"
        events.append(Event(round_, SPOILT, {"cluster": model, "devices": sorted(both or cell), "reason": reason}))
    for group in suspects:
        if 0 < len(group) < SEARCHED:
            out.update(group)
            events.append(Event(round_, GROUP_OUT, {"devices": sorted(group)}))
    left = tuple(group for group in suspects if len(group) >= SEARCHED)
    kept = {model: cell for model, cell in known.opened.items() if model not in {*used, *refused}}
    return Suspects(left, {**kept, **opened}, tuple(sorted(out))), tuple(events)


def _narrowed(group: tuple[str, ...], found: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is left of a group; it stays as it is where fewer than three would be.

    A sum may leave out devices of its half, since sums must differ by three.
    """
    return found if len(found) >= LEAST_CELL or not found else group
