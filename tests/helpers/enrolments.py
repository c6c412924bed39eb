"""A fleet, a broker in memory, and the owner and devices at it as they come and go."""

from __future__ import annotations

import time

from shoal_lab.loopback.transport import LoopbackBroker, LoopbackTransport

from aggregator import membership as aggregators
from aggregator.owner_inbox import OwnerInbox
from crypto.seal.identity import Identity, fingerprint
from edge_client.enrolment import Enrolling, prepare
from edge_client.membership import DeviceMembership
from shoal.membership.enrol_requests import token_id
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.enrolment import EnrolStatement, Token
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Message

NOW_S = int(time.time())
TOPICS = Topics("reef")
ROSTER_TOPIC = TOPICS.at(TopicKind.OWNER_ROSTER)
TOKEN = Token(
    fleet="reef",
    broker="mqtt://broker.example",
    owner="owner-print",
    aggregator="aggregator-print",
    expires_at_s=2_000,
    secret=bytes(range(16)),
)


def statement_of(token, card, asked_at_s=NOW_S):
    """Return the statement that a device's request under ``token`` makes, with any card."""
    return EnrolStatement(
        fleet=token.fleet,
        owner=token.owner,
        aggregator=token.aggregator,
        token=token_id(token.secret),
        expires_at_s=token.expires_at_s,
        asked_at_s=asked_at_s,
        card=card,
    )


class Scene:
    """A fleet with an aggregator, a broker in memory, and the owner and devices as they come and go."""

    def __init__(self, root):
        self.root = root
        self.owner = FleetDirectory.create(root / "owner", "reef", "mqtt://loopback")
        card = aggregators.init(root / "server")
        grant = self.owner.add_aggregator(card.read_bytes())
        self.server = aggregators.join(root / "server", grant.read_bytes(), self.owner.fingerprint)
        self.broker = LoopbackBroker()
        self.tokens = TokenStore(self.owner)
        self.complaints = []
        self._sittings = 0

    def token(self, life_s=600):
        return self.tokens.issue(1, life_s, NOW_S)[0]

    def ask(self, token, name="dev-1", now_s=NOW_S):
        """Start a device's `enrol`; return its `Enrolling`."""
        prepare(self.root / name, name)
        transport = LoopbackTransport(self.broker, f"enrol-{name}", lambda e: asking.on_event(e, now_s))
        asking = Enrolling(self.root / name, token, transport, self.complaints.append)
        asking.start(now_s)
        transport.start()
        self.broker.pump()
        return asking

    def sit(self, now_s=NOW_S, fleet=None, drain=None, *, look=False):
        """Let the owner connect and read the retained messages; return the registrar.

        Args:
            now_s: unix seconds.
            fleet: the directory as this program of the owner's has opened it.
            drain: as the `Registrar`'s; by default the broker handles everything.
            look: also look for a newer roster than the fleet has.
        """
        self._sittings += 1
        transport = LoopbackTransport(self.broker, f"owner-{self._sittings}", lambda e: registrar.on_event(e, now_s))
        registrar = Registrar(fleet or self.owner, transport, self.complaints.append, drain or self.broker.pump)
        registrar.start(now_s)
        transport.start()
        self.broker.pump()
        registrar.flush()
        if look:
            registrar.look_for_roster()
            self.broker.pump()
        return registrar

    def leave(self, topic, payload):
        """Publish a retained message, as any client of the broker could."""
        self.broker.submit("attacker", Message(topic, payload, retained=True), lambda: None)
        self.broker.pump()

    def leave_request(self, token, request):
        (chunk,) = split(request, kind=ChunkKind.ENROL, round=0)
        self.leave(TOPICS.enrol(token_id(token.secret)), chunk)

    def identity(self, name="dev-1"):
        return Identity.load(self.root / name / "identity.key")

    def print_of(self, name="dev-1"):
        return fingerprint(self.identity(name).member)

    def approve(self, name="dev-1"):
        """Let the owner connect, approve a device and send its grant."""
        self.sit().approve_all([self.print_of(name)], NOW_S)

    def publish(self, fleet=None):
        """Let the owner connect, look for a newer roster than ``fleet`` has, and publish roster and keys."""
        registrar = self.sit(fleet=fleet, look=True)
        registrar.publish_roster()
        registrar.publish_keys()
        self.broker.pump()

    def take_roster(self):
        """Let the aggregator read its retained roster; return the names of the devices in it."""
        assert OwnerInbox(self.server).take(ROSTER_TOPIC, self.broker.retained[ROSTER_TOPIC], 0.0)
        return [device.name for device in self.server.roster.devices]

    def enrol(self, name):
        """Let a device in; return its membership."""
        asking = self.ask(self.token(), name)
        self.approve(name)
        assert asking.granted
        return DeviceMembership(self.root / name)


class Connected:
    """Stands for `OwnerConnection`: a registrar at the scene's broker."""

    def __init__(self, scene, fleet):
        self.registrar = scene.sit(fleet=fleet, look=True)

    def look_for_roster(self):
        """Return: all is handled by then."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.registrar._transport.close()
