"""Accept the owner's messages while the aggregator runs: newer rosters, and newer keys for later runs.

Both are retained, so that they arrive again with every connection; a roster or grant that is not newer changes nothing.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from typing import Final

from crypto.seal.envelope import SealError, is_from, open_from_member, read_head
from crypto.seal.identity import fingerprint
from shoal.address import BrokerAddress
from shoal.errors import ShoalError, UntrustedError
from shoal.membership.directory import Membership
from shoal.membership.grants import OWNER_NAME
from shoal.membership.roster import RosterForkError
from shoal.membership.roster_changes import ReplacedError, read_owner_purpose
from shoal.protocol import channels
from shoal.protocol.documents import AggregatorGrant
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Message, Transport, TransportEvent
from shoal.transport.mqtt import MqttTransport

LOG = logging.getLogger("shoal.aggregator")
LOOK_S: Final = 1.0
"""Time for the broker to send the owner's roster, which it retains; a fleet that joined by file has none there."""
FROM_OWNER: Final = {channel.topic: channel for channel in (channels.OWNER_ROSTER, channels.KEYS)}
"""The owner's channels to the aggregator, by kind of topic."""


class GrantInbox:
    """Applies the owner's newer keys to a membership.

    Attributes:
        has_seen_roster: the broker has delivered a roster that names the owner as its sender.
    """

    topics: tuple[TopicKind, ...] = (TopicKind.KEYS,)

    def __init__(self, membership: Membership[AggregatorGrant]) -> None:
        self._membership = membership
        self._topics = Topics(membership.fleet)
        self._chunks = Reassembler(channels.OWNER_ROSTER.largest, whole_transfers=1)
        self.has_seen_roster = False

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
            ReplacedError: the owner has signed a newer roster for another aggregator: the program must end.
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
        found = read_owner_purpose(head.purpose)
        if found is None or (head.fleet, head.sender) != (member.fleet, OWNER_NAME):
            raise UntrustedError(f"a {head.purpose} of {head.sender!r} where the owner's roster belongs")
        try:
            signed, _ = open_from_member(member.identity, transfer.payload, head, at, member.owner_key, transfer.signed)
        except SealError as error:
            # The owner seals each roster to the aggregator that it names. Its signature tells whether it is the owner's.
            if found[0] > member.roster.sequence and is_from(transfer.payload, head, member.owner_key, transfer.signed):
                raise ReplacedError(found[0], fingerprint(member.identity.member)) from error
            raise
        finally:
            self.has_seen_roster = True
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


def check_place(membership: Membership[AggregatorGrant], address: BrokerAddress) -> None:
    """Look at the owner's newest roster on the broker, under a client id of its own; without one return after LOOK_S.

    Args:
        membership: the aggregator's.
        address: the broker's.

    Raises:
        ReplacedError: the owner has put another aggregator in the place of this one.
        BrokerUnreachableError: no broker answers.
    """
    inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    client = f"shoal-{membership.fleet}-aggregator-look-{secrets.token_hex(4)}"
    transport = MqttTransport(address, client, inbox.put, session_expiry_s=0)
    mail = OwnerInbox(membership)
    transport.subscribe(Topics(membership.fleet).filter(TopicKind.OWNER_ROSTER))
    transport.start(require=True)
    end_s = time.monotonic() + LOOK_S
    try:
        while not mail.has_seen_roster and (left_s := end_s - time.monotonic()) > 0:
            try:
                event = inbox.get(timeout=left_s)
                if isinstance(event, Message):
                    mail.take(event.topic, event.payload, time.monotonic())
            except queue.Empty:
                return
            except ReplacedError:
                raise
            except ShoalError as error:  # the daemon refuses it again, and logs that
                LOG.debug("refused", extra={"kv": {"reason": error}})
    finally:
        transport.close()
