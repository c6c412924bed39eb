"""Common code of the experiments of Duan et al., section IV: the methods of its Table III, and their score.

Score: in every round each device that was ever assigned to a group is tested on its own test samples with its group's model.
The share of correct answers over all of them is the round's accuracy, and the maximum over the rounds is the result (section
IV-A assumes early stopping). FedAvg and FedProx are tested on all devices. A round begins with the cold start of drawn devices
that have no group yet, so early rounds test few devices; each row of the history reports the number.

Parameters that the paper does not state follow its public code: IFCA and FeSEM weight devices equally, the others by samples,
and pre-training has no proximal term. Unlike here, that code starts FeSEM's centres at models of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from aggregator.strategies.base import RoundPlan, Strategy, final_assignment
from aggregator.strategies.registry import make_strategy
from shoal.errors import UsageError
from shoal.protocol.messages import Phase
from shoal.simulation.data import Population
from shoal.simulation.engine.evaluation import Evaluation, evaluate
from shoal.simulation.engine.simulate import Observation, SimResult, SimRound, simulate
from shoal.simulation.shares import statistics
from shoal.simulation.trainers.networks import Network
from shoal.task.manifest import LocalTraining
from shoal.util.console import counted
from shoal_lab.experiments.common.experiment import Options, Progress, Result
from shoal_lab.experiments.common.paper import paper_options

COHORT: Final = 20
EPOCHS: Final = 20
BATCH: Final = 10
ALPHA: Final = 20
PRETRAIN_STEPS: Final = 50
ROUNDS: Final = 300
KNOBS: Final = ("cohort", "epochs", "lr", "mu", "pretrain_steps", "evaluate_every", "trainer")


@dataclass(frozen=True, slots=True)
class Method:
    """A column of Table III as a strategy of the aggregator.

    Attributes:
        strategy: the strategy's name; settings: its settings, without the number of groups.
        groups: the name of that setting, "" where there is but one model.
        proximal: whether devices train with the proximal term.
        weighting: of the means.
    """

    strategy: str
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    groups: str = "groups"
    proximal: bool = False
    weighting: str = "samples"


_TOLD: Final = MappingProxyType({"discrepancy": "true"})
METHODS: Final[Mapping[str, Method]] = {
    "fg-edc": Method("fedgroup", {"measure": "edc"}),
    "fg-madc": Method("fedgroup", {"measure": "madc"}),
    "fgp-edc": Method("fedgrouprox", {"measure": "edc"}, proximal=True),
    "fgp-madc": Method("fedgrouprox", {"measure": "madc"}, proximal=True),
    "ifca": Method("ifca", groups="k", weighting="uniform"),
    "fesem": Method("fesem", _TOLD, groups="k", weighting="uniform"),
    "fedprox": Method("fedprox", _TOLD, groups="", proximal=True),
    "fedavg": Method("fedavg", _TOLD, groups=""),
    "rcc": Method("fedgroup", {"measure": "edc", "rcc": "true"}),
    "rac": Method("fedgroup", {"measure": "edc", "rac": "true"}),
}
GROUPED: Final = frozenset({"fedgroup", "fedgrouprox"})


@dataclass(frozen=True, slots=True)
class Setup:
    """The parameters of one experiment.

    Attributes:
        experiment: the experiment's id.
        population, network: the devices and the network that they train.
        groups: m.
        lr: step size; mu: weight of the proximal term.
        published: the paper's figure for the algorithm.
        rounds: rounds with training.
        parameters: other parameters to report with the result.
    """

    experiment: str
    population: Population
    network: Network
    groups: int
    lr: float
    published: Any
    rounds: int = ROUNDS
    mu: float = 1.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


class Scores:
    """Follows a run and tests, in every counted round, the devices that were ever assigned.

    Args:
        everybody: test all devices from the first round on.
        every: rounds between two tests; rounds: the last of them is always tested.
    """

    def __init__(self, *, everybody: bool, every: int, rounds: int) -> None:
        self._everybody, self._every, self._rounds = everybody, every, rounds
        self._met: set[str] = set()
        self._strategy: Strategy | None = None
        self.rows: dict[int, dict[str, Any]] = {}
        self.cold_start: Mapping[str, Any] | None = None

    def __call__(self, seen: Observation) -> None:
        """Look at one round."""
        self._met |= {c.device for c in seen.contributions}
        for event in seen.outcome.events:
            if event.kind == "cold-start":
                self.cold_start = dict(event.detail)
        if seen.round == 0:
            return
        row: dict[str, Any] = {}
        norms = [c.norm for c in seen.contributions if c.phase is Phase.TRAIN]
        if norms:
            row["discrepancy"] = sum(norms) / len(norms)
        for event in seen.outcome.events:
            if event.kind == "discrepancy" and "mean_after" in event.detail:
                row["discrepancy_after"] = event.detail["mean_after"]
        if seen.round == self._rounds or seen.round % self._every == 0:
            found = self._test(seen)
            if found is not None:
                row |= {"accuracy": found.accuracy, "tested": len(found.names)}
        self.rows[seen.round] = row

    def _test(self, seen: Observation) -> Evaluation | None:
        if self._strategy is None:
            self._strategy = make_strategy(seen.workforce.run, None, seen.workforce.average)
        names = seen.workforce.population.names
        devices = names if self._everybody else tuple(d for d in names if d in self._met)
        final = self._strategy.final(seen.state, seen.plan.round + 1, devices)
        return evaluate(seen.workforce, decided(final, seen.outcome.clusters), "assigned")


def decided(final: RoundPlan, clusters: Mapping[str, int]) -> RoundPlan:
    """Return the final round with each device's order limited to its cluster's model, so that IFCA's devices don't re-choose."""
    assignments = {
        d: assignment if len(assignment.candidates) == 1 else final_assignment((assignment.candidates[clusters[d]],))
        for d, assignment in final.assignments.items()
    }
    return dataclasses.replace(final, assignments=assignments)


def method_of(options: Options, algorithms: Mapping[str, Method] = METHODS) -> tuple[str, Method]:
    """Return the requested algorithm and its method.

    Raises:
        UsageError: there is none.
    """
    name = options.algorithm or next(iter(algorithms))
    if name not in algorithms:
        raise UsageError(f"no algorithm {name!r}", hint=f"there are {', '.join(algorithms)}")
    return name, algorithms[name]


def run_setup(setup: Setup, options: Options, progress: Progress, knobs: tuple[str, ...] = ()) -> Result:
    """Run the chosen algorithm on ``setup``.

    Args:
        setup: the experiment.
        options: the command's options; settings that are neither `KNOBS` nor ``knobs`` are passed to the strategy.
        progress: receives every round.
        knobs: names of the experiment's own settings.
    """
    name, method = method_of(options)
    settings = dict(method.settings) | ({method.groups: str(setup.groups)} if method.groups else {})
    if method.strategy in GROUPED:
        settings["alpha"] = str(ALPHA)
    settings |= options.strategy_settings(*KNOBS, *knobs)
    devices, rounds = len(setup.population), setup.rounds
    lr, cohort = options.knob("lr", setup.lr), min(options.knob("cohort", COHORT), devices)
    mu = options.knob("mu", setup.mu) if method.proximal else 0.0
    local = LocalTraining(epochs=options.knob("epochs", EPOCHS), batch_size=BATCH, lr=lr, prox_mu=mu)
    steps = options.knob("pretrain_steps", PRETRAIN_STEPS)
    sim_options = paper_options(
        rounds=rounds,
        local=local,
        pretrain=LocalTraining(epochs=0, steps=steps, batch_size=BATCH, lr=lr),
        seed=options.seed,
        mask=options.mask,
        participation=cohort / devices,
        weighting=method.weighting,
        evaluate_every=0,
        protocol="assigned",
        trainer=options.knob("trainer", "auto"),
        device=options.device,
        threads=options.threads,
    )
    scores = Scores(everybody=not method.groups, every=max(1, options.knob("evaluate_every", 1)), rounds=rounds)
    last: dict[str, Any] = {}

    def watch(seen: Observation) -> None:
        scores(seen)
        last.update(scores.rows.get(seen.round, {}))

    def told(closed: SimRound) -> None:
        # `progress` is called before `watch`, so this accuracy is still the previous round's.
        record = {"accuracy": last.get("accuracy"), "loss": closed.loss, "clusters": closed.clusters}
        progress.round(name, closed.round, rounds, record)

    progress.stage(f"{name}: {counted(devices, 'device')}, {counted(rounds, 'round')}")
    done = simulate(method.strategy, settings, setup.population, setup.network, sim_options, told, watch=watch)
    parameters = {
        "devices": devices,
        "rounds": rounds,
        "seed": options.seed,
        "mask": options.mask,
        "network": repr(setup.network),
        "coordinates": setup.network.length,
        "strategy": method.strategy,
        "settings": settings,
        "cohort": cohort,
        "epochs": local.epochs,
        "batch_size": BATCH,
        "lr": lr,
        "mu": mu,
        "weighting": method.weighting,
        "pretrain_steps": steps,
        **setup.parameters,
    }
    return _result(setup, name, done, scores, parameters)


def _result(setup: Setup, name: str, done: SimResult, scores: Scores, parameters: Mapping[str, Any]) -> Result:
    history = [{**closed.as_dict(), "accuracy": None, **scores.rows.get(closed.round, {})} for closed in done.history]
    tested = [row for row in history if row["accuracy"] is not None]
    best = max(tested, key=lambda row: row["accuracy"], default=None)  # the paper's early stopping
    final = done.history[-1]
    extra: dict[str, Any] = {"population": statistics(setup.population), "sizes": final.sizes}
    if best is not None:
        extra |= {"best_round": best["round"], "best_tested": best["tested"], "last_tested": tested[-1]["tested"]}
        extra["best_of_most_tested"] = _best_of_most(tested)
    if scores.cold_start is not None:
        extra["cold_start"] = scores.cold_start
    return Result(
        experiment=setup.experiment,
        algorithm=name,
        accuracy=None if best is None else best["accuracy"],
        accuracy_last=tested[-1]["accuracy"] if tested else None,
        clusters=final.clusters,
        rounds=setup.rounds,
        cpu_seconds_per_round=done.cpu_seconds_per_round,
        published=setup.published,
        history=history,
        parameters=parameters,
        purity=final.purity,
        ari=final.ari,
        extra=extra,
    )


MOST: Final = 0.95


def _best_of_most(tested: list[dict[str, Any]]) -> float:
    """Return the highest accuracy of the rounds that tested at least 95 % of the devices that the last one tested."""
    enough = MOST * tested[-1]["tested"]
    return max(float(row["accuracy"]) for row in tested if row["tested"] >= enough)
