"""Roster updates on a device: change by change, or as a whole roster if it has missed a change."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from crypto.seal.identity import SIGNATURE_BYTES
from shoal.errors import ShoalError, reason_of
from shoal.membership.roster import EXPIRED_HINT, RosterForkError, expiry_of
from shoal.membership.roster_delta import apply_change
from shoal.protocol.topics import TopicKind
from shoal.transport.base import resubscribe

if TYPE_CHECKING:
    from edge_client.membership import DeviceMembership
    from shoal.protocol.documents import RosterChange
    from shoal.protocol.topics import Topics
    from shoal.transport.base import Transport

LOG = logging.getLogger("shoal.edge")
WHOLE_AGAIN_S: Final = 60.0
"""A device that has waited this long for the whole roster requests it again; the wait doubles each time, since it is large."""
MOST_TRIES: Final = 5
"""Requests for one whole roster, half an hour in all. Then the device gives up until the next change."""

HEARD_LAPSED: Final = (TopicKind.ROSTER, TopicKind.ROSTER_CHANGE, TopicKind.KEYS, TopicKind.CTL)
"""The only topics that a device reads while its roster has expired. Keys are signed by the owner, and may be needed to open a
newer roster. On the device's own topic it reads only a roster that was sealed to it alone."""


class RosterSync:
    """One device's subscription to the fleet's roster.

    Attributes:
        revoked: a roster that the owner signed does not list this device any more.
        lapsed: our roster had expired at the last `look`; until a newer one arrives, other messages are ignored.
        wanted_devices: number of devices in the whole roster that was requested; None if none was.
    """

    def __init__(self, membership: DeviceMembership, transport: Transport, topics: Topics) -> None:
        self._membership = membership
        self._transport = transport
        self._whole = topics.filter(TopicKind.ROSTER)
        self._changes = topics.filter(TopicKind.ROSTER_CHANGE)
        self.revoked = self.lapsed = False
        self.wanted_devices: int | None = None
        self._wanted = 0
        self._asked_s = 0.0
        self._tries = 0

    def start(self) -> None:
        """Subscribe to changes only; the broker session may still hold a subscription to whole rosters from before a restart."""
        self._transport.unsubscribe(self._whole)
        self._transport.subscribe(self._changes)

    def look(self) -> bool:
        """Check whether our roster has expired; log a change of that, and return whether it changed."""
        member = self._membership
        if member.expired == self.lapsed:
            return False
        self.lapsed = not self.lapsed
        facts = {"sequence": member.roster.sequence, "until": expiry_of(member.roster)}
        if self.lapsed:
            LOG.warning(
                "the roster has expired: waiting for a newer one", extra={"kv": {**facts, "hint": EXPIRED_HINT}}
            )
        else:
            LOG.info("the roster is valid again", extra={"kv": facts})
        return True

    def look_again(self) -> None:
        """Re-request the newest change, and a requested whole roster: they may have arrived before they could be opened."""
        resubscribe(self._transport, self._changes)
        if self._wanted:
            resubscribe(self._transport, self._whole)

    def on_change(self, change: RosterChange, now_s: float) -> None:
        """Apply a change; request the whole roster if it does not follow ours or the result is not signed by the owner."""
        held = self._membership.roster.sequence
        if change.sequence == held and change.signature != self._membership.roster_bytes[:SIGNATURE_BYTES]:
            self._suspect_fork(change, now_s)
        if change.sequence <= held:
            return
        if change.after == held:
            try:
                self._take(apply_change(self._membership.roster, change))
            except ShoalError as error:
                facts = {"sequence": change.sequence, "reason": reason_of(error)}
                LOG.warning("change of the roster refused", extra={"kv": facts})
        if change.sequence > max(self._wanted, self._membership.roster.sequence):
            self._want(change, now_s)

    def _suspect_fork(self, change: RosterChange, now_s: float) -> None:
        """Request the whole of a roster with our sequence but another signature; `_take` reports it if the owner signed it."""
        if not self._wanted:
            self._want(change, now_s)

    def _want(self, change: RosterChange, now_s: float) -> None:
        """Request the whole roster of a change; its number of devices sets the size limit for the chunks."""
        self._wanted, self._tries = change.sequence, 0
        self.wanted_devices = max(change.devices, self.wanted_devices or 0)
        self._ask(now_s)

    def on_whole(self, signed: bytes) -> None:
        """Adopt a whole roster; unsubscribe from whole rosters once we have the newest one that a change announced.

        Raises:
            UntrustedError: not the owner's, rolled back, or expired.
            RosterForkError: another roster of the sequence in force.
        """
        self._take(signed)

    def _take(self, signed: bytes) -> None:
        member = self._membership
        try:
            if member.adopt(signed):
                LOG.info("new roster", extra={"kv": {"sequence": member.roster.sequence}})
        except RosterForkError as error:
            if member.is_new_fork(signed):
                LOG.error("two rosters of one sequence", extra={"kv": {"reason": error, "hint": error.hint}})
            raise
        finally:  # also after a refusal: `adopt` may have read a newer roster that was copied here by hand
            if member.roster.sequence >= self._wanted:
                self._want_no_more()
            self.revoked = not member.listed

    def _want_no_more(self) -> None:
        self.wanted_devices = None
        if self._wanted:
            self._wanted = 0
            self._transport.unsubscribe(self._whole)

    def _ask(self, now_s: float) -> None:
        self._asked_s = now_s
        self._tries += 1
        resubscribe(self._transport, self._whole)

    def tick(self, now_s: float) -> None:
        """Request a whole roster again if it has not arrived in time, or give up."""
        if not self._wanted or now_s - self._asked_s <= WHOLE_AGAIN_S * 2 ** (self._tries - 1):
            return
        if self._tries < MOST_TRIES:
            self._ask(now_s)
        else:
            LOG.warning("the whole roster did not arrive: giving up", extra={"kv": {"sequence": self._wanted}})
            self._want_no_more()
