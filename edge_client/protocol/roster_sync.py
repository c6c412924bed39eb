"""How a device's roster stays the newest: change by change, and as a whole where it has missed one."""

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
"""A device that has waited this long for the whole roster subscribes anew, and each time waits twice as long: it is large."""
MOST_TRIES: Final = 5
"""So often it asks, half an hour in all. What comes to nothing is then forgotten, and the next change counts."""

HEARD_LAPSED: Final = (TopicKind.ROSTER, TopicKind.ROSTER_CHANGE, TopicKind.KEYS, TopicKind.CTL)
"""All that a device listens to whose roster has expired. Keys are the owner's own, and may be what opens a newer roster; of
its own topic only a roster that was sent to it alone."""


class RosterSync:
    """One device's subscription to the fleet's roster.

    Attributes:
        revoked: a roster that the owner signed does not list this device any more.
        lapsed: our roster has expired, as `look` found it: until a newer one comes, nothing else is believed.
        wanted_devices: how many devices the whole roster that was asked for lists; None where none was.
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
        """Follow the changes; an earlier life's session may still hold a subscription to whole rosters."""
        self._transport.unsubscribe(self._whole)
        self._transport.subscribe(self._changes)

    def look(self) -> bool:
        """Look whether our roster holds, and say so where that has changed; return whether it has."""
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
            LOG.info("the roster holds", extra={"kv": facts})
        return True

    def look_again(self) -> None:
        """Have the newest change sent once more: it may have come before it could be read."""
        resubscribe(self._transport, self._changes)
        if self._wanted:
            resubscribe(self._transport, self._whole)

    def on_change(self, change: RosterChange, now_s: float) -> None:
        """Take up a change; where it does not follow our roster, or does not give one that the owner signed, ask for it all."""
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
        """Ask for the whole of a roster that has our sequence and another signature; if the owner signed it, `_take` says so."""
        if not self._wanted:
            self._want(change, now_s)

    def _want(self, change: RosterChange, now_s: float) -> None:
        """Ask for the whole roster of a change; without its number of devices no chunk of it would be accepted."""
        self._wanted, self._tries = change.sequence, 0
        self.wanted_devices = max(change.devices, self.wanted_devices or 0)
        self._ask(now_s)

    def on_whole(self, signed: bytes) -> None:
        """Take up a whole roster, and ask for no more of them once the newest that we have heard of is there.

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
        finally:  # one that is refused may come behind a newer one that was carried here by hand
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
        """Ask once more for a whole roster that does not come, or stop asking."""
        if not self._wanted or now_s - self._asked_s <= WHOLE_AGAIN_S * 2 ** (self._tries - 1):
            return
        if self._tries < MOST_TRIES:
            self._ask(now_s)
        else:
            LOG.warning("the whole roster does not come", extra={"kv": {"sequence": self._wanted}})
            self._want_no_more()
