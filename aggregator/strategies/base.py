"""The interface of strategies and its types: `ClusterModel`, `ClientUpdate`, `RoundPlan`, `Outcome` and `Strategy`.

A strategy is a pure transition system on masked updates: ``init`` makes a state, ``plan`` gives the devices their
assignments for the next round, ``close`` moves the models by means of the round's updates. It
uses no clock, socket, disk or random source; the daemon, the loopback fleet and the simulator run the same object.

`StrategySettings` is the base class of every algorithm's settings, and has the facts about a run that follow from them. The owner
derives parts of the run plan from these facts, and the simulator chooses how to sum updates by them. Neither asks
for an algorithm by its name, so a new algorithm overrides here the facts that differ from the defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import capped_weights, weighted_mean
from aggregator.numerics.backend import Backend, NumpyBackend
from aggregator.numerics.clustering import by_first_appearance
from aggregator.numerics.parted import PartedVector, is_parted
from aggregator.numerics.robust import winsorised
from shoal.errors import ConfigError, IntegrityError, KeyMismatchError
from shoal.hints import wanted
from shoal.protocol.cells import Partition
from shoal.protocol.documents import Capabilities, RunPlan
from shoal.protocol.messages import Assignment, Phase, Share, Upload
from shoal.types import Float32Vector

Reads = Literal["updates", "norms", "means"]
AUTO: Final = 0
AUTO_TEXT: Final = "auto"
"""A setting for the number of clusters, as a number and as the owner writes it, that leaves the number to the strategy."""


@dataclass(frozen=True, slots=True)
class StrategySettings:
    """Settings of one algorithm. A subclass adds a field with a default for each setting.

    Attributes:
        clusters_setting: name of the setting that fixes the number of clusters; empty if none does. If its default is `AUTO`, the
            strategy finds the number itself.
        splits: whether a cluster may be split in two, each half of at least ``min_contributors`` devices.
        most_kept: most clusters of an earlier run that a run can begin with, each with its model; 1 if it begins with one model.
        looks: whether its groups follow from a look at the cosines of updates (`Groups`).
    """

    clusters_setting: ClassVar[str] = ""
    looks: ClassVar[bool] = False
    splits: ClassVar[bool] = False
    most_kept: ClassVar[int] = 1

    @property
    def clusters(self) -> int:
        """The number of clusters that the settings fix; 1 if they fix none."""
        return max(1, int(getattr(self, self.clusters_setting))) if self.clusters_setting else 1

    @property
    def reads(self) -> Reads:
        """The part of single updates that the strategy reads: all (``updates``), their ``norms``, or only their ``means``.

        The simulator sums updates as they arise unless the strategy reads ``updates``.
        """
        return "updates"

    def compared(self, _drawn: int, _fleet: int, /) -> int:
        """Return the most updates whose products with each other a round needs at a time; 0 if it needs none.

        Searches for groups compare a sample of bounded size, and robust means compare blocks; both are not counted.

        Args:
            _drawn: devices that train in a round, by the run's participation.
            _fleet: all devices.
        """
        return 0

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that devices must allow besides training, scoring and evaluating; none by default."""
        return Capabilities()

    @property
    def uses_validation(self) -> bool:
        """Whether devices score models on their validation share, which they all need then."""
        return False

    @property
    def origins(self) -> int:
        """Number of starting models that the owner seals and ships, if none are those of an earlier run."""
        return 1

    @property
    def sums_suffice(self) -> bool:
        """Whether the sums of whole cells suffice, as in a run with a keeper, and groups from looks if the strategy `looks`."""
        asked = self.capabilities
        found = self.clusters_setting and getattr(self, self.clusters_setting) == AUTO
        return not (found or self.compared(2, 2) or asked.margins or asked.pretrain or asked.scale)

    def begins_with(self, models: int) -> bool:
        """Return whether a run can begin with so many models: its own ``origins``, or one for each cluster of an earlier run."""
        fixed = int(getattr(self, self.clusters_setting)) if self.clusters_setting else AUTO
        kept = fixed == models or (fixed == AUTO and models <= self.most_kept)
        return models == self.origins or (kept and self.most_kept > 1)

    @property
    def discarded_rounds(self) -> int:
        """Training rounds whose results are thrown away, such as those of random starts that are not chosen."""
        return 0


ORTHOGONAL_MODES: Final = frozenset({"none", "permutation", "signed-permutation", "rotation"})
"""Mask modes that keep dot products, norms and means: all modes there are."""

UploadKey = tuple[int, int, str]
"""(round, phase, device): unique within a run."""


@dataclass(frozen=True, slots=True)
class ClusterModel:
    """One model as the aggregator knows it: theta = scale * origin + sum of weight * other origin + unmask(offset).

    Attributes:
        origin: number of the state that it starts from, which devices hold: one of the run's sealed origins, or a later
            state (`aggregator.rounds.relay`).
        offset: shape (d,), float32, masked: what the round that closes adds; None between rounds.
        contributors: fewest devices in any mean that was added to the offset; 0 without one.
        version: round whose close last changed the slot.
        scale: 1 but for FedGroup's inter-group aggregation, which adds up whole models.
        others: (weight, number) of further vectors in the sum; none unless models of several states are added up.
    """

    origin: int = 0
    offset: Float32Vector | None = None
    contributors: int = 0
    version: int = 0
    scale: float = 1.0
    others: tuple[tuple[float, int], ...] = ()

    @property
    def norm(self) -> float:
        """The l2 norm of the offset, in float64."""
        return 0.0 if self.offset is None else norm_of(self.offset)

    def moved(self, delta: Float32Vector, contributors: int, version: int) -> ClusterModel:
        """Return the slot with ``delta`` (d,) added."""
        offset = delta if self.offset is None else self.offset + delta
        fewest = contributors if self.offset is None else min(self.contributors, contributors)
        return dataclasses.replace(self, offset=offset, contributors=fewest, version=version)


def starts_of(parts: Iterable[tuple[float, ClusterModel]]) -> dict[int, float]:
    """Return what a weighted sum of models starts from: number of the origin or state -> its weight, in order of appearance.

    Args:
        parts: (weight, model) of each model in the sum; their offsets are not looked at.
    """
    found: dict[int, float] = {}
    for weight, model in parts:
        for share, number in ((model.scale, model.origin), *model.others):
            found[number] = found.get(number, 0.0) + weight * share
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientUpdate:
    """One device's upload of a round, checked and durable.

    Attributes:
        model: the model that it scored best and trained from.
        loss: mean loss of that model on the scored share, before training.
        margins: each candidate's loss less the first candidate's.
        correct, tested: on the device's test share; 0 where not asked.
        vector: shape (d,), float32, masked update; None if the assignment was not to train.
        norm: l2 norm of the vector.
        model_norm: l2 norm of the model that was trained, in the clear; 0 where not asked.
        attached: the bytes that follow the update in the upload: checkpoints.
        digest: the hash that its device signed; a resent upload has the same.
        statement: the device's signed statement about the states that it holds.
        nearest: of the models to compare with, the one nearest to the trained model, by distance or, in phase PLACE, by
            direction; 0 where not asked.
        share: sealed to the keeper, in a run that has one; ``vector`` then holds padded words of 32 bits until sums are opened.
        sketch: the padded words that a look compares, in a run that has looks.
        checks: the padded codes of the update, in a run with a keeper.
        summed: whether vector and figures are those of a cell, so that none of them is this device's.
    """

    round: int
    phase: Phase
    device: str
    model: int
    samples: int
    loss: float
    key_id: bytes
    margins: tuple[float, ...] = ()
    correct: int = 0
    tested: int = 0
    vector: Float32Vector | None = None
    norm: float = 0.0
    model_norm: float = 0.0
    attached: bytes | memoryview = field(default=b"", repr=False)
    digest: bytes = field(default=b"", repr=False)
    statement: bytes = field(default=b"", repr=False)
    nearest: int = 0
    share: bytes = field(default=b"", repr=False)
    sketch: bytes = field(default=b"", repr=False)
    checks: tuple[int, ...] = field(default=(), repr=False)
    summed: bool = False

    @property
    def key(self) -> UploadKey:
        """The upload's key, unique within its run."""
        return (self.round, int(self.phase), self.device)

    @property
    def row(self) -> Float32Vector:
        """The masked update, for callers that need one.

        Raises:
            IntegrityError: the upload holds none.
        """
        if self.vector is None:
            raise IntegrityError(f"{self.device} uploaded no update in round {self.round}")
        return self.vector


_IN_BOTH: Final = {f.name for f in fields(ClientUpdate)} & {f.name for f in fields(Upload)} - {"attached"}
"""Fields that an update takes over from its upload's header, in which ``attached`` is a number of bytes."""


def contribution_of(
    upload: Upload,
    vector: Float32Vector | None,
    norm: float | None = None,
    attached: bytes | memoryview = b"",
    digest: bytes = b"",
) -> ClientUpdate:
    """Return the `ClientUpdate` of an upload.

    Args:
        upload: its header.
        vector: (d,), float32, the masked update; None if absent.
        norm: the vector's l2 norm; None computes it.
        attached: the bytes that follow the update in the upload.
        digest: the hash that its device signed.
    """
    if norm is None:
        norm = 0.0 if vector is None else norm_of(vector)
    said = {name: getattr(upload, name) for name in _IN_BOTH}
    return ClientUpdate(**said, vector=vector, norm=norm, attached=attached, digest=digest)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The models that a round sends and each device's assignment. A device without an assignment does not take part.

    Attributes:
        shared: with weight sharing (ifca section 4.3), the ``shared`` segment of every model; ``models`` are then ``cluster``
            segments.
        seal: models of which the next round will need a checkpoint.
        otherwise: state and plan to follow instead, if a device lacks a model of this round and no other can hand it over.
    """

    round: int
    models: Mapping[int, ClusterModel]
    assignments: Mapping[str, Assignment]
    final: bool = False
    shared: ClusterModel | None = None
    seal: frozenset[int] = frozenset()
    otherwise: tuple[Any, RoundPlan] | None = None

    @property
    def trains(self) -> bool:
        """Whether a device trains a model of the run, rather than pre-training, trying or scoring one."""
        return any(order.train and order.phase is Phase.TRAIN for order in self.assignments.values())


STANDS_APART: Final = "stands-apart"
"""Kind of the event that names a device whose update or margin differs from all others' of its cluster."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event for the log and the record of a round, such as a split, a refused split or the choice of a start."""

    round: int
    kind: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Groups:
    """What a look tells of a cell's updates, in a run with a keeper.

    Attributes:
        devices: those that were compared, at most `MOST_LOOKED`.
        partitions: candidates, each a label for each of the devices, the preferred one first; none without looks left.
        used: looks that the run has used.
        false: devices whose sketch is none.
    """

    devices: tuple[str, ...]
    partitions: tuple[Partition, ...] = ()
    used: int = 0
    false: tuple[str, ...] = ()

    def labels(self, at: int = 0) -> dict[str, int]:
        """Return the label of each device in a partition; none without one."""
        return dict(zip(self.devices, self.partitions[at].labels, strict=True)) if self.partitions else {}

    def known(self, given: Iterable[ClientUpdate]) -> list[ClientUpdate]:
        """Return the updates whose devices have a label."""
        labels = self.labels()
        return [c for c in given if c.device in labels]

    def numbers(self, known: Iterable[ClientUpdate]) -> NDArray[np.intp]:
        """Return their labels, renumbered by first appearance: a group whose sum is hidden has no update here."""
        labels = self.labels()
        return by_first_appearance(np.array([labels[c.device] for c in known]))

    def event(self, round_: int, cluster: int) -> Event:
        """Return the event about the look."""
        detail = {
            "cluster": cluster,
            "devices": len(self.devices),
            "used": self.used,
            "candidates": len(self.partitions),
        }
        return Event(round_, "look", detail | ({"false": list(self.false)} if self.false else {}))


LookAt = Callable[[Sequence[ClientUpdate]], Groups]
"""Looks at the updates of one cell, each time in a round with the same result."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of closing a round.

    Attributes:
        clusters: each device's cluster after the round, by the id of its model.
        events: changes of the clustering and other events.
        capped: device -> weight in samples, of devices that weighed less than their samples in a mean (`capped_devices`).
    """

    clusters: Mapping[str, int]
    events: tuple[Event, ...] = ()
    capped: Mapping[str, float] = field(default_factory=dict)


class Average(Protocol):
    """Turns contributions, a weighting and a weight cap into their mean update, (d,) float32.

    It is `mean_update`, unless a driver computes the same mean in another way: the simulator sums updates as they arise and
    never holds a single one.
    """

    def __call__(self, contributions: list[ClientUpdate], weighting: str, cap: float = 0.0) -> Float32Vector:
        """Return the mean of at least one contribution's update; see `weights_of` for the weights."""


@runtime_checkable
class Looking(Protocol):
    """A strategy whose groups follow from looks, in a run with a keeper.

    Attributes:
        look: looks at the updates of a cell; None in a run without a keeper, whose updates the strategy compares itself.
    """

    look: LookAt | None

    @staticmethod
    def partitions(run: RunPlan, gram: NDArray[np.float64]) -> tuple[Partition, ...]:
        """Return candidate groups by the dot products of a cell's updates, (n, n) float64: what the keeper carries out."""


Parts = Callable[[Sequence[ClientUpdate]], Mapping[str, int]]
"""Returns the parts in which the updates of a model are summed, by device; none if they are one."""


def parts_of(strategy: Any) -> Parts:
    """Return how a strategy divides the updates of a model into cells: its ``cells``, if it has such a method."""
    found: Parts = getattr(inner_of(strategy), "cells", lambda _given: {})
    return found


def inner_of(strategy: Any) -> Any:
    """Return the strategy within one that adds rounds of statistics, or else the strategy itself."""
    return getattr(strategy, "inner", strategy)


class Strategy(Protocol):
    """An aggregation algorithm. States are values: a method returns a new one and leaves its argument alone.

    Attributes:
        state_type: class of the states, a frozen dataclass that `shoal.util.state_codec` can encode.
        modes: mask modes in which its results are the same as on clear updates. A strategy that uses single coordinates,
            such as a coordinate-wise median, can't work in mode ``rotation``.
    """

    name: str
    settings_type: ClassVar[type[StrategySettings]]
    state_type: type[Any]
    modes: frozenset[str]

    def init(self, devices: tuple[str, ...]) -> Any:
        """Return the state before round 1 for the fleet's active ``devices``."""

    def plan(self, state: Any, round_: int, available: tuple[str, ...]) -> tuple[Any, RoundPlan]:
        """Return the plan of round ``round_`` for the devices that can take part."""

    def close(self, state: Any, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[Any, Outcome]:
        """Return the state after the round of updates ``given``, in order of device id."""

    def final(self, state: Any, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Return the round in which every device takes and reports on the model it ends with."""

    def models_of(self, state: Any) -> Mapping[int, ClusterModel]:
        """Return by id every model that `close` may have moved, and models that `final` makes of them.

        With weight sharing the shared segment is among them, as `SHARED_MODEL`.
        """

    def retain(self, state: Any, active: frozenset[str]) -> Any:
        """Return the state between two rounds without devices that are not ``active``: the owner has revoked them."""


def norm_of(vector: Float32Vector) -> float:
    """Return the l2 norm of ``vector`` (d,), accumulated in float64 by blocks."""
    if is_parted([vector]):
        return cast(PartedVector, vector).norm()
    return float(np.sqrt(dot(vector, vector)))


def dot(vector: Float32Vector, other: Float32Vector) -> float:
    """Return the dot product of two vectors (d,), accumulated in float64 by blocks."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # a device's update may overflow: callers check the norm
        for start in range(0, len(vector), 1 << 16):
            total += float(np.dot(vector[start : start + (1 << 16)], other[start : start + (1 << 16)]))
    return total


def norms_of(vectors: Iterable[Float32Vector]) -> list[float]:
    """Return the l2 norm of each of ``vectors``, in order; for all those in parts the workers are asked once."""
    found: list[Any] = [vector if is_parted([vector]) else norm_of(vector) for vector in vectors]
    return list(np.sqrt(found[0].space.squared_norms(found)).tolist()) if is_parted(found) else found


def in_order(contributions: Iterable[ClientUpdate]) -> list[ClientUpdate]:
    """Return contributions by device id: sums in this order give the same bits after a recovery."""
    return sorted(contributions, key=lambda c: c.device)


def of_one_round(contributions: Iterable[ClientUpdate]) -> list[ClientUpdate]:
    """Return the updates that a round's means are made of, by device id.

    Raises:
        KeyMismatchError: two updates are masked under different keys.
        IntegrityError: a device contributed twice.
    """
    ordered = in_order(contributions)
    # Where no vector is masked, the key that a device names decides nothing.
    for before, after in pairwise(c for c in ordered if c.vector is not None):
        if before.key_id != after.key_id:
            raise KeyMismatchError(f"{after.device} masked its update under another key")
    for before, after in pairwise(ordered):
        if before.key == after.key:
            raise IntegrityError(f"{after.device} contributed to round {after.round} before")
    return ordered


def weights_of(contributions: Iterable[ClientUpdate], weighting: str, cap: float) -> NDArray[np.float64]:
    """Return the weight of each contribution in their mean.

    Args:
        contributions: n of one cluster and round.
        weighting: ``samples`` or ``uniform``.
        cap: ``RunPlan.weight_cap``; 0 is off.

    Returns:
        shape (n,), float64.
    """
    weights = np.array([c.samples if weighting == "samples" else 1 for c in contributions], np.float64)
    return capped_weights(weights, cap)


def capped_devices(means: Iterable[list[ClientUpdate]], weighting: str, cap: float) -> dict[str, float]:
    """Return device -> weight in samples of those that ``weights_of`` capped in any of the round's means."""
    found: dict[str, float] = {}
    if weighting == "samples" and cap:
        for given in means:
            weights = weights_of(given, weighting, cap)
            found |= {c.device: float(w) for c, w in zip(given, weights, strict=True) if w < c.samples}
    return found


def mean_loss(contributions: list[ClientUpdate], run: RunPlan) -> float | None:
    """Return the mean of the losses that devices report, winsorised, by capped sample counts; None where there are none.

    Under uniform weighting devices report one sample each.
    """
    weights = weights_of(contributions, "samples", run.recipe.weight_cap).tolist()
    total = sum(weights)
    losses = winsorised(np.array([c.loss for c in contributions])).tolist()
    return sum(loss * w for loss, w in zip(losses, weights, strict=True)) / total if total else None


def mean_update(contributions: list[ClientUpdate], weighting: str, cap: float = 0.0) -> Float32Vector:
    """Return the mean of masked updates, (d,) float32, weighted as `weights_of` says."""
    return weighted_mean([c.row for c in contributions], weights_of(contributions, weighting, cap))


def advanced(
    slot: ClusterModel, given: list[ClientUpdate], run: RunPlan, average: Average, round_: int
) -> ClusterModel:
    """Return the slot moved by the mean of its devices' updates (fedgroup Alg. 1, line 8).

    With fewer than ``min_contributors`` updates, or none, the slot is unchanged.
    """
    if len(given) < max(1, run.recipe.min_contributors):
        return slot
    return slot.moved(average(given, run.recipe.weighting, run.recipe.weight_cap), len(given), round_)


def train_assignment(candidates: tuple[int, ...], *, evaluate: bool, phase: Phase = Phase.TRAIN) -> Assignment:
    """Return the assignment to take the best of ``candidates`` on the training share and train it."""
    return Assignment(phase, candidates, Share.TRAIN, train=True, evaluate=evaluate, margins=False)


def place_assignment(start: int, compare: tuple[int, ...]) -> Assignment:
    """Return the assignment to train ``start`` and report which of ``compare`` lies in the direction of the update."""
    return Assignment(Phase.PLACE, (start,), Share.TRAIN, train=False, evaluate=False, margins=False, compare=compare)


def final_assignment(candidates: tuple[int, ...]) -> Assignment:
    """Return the assignment to take the best of ``candidates`` and report its accuracy on the test share."""
    return Assignment(Phase.SCORE, candidates, Share.TRAIN, train=False, evaluate=True, margins=False)


def retained(of_device: Mapping[str, int], active: frozenset[str]) -> dict[str, int]:
    """Return ``of_device`` without devices that are not ``active``."""
    return {device: at for device, at in of_device.items() if device in active}


def evaluates(run: RunPlan, round_: int) -> bool:
    """Whether devices report accuracy in this round."""
    return run.recipe.evaluate_every > 0 and round_ % run.recipe.evaluate_every == 0


def parse_settings(kind: type[Any], run: RunPlan) -> Any:
    """Return the settings of a run plan as `read_settings` does."""
    return read_settings(kind, run.recipe.algorithm, run.recipe.values)


def read_settings(kind: type[Any], algorithm: str, given: Mapping[str, str]) -> Any:
    """Return an algorithm's settings.

    Args:
        kind: its subclass of `StrategySettings`, with fields of int, float, str and bool.
        algorithm: its name, for errors.
        given: values as text by name; settings that are not given take their defaults.

    Raises:
        ConfigError: a name is unknown, a value is not of its type, or ``kind`` refuses it.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in fields:
            raise ConfigError(
                f"{algorithm} has no setting {name!r}", hint=f"it has {', '.join(sorted(fields)) or 'none'}"
            )
        default = fields[name].default
        if name == kind.clusters_setting and default == AUTO:
            values[name] = AUTO if text == AUTO_TEXT else _value(text, int, name, also=AUTO_TEXT)
            known = values[name] >= 1 or text == AUTO_TEXT
            require(known, f"{name} is at least 1, or {AUTO_TEXT}", f"with {name}={AUTO_TEXT} the strategy finds it")
        else:
            values[name] = _value(text, type(default), name)
    return kind(**values)


def _value(text: str, kind: type[Any], name: str, also: str = "") -> Any:
    try:
        return {"true": True, "on": True, "false": False, "off": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"setting {name} is {wanted(kind)}{also and f' or {also}'}, not {text!r}",
            hint="`shoal-fleet run start --help-all` says what each takes",
        ) from error


def require(condition: bool, message: str, hint: str = "") -> None:
    """Raise ConfigError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message, hint=hint)


def require_proximal(run: RunPlan) -> None:
    """Raise ConfigError unless devices train with a proximal term."""
    require(
        run.local.prox_mu > 0,
        f"{run.recipe.algorithm} trains with a proximal term, but prox_mu is {run.local.prox_mu:g}",
        "set prox_mu of the local training above 0, for instance --local prox_mu=1, or take the algorithm without it",
    )


def require_origins(run: RunPlan, settings: StrategySettings) -> None:
    """Raise ConfigError unless the run has as many origins as its strategy begins with."""
    ours = f"{run.recipe.algorithm} begins with {settings.origins} models"
    require(settings.begins_with(run.origins), f"{ours}, and the run has {run.origins}")


def require_one_segment(run: RunPlan) -> None:
    """Raise ConfigError if models have a shared segment."""
    require(all(g.name == "cluster" for g in run.segments), f"{run.recipe.algorithm} has no shared segment")


class Common:
    """What the built-in strategies begin with: the plan, its settings, a backend, the mean of updates, and looks."""

    settings_type: ClassVar[type[StrategySettings]]
    settings: Any
    modes = ORTHOGONAL_MODES
    look: LookAt | None = None

    def __init__(self, run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> None:
        self.run = run
        self.backend = backend or NumpyBackend()
        self.average = average
        self.settings = parse_settings(self.settings_type, run)
        self.prepare()

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them: nothing, unless a subclass has more to do."""

    def cells(self, given: Sequence[ClientUpdate]) -> Mapping[str, int]:
        """Return the group of each device that has trained alone, by a look: the sum of each is opened in the same round."""
        alone = [c for c in given if c.phase is Phase.PRETRAIN]
        return {} if self.look is None or not alone else self.look(alone).labels()
