"""Accept the owner's messages while the aggregator runs: newer rosters, and newer keys for later runs.

Both are retained, so that they arrive again with every connection; a roster or grant that is not newer changes nothing.
"""

from __future__ import annotations

import logging
from typing import Final

from crypto.seal.envelope import open_from_member, read_head
from shoal.errors import UntrustedError
from shoal.membership.directory import Membership
from shoal.membership.grants import OWNER_NAME
from shoal.membership.roster import RosterForkError
from shoal.protocol import channels
from shoal.protocol.documents import AggregatorGrant
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Transport

LOG = logging.getLogger("shoal.aggregator")
FROM_OWNER: Final = {channel.topic: channel for channel in (channels.OWNER_ROSTER, channels.KEYS)}
"""The owner's channels to the aggregator, by kind of topic."""


class GrantInbox:
    """Applies the owner's newer keys to a membership."""

    topics: tuple[TopicKind, ...] = (TopicKind.KEYS,)

    def __init__(self, membership: Membership[AggregatorGrant]) -> None:
        self._membership = membership
        self._topics = Topics(membership.fleet)
        self._chunks = Reassembler(channels.OWNER_ROSTER.largest, whole_transfers=1)

    def subscribe(self, transport: Transport) -> None:
        """Subscribe to the owner's topics."""
        for kind in self.topics:
            own = self._membership.identity.name if kind is TopicKind.KEYS else ""
            transport.subscribe(self._topics.filter(kind, own))

    def take(self, topic: str, payload: bytes, now_s: float) -> bool:
        """Handle one message if its topic is one of the owner's; return whether it is.

        Args:
            topic: the message's topic.
            payload: one chunk; empty if the retained message was cleared.
            now_s: monotonic seconds.

        Raises:
            UntrustedError: not from the owner, not for this aggregator, a rolled back roster or a forked one.
            WireError: malformed.
        """
        parsed = self._topics.parse(topic)
        if parsed.kind not in self.topics:
            return False
        if parsed.kind is TopicKind.KEYS and parsed.device != self._membership.identity.name:
            raise UntrustedError(
                f"keys for {parsed.device!r}, which {self._membership.identity.name} has not subscribed to"
            )
        if not payload:
            return True
        self._chunks.expire(now_s)
        transfer = self._chunks.add(parsed.kind.name, payload, now_s, FROM_OWNER[parsed.kind].limit())
        if transfer is None:
            return True
        if parsed.kind is TopicKind.OWNER_ROSTER:
            self._on_roster(transfer)
        elif self._membership.take_grant(bytes(transfer.payload)):
            LOG.info("newer keys", extra={"kv": {"roster": self._membership.roster.sequence}})
        return True

    def _on_roster(self, transfer: Transfer) -> None:
        member = self._membership
        head, at = read_head(transfer.payload)
        ours = (head.fleet, head.sender, head.recipient) == (member.fleet, OWNER_NAME, member.identity.name)
        if not ours or head.purpose.partition("/")[0] != channels.OWNER_ROSTER.stem:
            raise UntrustedError(f"a {head.purpose} of {head.sender!r} where the owner's roster belongs")
        signed, _ = open_from_member(member.identity, transfer.payload, head, at, member.owner_key, transfer.signed)
        try:
            newer = member.adopt(bytes(signed))
        except RosterForkError as error:
            if member.is_new_fork(bytes(signed)):
                LOG.error("two rosters of one sequence", extra={"kv": {"reason": error, "hint": error.hint}})
            raise
        if newer:
            LOG.info("new roster from the owner", extra={"kv": {"sequence": member.roster.sequence}})


class OwnerInbox(GrantInbox):
    """Applies the owner's newer rosters and keys to the aggregator's membership."""

    topics = (TopicKind.OWNER_ROSTER, TopicKind.KEYS)
