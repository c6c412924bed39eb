"""The phases of a run and the table of transitions between them.

    GATHERING   no round is open: too few devices are online, or keys are awaited
    ROUND       a round is open
    FINAL       the final round is open
    FINISHED    the final round is closed; no event changes the state any more

A paused run is gathering, or completes its open round; the owner's orders (orders.py) are no phases of their own.

`Engine.handle` checks every change of phase against the table. One event can close a round and open the next, so the table
lists the phases before and after an event. `diagram` draws it for docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aggregator.rounds.state import EngineState


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
