"""Requests that the owner rejects, or can't approve: the others are approved, and the device is told at once."""

import pytest
from shoal_lab.loopback.transport import LoopbackTransport

from crypto.seal.identity import Identity
from edge_client.enrolment import Enrolling
from shoal import limits
from shoal.errors import ShoalError, UntrustedError, UsageError, WireError
from shoal.membership.enrol_requests import make_request, open_refusal, token_id
from shoal.owner.enrolment.admission import REJECTED
from shoal.owner.enrolment.requests import make_refusal
from shoal.protocol import channels
from shoal.protocol.chunking import split
from tests.helpers.enrolments import NOW_S, TOPICS
from tests.helpers.receiving import RECEIVING


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
    scene.broker.pump()
    assert "another device called 'pump-3'" in str(again.refused)
    assert "with the same enrolment line" in again.refused.hint
    assert scene.sit().pending == {}
    renamed = scene.ask(line, "pump-3b")
    registrar = scene.sit()
    registrar.approve_all([scene.print_of("pump-3b")], NOW_S)
    scene.broker.pump()
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
    scene.broker.pump()
    assert (registrar.pending, other.granted) == ({}, False)
    assert "the owner has rejected" in str(other.refused)
    with pytest.raises(UntrustedError):
        registrar.approve_all([scene.print_of("dev-2")], NOW_S)


def test_absent_device_is_told_later(scene, token):
    """A device that was away is told when it asks again."""
    stranger(scene, token, "dev-1")
    registrar = scene.sit()
    registrar.reject("dev-1")
    scene.broker.pump()
    back = scene.ask(token)
    scene.sit()
    scene.broker.pump()
    assert "rejected" in str(back.refused)
    assert not waits_at_broker(scene, token)


def test_nothing_to_reject(scene):
    for name in ("pi", "pi"):
        stranger(scene, scene.token(), name)
    registrar = scene.sit()
    with pytest.raises(UsageError, match="no request of 'dev-9'") as caught:
        registrar.reject("dev-9")
    assert "shoal-fleet devices" in caught.value.hint
    with pytest.raises(UsageError, match="2 devices called 'pi' ask"):
        registrar.reject("pi")
    assert len(registrar.pending) == 2


def test_refused_request_goes_by_its_token(scene, token):
    """A refused request is removed by its token."""
    scene.leave(TOPICS.enrol(token_id(token.secret)), b"junk")
    registrar = scene.sit()
    assert registrar.reject(token_id(token.secret)) == "?"
    scene.broker.pump()
    assert not waits_at_broker(scene, token)


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
    scene.broker.pump()
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
    member = Identity.load(scene.root / "dev-1" / "identity.key").member
    parts = {"owner": scene.owner.owner, "fleet": "reef", "token": token_id(token.secret), "member": member, **change}
    refusal = make_refusal(*parts.values(), UntrustedError("no"))
    with pytest.raises(ShoalError):
        open_refusal(refusal, token, member)
    (chunk,) = split(refusal, kind=channels.REFUSAL.kind, round=0)
    forger = LoopbackTransport(scene.broker, "forger", lambda _event: None)
    forger.start()
    forger.publish(TOPICS.grant(token_id(token.secret)), chunk)
    scene.broker.pump()
    assert asking.refused is None
    assert waits_at_broker(scene, token)
    assert "refused an answer" in scene.complaints[-1]


def test_refusal_has_clean_short_texts(scene, token):
    """A refusal has short texts without control characters."""
    asking = scene.ask(token)
    member = Identity.load(scene.root / "dev-1" / "identity.key").member
    error = UntrustedError("\x1b[31m" + "ü" * 5000, hint="x" * 5000)
    refusal = make_refusal(scene.owner.owner, "reef", token_id(token.secret), member, error)
    assert len(refusal) < channels.REFUSAL.largest
    for cut in (0, 64, len(refusal) - 1):
        with pytest.raises((UntrustedError, WireError)):
            open_refusal(refusal[:cut], token, member)
    (chunk,) = split(refusal, kind=channels.REFUSAL.kind, round=0)
    sender = LoopbackTransport(scene.broker, "sender", lambda _event: None)
    sender.start()
    sender.publish(TOPICS.grant(token_id(token.secret)), chunk)
    scene.broker.pump()
    assert str(asking.refused).isprintable()
