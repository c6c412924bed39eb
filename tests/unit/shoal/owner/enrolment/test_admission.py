"""Enrolment over an in-memory broker: admission, refusals with their reasons, revocation, and receiving keys.

Requests and grants that are refused: expired, replayed, moved, forged, not for this fleet, or rejected by the owner.
"""

import dataclasses

import pytest

from aggregator import membership as aggregators
from crypto.seal.envelope import seal_to_group
from crypto.seal.identity import Identity, fingerprint, sign_document
from edge_client.enrolment import Enrolling, prepare
from edge_client.membership import DeviceMembership
from edge_client.protocol.presence import receiving_notice
from shoal import limits
from shoal.errors import ConfigError, ShoalError, UntrustedError, UsageError, WireError
from shoal.membership import enrol_requests as seal_tokens
from shoal.membership.enrol_requests import make_request, open_refusal, token_id
from shoal.membership.grants import (
    AGGREGATOR_ROLE,
    DEVICE_ROLE,
    ErasedKeyError,
    make_card,
    open_card,
    peek_grant,
    seal_grant,
)
from shoal.owner.enrolment.admission import REJECTED, make_refusal, open_request
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol import channels
from shoal.protocol.channels import ENROLMENT
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Card, DeviceGrant, ReceivingNotice
from shoal.protocol.enrolment import EnrolRequest
from tests.helpers.enrolments import NOW_S, TOKEN, TOPICS, statement_of
from tests.helpers.receiving import RECEIVING, device_card
from tests.helpers.refusals import refused


def test_enrolled_while_the_owner_is_away(scene):
    """The device asks, the owner connects later and approves; the device then has the same files as after joining by file."""
    asking = scene.ask(scene.token())
    assert not asking.granted
    registrar = scene.sit()
    (request,) = registrar.pending.values()
    assert (request.name, request.fingerprint) == ("dev-1", scene.print_of())
    registrar.approve_all([request.fingerprint], NOW_S)
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


def test_a_device_enrols_once(scene):
    """And only under the name that its keys have."""
    scene.enrol("dev-1")
    with pytest.raises(ConfigError, match="belongs to a fleet already"):
        prepare(scene.root / "dev-1", "dev-1")
    prepare(scene.root / "dev-2", "dev-2")
    with pytest.raises(ConfigError, match="holds the keys of 'dev-2'"):
        prepare(scene.root / "dev-2", "dev-3")
    before = scene.identity("dev-2").member
    assert prepare(scene.root / "dev-2", "dev-2").member == before


def test_a_revocation_reaches_everybody_else(scene):
    """Remaining parties get new secrets, in force from the first run that is made with them; the revoked device gets none."""
    stays, goes = scene.enrol("dev-1"), scene.enrol("dev-2")
    before = scene.owner.secrets
    scene.owner.revoke("dev-2")
    after = scene.owner.secrets
    assert (before.version_secret != after.version_secret, before.broadcast_key != after.broadcast_key) == (True, True)
    scene.publish()
    assert TOPICS.keys("dev-2") not in scene.broker.retained
    assert scene.server.take_grant(scene.broker.retained[TOPICS.keys("aggregator")][52:])
    scene.take_roster()
    assert scene.server.roster.revoked == ("dev-2",)
    assert scene.server.grant.broadcast_key == before.broadcast_key
    assert scene.server.next.broadcast_key == after.broadcast_key
    first = scene.broker.retained[TOPICS.keys("dev-1")][52:]
    assert stays.take_grant(first)
    assert not stays.take_grant(first)
    with pytest.raises(UntrustedError):
        goes.take_grant(first)
    again = DeviceMembership(stays.directory)
    assert again.grant.version_secret == before.version_secret
    again.promote(again.next)
    assert DeviceMembership(stays.directory).grant.version_secret == after.version_secret
    assert not again.take_grant(first)
    files = [path.name for path in (scene.root / "owner" / "grants").iterdir()]
    assert files == ["aggregator.grant"], "the devices joined through the broker"


def test_no_secret_shows_in_any_repr(scene, token):
    """The line, the token, its file, the users and the grants."""
    scene.owner.users.make()
    member, password = scene.enrol("dev-1"), scene.owner.users.password("dev-1")
    assert password in member.grant.broker
    file = scene.tokens.find(token_id(token.secret))
    shown = repr((token, file, scene.owner.users, member.grant, scene.owner.secrets))
    secrets = (password, scene.owner.users.password("enrol"), token.secret.hex(), repr(token.secret)[2:-1])
    assert [secret for secret in secrets if secret in shown] == []


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
    """A delivery is sealed to the newest keys, of which a request brings the first, and they are remembered."""
    known = scene.owner.receiving.of("dev-1")
    assert (known.receiving.first, known.number, device.grant.receiving) == (1, 1, 1)
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
    with refused(ErasedKeyError, hint="shoal-fleet publish"):
        device.take_grant(delivered(scene))
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


def reasons(registrar):
    return [r.reason for r in registrar.refused.values()]


def test_an_expired_token_is_refused(scene):
    """By the owner's clock: when the request is read, and again when it is approved."""
    asking = scene.ask(scene.token(life_s=60))
    registrar = scene.sit(NOW_S + 60)
    with pytest.raises(UntrustedError, match="expired"):
        registrar.approve_all([scene.print_of()], NOW_S + 61)
    assert asking.refused is None
    assert reasons(scene.sit(NOW_S + 61)) == ["the line has expired"]
    assert "the line has expired" in str(asking.refused)
    assert "another enrolment line" in asking.refused.hint
    assert scene.owner.roster.devices == ()


def test_a_token_admits_one_device(scene, token):
    """Of two that wait the approved one uses it up. A later one is refused, and the first one's name is not lost."""
    scene.ask(token, "dev-0")
    registrar = scene.sit()
    scene.ask(token)
    assert set(registrar.pending) == {scene.print_of()}
    registrar.approve_all([scene.print_of()], NOW_S)
    granted = scene.broker.retained[TOPICS.grant(token_id(token.secret))]
    other = scene.ask(token, "dev-2")
    registrar = scene.sit()
    assert registrar.pending == {}
    assert str(other.refused) == f"the owner has refused this device: the line was used before, by {scene.print_of()}"
    assert scene.broker.retained[TOPICS.grant(token_id(token.secret))] == granted
    assert TOPICS.enrol(token_id(token.secret)) not in scene.broker.retained
    with pytest.raises(UntrustedError, match="no request of fingerprint"):
        registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    assert not other.granted


def test_a_replayed_request_changes_nothing(scene, token):
    """Recorded and sent again after the approval, it only brings the same device its grant again."""
    scene.ask(token)
    recorded = scene.broker.retained[TOPICS.enrol(token_id(token.secret))]
    scene.approve()
    before = scene.owner.roster
    scene.leave(TOPICS.enrol(token_id(token.secret)), recorded)
    registrar = scene.sit(NOW_S + 10**6)
    assert (registrar.pending, registrar.refused) == ({}, {})
    assert scene.owner.roster == before
    assert TOPICS.enrol(token_id(token.secret)) not in scene.broker.retained


def test_replay_brings_no_device_back(scene, token):
    """Neither with the old request nor with a new token for the old keys."""
    scene.ask(token)
    recorded = scene.broker.retained[TOPICS.enrol(token_id(token.secret))]
    registrar = scene.sit()
    registrar.approve_all([scene.print_of()], NOW_S)
    scene.owner.revoke("dev-1")
    scene.leave(TOPICS.enrol(token_id(token.secret)), recorded)
    assert reasons(registrar) == ["device 'dev-1' is revoked, and its line was used"]
    assert TOPICS.enrol(token_id(token.secret)) not in scene.broker.retained
    fresh = scene.token()
    scene.leave_request(fresh, make_request(scene.identity(), fresh, NOW_S, RECEIVING.public))
    registrar = scene.sit()
    with pytest.raises(ConfigError, match="another device called"):
        registrar.approve_all([scene.print_of()], NOW_S)
    assert scene.tokens.find(token_id(fresh.secret)).used_by == ""


def test_request_of_another_token_is_refused(scene, token):
    """It proves the token that it was made with, and no other; a token that is made up, or another owner's, is unknown."""
    request = make_request(Identity.generate("dev-1"), scene.token(), NOW_S, RECEIVING.public)
    scene.leave_request(token, request)
    assert reasons(scene.sit()) == ["the request does not prove the token that it names"]
    scene.leave(TOPICS.enrol(token_id(token.secret)), b"")
    made_up = dataclasses.replace(token, secret=bytes(16))
    scene.leave_request(made_up, make_request(Identity.generate("dev-1"), made_up, NOW_S, RECEIVING.public))
    (reason,) = reasons(scene.sit())
    assert "did not issue" in reason


def test_unusable_seal_key_spends_no_token(scene):
    """Otherwise a token's holder could get such a key signed into the roster, and no new keys could be sealed to the fleet."""
    token, hostile = scene.token(), Identity.generate("dev-1")
    keys = dataclasses.replace(hostile.member, seal_key=bytes(32))
    card = sign_document(hostile, Card("device", keys, RECEIVING.public))
    statement = encode(statement_of(token, card))
    head = ENROLMENT.head("reef", "dev-1", "owner")
    plain = seal_tokens.prove(token, statement) + statement
    scene.leave_request(
        token, encode(EnrolRequest(keys, seal_to_group(hostile, seal_tokens.token_group(token), head, plain)))
    )
    registrar = scene.sit()
    assert registrar.pending == {}
    assert "nothing can be sealed to it" in reasons(registrar)[0]
    with pytest.raises(UntrustedError):
        registrar.approve_all([fingerprint(keys)], NOW_S)
    with pytest.raises(WireError, match="nothing can be sealed"):
        scene.owner.add_device(card)
    assert scene.owner.roster.devices == ()
    scene.enrol("dev-2")
    scene.owner.revoke("dev-2")


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"x", ""),
        (b"SHL1" + bytes(48) + b"x", ""),
        (bytes(20_000), ""),
        (split(bytes(20_000), kind=ChunkKind.ENROL, round=0)[0], "20000 bytes"),
    ],
    ids=["a byte", "no chunk", "zeros", "more than a card needs"],
)
def test_junk_is_listed_and_harmless(scene, junk, reason, token):
    """The only place where strangers may write; the owner can clear it."""
    scene.ask(token)
    scene.leave(TOPICS.enrol("0" * 16), junk)
    registrar = scene.sit()
    assert len(registrar.pending) == 1
    (why,) = reasons(registrar)
    assert reason in why
    registrar.clear_refused()
    assert not registrar.refused
    scene.broker.pump()
    assert TOPICS.enrol("0" * 16) not in scene.broker.retained


@pytest.mark.parametrize("name", ["owner", "enrol", "aggregator"])
def test_taken_name_spends_no_token(scene, name, token):
    """A name that is somebody elses at the broker is refused before the token is spent."""
    scene.ask(token, name)
    registrar = scene.sit()
    with pytest.raises(ConfigError, match="can't be called"):
        registrar.approve_all([scene.print_of(name)], NOW_S)
    assert scene.tokens.find(token_id(token.secret)).used_by == ""


def forged_grants(scene, token):
    """Return name -> (grant file, the device's error text)."""
    owner = scene.owner
    card = open_card((scene.root / "dev-1" / "dev-1.card").read_bytes())
    other = FleetDirectory.create(scene.root / "other", "reef", "mqtt://loopback")
    other.add_aggregator(aggregators.init(scene.root / "agg-2", "agg-2").read_bytes())
    good = DeviceGrant(
        fleet="reef",
        owner_key=owner.owner.member.sign_key,
        broker="mqtt://x",
        roster=owner.roster_bytes,
        keys_since=owner.roster.keys_since,
        receiving=1,
        broadcast_key=bytes(32),
        version_secret=bytes(32),
    )
    foreign = dataclasses.replace(card, receiving=RECEIVING.public)
    others = dataclasses.replace(good, owner_key=other.owner.member.sign_key)
    return {
        "another owner's": (seal_grant(other.owner, card, others), "from owner"),
        "another fleet's": (seal_grant(owner.owner, card, dataclasses.replace(good, fleet="rock")), "for fleet 'rock'"),
        "without this device": (seal_grant(owner.owner, card, good), "does not list this device"),
        "sealed to somebody else": (seal_grant(owner.owner, foreign, good), "is not for the keys"),
        "with another's roster": (
            seal_grant(owner.owner, card, dataclasses.replace(good, roster=other.roster_bytes)),
            "signature",
        ),
        "junk": (b"junk", "message"),
    }


def test_forged_grants_do_not_count(scene, token):
    """None leaves a file, each gives its reason, and the device continues to wait."""
    asking = scene.ask(token)
    for grant, why in forged_grants(scene, token).values():
        (chunk,) = split(grant, kind=ChunkKind.GRANT, round=0)
        scene.leave(TOPICS.grant(token_id(token.secret)), chunk)
        assert why in scene.complaints[-1]
        assert not asking.granted
        assert not (scene.root / "dev-1" / "membership.bin").exists()
    assert len(scene.complaints) == 6
    scene.approve()
    assert asking.granted


def test_line_outlasts_its_aggregator(scene, token):
    """The owner has replaced it since: its signature says who has its place."""
    scene.owner.replace_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    asking = scene.ask(token)
    scene.approve()
    assert asking.granted
    member = DeviceMembership(scene.root / "dev-1")
    assert fingerprint(member.roster.aggregator) != token.aggregator
    assert member.roster.aggregator == scene.owner.roster.aggregator


# -- Requests that the owner rejects, or can't approve: the others are approved, and the device is told at once --


def waits_at_broker(scene, token):
    return TOPICS.enrol(token_id(token.secret)) in scene.broker.retained


def stranger(scene, token, name):
    """Leave a request of keys that no directory has."""
    scene.leave_request(token, make_request(Identity.generate(name), token, NOW_S, RECEIVING.public))


def test_all_possible_are_approved(scene):
    """A device that was set up anew asks under its old name, beside a good one and one with a name that is taken."""
    scene.enrol("pump-3")
    line = scene.token()
    scene.ask(scene.token(), "pump-4")
    (scene.root / "pump-3").rename(scene.root / "lost")
    again = scene.ask(line, "pump-3")
    stranger(scene, scene.token(), "owner")
    registrar = scene.sit()
    registrar.refuse_unfit(NOW_S)
    assert [r.name for r in registrar.pending.values()] == ["pump-4"]
    assert {r.name: r.reason.split(":")[0] for r in registrar.refused.values()} == {
        "pump-3": "the fleet has had another device called 'pump-3'",
        "owner": "a device can't be called 'owner'",
    }
    assert all("--name" in r.hint for r in registrar.refused.values())
    registrar.approve_all(registrar.pending, NOW_S)
    assert "another device called 'pump-3'" in str(again.refused)
    assert "with the same enrolment line" in again.refused.hint
    assert scene.sit().pending == {}
    renamed = scene.ask(line, "pump-3b")
    scene.approve("pump-3b")
    assert renamed.granted


@pytest.mark.parametrize("first", ["dev-a", "dev-b"])
def test_first_of_one_name_is_approved(scene, first):
    """Of two devices with one name the first to ask is approved."""
    tokens = {name: scene.token() for name in ("dev-a", "dev-b")}
    for name, token in tokens.items():
        asked_at_s = NOW_S if name == first else NOW_S + 9
        scene.leave_request(token, make_request(Identity.generate("pi"), token, asked_at_s, RECEIVING.public))
    registrar = scene.sit()
    registrar.refuse_unfit(NOW_S)
    (left,) = registrar.pending.values()
    assert left.token == token_id(tokens[first].secret)
    (refused,) = registrar.refused.values()
    assert refused.reason == "another device called 'pi' asks as well"
    registrar.approve_all([left.fingerprint], NOW_S)
    assert [d.name for d in scene.owner.roster.devices] == ["pi"]


@pytest.mark.parametrize("by", ["fingerprint", "name", "token"])
def test_rejected_device_is_told_at_once(scene, by, token):
    """A rejected device is told at once and its line is void."""
    asking = scene.ask(token)
    registrar = scene.sit()
    wanted = {"fingerprint": scene.print_of(), "name": "dev-1", "token": token_id(token.secret)}[by]
    assert registrar.reject(wanted) == "dev-1"
    scene.broker.pump()
    assert "the owner has rejected" in str(asking.refused)
    assert not waits_at_broker(scene, token)
    assert (scene.sit().pending, scene.sit().refused) == ({}, {})
    assert scene.tokens.find(token_id(token.secret)).used_by == REJECTED
    other = scene.ask(token, "dev-2")
    registrar = scene.sit()
    assert (registrar.pending, other.granted) == ({}, False)
    assert "the owner has rejected" in str(other.refused)
    with pytest.raises(UntrustedError):
        registrar.approve_all([scene.print_of("dev-2")], NOW_S)


def test_absent_device_is_told_later(scene, token):
    """A device that was away is told when it asks again; a refused request is removed by its token."""
    scene.leave(TOPICS.enrol(token_id(token.secret)), b"junk")
    assert scene.sit().reject(token_id(token.secret)) == "?"
    scene.broker.pump()
    assert not waits_at_broker(scene, token)
    stranger(scene, token, "dev-1")
    scene.sit().reject("dev-1")
    scene.broker.pump()
    back = scene.ask(token)
    scene.sit()
    assert "rejected" in str(back.refused)
    assert not waits_at_broker(scene, token)


def test_nothing_to_reject(scene):
    for name in ("pi", "pi"):
        stranger(scene, scene.token(), name)
    registrar = scene.sit()
    with refused(UsageError, "no request of 'dev-9'", hint="shoal-fleet devices"):
        registrar.reject("dev-9")
    with pytest.raises(UsageError, match="2 devices called 'pi' ask"):
        registrar.reject("pi")
    assert len(registrar.pending) == 2


def test_hundreds_of_requests_block_nobody(scene, monkeypatch):
    """Hundreds of requests of a stranger keep nobody out."""
    monkeypatch.setattr(limits, "MAX_REQUESTS", 100)
    for number in range(300):
        scene.leave(f"{TOPICS.enrol('0' * 13 + f'{number:03d}')}", b"junk" * 100)
    asking = scene.ask(scene.token())
    registrar = scene.sit()
    registrar.refuse_unfit(NOW_S)
    assert len(registrar.refused) == 100
    registrar.approve_all(registrar.pending, NOW_S)
    assert asking.granted


CASES = {
    "another owner": {"owner": Identity.generate("owner")},
    "another token": {"token": "0" * 16},
    "another device": {"member": Identity.generate("dev-1").member},
    "another fleet": {"fleet": "atoll"},
}


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_foreign_refusal_is_ignored(scene, change, token):
    """A refusal that is not the owners to this request is ignored."""
    asking: Enrolling = scene.ask(token)
    member = scene.identity().member
    parts = {"owner": scene.owner.owner, "fleet": "reef", "token": token_id(token.secret), "member": member, **change}
    refusal = make_refusal(*parts.values(), UntrustedError("no"))
    with pytest.raises(ShoalError):
        open_refusal(refusal, token, member)
    (chunk,) = split(refusal, kind=channels.REFUSAL.kind, round=0)
    scene.leave(TOPICS.grant(token_id(token.secret)), chunk)
    assert asking.refused is None
    assert waits_at_broker(scene, token)
    assert "refused an answer" in scene.complaints[-1]


def test_refusal_has_clean_short_texts(scene, token):
    """A refusal has short texts without control characters."""
    asking = scene.ask(token)
    member = scene.identity().member
    error = UntrustedError("\x1b[31m" + "ü" * 5000, hint="x" * 5000)
    refusal = make_refusal(scene.owner.owner, "reef", token_id(token.secret), member, error)
    assert len(refusal) < channels.REFUSAL.largest
    for cut in (0, 64, len(refusal) - 1):
        with pytest.raises((UntrustedError, WireError)):
            open_refusal(refusal[:cut], token, member)
    (chunk,) = split(refusal, kind=channels.REFUSAL.kind, round=0)
    scene.leave(TOPICS.grant(token_id(token.secret)), chunk)
    assert str(asking.refused).isprintable()


# -- Requests: only the holder of a token makes a valid one, for its own keys and under the token's own terms --


DEVICE, THIEF = Identity.generate("dev-1"), Identity.generate("dev-1")
UNPROVEN = "the request does not prove the token that it names"


def sealed_request(token=TOKEN, signer=DEVICE, *, card=None, proof=None, raw=None):
    """Return a request by a holder of the line, who may seal any statement."""
    statement = encode(statement_of(token, card or device_card(signer), 1_000))
    raw = statement if raw is None else raw
    proof = seal_tokens.prove(token, raw or b"-") if proof is None else proof
    head = ENROLMENT.head(token.fleet, signer.name, "owner")
    return encode(EnrolRequest(signer.member, seal_to_group(signer, seal_tokens.token_group(token), head, proof + raw)))


def test_request_gives_card_and_time():
    """A request gives the card and the time of its device; a forged one with the right proof is one as well."""
    card, asked = open_request(make_request(DEVICE, TOKEN, 1_234, RECEIVING.public), TOKEN)
    assert card == Card(DEVICE_ROLE, DEVICE.member, RECEIVING.public)
    assert asked.asked_at_s == 1_234
    assert decode(asked.card[64:], Card) == card
    assert open_request(sealed_request(), TOKEN)[0].member == DEVICE.member, "the tests below can fail"


TERMS = "another fleet, owner, aggregator or token than the enrolment line"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"secret": bytes(16)}, None),
        ({"fleet": "rock"}, None),
        ({"owner": "eve-print"}, TERMS),
        ({"aggregator": "eve-print"}, TERMS),
        ({"expires_at_s": 9_999}, TERMS),
    ],
    ids=["secret", "fleet", "owner", "aggregator", "expiry"],
)
def test_terms_unlike_the_line_are_refused(change, match):
    """The device pinned other fingerprints, or its line was given another expiry: the same secret does not help."""
    with pytest.raises(UntrustedError, match=match):
        open_request(make_request(DEVICE, dataclasses.replace(TOKEN, **change), 1_234, RECEIVING.public), TOKEN)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"proof": b"", "raw": b""}, WireError, "an empty enrolment statement"),
        ({"proof": bytes(31), "raw": b""}, WireError, "an empty enrolment statement"),
        ({"proof": bytes(32)}, UntrustedError, UNPROVEN),
        (
            {"signer": THIEF, "card": device_card(DEVICE)},
            UntrustedError,
            "card does not belong to the keys that sign the request",
        ),
        ({"card": make_card(DEVICE, AGGREGATOR_ROLE)}, UntrustedError, "card does not belong"),
    ],
    ids=["nothing", "half a proof", "wrong proof", "another device's card", "an aggregator's card"],
)
def test_wrong_proof_or_card_is_refused(changes, error, match):
    """Under the right seal."""
    with pytest.raises(error, match=match):
        open_request(sealed_request(**changes), TOKEN)


@pytest.mark.parametrize(
    ("member", "match"),
    [
        (THIEF.member, UNPROVEN),
        (dataclasses.replace(DEVICE.member, name="dev-2"), "a request of 'dev-1' to 'owner' of fleet 'reef'"),
    ],
    ids=["keys", "name"],
)
def test_another_member_around_it_is_refused(member, match):
    """A broker could replace the claimed identity, which is not encrypted."""
    request = decode(make_request(DEVICE, TOKEN, 1_234, RECEIVING.public), EnrolRequest)
    with pytest.raises(UntrustedError, match=match):
        open_request(encode(dataclasses.replace(request, member=member)), TOKEN)
