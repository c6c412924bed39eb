"""The owner's requests to the aggregator about runs, and its answers.

Each request has a number. The aggregator stores the highest one that it has accepted and refuses every request that is not
above it, so that a recorded request has no effect when it is sent again. A request also expires, so that a broker can't hold
one back for a week. An answer names the transfer id of the sealed request: it can't be taken for the answer to another.

Example: `OwnerRequest` 7 asks to pause run 2. The aggregator stores the number together with the order, and sends an
`OwnerAnswer` with outcome DONE. A request START is followed by an encoded `RunPackage`, CHOOSE by a signed `ModelChoice`, and an
answer by a JSON document.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from shoal.errors import WireError
from shoal.protocol.codec import U8, U32, U64, Fixed16, Fixed32, LaterFields, message
from shoal.protocol.documents import require_name

REQUEST_LIFE_S: Final = 600
"""Time from the owner's clock at which a request expires: longer than clocks may differ, and than a large run package takes."""
LATEST_RECORDS: Final = 1000
"""Most records of a run's log in one answer."""


class RequestAction(IntEnum):
    """The owner's wish. START stores a run, CHOOSE a choice of models; LIST to LOGS only read."""

    START = 1
    PAUSE = 2
    RESUME = 3
    STOP = 4
    LIST = 5
    STATUS = 6
    LOGS = 7
    CHOOSE = 8


class Outcome(IntEnum):
    """The kind of an answer.

    DONE: carried out. UNKNOWN: no run of this number. NOT_NOW: the run is not in a state that allows it. REFUSED: the run
    package is none that this aggregator can serve. REPLAYED: the request's number is not above those accepted before. EXPIRED:
    by the aggregator's clock. FAILED: the aggregator's disk is full or fails.
    """

    DONE = 1
    UNKNOWN = 2
    NOT_NOW = 3
    REFUSED = 4
    REPLAYED = 5
    EXPIRED = 6
    FAILED = 7


_ACTIONS: Final = frozenset(map(int, RequestAction))
OF_ONE_RUN: Final = (RequestAction.PAUSE, RequestAction.RESUME, RequestAction.STOP, RequestAction.LOGS)
"""Actions that name a run."""
OF_SCHEDULE: Final = (RequestAction.PAUSE, RequestAction.RESUME, RequestAction.STOP, RequestAction.LIST)
"""Actions that may mean the standing order."""


@message(58)
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRequest:
    """A request of the owner.

    Attributes:
        sequence: its number, at least 1.
        expires_at_s: unix seconds by the owner's clock.
        answer_key: X25519 key to which the answer is sealed; made for this request alone.
        action: a `RequestAction`, or the number of one that a later version has: the aggregator answers that it can't do it.
        run: number of the run; 0 if the action names none.
        now: with STOP, whether the open round closes at once.
        records: with LOGS, the number of records wanted.
        schedule: with PAUSE to LIST, whether the standing order is meant, and not runs.
    """

    fleet: str
    sequence: U64
    expires_at_s: U64
    answer_key: Fixed32
    action: U8
    run: U32 = 0
    now: bool = False
    records: U32 = 0
    schedule: bool = False
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet")
        if not self.sequence:
            raise WireError("a request without a number")
        if self.known is None:
            return
        if self.schedule and self.action not in OF_SCHEDULE:
            raise WireError(f"a request to {self.words} a standing order")
        if bool(self.run) is not (self.action in OF_ONE_RUN and not self.schedule):
            raise WireError(f"a request to {self.words} run {self.run}")
        if self.now and self.action != RequestAction.STOP:
            raise WireError(f"a request to {self.words} now")
        if not 0 <= self.records <= LATEST_RECORDS or bool(self.records) is not (self.action == RequestAction.LOGS):
            raise WireError(f"a request for {self.records} records")

    @property
    def known(self) -> RequestAction | None:
        """The action; None if this version does not have it."""
        return RequestAction(self.action) if self.action in _ACTIONS else None

    @property
    def words(self) -> str:
        """The action in words."""
        return f"do {self.action}" if self.known is None else self.known.name.lower()


@message(59)
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerAnswer:
    """The aggregator's answer to a request.

    Attributes:
        request: transfer id of the sealed request.
        accepted: the highest number that the aggregator has accepted.
        answered_at_s: unix seconds by the aggregator's clock.
        reason, hint: of a request that was not carried out; empty otherwise.
    """

    fleet: str
    request: Fixed16
    outcome: Outcome
    accepted: U64
    answered_at_s: U64
    reason: str = ""
    hint: str = ""
    later: LaterFields = ()
