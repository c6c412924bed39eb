"""Common code of the experiments of Ghosh et al., sections 6.2 and 6.3: run an algorithm and report its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aggregator.strategies.base import Event
from shoal.errors import UsageError
from shoal.simulation.data import Population
from shoal.simulation.engine.metrics import adjusted_rand, purity
from shoal.simulation.engine.simulate import SimResult, SimRound, simulate
from shoal.simulation.trainers.networks import Network
from shoal.task.manifest import LocalTraining
from shoal.util.console import counted
from shoal_lab.experiments.common.experiment import Options, Progress, Result
from shoal_lab.experiments.common.paper import paper_options
from shoal_lab.experiments.ifca.alone import train_alone

RESTART_ROUNDS: Final = 10
STRATEGY_OF: Final[Mapping[str, str]] = {"ifca": "ifca", "global": "fedavg", "one-shot": "one-shot"}
"""The strategy for each name in the papers' tables; ``local`` has no rounds and is run by `alone`."""
NO_SETTINGS: Final = frozenset({"global", "local"})


@dataclass(frozen=True, slots=True)
class Setup:
    """The parameters of one experiment.

    Attributes:
        experiment: the experiment's id.
        population, network: the devices and the network that they train.
        local: recipe of one round's local training.
        rounds: rounds of the start that continues.
        k: number of clusters.
        published: the paper's figure or figures.
        restarts: random starts of IFCA; the rounds of the others are added to ``rounds``.
        participation: share of devices drawn for a round; weighting: ``uniform`` or ``samples``.
        evaluate_every: rounds between two tests on the test images.
        alone_rounds: rounds of the baseline in which devices train alone.
        pretrain: one-shot's recipe of training to convergence.
        segments: (name, length) pairs if layers are shared.
        defaults: defaults for further settings of the strategy ``ifca``.
        parameters: other parameters to report with the result.
    """

    experiment: str
    population: Population
    network: Network
    local: LocalTraining
    rounds: int
    k: int
    published: Any
    restarts: int
    participation: float = 1.0
    weighting: str = "uniform"
    evaluate_every: int = 5
    alone_rounds: int = 0
    pretrain: LocalTraining | None = None
    segments: tuple[tuple[str, int], ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Starts:
    """The outcome of each random start, and the rounds in which the broadcast narrowed, from a run's events."""

    def __init__(self, events: Sequence[tuple[int, Event]]) -> None:
        self.ended: list[dict[str, Any]] = []
        self.kept: int | None = None
        self.broadcasts: list[dict[str, Any]] = []
        for number, event in events:
            if event.kind == "start-ended":
                self.ended.append(dict(event.detail))
            elif event.kind == "start-kept":
                self.kept = int(event.detail["start"])
            elif event.kind.startswith("broadcast-"):
                self.broadcasts.append({"round": number, "kind": event.kind})


def ifca_settings(setup: Setup, given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the strategy ``ifca``: those given with --set, then the experiment's, then our defaults.

    All starts but the best one are dropped after `RESTART_ROUNDS`; a run too short for that has a single start.
    """
    settings = {"k": str(setup.k), **setup.defaults, **given}
    rounds = min(RESTART_ROUNDS, setup.rounds - 1)
    if rounds >= 1:
        settings = {"restarts": str(setup.restarts), "restart_rounds": str(rounds), **settings}
    if settings.get("restarts") == "1":
        settings.pop("restart_rounds", None)
    return settings


def run_setup(setup: Setup, options: Options, progress: Progress, knobs: Sequence[str]) -> Result:
    """Run the chosen algorithm on ``setup``.

    Args:
        setup: the experiment.
        options: the command's options; settings that are not among ``knobs`` are passed to the strategy.
        progress: receives every round.
        knobs: names of the experiment's own settings.
    """
    algorithm = options.algorithm or "ifca"
    given = options.strategy_settings(*knobs)
    if algorithm in NO_SETTINGS and given:
        raise UsageError(f"{algorithm} has no setting {sorted(given)[0]!r}")
    if algorithm == "local":
        return _alone(setup, options, progress)
    settings = {"global": {}, "one-shot": {"k": str(setup.k), **given}}.get(algorithm)
    if settings is None:
        settings = ifca_settings(setup, given)
    sim_options = paper_options(
        rounds=setup.rounds,
        local=setup.local,
        pretrain=setup.pretrain,
        seed=options.seed,
        mask=options.mask,
        participation=setup.participation,
        weighting=setup.weighting,
        evaluate_every=setup.evaluate_every,
        protocol="assigned" if algorithm == "one-shot" else "argmin",
        segments=setup.segments if algorithm == "ifca" else (),
        trainer=options.knob("trainer", "auto"),
        device=options.device,
        threads=options.threads,
        checkpoint=options.checkpoint,
    )

    def told(closed: SimRound) -> None:
        progress.round(algorithm, closed.round, setup.rounds, closed.as_dict() | {"clusters": closed.clusters})

    progress.stage(f"{algorithm}: {counted(len(setup.population), 'device')}, {counted(setup.rounds, 'round')}")
    done = simulate(STRATEGY_OF[algorithm], settings, setup.population, setup.network, sim_options, told)
    return _result(setup, options, algorithm, done, Starts(done.events), settings)


def _result(
    setup: Setup, options: Options, algorithm: str, done: SimResult, starts: Starts, settings: Mapping[str, str]
) -> Result:
    last = done.history[-1]
    extra: dict[str, Any] = {}
    if starts.ended:
        extra["starts"] = starts.ended
        extra["start_kept"] = starts.kept
        extra["restart_rounds"] = done.restart_rounds
    if starts.broadcasts:
        extra["broadcasts"] = starts.broadcasts
    pure = [r.round for r in done.history if r.purity == 1.0]
    if setup.population.groups is not None and algorithm == "ifca":
        wrong = [r.round for r in done.history if r.purity is not None and r.purity < 1.0]
        extra["pure_from_round"] = min((r for r in pure if r > max(wrong, default=0)), default=None)
    if done.final is not None and algorithm == "ifca" and setup.population.probe_groups is not None:
        taken = done.final.models.tolist()
        extra["identity_test"] = {
            "purity": purity(taken, setup.population.probe_groups),
            "ari": adjusted_rand(taken, setup.population.probe_groups),
        }
    extra["best_accuracy"] = done.best_accuracy
    return Result(
        experiment=setup.experiment,
        algorithm=algorithm,
        accuracy=None if done.final is None else done.final.accuracy,
        clusters=last.clusters,
        rounds=setup.rounds,
        cpu_seconds_per_round=done.cpu_seconds_per_round,
        published=setup.published,
        history=[r.as_dict() | {"sizes": r.sizes} for r in done.history],
        parameters=_parameters(setup, options, settings),
        purity=last.purity,
        ari=last.ari,
        extra=extra,
    )


def _alone(setup: Setup, options: Options, progress: Progress) -> Result:
    rounds = setup.alone_rounds or setup.rounds
    count = len(setup.population)
    progress.stage(f"local: {counted(count, 'device')}, {counted(rounds, 'round')} each")

    def told(devices: int) -> None:
        progress.round("local", devices, count, None)

    ended = train_alone(
        setup.population,
        setup.network,
        setup.local,
        rounds=rounds,
        seed=options.seed,
        told=told,
        threads=options.threads,
    )
    tested = ended.accuracies[np.isfinite(ended.accuracies)]
    accuracy = float(tested.mean()) if len(tested) else None
    return Result(
        experiment=setup.experiment,
        algorithm="local",
        accuracy=accuracy,
        clusters=count,
        rounds=rounds,
        cpu_seconds_per_round=ended.seconds_cpu / rounds,
        published=setup.published,
        history=[{"round": rounds, "accuracy": accuracy, "loss": float(ended.losses.mean()), "purity": None}],
        parameters=_parameters(setup, options, {}) | {"mask": "nothing leaves a device"},
        extra={"accuracy_spread": float(tested.std()) if len(tested) else None},
    )


def _parameters(setup: Setup, options: Options, settings: Mapping[str, str]) -> dict[str, Any]:
    recipe = {name: getattr(setup.local, name) for name in ("epochs", "steps", "batch_size", "lr", "lr_decay")}
    return {
        "devices": len(setup.population),
        "samples": int(setup.population.samples.max()),
        "rounds": setup.rounds,
        "seed": options.seed,
        "mask": options.mask,
        "participation": setup.participation,
        "weighting": setup.weighting,
        "network": repr(setup.network),
        "coordinates": setup.network.length,
        **recipe,
        **setup.parameters,
        "settings": dict(settings),
    }
