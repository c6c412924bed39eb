"""A run of CFL, or of its baseline, on an image or text task, with every round recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.simulation.data import Population
from shoal.simulation.engine.simulate import SimResult, SimRound, simulate
from shoal.simulation.trainers.networks import Network
from shoal.task.manifest import LocalTraining
from shoal.util.console import counted
from shoal_lab.experiments.cfl.watch import CflWatch
from shoal_lab.experiments.common.experiment import Options, Progress, Result
from shoal_lab.experiments.common.paper import paper_options


def watched(
    algorithm: str,
    settings: Mapping[str, str],
    population: Population,
    network: Network,
    local: LocalTraining,
    rounds: int,
    evaluate_every: int,
    options: Options,
    progress: Progress,
) -> tuple[CflWatch, SimResult]:
    """Run ``algorithm`` with single updates available to the measurements, and record every round.

    Args:
        algorithm: ``cfl`` or ``fedavg``.
        settings: settings of its strategy.
        population: the devices; without true groups they count as one group.
        network: the network that they train.
        local: recipe of local training.
        rounds: number of rounds.
        evaluate_every: rounds between two tests on the test shares.
        options: seed, mask, device and the knob ``trainer``.
        progress: receives every round.
    """
    watch = CflWatch(population.groups or (0,) * len(population), evaluate_every)

    def told(closed: SimRound) -> None:
        progress.round(algorithm, closed.round, rounds, watch.rows[-1] if watch.rows else None)

    progress.stage(
        f"{algorithm}: {counted(len(population), 'device')}, {counted(rounds, 'round')}, {network.length} coordinates"
    )
    sim_options = paper_options(
        rounds=rounds,
        local=local,
        seed=options.seed,
        mask=options.mask,
        evaluate_every=0,
        count="all",
        trainer=options.knob("trainer", "auto"),
        device=options.device,
        threads=options.threads,
        deferred=False,
    )
    return watch, simulate(algorithm, settings, population, network, sim_options, told, watch=watch)


def watched_result(
    experiment: str,
    algorithm: str,
    published: Any,
    watch: CflWatch,
    done: SimResult,
    parameters: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> Result:
    """Return the result of a watched run, with ``extra`` before the figures of ``watch``."""
    last = watch.rows[-1]
    return Result(
        experiment=experiment,
        algorithm=algorithm,
        accuracy=None if done.final is None else done.final.accuracy,
        clusters=last["clusters"],
        rounds=len(watch.rows),
        cpu_seconds_per_round=done.cpu_seconds_per_round,
        published=published,
        history=watch.rows,
        parameters=dict(parameters),
        purity=last["purity"],
        ari=last["ari"],
        extra={**(extra or {}), **(watch.report() if algorithm == "cfl" else {})},
    )
