"""The simulator's loop: a real strategy, simulated devices, and metrics that the strategy never receives."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend, NumpyBackend
from aggregator.rounds.closing import close_round
from aggregator.strategies.base import (
    ClientUpdate,
    Event,
    Outcome,
    RoundPlan,
    Strategy,
    StrategySettings,
    mean_loss,
    read_settings,
    require_origins,
)
from aggregator.strategies.drawing import drawn
from aggregator.strategies.registry import build_strategy, find_strategy, models_needed
from aggregator.strategies.robust import RobustMean
from aggregator.strategies.statistics import Standardised
from edge_client.storage.scales import Scale
from shoal import limits
from shoal.errors import ConfigError
from shoal.protocol.documents import STATISTICS_SETTING, RunPlan, SegmentSpec
from shoal.protocol.messages import Phase
from shoal.protocol.precision.lengths import norm_room
from shoal.protocol.recipe import as_settings
from shoal.simulation.data import Population
from shoal.simulation.engine import checkpoint, metrics
from shoal.simulation.engine.evaluation import Evaluation, assigned, evaluate
from shoal.simulation.engine.private import PrivateStart
from shoal.simulation.engine.ranks import ByCoordinates, current_ranks
from shoal.simulation.engine.records import UNLIMITED_NORM, SimOptions, SimRound
from shoal.simulation.engine.secure import SecureRounds
from shoal.simulation.engine.threads import limited_threads
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import Network, origins
from shoal.task.data_declaration import DataDeclaration
from shoal.types import Float32Vector
from shoal.version import WIRE

__all__ = ["Observation", "SimOptions", "SimResult", "SimRound", "sim_plan", "simulate"]

FLEET: Final = "simulated"
RUN_ID: Final = b"simulated-run-id"
DIVERGED: Final = "training-diverged"
"""Event of a device whose training diverges for the first time in a run. It uploads nothing in such a round."""
LEFT_OUT: Final = "update-left-out"
"""Event of a device whose update is too long for the first time in a run: see `aggregator.rounds.screening`."""
ROUNDS_SPARE: Final = 10
"""A run may take at most this many times its counted rounds, since rounds of trials and cold starts may not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A closed round in full, for experiments that measure more."""

    round: int
    plan: RoundPlan
    contributions: tuple[ClientUpdate, ...]
    outcome: Outcome
    state: Any
    workforce: Workforce


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """Result of a simulated run.

    Attributes:
        history: counted rounds, of the best start if there were several.
        restart_rounds: rounds of abandoned starts.
        all_rounds: number of all rounds; events: their events, each with its counted round (0 for a round that doesn't count).
        assignment: each device's cluster at the end.
        final: the last evaluation; None if there are no test samples.
        thetas: model id -> clear (d,), float32, of the models at the end of the run, without private coordinates.
        scales: of a run with statistics, the scale of each device's model; None for a device whose fleet has none.
    """

    history: tuple[SimRound, ...]
    restart_rounds: int
    all_rounds: int
    events: tuple[tuple[int, Event], ...]
    clusters: Mapping[str, int]
    final: Evaluation | None
    thetas: Mapping[int, Float32Vector]
    run: RunPlan
    strategy: Strategy = field(repr=False)
    state: Any = field(repr=False)
    workforce: Workforce = field(repr=False)
    scales: tuple[Scale | None, ...] = ()
    _taken: NDArray[np.int64] | None = field(default=None, repr=False)

    @property
    def cpu_seconds_per_round(self) -> float:
        """Mean CPU seconds of the rounds in the history."""
        return float(np.mean([r.seconds_cpu for r in self.history])) if self.history else 0.0

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of the evaluated rounds, in percent; None if none was evaluated."""
        seen = [r.accuracy for r in self.history if r.accuracy is not None]
        return max(seen) if seen else None

    def final_plan(self) -> RoundPlan:
        """Return the strategy's plan of the final round, with every device's candidates."""
        return self.strategy.final(self.state, self.all_rounds + 1, self.workforce.population.names)

    def taken(self) -> NDArray[np.int64]:
        """Return the id of the model that each device takes in the final round, shape (devices,)."""
        if self._taken is not None:
            return self._taken
        final = self.final_plan()
        ids = sorted(final.models)
        models = torch.from_numpy(np.stack([self.thetas[model] for model in ids]))
        places = np.arange(len(self.workforce.population))
        taken: NDArray[np.int64] = np.array(ids, np.int64)[assigned(self.workforce, final, models, ids, places)]
        return taken

    def settled(self) -> Self:
        """Return the result of a run with statistics, in which each device's samples are in the scale of the model it takes."""
        taken, final, workforce = self.taken(), self.final_plan(), self.workforce
        scales = tuple(workforce.scale_of(final, int(model)) for model in taken)
        workforce.declared = None
        workforce.use_data(workforce.population.scaled(scales))
        return dataclasses.replace(self, scales=scales, _taken=taken)


Progress = Callable[[SimRound], None]
Watch = Callable[[Observation], None]
Tamper = Callable[[list[ClientUpdate], Workforce], list[ClientUpdate]]
"""Turns a round's uploads into those of a fleet in which some devices attack; updates are masked."""


def sim_plan(
    algorithm: str,
    settings: Mapping[str, str],
    network: Network,
    options: SimOptions,
    strategy: type[Strategy] | None = None,
    private: PrivateStart | None = None,
    declared: DataDeclaration | None = None,
    earlier: int = 0,
) -> RunPlan:
    """Return an unsigned run plan for the simulator.

    Args:
        algorithm: the strategy's name.
        settings: the strategy's settings.
        network: the network that devices train.
        options: all other options.
        strategy: the strategy's class, if it is not in `aggregator.strategies.registry`.
        private: the network's private coordinates, which the plan does not have.
        declared: the data's bounds, if the run is to have rounds of statistics.
        earlier: models of an earlier run that it begins with; 0 for as many new ones as the strategy takes.

    Raises:
        ConfigError: the strategy refuses the settings.
    """
    kind = strategy or find_strategy(algorithm)
    parsed: StrategySettings = read_settings(
        kind.settings_type, algorithm, {name: str(value) for name, value in settings.items()}
    )
    federated = network.length - (0 if private is None else len(private.places))
    segments = options.segments or (("cluster", federated),)
    statistics = {} if declared is None else {STATISTICS_SETTING: "on"}
    plan = RunPlan(
        wire=WIRE,
        fleet=FLEET,
        run=1,
        run_id=RUN_ID,
        roster_sequence=1,
        task_digest=bytes(32),
        recipe=dataclasses.replace(
            options.recipe,
            algorithm=algorithm,
            settings=as_settings({**settings, **statistics}),
            rounds=options.recipe.rounds + parsed.discarded_rounds,
            evaluate_every=0,
        ),
        origins=(earlier or parsed.origins) + len(statistics),
        max_models=limits.MAX_MODELS,
        segments=tuple(SegmentSpec(name, length) for name, length in segments),
        capabilities=parsed.capabilities,
    )
    require_origins(plan.without_statistics, parsed)
    if strategy is not None:
        return plan
    return dataclasses.replace(plan, max_models=min(models_needed(plan), limits.MAX_MODELS))


def simulate(
    algorithm: str,
    settings: Mapping[str, str],
    population: Population,
    network: Network,
    options: SimOptions,
    progress: Progress | None = None,
    *,
    watch: Watch | None = None,
    tamper: Tamper | None = None,
    secure: bool = False,
    start: NDArray[np.float32] | None = None,
    backend: Backend | None = None,
    strategy: type[Strategy] | None = None,
    private: PrivateStart | None = None,
    declared: DataDeclaration | None = None,
) -> SimResult:
    """Run ``algorithm`` on all devices of ``population``.

    Args:
        algorithm: the strategy's name.
        settings: the algorithm's settings.
        population: the devices' data.
        network: the network that they train.
        options: all other options.
        progress: called after every counted round.
        watch: called after every round; the number of a round that doesn't count is 0.
        tamper: changes the uploads of devices that attack; None if all are honest.
        secure: close rounds on sums, as with a keeper (`shoal.simulation.engine.secure`).
        start: origins (origins, d), float32, as many as the strategy begins with (`StrategySettings.begins_with`); None draws
            them from the seed by torch's initialisation. They have no private coordinates.
        backend: computes similarities; numpy if None.
        strategy: the strategy's class, if it is not in `aggregator.strategies.registry`; ``algorithm`` is its name.
        private: the network's private coordinates; None if all are federated.
        declared: the data's bounds, if devices standardise their samples by statistics, as real ones do in a task that says so:
            the fleet's, in a round before all others, and those of clusters. None takes the samples as they are.

    Raises:
        ConfigError: the strategy refuses the settings, a round has too few devices for a mean, too few rounds count (see
            ROUNDS_SPARE), or private coordinates meet probes, a checkpoint or several ranks.
        LostRankError: another rank has ended.
        TaskError: the training of all devices diverged.
    """
    rounded = options.recipe.precision_up != "float32"
    if rounded and options.checkpoint is not None:
        raise ConfigError(
            f"a run with {options.recipe.precision_up} updates can't be stored in a checkpoint: "
            "the residuals of devices are not in it"
        )
    if private is not None and (population.probes or options.checkpoint is not None):
        raise ConfigError("private values belong to devices: they are not tested on probes, nor stored in a checkpoint")
    ranks = current_ranks()
    if ranks.world > 1 and (private is not None or rounded or declared is not None):
        raise ConfigError(
            "several ranks share no private values, no residuals of rounded updates and no statistics",
            hint="take one process",
        )
    earlier = 0 if start is None else len(start)
    run = sim_plan(algorithm, settings, network, options, strategy, private, declared, earlier)
    present = len(drawn(run, 1, tuple(d for d in population.names if options.arrivals.get(d, 1) <= 1)))
    if 0 < present < run.recipe.min_contributors:
        raise ConfigError(
            f"{present} devices take part in a round, and a mean takes {run.recipe.min_contributors}: no model would ever change",
            hint="give more devices, a higher participation, or min_contributors=1 for means of single devices",
        )
    single = run.recipe.robust != "off" or tamper is not None or secure or private is not None or rounded
    if single and options.deferred:
        raise ConfigError(
            "deferred sums hold no single updates, which a robust mean, an attack, private coordinates and short precisions need",
            hint="choose robust off and float32, or leave deferred at None",
        )
    if start is None:
        start = origins(network, run.without_statistics.origins, run.seed)
        start = start if private is None else start[:, private.federated(network.length)]
    if declared is not None:
        start = np.concatenate((start, np.zeros_like(start[:1])))
    name = checkpoint.fingerprint(run, start, options.arrivals)
    workforce = Workforce(
        population,
        network,
        run,
        start,
        trainer=options.trainer,
        device=options.device,
        deferred=options.deferred,
        norms=options.norms or options.norm_screen or options.recipe.norm_limit < UNLIMITED_NORM,
        # The simulator can't know what else a strategy of the caller's reads, so it stores every update.
        reads="updates" if single or strategy is not None else None,
        watched=watch is not None,
        private=private,
        declared=declared,
    )
    if ranks.world > 1:
        ranks.agree("options, origins or data", name.encode(), checkpoint.data_digest(population).encode())
        backend = ByCoordinates(backend or NumpyBackend(), ranks)
    average = RobustMean(run, backend, workforce.average)
    made = build_strategy(strategy or find_strategy(algorithm), run.without_statistics, backend, average)
    if declared is not None:
        made = cast(Strategy, Standardised(made, run, average))
    simulation = _Simulation(
        strategy=made,
        workforce=workforce,
        average=average,
        options=options,
        progress=progress,
        watch=watch,
        tamper=tamper,
        secured=SecureRounds(run, len(population), made) if secure else None,
        name=name,
    )
    with limited_threads(options.threads):
        result = simulation.run()
        return result if declared is None else result.settled()


class _Simulation:
    def __init__(
        self,
        *,
        strategy: Strategy,
        workforce: Workforce,
        average: RobustMean,
        options: SimOptions,
        progress: Progress | None,
        watch: Watch | None,
        tamper: Tamper | None,
        secured: SecureRounds | None,
        name: str,
    ) -> None:
        self.strategy, self.workforce, self.options = strategy, workforce, options
        self.name = name
        self.data = "" if options.checkpoint is None else checkpoint.data_digest(workforce.population)
        self._saves = options.checkpoint is not None and workforce.ranks.rank == 0
        self.average, self.tamper, self.secured = average, tamper, secured
        self.longest = workforce.run.recipe.norm_limit * norm_room(workforce.run.recipe.precision_up)
        self.progress, self.watch = progress, watch
        self.names = workforce.population.names
        unknown = sorted(options.arrivals.keys() - set(self.names))
        if unknown or not self._there(1):
            raise ConfigError(f"no device {unknown[0]} to arrive" if unknown else "no device is there in round 1")
        self.last: Evaluation | None = None
        self.so_far = checkpoint.ResumePoint()
        self.diverged: set[str] = set()
        self.long: set[str] = set()

    def _there(self, round_: int) -> tuple[str, ...]:
        return tuple(d for d in self.names if self.options.arrivals.get(d, 1) <= round_)

    def _updates(self, plan: RoundPlan) -> list[ClientUpdate]:
        """Return what the aggregator gets in a round: the devices' updates, or stand-ins for them."""
        if self.secured is not None:
            self.workforce.models.links.ring = self.secured.begin(plan, self.so_far.watched.levels)
        given = self.workforce.carry_out(plan)
        if self.tamper is not None:
            given = self.tamper(given, self.workforce)
        return given if self.secured is None else self.secured(given, plan)

    def run(self) -> SimResult:
        state = self.strategy.init(self._there(1))
        run, options, so_far = self.workforce.run, self.options, self.so_far
        if options.checkpoint is not None:
            kept = checkpoint.load(options.checkpoint, self.name, self.data, self.strategy.state_type)
            if kept is not None:
                so_far, state, models = kept
                self.so_far = so_far
                self.workforce.models.restore(models)
        outcome = Outcome(so_far.clusters)
        saved_s = time.monotonic()
        # IFCA's starts set their histories aside; the loop must not end before one of them is chosen.
        while len(so_far.history) < options.recipe.rounds or so_far.starts:
            so_far.round += 1
            round_ = so_far.round
            if round_ > ROUNDS_SPARE * run.recipe.rounds:
                raise ConfigError(f"{round_ - 1} rounds brought only {len(so_far.history)} that count")
            begin = time.process_time()
            state, plan = self.strategy.plan(state, round_, self._there(round_))
            given = self._updates(plan)
            short = tuple(c for c in given if c.norm <= self.longest)
            long = {c.device: c.norm for c in given if c.norm > self.longest}
            state, outcome, so_far.watched, screened = close_round(
                self.strategy,
                state,
                plan,
                short,
                so_far.watched,
                run=run,
                average=self.average,
                fleet=self.names,
                there=frozenset(self._there(round_)),
                left_out=long,
                declined=self.workforce.diverged,
                screens=options.norm_screen,
            )
            refused = {**screened.refused, **long}
            new = sorted(self.workforce.diverged - self.diverged)
            self.diverged |= self.workforce.diverged
            events = [Event(round_, DIVERGED, {"device": device}) for device in new]
            events += [
                Event(round_, LEFT_OUT, {"device": d, "norm": n}) for d, n in refused.items() if d not in self.long
            ]
            self.long |= refused.keys()
            outcome = dataclasses.replace(outcome, events=(*outcome.events, *events))
            state = self.workforce.models.relay(self.strategy, state, round_)
            seconds = time.process_time() - begin
            counts = options.count == "all" or plan.trains
            number = len(so_far.history) + 1 if counts else 0
            if counts:
                self._record(number, round_, state, given, outcome, seconds, refused)
            else:
                so_far.uncounted_s += seconds
                so_far.uncounted_events += outcome.events
            so_far.events += [(number, event) for event in outcome.events]
            if self.watch is not None:
                self.watch(
                    Observation(
                        round=number,
                        plan=plan,
                        contributions=tuple(given),
                        outcome=outcome,
                        state=state,
                        workforce=self.workforce,
                    )
                )
            so_far.spent += self._restarts(state, round_, outcome)
            if self._saves and time.monotonic() - saved_s >= checkpoint.SAVE_EVERY_S:
                assert options.checkpoint is not None
                so_far.clusters = dict(outcome.clusters)
                checkpoint.save(options.checkpoint, self.name, self.data, so_far, state, self.workforce.models.held)
                saved_s = time.monotonic()
        if self.last is None:
            self.last = self._evaluate(state, so_far.round)
        final = self._final(state, so_far.round)
        thetas = {model: self.workforce.theta(final, model) for model in final.models}
        return SimResult(
            history=tuple(so_far.history),
            restart_rounds=so_far.spent,
            all_rounds=so_far.round,
            events=tuple(so_far.events),
            clusters=dict(outcome.clusters),
            final=self.last,
            thetas=thetas,
            run=run,
            strategy=self.strategy,
            state=state,
            workforce=self.workforce,
        )

    def _restarts(self, state: Any, round_: int, outcome: Outcome) -> int:
        """Store the history of a finished start, or restore the best start's; return the number of rounds dropped.

        The metrics of a start's last round are filled in only when that start is chosen: when it ends, the state already
        belongs to the next start.
        """
        kept = next((e.detail["start"] for e in outcome.events if e.kind == "start-kept"), None)
        so_far = self.so_far
        if _ends_start(outcome):
            so_far.starts.append(so_far.history)
            so_far.history = []
        if kept is None:
            return 0
        lost = sum(len(rounds) for i, rounds in enumerate(so_far.starts) if i != kept)
        history = so_far.starts[kept]
        so_far.history, so_far.starts = history, []
        history[-1] = dataclasses.replace(history[-1], **self._figures(len(history), state, round_, outcome))
        return lost

    def _final(self, state: Any, round_: int) -> RoundPlan:
        return self.strategy.final(state, round_ + 1, self._there(round_))

    def _evaluate(self, state: Any, round_: int) -> Evaluation | None:
        return evaluate(self.workforce, self._final(state, round_), self.options.protocol)

    def _figures(self, number: int, state: Any, round_: int, outcome: Outcome) -> dict[str, Any]:
        """Return the clustering's quality and, if an evaluation is due, the accuracy, as fields of a `SimRound`."""
        every = self.options.evaluate_every
        due = number == self.options.recipe.rounds or (every and number % every == 0)
        found = self._evaluate(state, round_) if due else None
        self.last = found if found is not None else self.last
        labels = [outcome.clusters[d] for d in self.names if d in outcome.clusters]
        sizes = sorted((labels.count(label) for label in set(labels)), reverse=True)
        figures: dict[str, Any] = {"clusters": len(sizes), "sizes": tuple(sizes)}
        if found is not None:
            figures |= {"accuracy": found.accuracy, "median": found.median, "test_loss": found.loss}
        groups = self.workforce.population.groups
        if groups is not None and labels:
            truth = [g for d, g in zip(self.names, groups, strict=True) if d in outcome.clusters]
            figures |= {"purity": metrics.purity(labels, truth), "ari": metrics.adjusted_rand(labels, truth)}
        return figures

    def _record(
        self,
        number: int,
        round_: int,
        state: Any,
        given: list[ClientUpdate],
        outcome: Outcome,
        seconds: float,
        refused: Mapping[str, float],
    ) -> None:
        accepted = [c for c in given if c.device not in refused and c.phase is not Phase.STATISTICS]
        loss = mean_loss(accepted, self.workforce.run)
        norms = [c.norm for c in given if c.norm > 0]
        entry = SimRound(
            round=number,
            plan_round=round_,
            loss=loss,
            norms=(float(np.mean(norms)), max(norms)) if norms else None,
            seconds_cpu=seconds + self.so_far.uncounted_s,
            events=(*self.so_far.uncounted_events, *outcome.events),
            capped=outcome.capped,
            refused_norm=refused,
            **({} if _ends_start(outcome) else self._figures(number, state, round_, outcome)),
        )
        self.so_far.uncounted_s, self.so_far.uncounted_events = 0.0, ()
        self.so_far.history.append(entry)
        if self.progress is not None:
            self.progress(entry)


def _ends_start(outcome: Outcome) -> bool:
    return any(e.kind == "start-ended" for e in outcome.events)
