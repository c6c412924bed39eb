"""Run every attack under every robust rule, and measure the honest devices and how far a mask changes a mean.

A fleet has ten or twenty devices that hold alike data, or whose label mixes differ. The digits come with scikit-learn; MNIST and
Fashion-MNIST are read from their files, at 14 x 14 pixels.

An attacker is a member of the fleet: it knows the round's mask, and sees what every device sees. "A little is enough" (ALIE)
is given more than that, the other devices' updates. `lines` makes the tables of docs/poison.md: attacks down, rules across, a
table for each data set and algorithm; backdoors have their own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from aggregator.strategies.base import ClientUpdate, norm_of
from aggregator.strategies.robust import RobustMean
from crypto.mask.masking import mask, unmask
from shoal import limits
from shoal.protocol.recipe import DEFAULTS, LocalTraining
from shoal.report import record
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import personal
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.simulate import Observation, simulate
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import OneHidden
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.experiments.common.experiment import one_of
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.wild import images
from shoal_lab.experiments.wild.fleets import Fleet
from shoal_lab.experiments.wild.scenarios import Scenario, blocks

BOOST: Final = 10.0
"""Factor of boosted updates; the relative norm limit is ten median norms."""
CAP: Final = 1.9
"""Length of a stretched backdoor's update in median norms: the filter shortens what is longer than 2."""
ALIE_DEVIATIONS: Final = 1.2
"""Standard deviations by which ALIE shifts each coordinate of the mean. With three false updates of ten the paper's formula
gives 0.4 for a median; 1.2 is what the published attacks on neural networks use."""

Change = Callable[[list[ClientUpdate], list[ClientUpdate], Workforce], list[ClientUpdate]]
"""Turns the attackers' uploads into false ones, given the honest ones; all with updates, which are masked."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What attackers do.

    Attributes:
        text: a description in one line.
        labels: whether they train on flipped labels.
        painted: whether a part of the images that they train on has the trigger and the label of a backdoor.
        change: replaces their uploads; None leaves these as they are.
        strategy: the algorithm under attack; empty for the caller's choice.
        attackers: their number; devices: that of the fleet, with them.
    """

    text: str
    labels: bool = False
    painted: bool = False
    change: Change | None = None
    strategy: str = ""
    attackers: int = 3
    devices: int = 10


def tamper(
    change: Change, names: tuple[str, ...], given: list[ClientUpdate], workforce: Workforce
) -> list[ClientUpdate]:
    """Return a round's uploads with those of ``names`` changed; uploads without an update stay."""
    false = [c for c in given if c.device in names and c.vector is not None]
    honest = [c for c in given if c.device not in names and c.vector is not None]
    if not false or not honest:
        return given
    changed = {c.device: c for c in change(false, honest, workforce)}
    return [changed.get(c.device, c) if c.vector is not None else c for c in given]


def with_vector(upload: ClientUpdate, vector: Float32Vector) -> ClientUpdate:
    """Return the upload with another masked update (d,)."""
    vector = np.ascontiguousarray(vector, np.float32)
    return dataclasses.replace(upload, vector=vector, norm=norm_of(vector))


def _times(factor: float) -> Change:
    return lambda false, _honest, _workforce: [with_vector(c, c.row * np.float32(factor)) for c in false]


def _long(factor: float) -> Change:
    """Make updates so many times as long as the median of the honest ones."""

    def changed(false: list[ClientUpdate], honest: list[ClientUpdate], _workforce: Workforce) -> list[ClientUpdate]:
        usual = float(np.median([c.norm for c in honest]))
        return [with_vector(c, c.row * np.float32(factor * usual / c.norm)) if c.norm else c for c in false]

    return changed


def _noise(false: list[ClientUpdate], _honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    """Normal noise as long as the update. A mask turns noise into noise, so there is none to apply."""
    found = []
    for c in false:
        drawn = np.random.default_rng([workforce.run.seed, c.round, workforce.place_of[c.device]])
        noise = drawn.standard_normal(len(c.row), np.float32)
        found.append(with_vector(c, noise * np.float32(c.norm / norm_of(noise))))
    return found


def _alie(false: list[ClientUpdate], honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    """Baruch et al. (2019): the honest mean less some standard deviations of each coordinate."""
    key = workforce.models.mask
    rows = [c.row if key is None else unmask(MaskedVector(c.row, key.key_id), key) for c in honest]
    clear = np.stack(rows)
    little = (clear.mean(axis=0) - ALIE_DEVIATIONS * clear.std(axis=0)).astype(np.float32)
    sent = little if key is None else mask(little, key).values
    return [with_vector(c, sent) for c in false]


def _false_counts(false: list[ClientUpdate], honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    flipped = _times(-1.0)(false, honest, workforce)
    return [dataclasses.replace(c, samples=workforce.run.recipe.max_samples) for c in flipped]


def _false_losses(false: list[ClientUpdate], honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    """Claim the model that most honest devices chose, with a loss of 0, and send a reversed update."""
    favourite = Counter(c.model for c in honest).most_common(1)[0][0]
    flipped = _times(-1.0)(false, honest, workforce)
    return [dataclasses.replace(c, model=favourite, loss=0.0, margins=tuple(-m for m in c.margins)) for c in flipped]


def _backdoors() -> dict[str, Attack]:
    """Return the backdoors by name: no attacker, or one to three of twenty, whose updates are of usual length or stretched."""

    def backdoor(attackers: int, text: str, change: Change | None = None) -> Attack:
        return Attack(text, painted=True, change=change, attackers=attackers, devices=20)

    found = {"backdoor-0": backdoor(0, "all twenty devices are honest")}
    for name, factor in (("backdoor", 1.0), ("backdoor-cap", CAP)):
        for count in (1, 2, 3):
            text = f"{count} of twenty train on images with a trigger, and send an update of {factor:g} median norms"
            found[f"{name}-{count}"] = backdoor(count, text, _long(factor))
    return found


NONE: Final = "none"
ABSENT: Final = "absent"
ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType(
    {
        ABSENT: Attack("the attackers are not in the fleet"),
        NONE: Attack("all ten devices are honest", attackers=0),
        "label-flip": Attack("trains on label 9 - y for y", labels=True),
        "sign-flip": Attack("sends its update reversed", change=_times(-1.0)),
        "boosted": Attack("sends its update times 10", change=_times(BOOST)),
        "boosted-100": Attack("sends its update times 100", change=_times(100.0)),
        "boosted-flip": Attack("sends its update reversed, times 9", change=_times(-0.9 * BOOST)),
        "boosted-labels": Attack(
            "trains on label 9 - y, sends the update times 9", labels=True, change=_times(0.9 * BOOST)
        ),
        "noise": Attack("sends noise as long as its update", change=_noise),
        "alie": Attack("sends the honest mean less 1.2 deviations of each coordinate", change=_alie),
        "false-counts": Attack(
            f"sends its update reversed, with {DEFAULTS.max_samples:,} samples", change=_false_counts
        ),
        "false-losses": Attack(
            "claims a loss of 0 for the honest devices' model and sends a reversed update",
            change=_false_losses,
            strategy="ifca",
        ),
        **_backdoors(),
    }
)
"""Attack by name. The plan's weight cap and the relative norm limit are in force under all of them."""

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


RESULTS: Final = Path(__file__).parents[3] / "results"

Rows = Sequence[Mapping[str, Any]]


def load(folder: Path = RESULTS) -> list[Mapping[str, Any]]:
    """Return the rows of the kept runs of ``shoal bench poison`` in ``folder``."""
    return [
        row
        for _, run in record.load(folder)
        if run["command"][1:3] == ["bench", "poison"]
        for row in run["data"]["rows"]
    ]


def tables(rows: Rows) -> dict[str, list[str]]:
    """Return the lines of a Markdown table for each data set and algorithm, by title.

    A cell is the honest devices' accuracy as the mean over the seeds, and the lowest of the seeds in parentheses if there are
    several. Before it there is the success of a backdoor, with the highest of the seeds.
    """
    by_data: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    strategies = {row["strategy"] for row in rows if row["attack"] == ABSENT}
    for row in rows:
        # An attack on one algorithm alone belongs to the table of those of the same data.
        own = row["strategy"] in strategies
        by_data[row["data"], row["strategy"] if own else min(strategies, default=row["strategy"])].append(row)
    return {f"{data}, {strategy}": _table(found) for (data, strategy), found in by_data.items()}


def _table(rows: Rows) -> list[str]:
    rules = [rule for rule in limits.ROBUST_RULES if any(r["rule"] == rule and r["attack"] != ABSENT for r in rows)]
    lines = [f"| attack | {' | '.join(rules)} |", "|---" * (len(rules) + 1) + "|"]
    for attack in ATTACKS:
        if attack == ABSENT:
            continue
        cells = [_cell([r for r in rows if (r["attack"], r["rule"]) == (attack, rule)]) for rule in rules]
        if any(cells):
            lines.append(f"| {attack} | {' | '.join(cell or '-' for cell in cells)} |")
    return lines


def _cell(rows: Rows) -> str:
    if not rows:
        return ""
    accuracy = _mean([float(row["accuracy"]) for row in rows], min)
    successes = [float(row["success"]) for row in rows if row.get("success") is not None]
    return f"{_mean(successes, max)} / {accuracy}" if successes else accuracy


def _mean(values: Sequence[float], worst: Callable[[Sequence[float]], float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.1f} ({worst(values):.1f})" if len(values) > 1 else f"{mean:.1f}"


def _reference(rows: Rows, title: str) -> str:
    data, strategy = title.split(", ")
    absent = [r for r in rows if (r["attack"], r["data"], r["strategy"]) == (ABSENT, data, strategy)]
    return f"{_cell(absent)} without the three" if absent else "no run without the three"


def lines(rows: Rows) -> list[str]:
    """Return all tables as lines of Markdown, each below its title, with the largest error that a mask made."""
    out: list[str] = []
    opened = [row for row in rows if row.get("success") is not None]
    for title, table in tables([row for row in rows if row not in opened]).items():
        out += [f"**{title}**: {_reference(rows, title)}", "", *table, ""]
    for title, table in tables(opened).items():
        out += [f"**{title}**: success of a backdoor / accuracy", "", *table, ""]
    errors = [float(row["error"]) for row in rows]
    modes = sorted({row["mode"] for row in rows})
    out.append(f"Largest error of a mean under the mask ({', '.join(modes)}): {max(errors, default=0.0):.0e}.")
    return out


def block() -> str:
    """Return the text between the page's marks, from the kept results."""
    return "\n".join(["", *lines(load()), ""])
