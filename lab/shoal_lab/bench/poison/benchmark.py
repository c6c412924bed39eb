"""Run every attack under every robust rule, and measure the honest devices and how far a mask changes a mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from aggregator.strategies.base import ClientUpdate
from aggregator.strategies.robust import RobustMean
from crypto.mask.masking import mask, unmask
from shoal import limits
from shoal.simulation.data import Population
from shoal.simulation.engine import personal
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.simulate import Observation, simulate
from shoal.types import MaskedVector
from shoal_lab.bench.poison import fleets
from shoal_lab.bench.poison.attacks import ABSENT, ATTACKS, tamper, with_vector
from shoal_lab.experiments.common.experiment import one_of
from shoal_lab.experiments.wild.fleets import Fleet

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
    names = [one_of("data", name, fleets.DATA) for name in data or fleets.present(data_dir)]
    rows = []
    for name in names:
        for seed in seeds:
            for attack in attacks:
                fleet = fleets.deal(name, seed, data_dir, ATTACKS[attack].devices)
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
    change = fleets.flipped if what.labels else fleets.poisoned if what.painted else None
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
        opened = personal.measure(done.workforce, taken, [fleets.triggered(shard) for shard in population.test])
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
