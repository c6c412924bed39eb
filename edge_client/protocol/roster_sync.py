"""Roster updates on a device: change by change, or as a whole roster if it has missed a change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from edge_client.protocol.session_io import ApplyRosterChange, Facts, Log, Resubscribe, Subscribe, Unsubscribe
from shoal.membership.roster import EXPIRED_HINT
from shoal.protocol.topics import TopicKind

if TYPE_CHECKING:
    from shoal.protocol.documents import RosterChange

WHOLE_AGAIN_S: Final = 60.0
"""A device that has waited this long for the whole roster requests it again; the wait doubles each time, since it is large."""
MOST_TRIES: Final = 5
"""Requests for one whole roster, half an hour in all. Then the device gives up until the next change."""

HEARD_LAPSED: Final = (TopicKind.ROSTER, TopicKind.ROSTER_CHANGE, TopicKind.KEYS, TopicKind.CTL)
"""The only topics that a device reads while its roster has expired. Keys are signed by the owner, and may be needed to open a
newer roster. On the device's own topic it reads only a roster that was sealed to it alone."""

STARTED: Final = (Unsubscribe(TopicKind.ROSTER), Subscribe(TopicKind.ROSTER_CHANGE))
"""A device subscribes to changes only; the broker may still hold its subscription to whole rosters from before a restart."""

Do = ApplyRosterChange | Log | Resubscribe | Subscribe | Unsubscribe
Step = tuple["RosterSync", tuple[Do, ...]]


@dataclass(frozen=True, slots=True)
class RosterSync:
    """One device's subscription to the fleet's roster.

    Attributes:
        revoked: a roster that the owner signed does not list this device any more.
        lapsed: our roster had expired at the last event; until a newer one arrives, other messages are ignored.
        wanted: sequence of the whole roster that was requested, 0 if none was; devices: number of devices in it, by which
            the size of its chunks is limited, None if none was.
        tries: requests for it so far; asked_s: time of the last one.
    """

    revoked: bool = False
    lapsed: bool = False
    wanted: int = 0
    devices: int | None = None
    tries: int = 0
    asked_s: float = 0.0

    def checked(self, facts: Facts) -> Step:
        """Return the state after a look at the roster's expiry, which is logged when it changes."""
        if facts.roster.expired == self.lapsed:
            return self, ()
        lapsed = not self.lapsed
        told = {"sequence": facts.roster.sequence, "until": facts.roster.until}
        line = Log("info", "the roster is valid again", told)
        if lapsed:
            line = Log("warning", "the roster has expired: waiting for a newer one", {**told, "hint": EXPIRED_HINT})
        return replace(self, lapsed=lapsed), (line,)

    def after_keys(self) -> tuple[Resubscribe, ...]:
        """Re-request the newest change, and a requested whole roster: they may have arrived before they could be opened."""
        change = Resubscribe(TopicKind.ROSTER_CHANGE)
        return (change, Resubscribe(TopicKind.ROSTER)) if self.wanted else (change,)

    def changed(self, change: RosterChange, facts: Facts) -> Step:
        """Take a change: apply it if it follows our roster, else request the whole roster."""
        held = facts.roster
        if change.sequence == held.sequence and change.signature != held.signature and not self.wanted:
            # Two rosters of one sequence: the whole one shows whether the owner signed it.
            return self._want(change, facts)
        if change.sequence <= held.sequence:
            return self, ()
        if change.after == held.sequence:
            return self, (ApplyRosterChange(change),)
        return self._want_newer(change, facts)

    def taken(self, change: RosterChange | None, facts: Facts) -> Step:
        """Take the outcome of a whole roster, or of a ``change``, which may not have led to a roster that the owner signed."""
        enough = facts.roster.sequence >= self.wanted
        state, done = self._want_no_more() if enough else (self, ())
        state = replace(state, revoked=not facts.roster.listed)
        if change is None:
            return state, done
        state, more = state._want_newer(change, facts)
        return state, (*done, *more)

    def ticked(self, facts: Facts) -> Step:
        """Request a whole roster again if it has not arrived in time, or give up."""
        if not self.wanted or facts.now_s - self.asked_s <= WHOLE_AGAIN_S * 2 ** (self.tries - 1):
            return self, ()
        if self.tries < MOST_TRIES:
            return self._ask(facts)
        line = Log("warning", "the whole roster did not arrive: giving up", {"sequence": self.wanted})
        state, done = self._want_no_more()
        return state, (line, *done)

    def _want_newer(self, change: RosterChange, facts: Facts) -> Step:
        if change.sequence <= max(self.wanted, facts.roster.sequence):
            return self, ()
        return self._want(change, facts)

    def _want(self, change: RosterChange, facts: Facts) -> Step:
        devices = max(change.devices, self.devices or 0)
        return replace(self, wanted=change.sequence, tries=0, devices=devices)._ask(facts)

    def _want_no_more(self) -> Step:
        done = (Unsubscribe(TopicKind.ROSTER),) if self.wanted else ()
        return replace(self, wanted=0, devices=None), done

    def _ask(self, facts: Facts) -> Step:
        state = replace(self, asked_s=facts.now_s, tries=self.tries + 1)
        return state, (Resubscribe(TopicKind.ROSTER),)
