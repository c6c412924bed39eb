"""Send revoked devices the owner's roster, which says that they were revoked.

A device that was off while the owner revoked it comes back with old keys. The aggregator then speaks under newer keys, so
that the device can read nothing that is retained for the fleet. What the device signs shows that it is there; the answer is
the owner's signed roster, sealed to the device itself. The device believes the owner's signature only: no aggregator can
make a device leave.
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
"""Less than the time between the two presences with which a device begins: the second one repeats a roster that was lost."""
MAX_PAUSE_S: Final = 60.0
"""A device is sent the roster again after pauses that double from the first to this: a roster may be large."""
MAX_NOTE_BYTES: Final = limits.CHUNK_BYTES
"""Only a message of one chunk is looked at: a presence, reminder or decline. An upload is followed by reminders."""


class Revocations:
    """Answers messages of revoked devices with the newest roster."""

    def __init__(self, membership: AggregatorMembership, publisher: Publisher) -> None:
        self._membership = membership
        self._publisher = publisher
        self._again_s: dict[str, tuple[float, float]] = {}

    def look(self, device: str, payload: bytes, now_s: float) -> None:
        """Send the roster to ``device`` if it is revoked and has signed the message, unless that was done a moment ago.

        Args:
            device: the name in the topic.
            payload: one chunk of a message.
            now_s: any clock that does not go back.
        """
        roster = self._membership.roster
        if device not in roster.revoked:
            return
        again_s, pause_s = self._again_s.get(device, (-math.inf, FIRST_PAUSE_S))
        member = next((d for d in roster.devices if d.name == device), None)
        if now_s < again_s or member is None or not self._is_signed(member, payload, now_s):
            return
        self._again_s[device] = now_s + pause_s, min(2 * pause_s, MAX_PAUSE_S)
        self._publisher.revoked(member, self._membership.roster_bytes)
        LOG.info("a revoked device was sent the roster", extra={"kv": {"device": device, "roster": roster.sequence}})

    def _is_signed(self, member: Member, payload: bytes, now_s: float) -> bool:
        with suppress(WireError):
            transfer: Transfer | None = Reassembler(MAX_NOTE_BYTES, whole_transfers=1, max_per_source=1).add(
                member.name, payload, now_s
            )
            if transfer is not None:
                head, _ = read_head(transfer.payload)
                ours = (head.fleet, head.sender) == (self._membership.fleet, member.name)
                return ours and is_from(transfer.payload, head, member.sign_key, transfer.signed)
        return False
