"""The state of a run, as the engine's transitions take it and return it.

States are values: a transition returns a new one and leaves the earlier ones as they were. The collections that change
with every presence or upload are persistent (aggregator/persistent.py), so that one event of a fleet of N devices
costs the same for any N. Only opening and closing a round may take time that grows with the fleet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aggregator.persistent import PersistentList, PersistentMap, PersistentSet
from aggregator.rounds.events import Action, RoundRecord
from aggregator.rounds.rollover import Rollover
from aggregator.rounds.screening import Levels
from aggregator.strategies.base import Contribution, Event, Outcome, RoundPlan, mean_loss
from shoal.protocol.documents import Roster, RunPlan
from shoal.protocol.messages import Obstacle, Phase

NEWS_KEPT: Final = 64
"""A rollover may fail for days, and all of this lies in every snapshot."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """Where a run stands.

    Attributes:
        devices: of the fleet; ``online`` is a part of them.
        run: the owner's plan as it stands in this mask epoch.
        round: the open round or the last one, 0 before the first; step: of the rollover after it, 0 where there is none.
        plan: the open round's or step's, None while gathering.
        received: device -> (phase, digest) of its durable upload of the open round.
        gone: ordered devices that are not waited for, since they went offline or can't, and have not uploaded; lost: those that
            left the fleet instead; declined: why, for those that have said so in the open round, see `unable`.
        refused: members of the fleet whose upload in the open round was refused, and that have not uploaded since.
        unasked: how many devices are online that the open round has no order for.
        overtime: the deadline of the open round, or of the gathering, has passed.
        since: the round after which the mask epoch began.
        generation: roster sequence of the secrets in force; newest: of the newest at hand.
        roster, roster_bytes: the newest.
        rollover: the one under way.
        news: what happened since the last round closed.
        levels: median norms of the last round's accepted updates, see `aggregator.rounds.screening`.
    """

    devices: PersistentSet[str]
    strategy: Any
    run: RunPlan
    online: PersistentSet[str] = field(default_factory=PersistentSet)
    round: int = 0
    step: int = 0
    plan: RoundPlan | None = None
    received: PersistentMap[str, tuple[Phase, bytes]] = field(default_factory=PersistentMap)
    contributions: PersistentList[Contribution] = field(default_factory=PersistentList)
    gone: PersistentSet[str] = field(default_factory=PersistentSet)
    lost: PersistentSet[str] = field(default_factory=PersistentSet)
    declined: PersistentMap[str, Obstacle] = field(default_factory=PersistentMap)
    refused: PersistentSet[str] = field(default_factory=PersistentSet)
    unasked: int = 0
    overtime: bool = False
    finished: bool = False
    since: int = 0
    generation: int = 0
    newest: int = 0
    roster: Roster | None = None
    roster_bytes: bytes = field(default=b"", repr=False)
    rollover: Rollover | None = None
    news: tuple[Event, ...] = ()
    levels: Levels = field(default_factory=dict)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ordered devices that have not uploaded, in name order."""
        return () if self.plan is None else tuple(sorted(d for d in self.plan.orders if d not in self.received))

    @property
    def unable(self) -> dict[str, str]:
        """What stands in the way of each ordered device that can't upload and has not done so after all, in name order."""
        return {d: self.declined[d].name.lower() for d in self.waiting if d in self.declined}

    @property
    def present(self) -> tuple[str, ...]:
        """Devices of the fleet that are there, in name order."""
        return tuple(sorted(self.online))

    @property
    def awaited(self) -> int:
        """How many ordered devices are there and have not uploaded; in a time that does not grow with the fleet."""
        return 0 if self.plan is None else len(self.plan.orders) - len(self.received) - len(self.gone)

    @property
    def asked(self) -> int:
        """How many ordered devices have uploaded or still can: the quorum is a share of these.

        Once the deadline has passed, a device whose upload was refused does not count: a single one that sends false
        figures could otherwise stop the run.
        """
        if self.plan is None:
            return 0
        refused = len(self.refused) if self.overtime else 0
        return len(self.plan.orders) - len(self.lost) - refused

    @property
    def standing(self) -> dict[str, Any]:
        """What, beside the strategy's state, `Engine.resume` needs to go on from here, as JSON."""
        r = self.rollover
        return {
            "epoch": self.run.epoch,
            "key_id": self.run.key_id.hex(),
            "since": self.since,
            "generation": self.generation,
            "step": self.step,
            "open": self.plan is not None,
            "levels": dict(self.levels),
            "news": [{"round": e.round, "kind": e.kind, "detail": dict(e.detail)} for e in self.news],
            "rollover": None
            if r is None
            else {"generation": r.generation, "tries": r.tries, "folder": r.folder, "signing": r.proposal is not None},
        }


def too_late(state: EngineState) -> str:
    """Return why what comes for a round that is not open is refused."""
    return "the run is over" if state.finished else "the round is not open"


Transition = tuple[EngineState, tuple[Action, ...]]


def opened(state: EngineState, plan: RoundPlan) -> EngineState:
    """Return the state with a round, or a step of a rollover, open."""
    return dataclasses.replace(
        state,
        round=plan.round,
        step=plan.step,
        plan=plan,
        received=PersistentMap(),
        contributions=PersistentList(),
        gone=PersistentSet(d for d in plan.orders if d not in state.online),
        lost=PersistentSet(d for d in plan.orders if d not in state.devices),
        declined=PersistentMap(),
        refused=PersistentSet(),
        unasked=sum(d not in plan.orders for d in state.online),
        overtime=False,
    )


def noted(state: EngineState, kind: str, detail: Mapping[str, Any]) -> EngineState:
    """Return the state with something to tell when the next round closes; of very much only the latest is told."""
    return dataclasses.replace(state, news=(*state.news, Event(state.round, kind, detail))[-NEWS_KEPT:])


def without(state: EngineState, device: str) -> EngineState:
    """Return the state in which the device is not there: the open round does not wait for it."""
    gone = state.gone.adding(device) if _owes(state, device) else state.gone
    unasked = state.unasked - (device in state.online and not _asked(state, device))
    return dataclasses.replace(state, online=state.online.removing(device), gone=gone, unasked=unasked)


def returned(state: EngineState, device: str) -> EngineState:
    """Return the state in which the device is there; one that has declined the open round is not waited for all the same."""
    return dataclasses.replace(
        state,
        devices=state.devices.adding(device),
        online=state.online.adding(device),
        gone=state.gone if device in state.declined else state.gone.removing(device),
        lost=state.lost.removing(device),
        unasked=state.unasked + (device not in state.online and not _asked(state, device)),
    )


def declining(state: EngineState, device: str, obstacle: Obstacle) -> EngineState:
    """Return the state in which nothing is expected of the device in the open round; it may be asked in the next."""
    if not _owes(state, device):
        return state
    counts = obstacle is Obstacle.UPLOAD and device not in state.lost
    return dataclasses.replace(
        state,
        gone=state.gone.adding(device),
        declined=state.declined.adding(device, obstacle),
        refused=state.refused.adding(device) if counts else state.refused.removing(device),
    )


def bereft(state: EngineState, device: str) -> EngineState:
    """Return the state in which the device belongs to the fleet no more: nothing counts on it."""
    lost = state.lost.adding(device) if _owes(state, device) else state.lost
    return dataclasses.replace(
        without(state, device),
        devices=state.devices.removing(device),
        lost=lost,
        refused=state.refused.removing(device),
    )


def _asked(state: EngineState, device: str) -> bool:
    return state.plan is not None and device in state.plan.orders


def _owes(state: EngineState, device: str) -> bool:
    return _asked(state, device) and device not in state.received


def forsaken(state: EngineState) -> bool:
    """Whether the deadline has passed, all that the open round asked went away or declined, and others are there.

    A round may ask very few, a newcomer's cold start one device: the fleet does not wait for these to come back.
    """
    plan = state.plan
    if plan is None or plan.final or state.received or not state.overtime:
        return False
    return not state.awaited and state.unasked > 0


def record_of(
    state: EngineState, plan: RoundPlan, outcome: Outcome, refused_norm: Mapping[str, float] | None = None
) -> RoundRecord:
    """Return the closed round in figures.

    Args:
        state: before the round's contributions are dropped.
        plan: the round's.
        outcome: the strategy's.
        refused_norm: see `RoundRecord`.
    """
    given = sorted(state.contributions, key=lambda c: c.device)
    refused = dict(sorted((refused_norm or {}).items()))
    return RoundRecord(
        round=plan.round,
        final=plan.final,
        ordered=len(plan.orders),
        contributed=len(given),
        missing=state.waiting,
        loss=mean_loss([c for c in given if c.device not in refused], state.run),
        correct=sum(c.correct for c in given),
        tested=sum(c.tested for c in given),
        norms={c.device: c.norm for c in given},
        clusters=outcome.clusters,
        events=tuple({"round": e.round, "kind": e.kind, **e.detail} for e in (*state.news, *outcome.events)),
        device_accuracy={c.device: (c.correct, c.tested) for c in given if c.tested},
        declined=state.unable,
        capped=dict(sorted(outcome.capped.items())),
        refused_norm=refused,
    )
