"""How a device's roster stays the newest: change by change, and as a whole where it has missed one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from crypto.seal.roster_change import apply_change
from edge_client.enrolment import REVOKED_HINT
from wire.errors import ShoalError, reason_of

if TYPE_CHECKING:
    from edge_client.enrolment import DeviceMembership
    from wire.documents import RosterChange
    from wire.topics import Topics
    from wire.transport import Transport

LOG = logging.getLogger("shoal.edge")
WHOLE_AGAIN_S: Final = 60.0
"""A device that has waited this long for the whole roster subscribes anew: it is large, and others may ask for it too."""


class RosterFeed:
    """One device's subscription to the fleet's roster."""

    def __init__(self, membership: DeviceMembership, transport: Transport, topics: Topics) -> None:
        self._membership = membership
        self._transport = transport
        self._whole = f"{topics.roster}/#"
        self._changes = f"{topics.roster_change}/#"
        self._wanted = 0
        self._asked_s = 0.0

    def start(self) -> None:
        """Follow the changes; an earlier life's session may still hold a subscription to whole rosters."""
        self._transport.unsubscribe(self._whole)
        self._transport.subscribe(self._changes)

    def look_again(self) -> None:
        """Have the newest change sent once more: it may have come before it could be read."""
        self._transport.unsubscribe(self._changes)
        self._transport.subscribe(self._changes)

    def on_change(self, change: RosterChange, now_s: float) -> None:
        """Take up a change; where it does not follow our roster, or does not give one that the owner signed, ask for it all."""
        held = self._membership.roster.sequence
        if change.sequence <= held:
            return
        if change.after == held:
            try:
                self._take(apply_change(self._membership.roster, change))
            except ShoalError as error:
                facts = {"sequence": change.sequence, "reason": reason_of(error)}
                LOG.warning("change of the roster refused", extra={"kv": facts})
            else:
                return
        if change.sequence > self._wanted:
            self._wanted = change.sequence
            self._ask(now_s)

    def on_whole(self, signed: bytes) -> None:
        """Take up a whole roster, and ask for no more of them once the newest that we know of is there.

        Raises:
            UntrustedError: not the owner's, rolled back, or expired.
        """
        self._take(signed)

    def _take(self, signed: bytes) -> None:
        member = self._membership
        listed = member.listed
        if member.adopt(signed):
            LOG.info("new roster", extra={"kv": {"sequence": member.roster.sequence}})
        if self._wanted and member.roster.sequence >= self._wanted:
            self._wanted = 0
            self._transport.unsubscribe(self._whole)
        if listed and not member.listed:
            LOG.warning("the owner has revoked this device", extra={"kv": {"hint": REVOKED_HINT}})

    def _ask(self, now_s: float) -> None:
        self._asked_s = now_s
        self._transport.unsubscribe(self._whole)
        self._transport.subscribe(self._whole)

    def tick(self, now_s: float) -> None:
        """Ask once more for a whole roster that does not come."""
        if self._wanted and now_s - self._asked_s > WHOLE_AGAIN_S:
            self._ask(now_s)
