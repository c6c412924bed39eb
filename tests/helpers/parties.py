"""An owner, an aggregator and devices that have joined, in directories of their own, without a run or a network."""

from __future__ import annotations

from contextlib import nullcontext

from aggregator import membership as aggregators
from crypto.seal.envelope import seal_to_group, seal_to_member
from crypto.seal.identity import Identity
from edge_client import membership as devices
from shoal.membership.directory import KEY_FILE
from shoal.membership.grants import AGGREGATOR_ROLE, OWNER_NAME
from shoal.membership.roster import digest_of
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.documents import Card
from shoal.protocol.topics import Topics

TOPICS = Topics("reef")


class Parties:
    """The fleet "reef".

    Attributes:
        owner: the owner's directory; server: the aggregator's membership; members: the devices' memberships by name.
    """

    def __init__(self, root, *names):
        self.root = root
        self.owner = FleetDirectory.create(root / "owner", "reef", "mqtt://loopback")
        self.owner.add_aggregator(aggregators.init(root / "server").read_bytes())
        for name in names:
            self.owner.add_device(devices.init(root / name, name).read_bytes())
        grant = self.owner.grant_for(Card(AGGREGATOR_ROLE, self.owner.roster.aggregator))
        self.server = aggregators.join(root / "server", grant, self.owner.fingerprint)
        self.members = {}
        for name in names:
            card = Card("device", Identity.load(root / name / KEY_FILE).member)
            self.members[name] = devices.join(root / name, self.owner.grant_for(card), self.owner.fingerprint)

    def grant(self, name="aggregator"):
        """Return the newest keys of a party, as the owner leaves them on the broker."""
        card = next(c for c in self.owner.cards() if c.member.name == name)
        return self.owner.grant_for(card, renewal=True)


class Line:
    """A transport that records what was subscribed to, and every publish as (topic, payload, retain)."""

    chunk_bytes = 1 << 16
    bytes_sent = bytes_received = 0

    def __init__(self):
        self.filters = []
        self.dropped = []
        self.sent = []
        self.closed = False

    together = staticmethod(nullcontext)

    def publish(self, topic, payload, *, retain=False, **_qos):
        """Record a publish."""
        self.sent.append((topic, bytes(payload), retain))

    def subscribe(self, topic_filter):
        """Record a subscription."""
        self.filters.append(topic_filter)

    def unsubscribe(self, topic_filter):
        """Record the end of a subscription."""
        self.dropped.append(topic_filter)

    def pending(self):
        """Return 0: nothing is under way."""
        return 0

    def close(self):
        """Record the end."""
        self.closed = True

    def take(self):
        """Return the topics of the publishes since the last time."""
        sent, self.sent = self.sent, []
        return [topic for topic, _, _ in sent]


def owners_roster(parties, signed=None, *, signer=None, to=None, fleet="reef", sender=OWNER_NAME, purpose=None):
    """Return the chunk in which the owner seals a roster to the aggregator; every part of it may be another."""
    signed = parties.owner.roster_bytes if signed is None else signed
    head = channels.OWNER_ROSTER.head(
        fleet, sender, "aggregator", sequence=parties.owner.roster.sequence, digest=digest_of(signed).hex()
    )
    if purpose is not None:
        head = type(head)(fleet, purpose, sender, "aggregator")
    recipient = to or parties.server.identity.member
    sealed = seal_to_member(signer or parties.owner.owner, recipient.seal_key, head, signed)
    (chunk,) = split(sealed, kind=channels.OWNER_ROSTER.kind, round=0)
    return chunk


def broadcast(parties, channel, plain, *, purpose=None, recipient="*", signer=None):
    """Return the chunk of a message from the aggregator under the broadcast key; its purpose and signer may be others."""
    head = channel.head("reef", "aggregator", recipient)
    if purpose is not None:
        head = type(head)("reef", purpose, "aggregator", recipient)
    sealed = seal_to_group(signer or parties.server.identity, parties.server.group, head, plain)
    (chunk,) = split(sealed, kind=channel.kind, round=0)
    return chunk
