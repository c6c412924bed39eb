"""Send revoked devices the owner's roster, which says that they were revoked.

A device that was offline while the owner revoked it reconnects with old keys. The aggregator uses newer keys by then, so the
device can open none of the messages retained for the fleet. When it signs a presence, reminder or decline, the aggregator
answers with the owner's signed roster, sealed to that device. The device trusts the owner's signature only, so an
aggregator can't revoke a device by itself.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from crypto.seal.envelope import is_from, read_head
from shoal import limits
from shoal.errors import WireError
from shoal.protocol.reassembly import Reassembler

if TYPE_CHECKING:
    from aggregator.membership import AggregatorMembership
    from aggregator.publisher import Publisher
    from shoal.protocol.documents import Member
    from shoal.protocol.reassembly import Transfer

LOG = logging.getLogger("shoal.aggregator")
FIRST_PAUSE_S: Final = 1.0
"""Shorter than the time between a device's first two presences, so that the second triggers a resend of a lost roster."""
MAX_PAUSE_S: Final = 60.0
"""Longest pause before the roster is sent to a device again; pauses double because a roster may be large."""
MAX_NOTE_BYTES: Final = limits.CHUNK_BYTES
"""Only messages of one chunk are checked: presences, reminders and declines. An upload is followed by reminders."""


class Revocations:
    """Answers messages of revoked devices with the newest roster.

    Args:
        membership: the aggregator's.
        publisher: sends the roster.
    """

    def __init__(self, membership: AggregatorMembership, publisher: Publisher) -> None:
        self._membership = membership
        self._publisher = publisher
        self._again_s: dict[str, tuple[float, float]] = {}

    def look(self, device: str, payload: bytes, now_s: float) -> None:
        """Send the roster to ``device`` if it is revoked and has signed the message, unless a pause is still running.

        Args:
            device: the name in the topic.
            payload: one chunk of a message.
            now_s: seconds of a monotonic clock.
        """
        roster = self._membership.roster
        # Each message comes through here: the list of the revoked is searched for the names of no active device.
        if roster.device(device) is not None or device not in roster.revoked:
            return
        again_s, pause_s = self._again_s.get(device, (-math.inf, FIRST_PAUSE_S))
        member = next((d for d in roster.devices if d.name == device), None)
        # The signature last: it is the only costly check, and anyone who can publish can make us do it.
        if now_s < again_s or member is None or not self._is_signed(member, payload, now_s):
            return
        self._again_s[device] = now_s + pause_s, min(2 * pause_s, MAX_PAUSE_S)
        self._publisher.revoked(member, self._membership.roster_bytes)
        LOG.info("a revoked device was sent the roster", extra={"kv": {"device": device, "roster": roster.sequence}})

    def _is_signed(self, member: Member, payload: bytes, now_s: float) -> bool:
        with suppress(WireError):
            # A reassembler for this message alone: an unverified sender must take no room from the fleet's transfers.
            transfer: Transfer | None = Reassembler(MAX_NOTE_BYTES, whole_transfers=1, max_per_source=1).add(
                member.name, payload, now_s
            )
            if transfer is not None:
                head, _ = read_head(transfer.payload)
                ours = (head.fleet, head.sender) == (self._membership.fleet, member.name)
                return ours and is_from(transfer.payload, head, member.sign_key, transfer.signed)
        return False
