"""Enrolment over an in-memory broker: admission, refusals with their reasons, revocation, and receiving keys."""

import dataclasses
from contextlib import nullcontext

import pytest

from aggregator.membership import AggregatorMembership
from aggregator.owner_inbox import OwnerInbox
from crypto.seal.identity import Identity, sign_document
from edge_client.enrolment import prepare
from edge_client.membership import DeviceMembership
from edge_client.protocol.presence import receiving_notice
from shoal import limits
from shoal.errors import ConfigError, ShoalError, UntrustedError, UsageError
from shoal.membership.enrol_requests import token_id
from shoal.membership.grants import ErasedKeyError, peek_grant
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.enrolment.tokens import FORGOTTEN_AFTER_S
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.codec import encode
from shoal.protocol.documents import ReceivingNotice
from shoal.protocol.enrolment import Token
from shoal.protocol.topics import TopicKind
from tests.helpers.enrolments import NOW_S, TOPICS
from tests.helpers.receiving import RECEIVING


def test_enrolled_while_the_owner_is_away(scene):
    """The device asks, the owner connects later and approves; the device then has the same files as after joining by file."""
    asking = scene.ask(scene.token())
    assert not asking.granted
    registrar = scene.sit()
    (request,) = registrar.pending.values()
    assert (request.name, request.fingerprint) == ("dev-1", scene.print_of())
    registrar.approve_all([request.fingerprint], NOW_S)
    scene.broker.pump()
    assert asking.granted
    member = DeviceMembership(scene.root / "dev-1")
    assert member.roster == scene.owner.roster
    assert member.owner_key == scene.owner.owner.member.sign_key
    assert member.version_key(0).reveal() == scene.owner.version_key.reveal()
    assert {p.name for p in (scene.root / "dev-1").iterdir()} == {
        ".lock", "identity.key", "receiving.key", "membership.bin", "roster.signed", "roster.least", "dev-1.card",
    }  # fmt: skip
    assert scene.sit().pending == {}
    assert scene.complaints == []


def test_aggregator_takes_no_older_roster(scene):
    """It learns of a new device without a file being carried, and refuses a replayed older roster."""
    mail = OwnerInbox(scene.server)
    scene.enrol("dev-1")
    first = scene.broker.retained[TOPICS.at(TopicKind.OWNER_ROSTER)]
    assert mail.take(TOPICS.at(TopicKind.OWNER_ROSTER), first, 0.0)
    assert [d.name for d in scene.server.roster.devices] == ["dev-1"]
    scene.enrol("dev-2")
    mail.take(TOPICS.at(TopicKind.OWNER_ROSTER), scene.broker.retained[TOPICS.at(TopicKind.OWNER_ROSTER)], 0.0)
    with pytest.raises(UntrustedError, match="rollback"):
        mail.take(TOPICS.at(TopicKind.OWNER_ROSTER), first, 0.0)
    assert AggregatorMembership(scene.root / "server").roster == scene.owner.roster
    assert not mail.take(TOPICS.up("dev-1"), b"x", 0.0)


def test_foreign_roster_is_refused(scene):
    """A stranger can seal to the aggregator as well, but can't sign as the owner."""
    mail = OwnerInbox(scene.server)
    stranger = FleetDirectory.create(scene.root / "stranger", "reef", "mqtt://loopback")
    stranger.add_aggregator((scene.root / "server" / "aggregator.card").read_bytes())
    Registrar(stranger, transport := Recorder()).publish_roster()
    with pytest.raises(UntrustedError):
        mail.take(TOPICS.at(TopicKind.OWNER_ROSTER), transport.sent[TOPICS.at(TopicKind.OWNER_ROSTER)], 0.0)
    with pytest.raises(ShoalError):
        mail.take(TOPICS.at(TopicKind.OWNER_ROSTER), b"SHL1junk", 0.0)
    assert scene.server.roster.devices == ()


class Recorder:
    """A transport that records the last payload of each topic."""

    chunk_bytes = limits.CHUNK_BYTES

    def __init__(self):
        self.sent = {}

    together = staticmethod(nullcontext)

    def publish(self, topic, payload, *, retain=False, qos=1):  # noqa: ARG002 - a transport's signature
        assert retain
        self.sent[topic] = bytes(payload)

    def subscribe(self, topic_filter):
        pass


def test_cut_approval_is_finished(scene, token):
    """The token is spent and the roster signed, but the grant never left."""
    asking = scene.ask(token)
    (request,) = scene.sit().pending.values()
    scene.tokens.use(token_id(token.secret), request.fingerprint)
    registrar = scene.sit()
    registrar.approve_all([request.fingerprint], NOW_S)
    scene.broker.pump()
    assert asking.granted


def test_a_device_enrols_once(scene):
    """And only under the name that its keys have."""
    scene.enrol("dev-1")
    with pytest.raises(ConfigError, match="belongs to a fleet already"):
        prepare(scene.root / "dev-1", "dev-1")
    prepare(scene.root / "dev-2", "dev-2")
    with pytest.raises(ConfigError, match="holds the keys of 'dev-2'"):
        prepare(scene.root / "dev-2", "dev-3")
    before = Identity.load(scene.root / "dev-2" / "identity.key").member
    assert prepare(scene.root / "dev-2", "dev-2").member == before


def test_old_tokens_are_swept(scene, token):
    """A week after they expired."""
    scene.ask(token)
    scene.sit(token.expires_at_s + FORGOTTEN_AFTER_S)
    scene.tokens.find(token_id(token.secret))
    scene.sit(token.expires_at_s + FORGOTTEN_AFTER_S + 1)
    scene.broker.pump()
    assert TOPICS.enrol(token_id(token.secret)) not in scene.broker.retained
    with pytest.raises(UntrustedError, match="did not issue"):
        scene.tokens.find(token_id(token.secret))


def test_a_revocation_reaches_everybody_else(scene):
    """Remaining parties get new secrets, in force from the first run that is made with them; the revoked device gets none."""
    stays, goes = scene.enrol("dev-1"), scene.enrol("dev-2")
    before = scene.owner.secrets
    scene.owner.revoke("dev-2")
    after = scene.owner.secrets
    for field in ("version_secret", "broadcast_key"):
        assert getattr(before, field) != getattr(after, field)
    registrar = scene.sit()
    registrar.publish_keys()
    registrar.publish_roster()
    scene.broker.pump()
    assert TOPICS.keys("dev-2") not in scene.broker.retained
    mail = OwnerInbox(scene.server)
    for topic in (TOPICS.at(TopicKind.OWNER_ROSTER), TOPICS.keys("aggregator")):
        mail.take(topic, scene.broker.retained[topic], 0.0)
    assert scene.server.roster.revoked == ("dev-2",)
    assert scene.server.grant.broadcast_key == before.broadcast_key
    assert scene.server.next.broadcast_key == after.broadcast_key
    delivered = scene.broker.retained[TOPICS.keys("dev-1")][52:]
    assert stays.take_grant(delivered)
    assert not stays.take_grant(delivered)
    with pytest.raises(UntrustedError):
        goes.take_grant(delivered)
    again = DeviceMembership(stays.directory)
    assert again.grant.version_secret == before.version_secret
    again.promote(again.next)
    assert DeviceMembership(stays.directory).grant.version_secret == after.version_secret
    assert not again.take_grant(delivered)


def newest_grant(scene):
    with scene.owner.changing():
        return scene.owner.grant_for(scene.owner.cards()[1], renewal=True)


def test_keys_of_before_do_not_come_back(scene):
    """A recorded delivery of an earlier generation is ignored."""
    member = scene.enrol("dev-1")
    scene.enrol("dev-2")
    scene.enrol("dev-3")
    scene.owner.revoke("dev-2")
    first = newest_grant(scene)
    scene.owner.revoke("dev-3")
    second = newest_grant(scene)
    assert member.take_grant(second)
    assert not member.take_grant(first)
    assert member.next.keys_since == scene.owner.roster.keys_since
    files = [path.name for path in (scene.root / "owner" / "grants").iterdir()]
    assert files == ["aggregator.grant"], "the devices joined through the broker"


def test_a_revocation_is_whole_or_not_at_all(scene):
    """The journal of a crash in between is carried out when the directory is opened again."""
    scene.enrol("dev-1")
    scene.enrol("dev-2")
    files = [scene.root / "owner" / name for name in ("secrets.bin", "roster.signed")]
    old = [f.read_bytes() for f in files]
    scene.owner.revoke("dev-2")
    new = [f.read_bytes() for f in files]
    from shoal.owner.keys.vault import CHANGE_FILE, Change
    from shoal.util.files import write_private

    for file, data in zip(files, old, strict=True):
        write_private(file, data)
    write_private(scene.root / "owner" / CHANGE_FILE, encode(Change(*new)))
    reopened = FleetDirectory(scene.root / "owner")
    assert reopened.roster == scene.owner.roster
    assert reopened.secrets == scene.owner.secrets
    assert not (scene.root / "owner" / CHANGE_FILE).exists()


def test_listed_device_is_revoked_once(scene):
    """Only a listed device is revoked and only once."""
    scene.enrol("dev-1")
    with pytest.raises(UsageError, match="not in the roster"):
        scene.owner.revoke("dev-9")
    scene.owner.revoke("dev-1")
    with pytest.raises(ConfigError, match="revoked already"):
        scene.owner.revoke("dev-1")


def test_no_secret_shows_in_any_repr(scene, token):
    """The line, the token, its file, the users and the grants."""
    scene.owner.users.make()
    member = scene.enrol("dev-1")
    password = scene.owner.users.password("dev-1")
    assert password in member.grant.broker
    shown = repr(
        (token, scene.tokens.find(token_id(token.secret)), scene.owner.users, member.grant, scene.owner.secrets)
    )
    for secret in (password, scene.owner.users.password("enrol"), token.secret.hex(), repr(token.secret)[2:-1]):
        assert secret not in shown
    assert isinstance(token, Token)


# -- Receiving keys at the broker: the owner seals to the newest that a rostered device has signed, and never to older ones --


@pytest.fixture
def device(scene):
    return scene.enrol("dev-1")


def offer(scene, device):
    """Leave the device's notice at the broker, as it does when it connects."""
    topic, payload = receiving_notice(device)
    scene.leave(topic, payload)
    return payload


def forge(scene, notice, signer, name="dev-1"):
    (chunk,) = split(sign_document(signer, notice), kind=ChunkKind.RECEIVING, round=0)
    scene.leave(TOPICS.receiving(name), chunk)


def delivered(scene, name="dev-1"):
    """Let the owner publish keys; return what the broker then retains for a device."""
    scene.sit().publish_keys()
    scene.broker.pump()
    return scene.broker.retained[TOPICS.keys(name)][52:]


def number(scene):
    return peek_grant(delivered(scene)).receiving


def test_sealed_to_the_newest_keys(scene, device):
    """A delivery is sealed to the newest keys and they are remembered."""
    assert device.receiving.first == 2
    assert number(scene) == 1, "the owner knows the card alone"
    offer(scene, device)
    assert number(scene) == 2
    scene.leave(TOPICS.receiving("dev-1"), b"")
    assert number(scene) == 2
    assert FleetDirectory(scene.owner.path).receiving.of("dev-1").receiving == device.receiving.public


def test_each_delivery_has_its_own_key(scene, device):
    """Each delivery is sealed to another key."""
    for _ in range(12):
        offer(scene, device)
        scene.owner.rotate()
        first = device.receiving.first
        assert device.take_grant(delivered(scene))
        assert device.receiving.first > first
    assert scene.complaints == []


def test_repeated_notice_locks_nobody_out(scene, device):
    """An old notice that the broker repeats locks nobody out."""
    old = offer(scene, device)
    for _ in range(2):
        scene.owner.rotate()
        assert device.take_grant(delivered(scene))
        offer(scene, device)
    scene.sit().publish_keys()
    scene.leave(TOPICS.receiving("dev-1"), old)
    scene.owner.rotate()
    assert device.take_grant(delivered(scene))
    assert "receiving keys of dev-1 from number 2 on, and it has published those from 4 on" in scene.complaints[-1]


def test_withheld_notice_is_made_good(scene, device):
    """A notice that is withheld is made good by the next publication."""
    offer(scene, device)
    for _ in range(limits.RECEIVING_KEYS):
        scene.owner.rotate()
        assert device.take_grant(delivered(scene))
    scene.owner.rotate()
    with pytest.raises(ErasedKeyError) as caught:
        device.take_grant(delivered(scene))
    assert "shoal-fleet publish" in caught.value.hint
    assert "dev-1 has published no receiving keys for a long time" in scene.complaints[-1]
    offer(scene, device)
    assert device.take_grant(delivered(scene))


def test_forged_notices_are_refused(scene, device):
    notice = ReceivingNotice("reef", "dev-1", dataclasses.replace(RECEIVING.public, first=100))
    other = scene.enrol("dev-2")
    for client in [c for c in scene.broker.connected() if c.startswith("owner-")]:
        scene.broker.disconnect(client)
    for false, signer in (
        (notice, Identity.generate("dev-1")),
        (notice, other.identity),
        (dataclasses.replace(notice, fleet="rock"), device.identity),
        (dataclasses.replace(notice, device="dev-2"), device.identity),
    ):
        forge(scene, false, signer)
        with pytest.raises(UntrustedError):
            scene.sit()
        scene.broker.disconnect(f"owner-{scene._sittings}")
    scene.leave(TOPICS.receiving("dev-1"), b"")
    assert number(scene) == 1


def test_notices_of_others_are_ignored(scene, device):
    """A name that is not in the roster, and a revoked device."""
    notice = ReceivingNotice("reef", "dev-9", RECEIVING.public)
    forge(scene, notice, Identity.generate("dev-9"), "dev-9")
    scene.enrol("dev-2")
    scene.owner.revoke("dev-1")
    offer(scene, device)
    scene.sit().publish_keys()
    assert scene.complaints == []
    assert set(FleetDirectory(scene.owner.path).receiving.devices) == {"dev-1", "dev-2"}


def test_a_request_brings_the_first_keys(scene, device):
    known = scene.owner.receiving.of("dev-1")
    assert (known.receiving.first, known.number) == (1, 1)
    assert device.grant.receiving == 1
