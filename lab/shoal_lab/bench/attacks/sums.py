"""Attacks on a run with a keeper, in which the aggregator has padded words of each update and sums of at least three.

The attacker is the aggregator with the mask of the round from one device, so all that it has counts as unmasked. The sums and the
words are those of `crypto.sums`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import cosine_from_gram
from aggregator.numerics.silhouette import join_small
from aggregator.strategies.cfl.split import candidates
from aggregator.strategies.cfl.state import CflSettings
from aggregator.strategies.fedgroup.strategy import group_gram
from crypto.sums.codes import added, code, matches
from crypto.sums.looks import sketch
from crypto.sums.ring import add_pad, hidden, mean_of, unit_of
from shoal import limits
from shoal.owner.runs.plan import most_summed
from shoal.protocol.cells import LEAST_CHANGE
from shoal.protocol.recipe import DEFAULTS
from shoal.types import Float32Vector
from shoal_lab.bench.attacks.lab import CLASSES, ONE_EPOCH, Images, Lab, Result, cosine

MODE: Final = "sums"
"""Stands for a mask mode in the report; the mask under the pads is a rotation."""
ATTACKER: Final = "aggregator with the mask that one device holds in one round, in a run with a keeper"
CELLS: Final = (3, 5, 10)
"""Devices of the cells that are attacked."""
LEAVERS: Final = (6, 10, 20)
"""Devices of the clusters that one device leaves: at least six, or the keeper opens no cell without three."""
VICTIMS: Final = 5
"""Devices that leave, each in a trial of its own; the median counts."""
LEFT_AFTER: Final = 6
"""Rounds of the run that is attacked; devices leave before the last one."""
EACH: Final = 80
"""Images of a device."""
RIDGE: Final = (1e-4, 1e-2, 1.0)
CRAFTED: Final = 1000
"""Vectors that are tried as means."""
LOOKED: Final = 20
"""Devices that a look compares, beside the probe."""


def attack_all(lab: Lab) -> dict[str, list[Result]]:
    """Return the results of every attack on a run with a keeper, by the attack's name."""
    return {
        "colluding-device": [colluding(lab)],
        "label-mix": label_mix(lab),
        "leaver": leaver(lab),
        "probe": probe(lab),
        "crafted-mean": [crafted(lab)],
        "keeper": keepers(lab),
    }


def words_of(updates: Sequence[Float32Vector]) -> tuple[list[NDArray[np.uint32]], Float32Vector]:
    """Return the padded words of updates (d,), as the aggregator has them, and the mean that it opens with their keeper."""
    length, most = len(updates[0]), most_summed(len(updates))
    unit = unit_of(DEFAULTS.norm_limit, length, most)
    words = [hidden(update, unit, most, [_seed(at)]) for at, update in enumerate(updates)]
    total = sum((hidden(update, unit, most, ()) for update in updates), np.zeros(length, np.uint32))
    return words, mean_of(total, len(updates), unit, DEFAULTS.norm_limit)


def _seed(device: int) -> bytes:
    return hashlib.sha256(f"pad {device}".encode()).digest()


def nearest(update: Float32Vector, held: Sequence[NDArray[Any]]) -> float:
    """Return the largest cosine of an update (d,) with any combination of the vectors that the attacker has."""
    basis, _ = np.linalg.qr(np.stack([np.asarray(v, np.float64) for v in held], axis=1))
    return float(np.linalg.norm(basis.T @ update) / np.linalg.norm(update))


def colluding(lab: Lab) -> Result:
    """Return how near any combination of words and means comes to one update, and how near the mean alone does."""
    updates = [lab.update(lab.pick(f"sums {i}", EACH), ONE_EPOCH, seed=i) for i in range(CELLS[0])]
    words, mean = words_of(updates)
    # From chance, as many vectors of noise: in so few coordinates any vectors come near any other.
    noise = [lab.rng(f"sums noise {i}").integers(0, 1 << 32, lab.length, np.uint32).view(np.int32) for i in CELLS]
    return Result(
        name="colluding-device",
        attacker=ATTACKER,
        success=max(nearest(u, [*(w.view(np.int32) for w in words), mean]) for u in updates),
        chance=max(nearest(u, [*noise, mean]) for u in updates),
        unit="cosine",
        margin=0.02,
        note=f"the mean of {CELLS[0]} alone {max(cosine(u, mean) for u in updates):.3f}; without a keeper 1.000",
        keys="round",
        devices=CELLS[0],
    )


def _uneven(lab: Lab, what: str, count: int, images: Images, evenness: float = 1.0) -> list[Images]:
    """Return the images of ``count`` devices, whose labels are uneven by a Dirichlet draw."""
    rng, found = lab.rng(what), []
    by_label = [np.flatnonzero(images.y == c) for c in range(CLASSES)]
    for _ in range(count):
        labels = rng.choice(CLASSES, EACH, p=rng.dirichlet(np.full(CLASSES, evenness)))
        found.append(images.rows(np.array([rng.choice(by_label[c]) for c in labels])))
    return found


def _devices(lab: Lab, what: str, count: int, images: Images) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return updates (count, d) of devices with uneven labels, and the share of each label on them (count, 10)."""
    parts = _uneven(lab, what, count, images)
    updates = [lab.update(mine, ONE_EPOCH, seed=device).astype(np.float64) for device, mine in enumerate(parts)]
    return np.stack(updates), np.stack([np.bincount(mine.y, minlength=CLASSES) / EACH for mine in parts])


def label_mix(lab: Lab) -> list[Result]:
    """Return the correlation of a device's label shares with those read from the mean of its cell.

    The reader is a ridge regression from the updates of the attacker's own devices to their labels; of its strengths the best for
    the attacker counts.
    """
    updates, mixes = _devices(lab, "label mix", lab.trials(60, 30), lab.private)
    own, known = _devices(lab, "label mix, own", lab.trials(300, 60), lab.public)
    centre, share = own.mean(0), known.mean(0)
    gram = (own - centre) @ (own - centre).T
    found = []
    for size in (1, *CELLS):
        cells = len(updates) // size
        means = updates[: cells * size].reshape(cells, size, -1).mean(1)
        best = -1.0
        for strength in RIDGE:
            solved = np.linalg.solve(gram + strength * np.trace(gram) / len(gram) * np.eye(len(gram)), known - share)
            guess = np.repeat((means - centre) @ (own - centre).T @ solved + share, size, axis=0)
            best = max(best, float(np.corrcoef(guess.ravel(), mixes[: cells * size].ravel())[0, 1]))
        found.append(best)
    return [
        Result(
            name="label-mix",
            attacker=ATTACKER,
            success=r,
            chance=0.0,
            unit="r",
            note=f"from the update itself {found[0]:.2f}",
            keys="round",
            devices=size,
        )
        for size, r in zip(CELLS, found[1:], strict=True)
    ]


def probe(lab: Lab) -> list[Result]:
    """Return how much the groups of a look say of a class's share on a device, with a probe among the updates and without.

    The probe is the direction in which updates differ by the share of that class, learnt from the attacker's own devices. The
    aggregator gets sides of CFL's cut, or the two groups of FedGroup (EDC). The last row is that of a keeper that has a device:
    it gets the cosines with the probe.
    """
    updates, mixes = _devices(lab, "probe", lab.trials(60, LOOKED), lab.private)
    own, known = _devices(lab, "probe, own", lab.trials(300, 60), lab.public)
    centred = own - own.mean(0)
    gram = centred @ centred.T
    directions = centred.T @ np.linalg.solve(
        gram + RIDGE[1] * np.trace(gram) / len(gram) * np.eye(len(gram)), known - known.mean(0)
    )
    directions *= np.median(np.linalg.norm(updates, axis=1)) / np.linalg.norm(directions, axis=0)
    found: dict[str, list[tuple[float, float]]] = {"probe": [], "probe, EDC": [], "probe, keeper": []}
    for start in range(0, len(updates) - LOOKED + 1, LOOKED):
        part, shares = updates[start : start + LOOKED], mixes[start : start + LOOKED]
        for label in range(CLASSES):
            alone, probed = (_cosines(lab, rows) for rows in (part, np.vstack([part, directions[:, label]])))
            for name, sides in (("probe", _cut), ("probe, EDC", _two)):
                with_probe, without = (_related(sides(c)[:LOOKED], shares[:, label]) for c in (probed, alone))
                found[name].append((with_probe, without))
            found["probe, keeper"].append((_related(probed[LOOKED, :LOOKED], shares[:, label]), 0.0))
    attackers = {"probe, keeper": "keeper with one device, which sends a probe"}
    return [
        Result(
            name=name,
            attacker=attackers.get(name, ATTACKER),
            success=float(np.mean([one for one, _ in pairs])),
            chance=float(np.mean([other for _, other in pairs])),
            unit="r",
            margin=0.05,
            note=f"share of a class on each of {LOOKED} devices; chance is without a probe",
            keys="round",
            devices=LOOKED,
        )
        for name, pairs in found.items()
    ]


def _cosines(lab: Lab, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines of updates (n, d) by their sketches under the round's rotation, as the keeper gets them."""
    sketches = [sketch(lab.masked(row.astype(np.float32), "rotation")).view(np.int32) for row in rows]
    words = np.stack(sketches).astype(np.float64)
    return cosine_from_gram(words @ words.T)


def _cut(cosines: NDArray[np.float64]) -> NDArray[np.float64]:
    side = np.zeros(len(cosines))
    for cut in candidates(CflSettings(), cosines, limits.LEAST_CELL)[:1]:
        side[list(cut.right)] = 1
    return side


def _two(cosines: NDArray[np.float64]) -> NDArray[np.float64]:
    return join_small(cosines, group_gram(cosines, 2, "edc", 0), limits.LEAST_CELL).astype(np.float64)


def _related(told: NDArray[np.float64], share: NDArray[np.float64]) -> float:
    return 0.0 if told.std() == 0 or share.std() == 0 else abs(float(np.corrcoef(told, share)[0, 1]))


def crafted(lab: Lab) -> Result:
    """Return how many of `CRAFTED` vectors that are no opened sum a device takes from an aggregator without a device.

    It has the opened sums of two rounds and their codes, and sends numbers of its own, other orders, fractions and sums of the
    other round.
    """
    rng, most = lab.rng("crafted"), most_summed(CELLS[1])
    unit, count = unit_of(DEFAULTS.norm_limit, lab.length, most), CELLS[1]
    keys, sums, codes = [rng.bytes(32) for _ in range(2)], [], []
    for round_, key in enumerate(keys):
        updates = [lab.update(lab.pick(f"crafted {round_} {i}", EACH), ONE_EPOCH, seed=i) for i in range(count)]
        words = [hidden(update, unit, most, ()).view(np.int32) for update in updates]
        sums.append(np.sum(words, axis=0, dtype=np.int64).astype(np.int32))
        codes.append(added(code(one, key, {0: 1}) for one in words))
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: (rng.integers(-(1 << 31), 1 << 31, lab.length).astype(np.int32), codes[0]),
        lambda: (rng.permutation(sums[0]), codes[0]),
        lambda: ((sums[0] * rng.random()).astype(np.int32), codes[0]),
        lambda: (sums[1], codes[rng.integers(2)]),
    )
    tried = (kinds[trial % len(kinds)]() for trial in range(CRAFTED))
    accepted = sum(matches(values, keys[0], {0: count}, told) for values, told in tried)
    return Result(
        name="crafted-mean",
        attacker="aggregator without a device, in a run with a keeper",
        success=accepted / CRAFTED,
        chance=0.0,
        unit="share",
        note=f"{accepted} of {CRAFTED} accepted",
        keys="round",
        devices=count,
    )


def keepers(lab: Lab) -> list[Result]:
    """Return how near they come to one update who have the aggregator and its keeper, or one that was restored from a backup."""
    updates = [lab.update(lab.pick(f"sums {i}", EACH), ONE_EPOCH, seed=i) for i in range(CELLS[1])]
    words, mean = words_of(updates)
    pad = np.zeros(lab.length, np.uint32)
    add_pad(pad, _seed(0))
    total, without = np.sum(updates, axis=0), np.sum(updates[1:], axis=0)
    found = {
        "keeper, with it": ((words[0] - pad).view(np.int32), "aggregator and its keeper"),
        "keeper, restored": (total - without, "aggregator with a keeper from a backup, which opens a second partition"),
    }
    return [
        Result(
            name=name,
            attacker=attacker,
            success=cosine(np.asarray(vector, np.float64), updates[0]),
            chance=cosine(mean, updates[0]),
            unit="cosine",
            note="the claim does not cover this",
            keys="round",
            devices=CELLS[1],
        )
        for name, (vector, attacker) in found.items()
    ]


def leaver(lab: Lab) -> list[Result]:
    """Return how near the difference of two rounds' sums comes to a leaver's update, with the keeper's rule and without.

    The rule lets sums differ by `LEAST_CHANGE` devices, so two others leave with it. Chance is the mean of the round before.
    """
    found = []
    for count in LEAVERS:
        parts = _uneven(lab, f"leaver {count}", count, lab.private, evenness=0.5)
        *_, before, after = lab.fedavg([parts] * LEFT_AFTER, seed_step=count)
        for name, gone in (("leaver", LEAST_CHANGE), ("leaver, rule off", 1)):
            near, mean = [], []
            for victim in range(VICTIMS):
                stay = [i for i in range(count) if (i - victim) % count >= gone]
                near.append(cosine(before.sum(0) - after[stay].sum(0), before[victim]))
                mean.append(cosine(before.mean(0), before[victim]))
            found.append(
                Result(
                    name=name,
                    attacker=ATTACKER,
                    success=float(np.median(near)),
                    chance=float(np.median(mean)),
                    unit="cosine",
                    margin=0.25 if gone > 1 else 0.02,
                    note=f"{gone} of {count} gone after round {LEFT_AFTER - 1}",
                    keys="round",
                    devices=count,
                )
            )
    return found
