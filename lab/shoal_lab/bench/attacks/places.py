"""Where the coordinates of masked updates belong: their tensor, or their place in the model.

Two runs stand side by side for attacks that watch several rounds under one key: the fleet's, and the attacker's shadow of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.types import Float32Vector
from shoal_lab.bench.attacks.lab import ONE_EPOCH, Attack, Images, Keeps, Lab, Result, balanced_accuracy, cosine

DEVICES: Final = 10
SAMPLES: Final = 80
ROUNDS: Final = 10

Updates = NDArray[np.float32]


def fleet_run(lab: Lab) -> Updates:
    """Return the clear updates of ten devices over the rounds, (rounds, devices, d), from the lab's origin."""
    return lab.once("fleet run", lambda: _run(lab, lab.private, "fleet"))


def shadow_run(lab: Lab) -> Updates:
    """Return the same of the attacker's imitation: the same origin, own data of the same kind."""
    return lab.once("shadow run", lambda: _run(lab, lab.public, "shadow"))


def masked_run(lab: Lab, mode: str) -> Updates:
    """Return the fleet's run as the aggregator has it, all under one key, (rounds, devices, d)."""
    return lab.once(
        ("masked run", mode),
        lambda: np.stack([np.stack([lab.masked(u, mode) for u in one]) for one in fleet_run(lab)]),
    )


def _run(lab: Lab, images: Images, who: str) -> Updates:
    parts = [lab.pick(f"{who} {i}", SAMPLES, images) for i in range(DEVICES)]
    return np.stack(lab.fedavg([parts] * ROUNDS, 1000))


IMITATES: Final = "aggregator with the clear initial model and data of the same kind, to imitate the run"
PER_LAYER: Final = 800
"""Coordinates of a tensor to learn from, at most."""
FLOOR: Final = 1e-12


def features(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return features of each coordinate, (d, features), from updates (rounds, devices, d); signs are left out."""
    size = np.abs(values).astype(np.float64) + FLOOR
    mean = np.abs(values.mean(1, dtype=np.float64)) + FLOOR
    spread = values.std((0, 1), dtype=np.float64) + FLOOR
    return np.stack(
        [
            np.log(size.mean((0, 1))),
            np.log(size.max((0, 1))),
            np.log(mean.mean(0)),
            (values == 0).mean((0, 1)),
            np.log(size.mean((0, 1))) - np.log(spread),
            np.log(mean[0]),
            np.log(mean[-1]),
        ],
        1,
    )


def of_each(truth: NDArray[np.int64], rng: np.random.Generator, most: int) -> NDArray[np.int64]:
    """Return coordinates, at most so many of each tensor that ``truth`` (d,) names."""
    which = [np.flatnonzero(truth == c) for c in np.unique(truth)]
    return np.concatenate([rng.choice(w, min(most, len(w)), replace=False) for w in which])


def forest(lab: Lab, name: str, at: NDArray[np.int64], rows: Callable[[], NDArray[np.float64]], least: int = 1) -> Any:
    """Return a classifier of coordinates by tensor, made once: it learns ``rows`` of the coordinates ``at`` (n,)."""
    from sklearn.ensemble import RandomForestClassifier

    made = RandomForestClassifier(60, class_weight="balanced", min_samples_leaf=least, random_state=0, n_jobs=1)
    return lab.once(name, lambda: made.fit(rows(), lab.layers[at]))


def learned(lab: Lab, rounds: int) -> Any:
    """Return the classifier of the shadow run's first ``rounds``."""
    at = of_each(lab.layers, lab.rng("layer statistics"), PER_LAYER)
    return forest(lab, f"layers learned {rounds}", at, lambda: features(shadow_run(lab)[:rounds])[at], least=2)


def layer_statistics(lab: Lab, mode: str) -> list[Result]:
    """Return how well the tensor of each masked coordinate is named, from one round and from all under one key.

    The attacker trains a classifier of the spread of a coordinate's values on a shadow run, where the answer is known: Shokri et
    al., "Membership Inference Attacks against Machine Learning Models" (2017), for shadow training. The figure is the balanced
    accuracy over the tensors.
    """
    truth = lab.layer_of(mode)
    results = []
    for rounds in (1, ROUNDS):
        guess = learned(lab, rounds).predict(features(masked_run(lab, mode)[:rounds]))
        note = "judged by the tensor that a coordinate draws most on"
        results.append(
            Result(
                name=f"layer of a coordinate, {rounds} round{'s' * (rounds > 1)}",
                attacker=IMITATES,
                success=balanced_accuracy(guess, truth),
                chance=1 / len(np.unique(truth)),
                unit="accuracy",
                margin=0.1,
                note=note if lab.keeps(mode) == "lengths" else "",
                devices=DEVICES,
            )
        )
    return results


MOST: Final = 1200
"""Coordinates that are looked for, at most: those of the last layer and a sample of the others."""
TIMES_CHANCE: Final = 10
"""Threshold of success: this many times chance is not reached by luck with several hundred coordinates."""
_CHUNK: Final = 256


def paths(values: NDArray[np.float32], scale: NDArray[np.float64], *, signed: bool) -> NDArray[np.float64]:
    """Return each coordinate's mean over the devices in every round, (d, rounds), over ``scale`` (rounds,).

    Unless ``signed``, a path's sign is chosen so that its longest step is positive.
    """
    path: NDArray[np.float64] = values.mean(1, dtype=np.float64).T / scale
    if signed:
        return path
    longest = path[np.arange(len(path)), np.abs(path).argmax(1)]
    return np.asarray(path * np.where(longest < 0, -1.0, 1.0)[:, None], np.float64)


def closest(paths_seen: NDArray[np.float64], paths_known: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each path (n, rounds) the nearest of the known ones (d, rounds), (n,), int64."""
    lengths = (paths_known**2).sum(1)
    found = [
        (lengths - 2 * paths_seen[at : at + _CHUNK] @ paths_known.T).argmin(1)
        for at in range(0, len(paths_seen), _CHUNK)
    ]
    return np.concatenate(found)


def shadow_matching(lab: Lab, mode: str) -> list[Result]:
    """Return the shares of the last layer's coordinates and of the others' whose place is found.

    All rounds use one key, so coordinate i is the same in every round; and runs from one origin on similar data behave alike, so
    a coordinate's path over the rounds is matched to the paths of a shadow run. A linkage attack as on pseudonymised series:
    Narayanan and Shmatikov, "Robust De-anonymization of Large Sparse Datasets" (2008), with the shadow run as the auxiliary
    information.
    """
    places, signed = lab.places(mode), lab.keeps(mode) != "magnitudes"
    moves = np.abs(shadow_run(lab)).max((0, 1)) > 0
    last = lab.layers >= lab.layers.max() - 1
    groups = {"last layer": np.flatnonzero(last & moves), "first layer": np.flatnonzero(~last & moves)}
    rng = lab.rng("shadow matching")
    results = []
    for rounds in (1, ROUNDS):
        known, seen = shadow_run(lab)[:rounds], masked_run(lab, mode)[:rounds]
        scale = known.mean(1, dtype=np.float64).std(1)
        known_paths, seen_paths = paths(known, scale, signed=signed), paths(seen, scale, signed=signed)
        for name, wanted in groups.items():
            chosen = wanted if len(wanted) <= MOST else rng.choice(wanted, MOST, replace=False)
            rows = np.flatnonzero(np.isin(places, chosen)) if (places >= 0).all() else chosen
            found = closest(seen_paths[rows], known_paths)
            results.append(
                Result(
                    name=f"shadow matching, {rounds} round{'s' * (rounds > 1)}, {name}",
                    attacker=IMITATES,
                    success=float((found == places[rows]).mean()),
                    chance=1 / lab.length,
                    unit="share",
                    margin=TIMES_CHANCE / lab.length,
                    note="coordinates whose place is found exactly",
                    devices=DEVICES,
                )
            )
    return results


KNOWS_PAIR: Final = (
    "aggregator that gets hold of one clear vector and its masked form, here an origin, which the protocol never sends"
)


def read_map(
    clear: Float32Vector, masked: Float32Vector, keeps: Keeps
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return (places, signs), each (d,): masked coordinate i is taken to be signs[i] times clear coordinate places[i].

    Ranks are matched (of absolute values if the mode changes signs), so rounding errors in either vector do no harm.
    """
    a, b = (np.abs(clear), np.abs(masked)) if keeps == "magnitudes" else (clear, masked)
    places = np.empty(clear.size, np.int64)
    places[np.argsort(b, kind="stable")] = np.argsort(a, kind="stable")
    signs = np.ones(clear.size, np.float32)
    if keeps == "magnitudes":
        signs = np.where((clear[places] < 0) == (masked < 0), 1.0, -1.0).astype(np.float32)
    return places, signs


def undo(masked: Float32Vector, places: NDArray[np.int64], signs: NDArray[np.float32]) -> Float32Vector:
    """Return ``masked`` (d,) with each coordinate moved to its place in the map of `read_map`."""
    clear = np.zeros_like(masked)
    clear[places] = masked * signs
    return clear


def known_pair(lab: Lab, mode: str) -> list[Result]:
    """Return the share of the coordinates whose place is found from one known pair, and how well another update is opened.

    A known-plaintext attack: one clear vector and its masked form.
    """
    places, signs = read_map(lab.origin, lab.masked(lab.origin, mode), lab.keeps(mode))
    update = lab.update(lab.pick("known pair", 80), ONE_EPOCH)
    opened = undo(lab.masked(update, mode), places, signs)
    apart = cosine(lab.update(lab.pick("known pair, the attacker's", 80, lab.public), ONE_EPOCH), update)
    return [
        Result(
            name="known pair: places of coordinates",
            attacker=KNOWS_PAIR,
            success=float((places == lab.places(mode)).mean()),  # no place is right if the mode mixes coordinates
            chance=1 / lab.length,
            unit="share",
            margin=0.01,
        ),
        Result(
            name="known pair: another update opened",
            attacker=KNOWS_PAIR,
            success=cosine(opened, update),
            chance=apart,
            unit="cosine",
            margin=0.05,
            note="chance is the attacker's own training from the same origin",
        ),
    ]


KNOWS_MEAN: Final = "aggregator that gets two successive clear models, as any device has them"
KNOWS_MANY: Final = "aggregator that knows the clear updates of some devices, without their key"


def updates(lab: Lab) -> list[Float32Vector]:
    """Return the clear updates (d,) of ten devices in one round."""
    return lab.once(
        "known mean",
        lambda: [lab.update(lab.pick(f"known mean {i}", SAMPLES), ONE_EPOCH, seed=i) for i in range(DEVICES)],
    )


def project(
    known: list[Float32Vector], known_masked: list[Float32Vector], masked: Float32Vector
) -> NDArray[np.float64]:
    """Return the vector (d,) in the span of the ``known`` clear ones that is nearest to the unmasked ``masked`` (d,)."""
    b = np.stack(known_masked).astype(np.float64)
    weights = np.linalg.lstsq(b.T, masked.astype(np.float64), rcond=None)[0]
    return np.asarray(weights @ np.stack(known).astype(np.float64), np.float64)


def known_mean(lab: Lab, mode: str) -> list[Result]:
    """Return how well a device's update is opened with one clear mean, and with the clear updates of nine others.

    Two successive clear models give a clear mean, whose masked form the aggregator computed itself: a known pair for
    permutations. Any mask preserves dot products, so under every mode an update's component along known vectors follows by
    projection; with enough known vectors this is the whole update. Liu et al., "An Attacker's View of Distance Preserving Maps
    for Privacy Preserving Data Mining" (2006), for known samples under rotations.
    """
    clear = updates(lab)
    masked = [lab.masked(u, mode) for u in clear]
    after = lab.origin + np.stack(clear).mean(0)
    mean, mean_masked = after - lab.origin, np.stack(masked).mean(0)
    keeps, target = lab.keeps(mode), clear[3]
    if keeps == "lengths":
        opened = project([mean], [mean_masked], masked[3]).astype(np.float32)
    else:
        opened = undo(masked[3], *read_map(mean, mean_masked, keeps))
    others = [i for i in range(DEVICES) if i != 3]
    many = project([clear[i] for i in others], [masked[i] for i in others], masked[3])
    best_single = max(cosine(clear[i], target) for i in others)
    return [
        Result(
            name="known mean: an update opened",
            attacker=KNOWS_MEAN,
            success=cosine(opened, target),
            chance=cosine(mean, target),
            unit="cosine",
            margin=0.02,
            note="chance is the mean itself",
            devices=DEVICES,
        ),
        Result(
            name="nine updates known: the tenth projected",
            attacker=KNOWS_MANY,
            success=cosine(many, target),
            chance=max(best_single, cosine(np.mean([clear[i] for i in others], axis=0), target)),
            unit="cosine",
            margin=0.02,
            note="dot products alone: the same under every mask; chance is the mean of the nine",
            devices=DEVICES,
        ),
    ]


ATTACKS: Final = (
    Attack("layer from statistics", "Shokri et al. 2017 (shadow training)", IMITATES, layer_statistics),
    Attack("shadow matching", "Narayanan and Shmatikov 2008 (linking by auxiliary series)", IMITATES, shadow_matching),
    Attack("known pair", "known-plaintext attack; Shoal's design, rule 1", KNOWS_PAIR, known_pair),
    Attack("known mean", "Liu et al. 2006 (known samples); known plaintext", KNOWS_MEAN, known_mean),
)
