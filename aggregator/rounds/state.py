"""The state of a run, the engine's events and actions, and the transitions that one event of a device causes.

States are immutable: a transition returns a new one. The collections that change with every presence or upload are
persistent (aggregator/persistent.py), so that the cost of an event does not depend on the size of the fleet. Only opening
and closing a round may take time that grows with the fleet.

`Engine.handle` takes an event and returns actions for the driver.

The phases of a run and the table of transitions between them.

    GATHERING   no round is open: too few devices are online, or keys are awaited
    ROUND       a round is open
    FINAL       the final round is open
    FINISHED    the final round is closed; no event changes the state any more

A paused run is gathering, or completes its open round; the owner's orders are no phases of their own.

`Engine.handle` checks every change of phase against the table. One event can close a round and open the next, so the table
lists the phases before and after an event. `diagram` draws it for docs/architecture.md.

The owner's orders (`Order`):

    GO          rounds open as usual; every run begins with it
    PAUSE       the open round goes on to its close, and no other opens
    STOP        the same, and then the final round opens, or the run ends if no round has opened yet
    STOP_NOW    as STOP, and the open round closes at once with the uploads that are durable

A final round that is open goes on under every order: its figures and checkpoints are the result of the run.

Example: a run in round 4 gets PAUSE. Round 4 closes with its quorum, and round 5 opens once the owner has resumed the run with
GO. STOP instead makes the final round follow. No order follows STOP but STOP_NOW.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from aggregator.numerics.averaging import capped_weights
from aggregator.persistent import PersistentList, PersistentMap, PersistentSet
from aggregator.rounds.closing import Cosines, Watched, sampled_cosines
from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.snapshot import ResumeMetadata
from aggregator.rounds.standstill import StillCluster
from aggregator.rounds.summed import short_unit
from aggregator.strategies.base import ClientUpdate, Event, Outcome, RoundPlan, mean_loss
from shoal.protocol.documents import Roster, RunPlan
from shoal.protocol.messages import ORDER_WORDS, DeclineReason, Phase, RunOrder


class Order(Enum):
    """An order of the owner; the value is its name in files and in `status`."""

    GO = "go"
    PAUSE = "pause"
    STOP = "stop"
    STOP_NOW = "stop_now"

    @property
    def stops(self) -> bool:
        """Whether the run ends before its last round."""
        return self in (Order.STOP, Order.STOP_NOW)


WORDS: Final[Mapping[Order, str]] = MappingProxyType(
    {
        Order.GO: ORDER_WORDS[RunOrder.NONE],
        Order.PAUSE: ORDER_WORDS[RunOrder.PAUSED],
        Order.STOP: ORDER_WORDS[RunOrder.STOPPED],
        Order.STOP_NOW: ORDER_WORDS[RunOrder.STOPPED],
    }
)
"""The words of each order in `status`, log and records; empty for a run that goes on."""


def may_follow(before: Order, after: Order) -> bool:
    """Return whether ``after`` may replace ``before``; the same order again may always."""
    return after is before or not before.stops or after is Order.STOP_NOW


def newest(before: Order, after: Order) -> Order:
    """Return the order in force once ``after`` has come: STOP after STOP_NOW changes nothing."""
    return after if may_follow(before, after) else before


class RunPhase(Enum):
    """The phase of a run."""

    GATHERING = "gathering"
    ROUND = "round"
    FINAL = "final_round"
    FINISHED = "finished"


class PhaseError(RuntimeError):
    """A change of phase that the table does not list: a bug in the engine."""


TRANSITIONS: Final[Mapping[tuple[RunPhase, RunPhase], str]] = MappingProxyType(
    {
        (RunPhase.GATHERING, RunPhase.ROUND): "enough devices online",
        (RunPhase.GATHERING, RunPhase.FINAL): "enough devices online after the last round",
        (RunPhase.GATHERING, RunPhase.FINISHED): "stopped before the first round",
        (RunPhase.ROUND, RunPhase.ROUND): "round closes, next one opens",
        (RunPhase.ROUND, RunPhase.GATHERING): "round closes, too few devices online or paused",
        (RunPhase.ROUND, RunPhase.FINAL): "last round closes",
        (RunPhase.FINAL, RunPhase.FINISHED): "final round closes",
    }
)


def phase_of(state: EngineState) -> RunPhase:
    """Return the phase of a run."""
    if state.finished:
        return RunPhase.FINISHED
    if state.plan is None:
        return RunPhase.GATHERING
    return RunPhase.FINAL if state.plan.final else RunPhase.ROUND


def check_transition(before: EngineState, after: EngineState) -> None:
    """Check the change of phase that one event has caused.

    Raises:
        PhaseError: the table does not list it.
    """
    if before.plan is after.plan and before.finished == after.finished:
        return
    change = phase_of(before), phase_of(after)
    if change not in TRANSITIONS:
        raise PhaseError(f"from {change[0].value} to {change[1].value}")


@dataclass(frozen=True, slots=True)
class CameOnline:
    """A device announced that it is online, and which origins of a later run of a standing order it holds."""

    device: str
    origins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WentOffline:
    """A device, or its last will, announced that it is offline."""

    device: str


@dataclass(frozen=True, slots=True)
class Left:
    """The owner revoked a device."""

    device: str


@dataclass(frozen=True, slots=True)
class Declined:
    """A device can't take part in the round that was announced with ``nonce``, or its upload was refused.

    Attributes:
        other: the transcript in the statement of a refused upload, if it is not the run's; else empty.
        model: with reason SUM, the one whose mean the device has refused.
    """

    device: str
    nonce: bytes
    reason: DeclineReason
    other: bytes = b""
    model: int = 0


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The deadline of a round, or of the gathering after it, has passed."""

    round: int


@dataclass(frozen=True, slots=True)
class Rostered:
    """The owner published a newer roster."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class KeysHeld:
    """The secrets of key version ``version`` are available; the next round uses them if they are the newest."""

    version: int


@dataclass(frozen=True, slots=True)
class Ordered:
    """The owner pauses, resumes or stops the run; the driver has made the order durable."""

    order: Order


EngineEvent = CameOnline | WentOffline | Left | Declined | ClientUpdate | DeadlinePassed | Rostered | KeysHeld | Ordered
"""A `ClientUpdate` is an upload that `Engine.validate` accepted and that is durable."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for devices; feed `DeadlinePassed` with the state's round after the plan's deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """Make ``before`` durable and announce ``plan``; `RunService` decides which comes first.

    Attributes:
        plan: the round's plan.
        nonce: an upload to the round must repeat it.
        before: the strategy's state from which, with ``available``, the same plan follows again.
        available: the devices that could take part.
        held: the models to announce, from which, with ``before``, the round follows again.
        unit: see `shoal.protocol.messages.Announcement`.
    """

    plan: RoundPlan
    nonce: bytes
    before: Any
    available: tuple[str, ...]
    held: HeldModels
    unit: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Record a closed round."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class RunFinished:
    """End the run: the final round is closed.

    Attributes:
        last: the final round with its checkpoints, to be announced again and made durable.
    """

    last: OpenRound


Action = Gather | OpenRound | RoundClosed | RunFinished


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The record of a closed round.

    Attributes:
        round: its number.
        final: whether it was the final round.
        ordered: number of devices with an order.
        contributed: number of devices that uploaded.
        missing: the devices with an order that did not upload.
        loss: mean of the devices' losses on the scored share, weighted by samples; of five or more the smallest and the largest
            count as their neighbours.
        correct, tested: sums over the devices' test shares, each of at most the plan's weight cap times the median; 0 of 0 if no
            device was asked.
        norms: device -> norm of its update.
        clusters: device -> cluster after the round.
        events: the strategy's and the engine's events.
        device_accuracy: device -> (correct, tested), capped in proportion, for the devices that were asked.
        declined: device -> reason, for the missing devices that gave one.
        capped: device -> weight in samples, for devices that weighed less than the samples they reported.
        refused_norm: device -> norm, for updates left out because of their norm.
        out_of_step: device -> model, for updates left out because most devices hold another state of the model.
        cluster_losses: cluster -> mean loss, as ``loss``, of the devices that are in it after the round.
        still: the clusters whose model has not changed for some rounds, see `aggregator.rounds.standstill`.
        cluster_tests: cluster -> (correct, tested), sums over the test shares of the devices that are in it after the round.
        cosines: between the round's updates; None without two of them.
    """

    round: int
    final: bool
    ordered: int
    contributed: int
    missing: tuple[str, ...]
    loss: float
    correct: int
    tested: int
    norms: Mapping[str, float]
    clusters: Mapping[str, int]
    events: tuple[Mapping[str, Any], ...]
    device_accuracy: Mapping[str, tuple[int, int]]
    declined: Mapping[str, str] = field(default_factory=dict)
    capped: Mapping[str, float] = field(default_factory=dict)
    refused_norm: Mapping[str, float] = field(default_factory=dict)
    out_of_step: Mapping[str, int] = field(default_factory=dict)
    still: tuple[StillCluster, ...] = ()
    cluster_losses: Mapping[int, float] = field(default_factory=dict)
    cluster_tests: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    cosines: Cosines | None = None


SILENT_ROUNDS: Final = 3
"""Rounds in a row, or deadlines of one round, that an online device leaves unanswered until rounds wait for it no longer.

One upload ends that. A round that waits after its deadline counts again with each time as long that passes."""
NOT_WAITED_FOR: Final = "not-waited-for"
"""Kind of the event that names such a device."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of a run.

    Attributes:
        devices: the fleet; ``online`` is a subset.
        strategy: the strategy's own state.
        run: the owner's plan.
        held: the models as devices hold them, with the key version in use.
        round: number of the open round or the last one, 0 before the first.
        plan: plan of the open round, None while gathering.
        received: device -> (phase, digest) of its durable upload to the open round.
        contributions: the durable uploads to the open round.
        unavailable: devices with an order that have not uploaded and are not waited for: offline, declined or revoked.
        removed: the subset of them that the owner has revoked.
        declined: device -> reason, for declines of the open round; see `unable`.
        refused: devices whose upload to the open round was refused, or that wait for the owner's newer keys, and that have not
            uploaded since: they can do a later round.
        unfit: devices that have declined the open round for any other reason but a lack of state, and not uploaded since.
        lacking: devices that declined the open round for lack of a model's state, and that have not uploaded since.
        checkpoints_only: whether devices only hand over checkpoints in the open round, which the strategy does not see.
        parted: whether the owner has revoked devices since the strategy last heard of it.
        head: the run's transcript with the announcement of the open round.
        others: device -> the other transcript that it has signed in the open round.
        disputed: device -> the model whose mean it refuses in the open round.
        unasked: number of online devices without an order in the open round.
        deadline_passed: whether the deadline of the open round, or of the gathering, has passed.
        newest: the newest key version that is available.
        roster: the newest roster; None if it is not known.
        news: events since the last round closed.
        watched: see `aggregator.rounds.closing`.
        silent: device -> rounds in a row that it left unanswered, or in which its upload was refused, while online. A round
            counts as often as its deadline has passed; see `after_deadline`.
        order: the owner's.
    """

    devices: PersistentSet[str]
    strategy: Any
    run: RunPlan
    held: HeldModels
    online: PersistentSet[str] = field(default_factory=PersistentSet)
    round: int = 0
    plan: RoundPlan | None = None
    received: PersistentMap[str, tuple[Phase, bytes]] = field(default_factory=PersistentMap)
    contributions: PersistentList[ClientUpdate] = field(default_factory=PersistentList)
    unavailable: PersistentSet[str] = field(default_factory=PersistentSet)
    removed: PersistentSet[str] = field(default_factory=PersistentSet)
    declined: PersistentMap[str, DeclineReason] = field(default_factory=PersistentMap)
    refused: PersistentSet[str] = field(default_factory=PersistentSet)
    unfit: PersistentSet[str] = field(default_factory=PersistentSet)
    lacking: PersistentSet[str] = field(default_factory=PersistentSet)
    checkpoints_only: bool = False
    parted: bool = False
    head: bytes = b""
    others: PersistentMap[str, bytes] = field(default_factory=PersistentMap)
    disputed: PersistentMap[str, int] = field(default_factory=PersistentMap)
    unasked: int = 0
    deadline_passed: bool = False
    finished: bool = False
    newest: int = 0
    roster: Roster | None = None
    news: tuple[Event, ...] = ()
    watched: Watched = field(default_factory=Watched)
    silent: Mapping[str, int] = field(default_factory=dict)
    order: Order = Order.GO

    @property
    def stopped(self) -> bool:
        """Whether the run ends, or has ended, before its last round because of the owner's order."""
        return self.order.stops

    @property
    def waiting(self) -> tuple[str, ...]:
        """Devices with an order that have not uploaded, in name order."""
        return () if self.plan is None else tuple(sorted(d for d in self.plan.assignments if d not in self.received))

    @property
    def unable(self) -> dict[str, str]:
        """Reason of each device that has declined the open round and not uploaded since, in name order."""
        return {d: self.declined[d].name.lower() for d in self.waiting if d in self.declined}

    @property
    def present(self) -> tuple[str, ...]:
        """Online devices, in name order."""
        return tuple(sorted(self.online))

    @property
    def awaited(self) -> int:
        """Number of available devices with an order that have not uploaded; in constant time."""
        return 0 if self.plan is None else len(self.plan.assignments) - len(self.received) - len(self.unavailable)

    @property
    def asked(self) -> int:
        """Number of devices with an order that are in the fleet and have the model.

        A device that lacks a model's state does not count: it can't upload before a later round.
        """
        return 0 if self.plan is None else len(self.plan.assignments) - len(self.removed) - len(self.lacking)

    @property
    def able(self) -> int:
        """Number of the devices asked that can do the round; the quorum is a share of these.

        A device that has declined does not count, nor one that has left rounds unanswered, nor after the deadline one whose
        upload was refused or that says it waits for newer keys: one device must not stop the others.
        """
        late = self.deadline_passed
        counted = [d for d in self.silent if is_silent(self, d) and d not in self.received and _asked(self, d)]
        gone = (self.unfit, self.lacking, self.removed, *((self.refused,) if late else ()))
        silent = sum(not any(d in known for known in gone) for d in counted)
        return self.asked - len(self.unfit) - (len(self.refused) if late else 0) - silent

    @property
    def resume_metadata(self) -> ResumeMetadata:
        """Data that `Engine.resume` needs besides the strategy's state."""
        return ResumeMetadata(self.held.key_version, self.watched, self.news, self.silent)


def too_late(state: EngineState) -> str:
    """Return why an upload to a round that is not open is refused."""
    return "the run is over" if state.finished else "the round is not open"


def is_silent(state: EngineState, device: str) -> bool:
    """Return whether the run does not wait for a device that left so many rounds unanswered; its upload counts if it comes."""
    return state.silent.get(device, 0) >= SILENT_ROUNDS


def not_waited_for(state: EngineState) -> tuple[str, ...]:
    """Return the devices of the fleet that are silent, in name order."""
    return tuple(sorted(d for d in state.silent if is_silent(state, d) and d in state.devices))


def after_deadline(state: EngineState) -> EngineState:
    """Return the state after a deadline of the open round, which counts against the devices that it still waits for.

    It counts only once ``min_contributors`` have answered: where all devices are slow, none of them is silent.
    """
    if len(state.received) < state.run.recipe.min_contributors:
        return dataclasses.replace(state, deadline_passed=True)
    silent, named = after_silence(dataclasses.replace(state, deadline_passed=False))
    return dataclasses.replace(state, deadline_passed=True, silent=silent, news=(*state.news, *named))


def after_silence(state: EngineState) -> tuple[dict[str, int], tuple[Event, ...]]:
    """Return `EngineState.silent` after the open round, and an event for each device that it waits for no longer.

    A round whose deadline has passed has counted by then.
    """
    silent, named = dict(state.silent), []
    for device in () if state.plan is None else state.plan.assignments:
        if device in state.received or state.declined.get(device, DeclineReason.UPLOAD) is not DeclineReason.UPLOAD:
            silent.pop(device, None)
        elif device in state.online and not state.deadline_passed:
            silent[device] = silent.get(device, 0) + 1
            if silent[device] == SILENT_ROUNDS:
                named.append(Event(state.round, NOT_WAITED_FOR, {"device": device, "rounds": SILENT_ROUNDS}))
    return silent, tuple(named)


Transition = tuple[EngineState, tuple[Action, ...]]


def opened(state: EngineState, plan: RoundPlan) -> EngineState:
    """Return the state with a round open."""
    return dataclasses.replace(
        state,
        round=plan.round,
        plan=plan,
        received=PersistentMap(),
        contributions=PersistentList(),
        unavailable=PersistentSet(d for d in plan.assignments if d not in state.online or is_silent(state, d)),
        removed=PersistentSet(d for d in plan.assignments if d not in state.devices),
        declined=PersistentMap(),
        refused=PersistentSet(),
        unfit=PersistentSet(),
        lacking=PersistentSet(),
        others=PersistentMap(),
        disputed=PersistentMap(),
        unasked=sum(d not in plan.assignments for d in state.online),
        deadline_passed=False,
    )


def on_offline(state: EngineState, device: str) -> EngineState:
    """Mark a device as offline; the open round does not wait for it."""
    unavailable = state.unavailable.adding(device) if _owes(state, device) else state.unavailable
    unasked = state.unasked - (device in state.online and not _asked(state, device))
    return dataclasses.replace(state, online=state.online.removing(device), unavailable=unavailable, unasked=unasked)


def on_online(state: EngineState, device: str) -> EngineState:
    """Mark a device as online; the open round waits for it unless it has declined, or has left the last rounds unanswered."""
    stays = device in state.declined or (is_silent(state, device) and _owes(state, device))
    return dataclasses.replace(
        state,
        devices=state.devices.adding(device),
        online=state.online.adding(device),
        unavailable=state.unavailable if stays else state.unavailable.removing(device),
        removed=state.removed.removing(device),
        unasked=state.unasked + (device not in state.online and not _asked(state, device)),
    )


def on_declined(state: EngineState, device: str, reason: DeclineReason) -> EngineState:
    """Record that a device declined the open round, or that its upload was refused; the round does not wait for it."""
    if not _owes(state, device):
        return state
    here = device not in state.removed
    refused, lacks = (
        here and reason in (DeclineReason.UPLOAD, DeclineReason.KEYS),
        here and reason in (DeclineReason.STATE, DeclineReason.SUM),
    )
    unfit = here and not refused and not lacks
    return dataclasses.replace(
        state,
        unavailable=state.unavailable.adding(device),
        declined=state.declined.adding(device, reason),
        refused=state.refused.adding(device) if refused else state.refused.removing(device),
        unfit=state.unfit.adding(device) if unfit else state.unfit.removing(device),
        lacking=state.lacking.adding(device) if lacks else state.lacking.removing(device),
    )


def on_revoked(state: EngineState, device: str) -> EngineState:
    """Remove a revoked device from the fleet; it no longer counts towards the quorum."""
    removed = state.removed.adding(device) if _owes(state, device) else state.removed
    return dataclasses.replace(
        on_offline(state, device),
        devices=state.devices.removing(device),
        parted=state.parted or device in state.devices,
        removed=removed,
        refused=state.refused.removing(device),
        unfit=state.unfit.removing(device),
        lacking=state.lacking.removing(device),
    )


def _asked(state: EngineState, device: str) -> bool:
    return state.plan is not None and device in state.plan.assignments


def _owes(state: EngineState, device: str) -> bool:
    return _asked(state, device) and device not in state.received


def unit_in(state: EngineState) -> float:
    """Return the announced unit of the open round: see `shoal.protocol.messages.Announcement`."""
    run = state.run
    return 0.0 if state.plan is None else short_unit(run, state.plan, state.watched.levels)


def record_of(
    state: EngineState,
    plan: RoundPlan,
    outcome: Outcome,
    refused_norm: Mapping[str, float] | None = None,
    out_of_step: Mapping[str, int] | None = None,
    opened: Sequence[ClientUpdate] | None = None,
) -> RoundRecord:
    """Return the record of a round that closes.

    Args:
        state: the state before the round's contributions are dropped, with the standstill after the round.
        plan: the round's plan.
        outcome: the strategy's outcome.
        refused_norm: see `RoundRecord`.
        out_of_step: see `RoundRecord`.
        opened: stand-ins for the updates in a run with a keeper, where no figures of single devices are known; None in others.
    """
    alone = opened is None
    given = sorted(state.contributions, key=lambda c: c.device) if opened is None else list(opened)
    refused = dict(sorted((refused_norm or {}).items()))
    apart = dict(sorted((out_of_step or {}).items()))
    tests = _tests(given, state.run.recipe.weight_cap)
    counted = [c for c in given if c.device not in refused and c.device not in apart]
    loss = mean_loss(counted, state.run)
    return RoundRecord(
        round=plan.round,
        final=plan.final,
        ordered=len(plan.assignments),
        contributed=len(state.contributions),
        missing=state.waiting,
        loss=0.0 if loss is None else loss,
        correct=sum(correct for correct, _ in tests.values()),
        tested=sum(tested for _, tested in tests.values()),
        norms={c.device: c.norm for c in given} if alone else {},
        clusters=outcome.clusters,
        events=tuple({"round": e.round, "kind": e.kind, **e.detail} for e in (*state.news, *outcome.events)),
        device_accuracy=tests if alone else {},
        declined=state.unable,
        capped=dict(sorted(outcome.capped.items())),
        refused_norm=refused,
        out_of_step=apart,
        still=state.watched.standstill.now,
        cluster_losses=cluster_losses(counted, outcome.clusters, state.run),
        cluster_tests=_cluster_tests(tests, outcome.clusters),
        cosines=None if plan.final or not alone else sampled_cosines(counted, outcome.clusters),
    )


def cluster_losses(given: list[ClientUpdate], clusters: Mapping[str, int], run: RunPlan) -> dict[int, float]:
    """Return the mean loss of each cluster that has one.

    Args:
        given: updates of one round.
        clusters: device -> cluster.
        run: gives the weights.
    """
    members: dict[int, list[ClientUpdate]] = {}
    for contribution in given:
        if contribution.device in clusters:
            members.setdefault(clusters[contribution.device], []).append(contribution)
    losses = {cluster: mean_loss(found, run) for cluster, found in sorted(members.items())}
    return {cluster: loss for cluster, loss in losses.items() if loss is not None}


def _tests(given: list[ClientUpdate], cap: float) -> dict[str, tuple[int, int]]:
    """Return device -> (correct, tested) of those that were asked, with no more tested than ``cap`` times the median."""
    asked = [c for c in given if c.tested]
    counted = capped_weights(np.array([c.tested for c in asked], np.float64), cap).tolist()
    return {c.device: (round(c.correct * n / c.tested), round(n)) for c, n in zip(asked, counted, strict=True)}


def _cluster_tests(tests: Mapping[str, tuple[int, int]], clusters: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """Return (correct, tested) of each cluster in which a device was asked."""
    sums: dict[int, tuple[int, int]] = {}
    for device, (correct, tested) in tests.items():
        if device in clusters:
            before = sums.get(clusters[device], (0, 0))
            sums[clusters[device]] = before[0] + correct, before[1] + tested
    return dict(sorted(sums.items()))
