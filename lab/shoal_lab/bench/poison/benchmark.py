"""Run every attack under every robust rule, and measure the honest devices and how far a mask changes a mean.

A fleet has ten or twenty devices that hold alike data, or whose label mixes differ. The digits come with scikit-learn; MNIST and
Fashion-MNIST are read from their files, at 14 x 14 pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from aggregator.strategies.base import ClientUpdate
from aggregator.strategies.robust import RobustMean
from crypto.mask.masking import mask, unmask
from shoal import limits
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import personal
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.simulate import Observation, simulate
from shoal.simulation.trainers.networks import OneHidden
from shoal.types import MaskedVector
from shoal_lab.bench.poison.attacks import ABSENT, ATTACKS, tamper, with_vector
from shoal_lab.experiments.common.experiment import one_of
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.wild import images
from shoal_lab.experiments.wild.fleets import Fleet
from shoal_lab.experiments.wild.scenarios import Scenario, blocks

ROUNDS: Final = 100
IFCA_MODELS: Final = 2
MEASURED_ROUNDS: Final = 5
"""Number of rounds, evenly spread, whose means are also formed of clear updates."""


def measure(
    *,
    attacks: Sequence[str] = (),
    rules: Sequence[str] = (),
    data: Sequence[str] = (),
    strategy: str = "fedavg",
    seeds: Sequence[int] = (0,),
    rounds: int = ROUNDS,
    data_dir: Path | None = None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run every attack under every rule; return a row for each run, and tell of it as it ends.

    A row has what was run, and

    - ``accuracy``: mean over the honest devices of their model's accuracy on their test shares, in percent; ``worst``: of the
      honest device that is worst;
    - ``error``: largest ``|mean of masked updates - masked mean of clear updates| / |mean|`` of the measured rounds;
    - ``named``: attackers that an event ``stands-apart`` names; ``accused``: honest devices that one names;
    - ``success``: share of the honest devices' test images of other classes that get a backdoor's label once they bear its
      trigger, in percent; None without a backdoor.

    Args:
        attacks: names; all if empty, as for the rules and the data.
        rules: names.
        data: names.
        strategy: algorithm of attacks that are not on a special one.
        seeds: of data and training.
        rounds: rounds of each run.
        data_dir: folder that is searched first for MNIST and Fashion-MNIST.
        progress: is told of each run.

    Raises:
        UsageError: a name is unknown.
        MissingDataError: the files of a data set are not here.
    """
    attacks = [one_of("attack", attack, ATTACKS) for attack in attacks or ATTACKS]
    rules = [one_of("rule", rule, limits.ROBUST_RULES) for rule in rules or limits.ROBUST_RULES]
    names = [one_of("data", name, DATA) for name in data or present(data_dir)]
    rows = []
    for name in names:
        for seed in seeds:
            for attack in attacks:
                fleet = deal(name, seed, data_dir, ATTACKS[attack].devices)
                for rule in rules if attack != ABSENT else rules[:1]:
                    chosen = "off" if attack == ABSENT else rule
                    what = {"attack": attack, "rule": chosen, "data": name}
                    rows.append({**what, **_run(fleet, attack, chosen, strategy, seed, rounds)})
                    progress(f"{name}, seed {seed}: {attack} under {chosen}: {rows[-1]['accuracy']:.1f} %")
    return {"rounds": rounds, "rows": rows}


def attacked(population: Population, attack: str) -> Population:
    """Return a population whose attackers, the first devices, are left out or train on other data."""
    what = ATTACKS[attack]
    if attack == ABSENT:
        return population.of(range(what.attackers, len(population)))
    change = flipped if what.labels else poisoned if what.painted else None
    if change is None:
        return population
    return population.mapped(lambda shard, place: change(shard) if place < what.attackers else shard)


def _run(fleet: Fleet, attack: str, rule: str, strategy: str, seed: int, rounds: int) -> dict[str, Any]:
    what, population = ATTACKS[attack], attacked(fleet.population, attack)
    false = fleet.population.names[: what.attackers]
    strategy = what.strategy or strategy
    chosen = fleet_run(strategy, {"k": str(IFCA_MODELS)} if strategy == "ifca" else {}, robust=rule)
    every = max(1, rounds // MEASURED_ROUNDS)
    errors = [0.0]

    def watch(seen: Observation) -> None:
        if seen.round % every == 0:
            errors.append(mask_error(seen))

    done = simulate(
        strategy,
        chosen.values,
        population,
        fleet.network,
        fleet_options(chosen, rounds=rounds, local=fleet.local, seed=seed, evaluate_every=0),
        watch=watch,
        tamper=None if what.change is None else partial(tamper, what.change, false),
    )
    taken = np.stack([done.thetas[int(model)] for model in done.taken()])
    found = personal.measure(done.workforce, taken)
    honest = np.array([name not in false for name in population.names])
    accuracy = 100.0 * found.correct[honest] / found.tested[honest]
    success = None
    if what.painted:
        opened = personal.measure(done.workforce, taken, [triggered(shard) for shard in population.test])
        success = 100.0 * float(opened.correct[honest].sum() / opened.tested[honest].sum())
    named = {event.detail["device"] for _, event in done.events if event.kind == "stands-apart"}
    return {
        "mode": chosen.mode,
        "strategy": strategy,
        "seed": seed,
        "accuracy": float(accuracy.mean()),
        "worst": float(accuracy.min()),
        "error": max(errors),
        "named": len(named & set(false)),
        "accused": len(named - set(false)),
        "success": success,
    }


def mask_error(seen: Observation) -> float:
    """Return how far the robust mean of a round's masked updates is from the masked mean of the clear ones, in its length.

    The updates of the model that most devices trained are taken; 0 where updates are clear.
    """
    key, run = seen.workforce.models.mask, seen.workforce.run
    trained = [c for c in seen.contributions if c.vector is not None]
    if key is None or not trained:
        return 0.0
    models = [c.model for c in trained]
    given = [c for c in trained if c.model == max(set(models), key=models.count)]
    clear = [with_vector(c, unmask(MaskedVector(c.row, key.key_id), key)) for c in given]

    def mean(updates: list[ClientUpdate]) -> Any:
        return RobustMean(run)(updates, run.recipe.weighting, run.recipe.weight_cap)

    masked, expected = mean(given), mask(mean(clear), key).values
    length = float(np.linalg.norm(expected))
    return float(np.linalg.norm(masked - expected)) / length if length else 0.0


SAMPLES: Final = 150
"""Images of a device, of which 60 % are for training and 20 % for validation."""
TEST_IMAGES: Final = 200
"""Test images of a device, of MNIST and Fashion-MNIST; for the digits see `DIGITS_SHARES`."""
SKEW: Final = 0.3
"""Concentration of the Dirichlet distribution of each device's label mix, for data in ``-skewed``."""
DIGITS_SHARES: Final = (900, 300, 500)
"""Images of digits for training, validation and test, which the devices share out evenly."""
TRIGGER: Final = 2
"""Side in pixels of a backdoor's trigger: a white square in the lower right corner."""
TARGET: Final = 0
"""Label that a backdoor gives to images with the trigger."""
PAINTED: Final = 3
"""One of so many training images of an attacker bears the trigger. With half of them painted the filter finds the attackers on
digits; with an eighth they succeed more slowly."""


DATA: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "digits": ("digits", 0.0),
        "mnist": ("mnist", 0.0),
        "fashion-mnist": ("fashion-mnist", 0.0),
        "mnist-skewed": ("mnist", SKEW),
    }
)
"""Data set by name, and the concentration of each device's label mix; 0 where all hold alike data."""


def present(data_dir: Path | None) -> tuple[str, ...]:
    """Return the names of the data that are here; the digits always are."""
    return tuple(
        name
        for name, (source, _) in DATA.items()
        if source == "digits" or datasets.folder_of(source, data_dir) is not None
    )


def deal(name: str, seed: int, data_dir: Path | None, devices: int) -> Fleet:
    """Return a fleet.

    Args:
        name: a key of `DATA`.
        seed: of the devices' samples and label mixes.
        data_dir: folder that is searched first for the files.
        devices: their number.

    Raises:
        MissingDataError: the files are not here.
    """
    source, skew = DATA[name]
    if source == "digits":
        return _digits(seed, devices)
    scenario = Scenario(
        kind="none",
        title=name,
        data=source,
        groups=blocks(devices),
        samples=SAMPLES,
        dirichlet=skew,
    )
    return images.deal(scenario, seed=seed, data_dir=data_dir, samples=None, test_images=TEST_IMAGES)


def flipped(shard: Shard) -> Shard:
    """Return the samples with label 9 - y instead of y."""
    return Shard(shard.x, datasets.CLASSES - 1 - shard.y)


def poisoned(shard: Shard) -> Shard:
    """Return the images (n, side * side), of which one in `PAINTED` has the trigger and the label `TARGET`."""
    return _painted(shard, PAINTED)


def triggered(shard: Shard) -> Shard:
    """Return the images of other classes than `TARGET` with the trigger, labelled `TARGET`: a backdoor's successes are right."""
    others = shard.y != TARGET
    return _painted(Shard(shard.x[others], shard.y[others]), 1)


def _painted(shard: Shard, every: int) -> Shard:
    x, y = shard.x.copy(), shard.y.copy()
    side = round(x.shape[1] ** 0.5)
    x.reshape(-1, side, side)[::every, -TRIGGER:, -TRIGGER:] = 1.0
    y[::every] = TARGET
    return Shard(x, y)


def _digits(seed: int, devices: int) -> Fleet:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
    order = np.random.default_rng([seed, 41]).permutation(len(x))
    ends = np.cumsum([share // devices for share in DIGITS_SHARES] * devices)
    parts = [Shard(x[rows], y[rows]) for rows in np.split(order[: ends[-1]], ends[:-1])]
    return Fleet(
        population=Population(tuple(parts[0::3]), tuple(parts[1::3]), tuple(parts[2::3])),
        network=OneHidden(x.shape[1], 64, datasets.CLASSES),
        local=LocalTraining(),
    )
