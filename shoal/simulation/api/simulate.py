"""`simulate`, the public way to run a strategy on partitions of data in this process."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Unpack, get_type_hints

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import NumpyBackend
from aggregator.strategies.base import Strategy, StrategySettings, read_settings
from aggregator.strategies.registry import STRATEGIES, build_strategy, check_members, find_strategy
from crypto.mask.modes.registry import find
from edge_client.learning.finish_rule import node_name
from shoal.errors import UsageError
from shoal.limits import MOST_DITTO_WEIGHT
from shoal.owner.runs.plan import check_devices, doubts, with_keeper
from shoal.owner.runs.training import local_training
from shoal.protocol.documents import check_choices
from shoal.protocol.messages import STATISTICS_MODELS, Phase
from shoal.protocol.recipe import DEFAULTS, Choices, Recipe, knobs
from shoal.simulation.api.models import Model, classes_of, network_of, source_of
from shoal.simulation.api.partitions import Partition, check_labels, population_of, require_validation
from shoal.simulation.api.result import Result, Round
from shoal.simulation.api.standardisation import (
    declaration,
    scaled_targets,
    scales_of,
    target_scale,
)
from shoal.simulation.api.writers import HistoryWriter
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import simulate as engine
from shoal.simulation.engine.evaluation import Evaluation
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.personal import drawn_start, finish
from shoal.simulation.engine.private import PrivateStart
from shoal.simulation.engine.records import SimOptions, SimRound
from shoal.simulation.engine.threads import limited_threads
from shoal.simulation.trainers.dense import is_dense
from shoal.simulation.trainers.networks import Kind
from shoal.types import Float32Vector
from shoal.util.console import note

CHOICES: Final = {name: getattr(DEFAULTS, name) for name in knobs(Recipe) if name in Choices.__annotations__} | {
    "rounds": 100,
    "seed": 0,
}
"""A simulated run's choices unless others are given."""
SAMPLES_TRIED: Final = 8
"""Samples on which a model is tried before the run."""


def simulate(
    model: Model,
    partitions: Sequence[Partition],
    *,
    strategy: str | type[Strategy] = "cfl",
    settings: Mapping[str, Any] | None = None,
    local: Mapping[str, Any] | None = None,
    task: str = "classification",
    progress: bool = False,
    personal: float = 0.0,
    private: Sequence[str] = (),
    standardise: str = "off",
    target: tuple[float, float] | None = None,
    mask: str = "default",
    precision: str = DEFAULTS.precision_up,
    writer: HistoryWriter | None = None,
    secure: bool = False,
    **choices: Unpack[Choices],
) -> Result:
    """Train ``model`` on all partitions, one a device, and return a `Result`.

    Weights, limits and local training are those of ``shoal-fleet run start`` unless given: means by samples of at least three
    devices, none of which weighs more than three times the median. A device whose training diverges takes no part in that round,
    and an event of `Result.events` names it.

    Args:
        model: an ``nn.Module``; a function that returns one; or, as ``shoal-fleet task compile`` takes it, ``file.py:function``
            or the name of a task, which also gives task, loss and local training. A module starts with its own weights,
            unless the strategy needs several different starting models (``ifca``): its layers then draw theirs again. A
            list of modules, such as ``list(result.models.values())``, begins with the clusters of an earlier run: each device
            takes the one of least loss.
        partitions: one mapping a device: ``train`` and optionally ``validation`` and ``test``, each (x, y) arrays.
        strategy: a name, or a class as `Strategy` describes.
        settings: the strategy's own, as ``--set`` takes them.
        local: local training, as ``--local`` takes it.
        task: ``classification``, ``regression`` or ``sequence``.
        progress: write a line a round to stderr.
        personal: weight of the proximal term of Ditto's personal model, a further candidate of `Result.personal`; 0 is none.
        private: names of parameters, or beginnings of them such as a layer's name, that stay on each device, which trains its
            own from the model's values, as `--private` of ``shoal-fleet task compile``.
        standardise: ``off``; ``local``, each device's features by its own training share; or ``federated``, by the fleet's
            statistics, as `--standardise` of ``shoal-fleet task compile``. The models then take standardised samples: see
            `Result.standardised`.
        target: range of the numbers that a regression predicts, as `--target` of ``shoal-fleet task compile``: models train in
            its unit, and `Result` has models and losses in the data's. By default that of the median device; for a task with
            its own loss, the data's unit. Give (-2, 2) to train a model further that predicts in the data's unit already.
        mask: the mask mode, as `--mode` of ``shoal-fleet run start``; ``default`` is its default.
        precision: of devices' updates, as its `--precision-up`.
        writer: gets each round as it closes, such as a `shoal.CsvWriter`.
        secure: close rounds on sums of at least three updates, as a run with a keeper does: updates weigh alike, no rule compares
            them, and devices are left out where sums would differ by one or two.
        choices: those of ``shoal-fleet run start --help-all`` that change a simulated run, by the names of its options. There are
            100 ``rounds`` by default, those of IFCA's discarded starts not counted, and ``seed`` is 0: it is that of starting
            models and of the mask as well, and equal seeds give equal results.

    Raises:
        UsageError: an argument makes no sense.
        ConfigError: the strategy is unknown, or refuses the mask mode or a setting; or no model would ever change.
        DataError: the data holds NaN, shares differ in shape, labels are out of range, or a share is missing.
        TaskError: the model does not fit the data, a name in ``private`` fits no parameter, or the training of all
            devices diverged.
    """
    if unknown := sorted(choices.keys() - CHOICES.keys()):
        raise TypeError(f"simulate() got an unexpected keyword argument {unknown[0]!r}")
    if not isinstance(personal, int | float) or not 0 <= personal <= MOST_DITTO_WEIGHT:
        raise UsageError(f"personal is a weight from 0 to {MOST_DITTO_WEIGHT:g}, not {personal!r}")
    name, own = _strategy(strategy)
    mode = DEFAULTS.mode if mask == "default" else mask
    given = {**CHOICES, **choices, "mode": mode, "precision_up": precision}
    fleet = _recipe(name, _text(settings or {}, "settings"), given, secure=secure)
    find(fleet.mode)
    seed, rounds = fleet.seed or 0, fleet.rounds
    source = source_of(model, task, seed)
    if isinstance(private, str):
        raise UsageError(f"private is the text {private!r}", hint=f"give a list of names: private=[{private!r}]")
    own_part = source.private_start(private)
    options = fleet_options(fleet, local=local_training(source.local, _text(local or {}, "local")))
    raw = population_of(partitions, source.kind, integer_inputs=source.integer_inputs)
    scale, square = (0.0, 1.0), 1.0
    if target is not None and source.kind != "regression":
        raise UsageError(f"a {source.kind} task has no range of targets", hint="leave target out")
    if target is not None or (source.kind == "regression" and source.loss is None):
        scale = target_scale(raw, target)
        raw, square = scaled_targets(raw, scale), scale[1] ** 2 if source.loss is None else 1.0
    scales = scales_of(raw, standardise, fleet.weight_cap)
    population = raw.scaled(scales)
    first = population.train[0]
    network = network_of(source, first.x[:SAMPLES_TRIED], first.y[:SAMPLES_TRIED])
    if source.kind != "regression":
        check_labels(population, classes_of(source, first.x[:1]))
    exact = fleet.precision_up == fleet.precision_down == "float32"
    length = network.length if own_part is None else len(own_part.federated(network.length))
    declared = declaration(raw, standardise if exact else "off", length)
    population = population if declared is None else raw
    if is_dense(network):
        population = population.mapped(lambda s, _: Shard(s.x.reshape(len(s), -1) if len(s) else s.x, s.y))
    plan = engine.sim_plan(name, fleet.values, network, options, own, own_part, earlier=len(source.earlier))
    kind = own or find_strategy(name)
    build_strategy(kind, plan)
    chosen: StrategySettings = read_settings(kind.settings_type, name, fleet.values)
    if chosen.uses_validation:
        require_validation(population, name)
    check_devices(plan, population.names, chosen)
    for doubt in doubts(plan, population.names, chosen):
        warnings.warn(doubt, stacklevel=2)
    start = source.origins(plan.origins, seed)
    start = start if own_part is None else start[:, own_part.federated(network.length)]
    result = engine.simulate(
        name,
        fleet.values,
        population,
        network,
        options,
        _told(rounds if progress else 0, writer, source.kind, square),
        start=start,
        backend=NumpyBackend(),
        strategy=own,
        private=own_part,
        declared=declared,
        secure=secure,
    )
    scales = tuple(own or given for own, given in zip(result.scales, scales, strict=True)) if declared else scales
    accuracy, loss = _figures(result.final, population, source.kind, square)
    clusters = result.taken()
    return Result(
        accuracy=accuracy,
        loss=loss,
        clusters=clusters,
        history=[_round(record, source.kind, square) for record in result.history],
        events=[event for _, event in result.events],
        _template=source.template,
        _thetas={
            model: _initial(theta, own_part, network.length)
            for model, theta in result.thetas.items()
            if model not in STATISTICS_MODELS
        },
        _own=lambda device: _whole(result, device, int(clusters[device])),
        _finish=partial(_personal, result, options, start, source.kind, personal, own_part, square),
        _scales=scales,
        _target=scale,
    )


def _recipe(name: str, settings: Mapping[str, str], choices: Mapping[str, Any], *, secure: bool) -> Recipe:
    """Return the recipe of a simulated run, for sums only if it is ``secure``."""
    fleet = fleet_run(name, settings, **choices)
    if fleet.seed is None:
        raise UsageError("a simulated run has a seed", hint="leave seed out, or give a number")
    if secure:
        fleet = with_keeper(fleet)
        check_choices(fleet)
    return fleet


def _signature() -> inspect.Signature:
    """Return the signature of `simulate` with each choice by its name, for ``help``."""
    named = inspect.signature(simulate)
    own = [p for p in named.parameters.values() if p.kind is not p.VAR_KEYWORD]
    hints = get_type_hints(Choices)
    choices = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=hints[n]) for n, d in CHOICES.items()
    ]
    return named.replace(parameters=[*own, *choices])


simulate.__signature__ = _signature()  # type: ignore[attr-defined]


def _strategy(strategy: Any) -> tuple[str, type[Strategy] | None]:
    """Return a strategy's name, and its class unless the registry knows it."""
    if isinstance(strategy, str):
        find_strategy(strategy)
        return strategy, None
    name = str(getattr(strategy, "name", ""))
    if STRATEGIES.get(name) is strategy:
        return name, None
    if not isinstance(strategy, type):
        raise UsageError(
            f"strategy is a {type(strategy).__name__}", hint="give a name or the class itself: each run makes its own"
        )
    check_members(strategy)
    return name, strategy


def _text(values: Mapping[str, Any], what: str) -> dict[str, str]:
    """Return settings as the command line gives them: text by name."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{what} is a {type(values).__name__}", hint=f"give a mapping, such as {what}={{'name': 1}}")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, bool | int | float | str | np.number | np.bool_):
            raise UsageError(f"{what}: {name!r} is {value!r}", hint="values are numbers, text, True or False")
    return {name: str(value) for name, value in values.items()}


def _told(rounds: int, writer: HistoryWriter | None, kind: Kind, square: float) -> Callable[[SimRound], None]:
    """Return a function that notes a round, of ``rounds`` unless that is 0, and gives it to the writer."""

    def tell(record: SimRound) -> None:
        if writer is not None:
            writer.write(_round(record, kind, square))
        if not rounds:
            return
        loss = "" if record.loss is None else f"loss {record.loss * square:.4g}, "
        accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:.1f} %, "
        note(f"round {record.round} of {rounds}: {loss}{accuracy}clusters {record.clusters}")

    return tell


def _figures(
    final: Evaluation | None, population: Population, kind: Kind, square: float
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
    """Return accuracy and test loss of each device, shape (devices,); NaN if it has no test share."""
    accuracy, loss = np.full(len(population), np.nan), np.full(len(population), np.nan)
    if final is not None:
        place_of = {name: i for i, name in enumerate(population.names)}
        places = [place_of[name] for name in final.names]
        accuracy[places] = final.correct / final.tested
        loss[places] = final.losses * square
    return None if kind == "regression" else accuracy, loss


def _personal(
    result: engine.SimResult,
    options: SimOptions,
    start: NDArray[np.float32],
    kind: Kind,
    weight: float,
    private: PrivateStart | None,
    square: float,
) -> NDArray[np.float64]:
    """Return the accuracy of each device after its personal finish, shape (devices,); for regression its loss."""
    workforce = result.workforce
    fresh = drawn_start(workforce.network, start[0], workforce.run.seed, private)
    with limited_threads(options.threads):
        found = finish(workforce, _taken(result), result.all_rounds + 1, fresh, above=_above(result), weight=weight)
    if kind == "regression":
        return found.losses * square
    accuracy = np.full(len(found.tested), np.nan)
    tested = found.tested > 0
    accuracy[tested] = found.correct[tested] / found.tested[tested]
    return accuracy


def _above(result: engine.SimResult) -> list[dict[str, Float32Vector]]:
    """Return the models above each device's own in cfl's tree, from the root, by candidate; empty without ``path``."""
    assignments = result.final_plan().assignments
    found = []
    for place, name in enumerate(result.workforce.population.names):
        kept = assignments[name].phase == Phase.KEEP
        nodes = sorted(assignments[name].candidates[1:]) if kept else []
        found.append({node_name(node): _whole(result, place, node) for node in nodes})
    return found


def _taken(result: engine.SimResult) -> NDArray[np.float32]:
    """Return the model that each device takes, with its private coordinates: (devices, d + p)."""
    return np.stack([_whole(result, place, int(model)) for place, model in enumerate(result.taken())])


def _whole(result: engine.SimResult, place: int, model: int) -> Float32Vector:
    """Return a model with the private coordinates of the device at ``place``: (d + p,), float32."""
    whole: Float32Vector = result.workforce.whole(result.thetas[model][None], np.array([place]))[0]
    return whole


def _initial(theta: Float32Vector, private: PrivateStart | None, length: int) -> Float32Vector:
    """Return a model (d,) with the initial private values: (d + p,)."""
    if private is None:
        return theta
    whole = np.empty(length, np.float32)
    whole[private.federated(length)], whole[private.places] = theta, private.values
    return whole


def _round(record: SimRound, kind: Kind, square: float) -> Round:
    """Return a round's figures, with losses in the unit of the data, of which ``square`` is a loss of 1."""
    accuracy = None if record.accuracy is None or kind == "regression" else record.accuracy / 100
    return Round(
        round=record.round,
        loss=None if record.loss is None else record.loss * square,
        accuracy=accuracy,
        test_loss=None if record.test_loss is None else record.test_loss * square,
        clusters=record.clusters,
        sizes=record.sizes,
    )
