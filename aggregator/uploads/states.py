"""The states of an upload and the table of its transitions.

The package's docstring explains the states. `diagram` draws the table for docs/architecture.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from aggregator.storage.store import UploadRef

ANSWERS_REMEMBERED: Final = 16_384
"""Enough for several rounds of a large fleet. A device whose answer was forgotten must send its upload again to get it."""


class UploadState(Enum):
    """Progress of one upload; see the package's docstring."""

    RECEIVING = "receiving"
    VERIFYING = "verifying"
    VALID = "valid"
    COMMITTING = "committing"
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"


class UploadEvent(Enum):
    """Cause of a transition; the value is its label in the diagram."""

    COMPLETE = "complete"
    VALIDATED = "valid"
    DROPPED = "forged, or a copy"
    REJECTED = "breaks a rule, or comes too late"
    FOUND_STORED = "found in the store"
    COMMIT_STARTED = "commit starts"
    ROUND_CLOSED = "round closes first"
    COMMITTED = "durable"
    FORGOTTEN = "answer forgotten"


class TransitionError(RuntimeError):
    """An event that the upload's state does not allow: a bug in the aggregator, never a device's fault."""


_S, _E = UploadState, UploadEvent
TRANSITIONS: Final[Mapping[tuple[UploadState, UploadEvent], UploadState]] = MappingProxyType(
    {
        (_S.RECEIVING, _E.COMPLETE): _S.VERIFYING,
        (_S.RECEIVING, _E.REJECTED): _S.REFUSED,
        (_S.RECEIVING, _E.FOUND_STORED): _S.ACKNOWLEDGED,
        (_S.VERIFYING, _E.DROPPED): _S.RECEIVING,
        (_S.VERIFYING, _E.VALIDATED): _S.VALID,
        (_S.VERIFYING, _E.REJECTED): _S.REFUSED,
        (_S.VERIFYING, _E.FOUND_STORED): _S.ACKNOWLEDGED,
        (_S.VALID, _E.COMMIT_STARTED): _S.COMMITTING,
        (_S.VALID, _E.ROUND_CLOSED): _S.REFUSED,
        (_S.COMMITTING, _E.COMMITTED): _S.ACKNOWLEDGED,
        (_S.ACKNOWLEDGED, _E.FORGOTTEN): _S.RECEIVING,
        (_S.REFUSED, _E.FORGOTTEN): _S.RECEIVING,
    }
)
ANSWERED: Final = frozenset({UploadState.ACKNOWLEDGED, UploadState.REFUSED})
"""States in which the device was answered; a reminder gets the same answer again."""


class UploadTable:
    """State of each upload of one run, and the reason of each refusal.

    Uploads without an entry are RECEIVING. The number of answered uploads is bounded: the oldest are forgotten first.
    """

    def __init__(self, answers_remembered: int = ANSWERS_REMEMBERED) -> None:
        self._answers_remembered = answers_remembered
        self._in_progress: dict[UploadRef, UploadState] = {}
        # Not a plain dict: that one takes longer and longer to find its first entry as earlier ones are deleted.
        self._answered: OrderedDict[UploadRef, tuple[UploadState, str]] = OrderedDict()

    def state(self, ref: UploadRef) -> UploadState:
        """Return the state of an upload."""
        answered = self._answered.get(ref)
        if answered is not None:
            return answered[0]
        return self._in_progress.get(ref, UploadState.RECEIVING)

    def reason(self, ref: UploadRef) -> str:
        """Return why an upload was refused; empty if it was not."""
        answered = self._answered.get(ref)
        return "" if answered is None else answered[1]

    def move(self, ref: UploadRef, event: UploadEvent, reason: str = "") -> UploadState:
        """Apply an event to an upload and return its new state.

        Args:
            ref: the upload.
            event: the event.
            reason: of a refusal.

        Raises:
            TransitionError: the upload's state does not allow the event.
        """
        before = self.state(ref)
        after = TRANSITIONS.get((before, event))
        if after is None:
            raise TransitionError(f"{event.name} is not allowed for the {before.value} upload of {ref.device}")
        if after in ANSWERED:
            self._in_progress.pop(ref, None)
            self._answered[ref] = after, reason
            if len(self._answered) > self._answers_remembered:
                # One forgotten answer makes room; that move deletes the entry and forgets no other.
                self.move(next(iter(self._answered)), UploadEvent.FORGOTTEN)
        elif after is UploadState.RECEIVING:
            self._in_progress.pop(ref, None)
            self._answered.pop(ref, None)
        else:
            self._in_progress[ref] = after
        return after
