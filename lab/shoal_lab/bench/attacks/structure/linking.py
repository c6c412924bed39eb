"""A coordinate found again under the next round's key: by its values over the devices, by invariants, by a repeated update.

Narayanan and Shmatikov, "De-anonymizing Social Networks" (2009), for matching by structure. Under a mask that mixes coordinates
the coordinate to find is the one that draws most on it, by the true keys; absolute values, squares and the map between the two
rounds' spans are tried too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.lab import LIFETIMES, Attack, FleetKeys, Lab, Lifetime, Result, Rows
from shoal_lab.bench.attacks.structure.fleet import fleet_sizes

WHO: Final = "aggregator that follows the protocol; no device, no initial model"
WHO_RESENT: Final = "aggregator that gets one update under two rounds' keys"
SAMPLES: Final = 80
WARM_UP: Final = 2
"""Rounds before the two that are linked."""
ASKED: Final = 400
"""Coordinates that are looked for under a mask that mixes them."""
MARGIN: Final = 0.01

Scores = NDArray[np.float32]


def honest(lab: Lab, devices: int) -> tuple[Rows, Rows]:
    """Return the clear updates (n, d) of two successive rounds of FedAvg with local epochs."""

    def trained() -> tuple[Rows, Rows]:
        parts = [lab.pick(f"linking {i}", SAMPLES) for i in range(devices)]
        *_, before, after = lab.fedavg([*[parts[:15]] * WARM_UP, parts, parts], 10000)
        return before, after

    return lab.once(f"linking {devices}", trained)


def standard(rows: Rows) -> Rows:
    """Return columns (n, d) with mean 0 and length 1."""
    columns = rows - rows.mean(0)
    columns /= np.linalg.norm(columns, axis=0) + np.float32(1e-30)
    return np.asarray(columns, np.float32)


def by_profile(
    before: Rows, after: Rows, asked: NDArray[np.int64], how: Callable[[Rows], Rows], *, signed: bool
) -> Scores:
    """Return the likeness of the ``asked`` columns of ``before`` (n, d) and all of ``after`` (n, d), (asked, d)."""
    likeness = standard(how(before))[:, asked].T @ standard(how(after))
    return np.asarray(likeness if signed else np.abs(likeness), np.float32)


def by_invariants(before: Rows, after: Rows, asked: NDArray[np.int64]) -> Scores:
    """Return the same by the sorted absolute values of a column, its norm and its zeros, whatever the order of devices."""

    def features(rows: Rows) -> Rows:
        size = np.abs(rows)
        values = np.quantile(size, np.linspace(0, 1, min(len(rows), 24)), axis=0)
        norms = np.linalg.norm(rows, axis=0)[None]
        scale = np.float32(np.median(norms) + 1e-30)
        return np.concatenate([values / scale, norms / scale, (rows == 0).mean(0)[None]]).astype(np.float32)

    a, b = features(before)[:, asked], features(after)
    return np.asarray(2 * a.T @ b - (b**2).sum(0)[None], np.float32)


def by_span(before: Rows, after: Rows, asked: NDArray[np.int64]) -> Scores:
    """Return the same by the linear map that takes the updates before to those after, as if they were equal."""
    gram = before.astype(np.float64) @ before.T.astype(np.float64)
    gram += 1e-6 * np.trace(gram) / len(gram) * np.eye(len(gram))
    weights = np.linalg.solve(gram, before[:, asked].astype(np.float64))
    return np.asarray(np.abs(weights.T.astype(np.float32) @ after), np.float32)


def by_rank(before: Rows, after: Rows, asked: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the coordinate of one update ``after`` (1, d) with the same rank of its absolute value as each one asked for."""
    order = np.empty(before.shape[1], np.int64)
    order[np.argsort(np.abs(before[0]), kind="stable")] = np.argsort(np.abs(after[0]), kind="stable")
    return order[asked]


class Pair:
    """Updates of two rounds as the aggregator has them, and the coordinates to be linked."""

    def __init__(self, lab: Lab, mode: str, lifetime: Lifetime, first: Rows, second: Rows) -> None:
        """Mask ``first`` and ``second``, each (n, d), under the keys of rounds 1 and 2."""
        keys = FleetKeys(lab, mode, lifetime, first.shape[1])
        self.before, self.after = keys.masked(first, 1), keys.masked(second, 2)
        places, again, length = keys.places(1), keys.places(2), first.shape[1]
        if (places >= 0).all():
            live = ((first != 0).any(0) & (second != 0).any(0))[places]
            self.asked = np.flatnonzero(live)
            self.truth = np.argsort(again)[places[self.asked]]
            return
        self.asked = lab.rng("linking asked").choice(length, min(ASKED, length), replace=False)
        units = np.eye(length, dtype=np.float32)[self.asked]
        self.truth = np.abs(keys.masked(keys.unmasked(units, 1), 2)).argmax(1)

    def share(self, found: NDArray[np.int64]) -> float:
        """Return the share of the asked coordinates that were found."""
        return float((found == self.truth).mean())


def linked(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> list[Result]:
    """Return the share of coordinates found again by profiles and by invariants."""
    pair, keeps = Pair(lab, mode, lifetime, *honest(lab, devices)), lab.keeps(mode)
    if lifetime == "run":
        return [
            _result("profile-linking", pair.share(pair.asked), pair, lifetime, devices, WHO, "at its place: one key")
        ]
    ways: list[Scores] = [
        by_profile(pair.before, pair.after, pair.asked, np.asarray, signed=keeps in ("order", "values"))
    ]
    if keeps == "lengths":
        ways += [by_profile(pair.before, pair.after, pair.asked, how, signed=True) for how in (np.abs, np.square)]
        ways.append(by_span(pair.before, pair.after, pair.asked))
    profile = max(pair.share(scores.argmax(1)) for scores in ways)
    invariants = pair.share(by_invariants(pair.before, pair.after, pair.asked).argmax(1))
    tried = "values, absolute values, squares and the span" if keeps == "lengths" else "values over the devices"
    return [
        _result("profile-linking", profile, pair, lifetime, devices, WHO, f"by {tried}"),
        _result("invariant-linking", invariants, pair, lifetime, devices, WHO, "by sorted values, norms and zeros"),
    ]


def resent(lab: Lab, mode: str, lifetime: Lifetime) -> Result:
    """Return the share of coordinates linked by one update that is sent under two keys."""
    update = honest(lab, min(fleet_sizes(lab)))[0][:1]
    pair = Pair(lab, mode, lifetime, update, update)
    found = by_rank(pair.before, pair.after, pair.asked)
    if lab.keeps(mode) == "order" or lifetime == "run":
        found = pair.asked
    return _result(
        "resent-update-linking", pair.share(found), pair, lifetime, 1, WHO_RESENT, "by equal absolute values"
    )


def _result(name: str, success: float, pair: Pair, lifetime: Lifetime, devices: int, who: str, note: str) -> Result:
    return Result(
        name=name,
        attacker=who,
        success=success,
        chance=1 / len(pair.before[0]),
        unit="share",
        margin=MARGIN,
        keys=lifetime,
        devices=devices,
        note=note,
    )


def linking(lab: Lab, mode: str) -> list[Result]:
    """Return the results for each key lifetime and fleet size; under one key a run, coordinates need no linking."""
    results = [one for keys in LIFETIMES for n in fleet_sizes(lab) for one in linked(lab, mode, keys, n)]
    return results + ([resent(lab, mode, keys) for keys in LIFETIMES] if results else [])


ATTACKS: Final = (Attack("linking of keys", "Narayanan and Shmatikov 2009 (matching by structure)", WHO, linking),)
