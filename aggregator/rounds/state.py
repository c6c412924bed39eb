"""The state of a run, and the transitions that one event of a device causes.

States are immutable: a transition returns a new one. The collections that change with every presence or upload are
persistent (aggregator/persistent.py), so that the cost of an event does not depend on the size of the fleet. Only opening
and closing a round may take time that grows with the fleet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aggregator.numerics.averaging import capped_weights
from aggregator.persistent import PersistentList, PersistentMap, PersistentSet
from aggregator.rounds.closing import Watched
from aggregator.rounds.cosines import sampled_cosines
from aggregator.rounds.events import Action, RoundRecord
from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.orders import Order
from aggregator.rounds.resume import ResumeMetadata
from aggregator.strategies.base import ClientUpdate, Event, Outcome, RoundPlan, mean_loss
from shoal.protocol.documents import Roster, RunPlan
from shoal.protocol.messages import DeclineReason, Phase

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
        here and reason is DeclineReason.STATE,
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


def record_of(
    state: EngineState,
    plan: RoundPlan,
    outcome: Outcome,
    refused_norm: Mapping[str, float] | None = None,
    out_of_step: Mapping[str, int] | None = None,
) -> RoundRecord:
    """Return the record of a round that closes.

    Args:
        state: the state before the round's contributions are dropped, with the standstill after the round.
        plan: the round's plan.
        outcome: the strategy's outcome.
        refused_norm: see `RoundRecord`.
        out_of_step: see `RoundRecord`.
    """
    given = sorted(state.contributions, key=lambda c: c.device)
    refused = dict(sorted((refused_norm or {}).items()))
    apart = dict(sorted((out_of_step or {}).items()))
    tests = _tests(given, state.run.recipe.weight_cap)
    counted = [c for c in given if c.device not in refused and c.device not in apart]
    loss = mean_loss(counted, state.run)
    return RoundRecord(
        round=plan.round,
        final=plan.final,
        ordered=len(plan.assignments),
        contributed=len(given),
        missing=state.waiting,
        loss=0.0 if loss is None else loss,
        correct=sum(correct for correct, _ in tests.values()),
        tested=sum(tested for _, tested in tests.values()),
        norms={c.device: c.norm for c in given},
        clusters=outcome.clusters,
        events=tuple({"round": e.round, "kind": e.kind, **e.detail} for e in (*state.news, *outcome.events)),
        device_accuracy=tests,
        declined=state.unable,
        capped=dict(sorted(outcome.capped.items())),
        refused_norm=refused,
        out_of_step=apart,
        still=state.watched.standstill.now,
        cluster_losses=cluster_losses(counted, outcome.clusters, state.run),
        cluster_tests=_cluster_tests(tests, outcome.clusters),
        cosines=None if plan.final else sampled_cosines(counted, outcome.clusters),
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
