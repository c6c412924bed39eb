"""The facts of the run that is served, from the engine's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aggregator.rounds.orders import WORDS
from aggregator.rounds.phases import RunPhase, phase_of
from aggregator.rounds.quorum_and_deadline import members, online_needed, uploads_needed
from aggregator.rounds.state import not_waited_for
from aggregator.run_log import awaited_keys
from aggregator.shortage import is_paused, shortage
from aggregator.status.facts import RunStatus

if TYPE_CHECKING:
    from aggregator.rounds.state import EngineState


def run_facts(state: EngineState, *, since_s: int, deadline_at_s: int | None, computing: bool = False) -> RunStatus:
    """Return the facts of a run.

    Args:
        state: of the engine.
        since_s: unix seconds since when the open round, or the gathering, lasts.
        deadline_at_s: unix seconds at which it is over; None if there is no deadline.
        computing: whether the round is being closed: then it waits for no device.
    """
    phase, short = phase_of(state), None if computing else shortage(state)
    waiting: tuple[str, ...] = ()
    quorum = received = 0
    too_small = short is not None and not short.late
    if is_paused(state) or too_small:
        deadline_at_s = None  # the run waits for the owner, and no device is late
    if phase is RunPhase.GATHERING and not is_paused(state):
        waiting = tuple(sorted(members(state) - state.online))
        quorum, received = online_needed(state), len(state.online)
    elif phase in (RunPhase.ROUND, RunPhase.FINAL):
        waiting = () if computing else tuple(d for d in state.waiting if d in state.devices)
        quorum, received = uploads_needed(state), len(state.received)
    return RunStatus(
        run=state.run.run,
        algorithm=state.run.recipe.algorithm,
        rounds=state.run.recipe.rounds,
        phase=phase.value,
        round=state.round,
        since_s=since_s,
        deadline_at_s=None if phase is RunPhase.FINISHED else deadline_at_s,
        deadline_passed=state.deadline_passed and not too_small,
        quorum=quorum,
        received=received,
        waiting=waiting,
        not_waited_for=not_waited_for(state),
        obstacle="" if is_paused(state) else awaited_keys(state),
        order=WORDS[state.order],
        computing=computing,
        shortage="" if short is None else short.reason,
        advice="" if short is None else short.hint,
    )
