"""Clusters whose model has stalled, with the reason and what the owner can do.

A mean takes ``min_contributors`` updates, so a cluster that gets fewer in a round keeps its model, and keeps it for ever if
that goes on. `observe` looks at every closed round that trains. It reports a cluster after `ROUNDS_STILL` rounds without a
change, and reports again when the model changes or the last device leaves the cluster. It reads only the round's plan, the
devices in it and the models' versions, so it works for every strategy. A cluster whose devices score or try models in a round
instead of training is not judged by that round.

Clusters that take turns under partial participation are reported once each, since they stop and go on all the time.

Example: two devices, and a mean of at least three.

    >>> from aggregator.rounds.standstill import RoundFacts, Standstill, observe
    >>> from aggregator.strategies.base import ClusterModel, RoundPlan, train_assignment
    >>> pair, train = ("dev-1", "dev-2"), train_assignment((0,), evaluate=False)
    >>> before, model = Standstill(), {0: ClusterModel()}
    >>> for round_ in (1, 2, 3):
    ...     plan = RoundPlan(round_, model, dict.fromkeys(pair, train))
    ...     facts = RoundFacts(plan=plan, clusters=dict.fromkeys(pair, 0), models=model, there=pair, used=pair)
    ...     before, events = observe(before, facts, least=3, participation=1.0)
    >>> events[0].kind, events[0].detail["reason"]
    ('cluster-stands-still', 'it has 2 devices, and a mean takes 3')

Devices whose updates are outliers in their cluster for several rounds in a row.

A rule of `aggregator.numerics.robust` weighs the updates of each mean. Once is chance; after `ROUNDS_APART` rounds in a row the
owner is told the device's name. Rounds in which a device was in no mean do not count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from aggregator.strategies.base import STANDS_APART, ClusterModel, Event, RoundPlan
from aggregator.strategies.robust import Finding, Standings
from shoal.protocol.messages import Phase

ROUNDS_STILL: Final = 3
"""Rounds of training without a change after which a cluster is reported."""
NAMES_SHOWN: Final = 5
"""Most devices named in a reason or a hint."""
READABLE: Final = "(devices can then read means of so few)"
STANDS_STILL: Final = "cluster-stands-still"
MOVES_AGAIN: Final = "cluster-moves-again"
LEFT_EMPTY: Final = "cluster-left-empty"
"""Kinds of the events: a cluster stalls, its model changes again, or no device is in it any more."""


@dataclass(frozen=True, slots=True)
class StillCluster:
    """A cluster whose model has stalled.

    Attributes:
        cluster: its id.
        devices: number of devices in it.
        rounds: rounds of training in a row in which its model did not change.
        reason: why it did not change in the last of them.
        hint: what the owner can do.
        turn: whether the reason is that no device of it was drawn.
    """

    cluster: int
    devices: int
    rounds: int
    reason: str
    hint: str
    turn: bool = False


@dataclass(frozen=True, slots=True)
class Standstill:
    """What the rounds so far showed.

    Attributes:
        rounds: cluster -> rounds of training in a row in which its model did not change.
        now: the stalled clusters, by id.
        told: clusters whose standstill an event has reported, and no event has ended.
        turns: clusters that were reported because no device of theirs was drawn.
    """

    rounds: Mapping[int, int] = field(default_factory=dict)
    now: tuple[StillCluster, ...] = ()
    told: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """A closed round as `observe` sees it.

    Attributes:
        plan: its plan.
        clusters: device -> cluster after the round, without devices that have left the fleet.
        models: model id -> model after the close (`Strategy.models_of`).
        there: devices that were available.
        used: devices whose update the strategy got.
        left_out: devices whose update was left out because of its norm or its state.
        declined: devices that declined, or whose upload was refused.
    """

    plan: RoundPlan
    clusters: Mapping[str, int]
    models: Mapping[int, ClusterModel]
    there: Collection[str]
    used: Collection[str]
    left_out: Collection[str] = ()
    declined: Collection[str] = ()


def observe(
    before: Standstill, facts: RoundFacts, *, least: int, participation: float
) -> tuple[Standstill, tuple[Event, ...]]:
    """Return the clusters that are stalled after a closed round, and an event for each that stalls or resumes.

    Args:
        before: after the round before; stays as it is.
        facts: of the round. A round in which no device trains changes nothing.
        least: ``RunPlan.min_contributors``.
        participation: ``RunPlan.participation``.
    """
    plan = facts.plan
    if not plan.trains:
        return before, ()
    members: dict[int, list[str]] = {}
    for device, cluster in sorted(facts.clusters.items()):
        members.setdefault(cluster, []).append(device)
    rounds = {
        cluster: _rounds(before.rounds.get(cluster, 0), facts, cluster, found)
        for cluster, found in sorted(members.items())
        if cluster in facts.models
    }
    now = tuple(
        _explained(facts, cluster, members[cluster], count, least, participation)
        for cluster, count in rounds.items()
        if count >= ROUNDS_STILL
    )
    begun = [c for c in now if c.cluster not in before.told and not (c.turn and c.cluster in before.turns)]
    events = [Event(plan.round, STANDS_STILL, _detail(c)) for c in begun]
    still = {c.cluster for c in now}
    for cluster in before.told:
        if cluster not in still:
            kind = MOVES_AGAIN if cluster in rounds else LEFT_EMPTY
            events.append(Event(plan.round, kind, {"cluster": cluster, "rounds": before.rounds[cluster]}))
    told = sorted({c for c in before.told if c in still} | {c.cluster for c in begun})
    turns = sorted({*before.turns, *(c.cluster for c in begun if c.turn)})
    return Standstill(rounds, now, tuple(told), tuple(turns)), tuple(events)


def named(devices: Collection[str]) -> str:
    """Return names in ascending order, at most NAMES_SHOWN of them."""
    shown = ", ".join(sorted(devices)[:NAMES_SHOWN])
    return f"{shown} and {len(devices) - NAMES_SHOWN} more" if len(devices) > NAMES_SHOWN else shown


def _detail(still: StillCluster) -> dict[str, object]:
    return {k: v for k, v in dataclasses.asdict(still).items() if k != "turn"}


def _rounds(before: int, facts: RoundFacts, cluster: int, members: list[str]) -> int:
    """Return the cluster's rounds without a change, with this one."""
    if facts.models[cluster].version == facts.plan.round:
        return 0
    orders = [facts.plan.assignments[d] for d in members if d in facts.plan.assignments]
    busy = any(not order.train or order.phase is not Phase.TRAIN for order in orders)
    return before if busy else before + 1


def _explained(
    facts: RoundFacts, cluster: int, members: list[str], rounds: int, least: int, participation: float
) -> StillCluster:
    """Return the cluster with the first stage of the round at which fewer than ``least`` of its devices were left."""
    asked = [d for d in members if d in facts.plan.assignments]
    here = [d for d in members if d in facts.there or d in asked]
    left_out = [d for d in asked if d in facts.left_out]
    used = [d for d in asked if d in facts.used]
    turn = False
    if len(members) < least:
        reason = f"it has {_counted(len(members))}, and a mean takes {least}"
        # A newcomer can't join now: fewer devices than a certificate takes hold the cluster's model.
        hint = f"begin the next run with more devices like these, or with a --min-contributors of {len(members)} {READABLE}"
    elif len(here) < least:
        away = [d for d in members if d not in here]
        reason = f"{len(here)} of its {_counted(len(members))} are online, and a mean takes {least}"
        hint = f"start {named(away)} again" + (f", or {_lower(len(here))}" if here else "")
    elif len(asked) < least and participation < 1:
        turn = not asked
        drawn = (
            f"{len(asked) or 'none'} of its {_counted(len(here))} online {'was' if len(asked) < 2 else 'were'} drawn"
        )
        reason = f"{drawn}, and a mean takes {least}"
        enough = min(1.0, math.ceil(100 * least / len(here)) / 100)
        wait = "wait for its turn" if turn else "wait for a round that draws more of them"
        ways = [f"raise --participation to {enough:g} in the next run"] if enough > participation else []
        ways += [] if turn else [_lower(min(least - 1, max(1, round(participation * len(here)))))]
        hint = ", or ".join((*ways, wait))
    elif len(asked) < least:
        later = [d for d in here if d not in asked]
        reason = f"{len(asked)} of its {_counted(len(here))} online had an assignment, and a mean takes {least}"
        hint = f"wait until {named(later)} have a checkpoint of the model, which {least} devices that hold it certify; "
        hint += "if fewer hold it, it goes back to its last checkpoint, if there is one; else "
        hint += _lower(max(1, len(asked)))
    elif len(used) + len(left_out) < least:
        declined = [d for d in asked if d in facts.declined]
        silent = [d for d in asked if d not in used and d not in left_out and d not in declined]
        reason = f"{len(used) + len(left_out)} of {_counted(len(asked))} asked uploaded, and a mean takes {least}"
        reason += f" ({named(declined)} declined)" if declined else ""
        ways = [f"wait for {named(silent)}, or start them again"] if silent else []
        ways += [f"read the reason in the log of {named(declined)}"] if declined else []
        hint = "; ".join(ways)
    elif len(used) < least:
        reason = f"updates of {named(left_out)} were left out, and a mean takes {least}"
        hint = "`shoal-aggregator status` says why"
    else:
        reason = f"{_counted(len(used))} uploaded, and the algorithm left the model as it is"
        hint = "wait; a round that tests or moves devices does so"
    return StillCluster(cluster, len(members), rounds=rounds, reason=reason, hint=hint, turn=turn)


def _counted(devices: int) -> str:
    return f"{devices} device" + ("" if devices == 1 else "s")


def _lower(devices: int) -> str:
    return f"lower --min-contributors to {devices} in the next run {READABLE}"


ROUNDS_APART: Final = 3
"""Rounds in a row, among those in which the device was in a mean, after which it is named."""


def observed(
    known: Standings, found: Mapping[str, Finding], round_: int, rule: str
) -> tuple[Standings, tuple[Event, ...]]:
    """Return what is known of the devices after a round, and an event for each that reaches `ROUNDS_APART`.

    Args:
        known: what was known before.
        found: the round's findings, see `RobustMean.take`.
        round_: number of the round.
        rule: the run's robust rule.
    """
    if not found:
        return known, ()
    rounds = {device: count for device, count in known.rounds.items() if device not in found}
    rounds |= {device: known.rounds.get(device, 0) + 1 for device, one in found.items() if one.apart}
    against = dict(known.against)
    for device, one in found.items():
        models = {model for model in against.pop(device, ()) if model not in one.against}
        models |= {model for model, is_against in one.against.items() if is_against}
        if models:
            against[device] = tuple(sorted(models))
    named = sorted(device for device, one in found.items() if one.apart and rounds[device] == ROUNDS_APART)
    events = tuple(
        Event(round_, STANDS_APART, {"device": device, "rounds": ROUNDS_APART, "robust": rule}) for device in named
    )
    return Standings(rounds, against), events
