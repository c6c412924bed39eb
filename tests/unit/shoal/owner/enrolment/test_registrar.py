"""The owner at the broker beside other programs of the owner's, and after crashes: who gets which secrets, and who hears."""

from __future__ import annotations

import pytest

from aggregator.owner_inbox import OwnerInbox
from crypto.seal.identity import Identity
from edge_client.membership import DeviceMembership
from shoal import limits
from shoal.errors import BrokerUnreachableError, ConfigError, IntegrityError, UntrustedError
from shoal.membership.directory import load_receiving
from shoal.membership.enrol_requests import make_request, token_id
from shoal.membership.grants import open_grant
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.enrolment.tokens import FORGOTTEN_AFTER_S, TOKENS, TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.documents import DeviceGrant
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind
from shoal.util.files import exclusive
from tests.helpers.enrolments import NOW_S, TOPICS
from tests.helpers.power_cuts import PowerCut, cut
from tests.helpers.refusals import refused


def another(scene):
    """The fleet as another program of the owner's opens it now."""
    return FleetDirectory(scene.owner.path)


def identity(scene, name="dev-1"):
    return Identity.load(scene.root / name / "identity.key")


def granted(scene, token, held, name="dev-1"):
    """Return the opened grant on the broker for a device under its token, or None.

    ``held`` are the device's receiving keys before it had a grant.
    """
    chunk = scene.broker.retained.get(TOPICS.grant(token_id(token.secret)))
    if chunk is None:
        return None
    found = Reassembler(limits.MAX_GRANT_BYTES).add("grant", chunk, 0.0)
    return open_grant(identity(scene, name), bytes(found.payload), DeviceGrant, scene.owner.fingerprint, held)


def clear(scene, token):
    scene.leave(TOPICS.grant(token_id(token.secret)), b"")


def approved(scene):
    """Let dev-1 ask and be approved, and its grant leave the broker; return its token and the receiving keys that it had."""
    token = scene.token()
    scene.ask(token)
    held = load_receiving(scene.root / "dev-1")
    scene.approve()
    clear(scene, token)
    return token, held


def rosters_of(scene):
    """Let the aggregator read its retained roster; return the names of the devices in it."""
    OwnerInbox(scene.server).take(
        TOPICS.at(TopicKind.OWNER_ROSTER), scene.broker.retained[TOPICS.at(TopicKind.OWNER_ROSTER)], 0.0
    )
    return [d.name for d in scene.server.roster.devices]


def test_open_program_sends_revoked_nothing(scene):
    """`devices --watch` in one terminal, `revoke` in another: the device's old request is refused, not answered again."""
    token, held = approved(scene)
    watching = scene.sit(fleet=another(scene))
    another(scene).revoke("dev-1")
    scene.leave_request(token, make_request(identity(scene), token, NOW_S, held.public))
    assert granted(scene, token, held) is None
    assert [r.reason for r in watching.refused.values()] == ["device 'dev-1' is revoked, and its line was used"]


def test_open_program_approves_no_revoked(scene, token):
    """A program that was open before does not approve a revoked device."""
    scene.ask(token)
    waiting = scene.sit(fleet=another(scene))
    scene.approve()
    another(scene).revoke("dev-1")
    clear(scene, token)
    with pytest.raises(ConfigError, match="another device called"):
        waiting.approve_all([scene.print_of()], NOW_S)
    waiting.pending.clear()
    with pytest.raises(UntrustedError, match="no request of fingerprint"):
        waiting.approve_all([scene.print_of()], NOW_S)
    scene.broker.pump()
    assert granted(scene, token, None) is None


@pytest.mark.parametrize("again", ["devices", "approve"])
def test_next_command_finishes_an_approval(scene, monkeypatch, again, token):
    """The device is in the roster, but neither grant nor roster is published: the next command publishes both."""
    asking = scene.ask(token)
    registrar = scene.sit()
    with monkeypatch.context() as patched:
        patched.setattr(registrar, "_answer", cut)
        with pytest.raises(PowerCut):
            registrar.approve_all([scene.print_of()], NOW_S)
    assert not asking.granted
    later = scene.sit(fleet=another(scene))
    if again == "approve":
        assert later.approve_all([scene.print_of()], NOW_S)[0].name == "dev-1"
    scene.broker.pump()
    assert asking.granted
    assert rosters_of(scene) == ["dev-1"]


def test_approving_twice_publishes_again(scene):
    """Though the request is gone: the broker may have lost both."""
    token, held = approved(scene)
    scene.leave(TOPICS.at(TopicKind.OWNER_ROSTER), b"")
    scene.sit(fleet=another(scene)).approve_all([scene.print_of().upper()], NOW_S + 10**6)
    scene.broker.pump()
    assert granted(scene, token, held).version_secret == scene.owner.secrets.version_secret
    assert rosters_of(scene) == ["dev-1"]


def test_fleet_is_locked_until_published(scene):
    """Otherwise a program with newer keys could publish them first, and ours would replace them."""
    found = []

    def drain():
        try:
            with exclusive(scene.owner.path, wait_s=0, hint="-"):
                found.append("free")
        except ConfigError:
            found.append("locked")

    scene.ask(scene.token(), "dev-2")
    registrar = scene.sit(drain=drain)
    registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    assert found == ["free", "locked"]


def test_publishing_clears_revoked_keys(scene):
    """Also of who was revoked while the broker was away."""
    scene.enrol("dev-1")
    scene.enrol("dev-2")
    scene.sit().publish_keys()
    scene.broker.pump()
    assert TOPICS.keys("dev-1") in scene.broker.retained
    another(scene).revoke("dev-1")
    scene.sit().publish_keys()
    scene.broker.pump()
    assert TOPICS.keys("dev-1") not in scene.broker.retained
    assert TOPICS.keys("dev-2") in scene.broker.retained


def test_tokens_stay_until_cleared(scene, token):
    """A command that never reached it leaves them for the next one."""
    late_s = token.expires_at_s + FORGOTTEN_AFTER_S + 1

    class Away:
        def subscribe(self, topic_filter):
            pass

        def publish(self, topic, payload, *, retain=False, qos=1):
            pass

    def drain():
        raise BrokerUnreachableError("away")

    registrar = Registrar(scene.owner, Away(), drain=drain)
    registrar.start(late_s)
    with pytest.raises(BrokerUnreachableError):
        registrar.flush()
    assert scene.tokens.find(token_id(token.secret)).token == token
    scene.sit(late_s)
    with pytest.raises(UntrustedError, match="did not issue"):
        scene.tokens.find(token_id(token.secret))


def test_two_programs_forget_the_same_tokens(scene, token):
    late_s = token.expires_at_s + FORGOTTEN_AFTER_S + 1
    stores = [TokenStore(another(scene)) for _ in range(2)]
    found = [store.old(late_s, scene.complaints.append) for store in stores]
    for store, names in zip(stores, found, strict=True):
        store.forget(names)
    assert found == [[token_id(token.secret)]] * 2
    assert list((scene.owner.path / TOKENS).iterdir()) == []


def test_damaged_token_affects_no_other(scene, token):
    """A request with it is refused with a hint; other devices are admitted."""
    file = scene.owner.path / TOKENS / f"{token_id(token.secret)}.token"
    file.write_bytes(b"")
    with refused(IntegrityError, "is damaged", hint="remove it"):
        scene.tokens.find(token_id(token.secret))
    scene.enrol("dev-2")
    assert scene.complaints
    assert all(str(file) in c for c in scene.complaints)
    scene.ask(token)
    (left,) = scene.sit().refused.values()
    assert str(file) in left.reason


# ---------------------------------------------------------------------------- secrets that an admission draws


def waiting_for(scene, *names):
    """Let devices ask; return their `Enrolling`s and a registrar that has read the requests."""
    asking = [scene.ask(scene.token(), name) for name in names]
    return asking, scene.sit()


def keys_left_for(scene, name):
    return scene.broker.retained[TOPICS.keys(name)][52:]


def test_drawing_approval_reaches_everybody(scene):
    """Newcomer, the other device and the aggregator get the same secrets, drawn once."""
    stays = scene.enrol("dev-1")
    scene.owner.take_run()
    sequence, old = scene.owner.roster.sequence, stays.grant
    (asking,), registrar = waiting_for(scene, "dev-2")
    registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    scene.broker.pump()
    assert asking.granted
    assert scene.owner.roster.keys_since == scene.owner.roster.sequence == sequence + 1
    assert stays.take_grant(keys_left_for(scene, "dev-1"))
    assert scene.server.take_grant(keys_left_for(scene, "aggregator"))
    newcomer = DeviceMembership(scene.root / "dev-2")
    assert newcomer.grant.version_secret == stays.next.version_secret == scene.owner.secrets.version_secret
    assert newcomer.grant.version_secret != old.version_secret
    assert scene.server.next.broadcast_key == newcomer.grant.broadcast_key
    assert not newcomer.take_grant(keys_left_for(scene, "dev-2")), "its grant had them"
    assert rosters_of(scene) == ["dev-1", "dev-2"]


def test_early_approval_keeps_the_keys(scene):
    """Before the first run an approval leaves the keys as they are."""
    scene.enrol("dev-1")
    scene.enrol("dev-2")
    assert scene.owner.roster.keys_since == 0
    assert not [topic for topic in scene.broker.retained if topic.startswith(TOPICS.keys("dev"))]


def test_several_approvals_share_one_draw(scene):
    stays = scene.enrol("dev-1")
    scene.owner.take_run()
    sequence = scene.owner.roster.sequence
    asking, registrar = waiting_for(scene, "dev-2", "dev-3")
    members = registrar.approve_all(map(scene.print_of, ("dev-3", "dev-2")), NOW_S)
    scene.broker.pump()
    assert [m.name for m in members] == ["dev-3", "dev-2"]
    assert all(a.granted for a in asking)
    assert scene.owner.roster.sequence == scene.owner.roster.keys_since == sequence + 1
    secrets = {DeviceMembership(scene.root / name).grant.version_secret for name in ("dev-2", "dev-3")}
    assert stays.take_grant(keys_left_for(scene, "dev-1"))
    assert secrets == {stays.next.version_secret}
    assert not registrar.pending


def test_one_unknown_approves_none(scene):
    """Of several approvals none counts where one is unknown."""
    (asking,), registrar = waiting_for(scene, "dev-2")
    before = scene.owner.roster
    with pytest.raises(UntrustedError, match="no request of fingerprint nobody waits on the broker"):
        registrar.approve_all([scene.print_of("dev-2"), "nobody"], NOW_S)
    assert (another(scene).roster, list(registrar.pending)) == (before, [scene.print_of("dev-2")])
    registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    scene.broker.pump()
    assert asking.granted


@pytest.mark.parametrize("again", ["devices", "approve"])
def test_next_command_delivers_lost_keys(scene, monkeypatch, again):
    """Keys that a crash kept from the broker are delivered by the next command."""
    stays = scene.enrol("dev-1")
    scene.owner.take_run()
    (asking,), registrar = waiting_for(scene, "dev-2")
    with monkeypatch.context() as patched:
        patched.setattr(registrar, "_answer", cut)
        with pytest.raises(PowerCut):
            registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    drawn = another(scene).roster.keys_since
    later = scene.sit(fleet=another(scene))
    if again == "approve":
        later.approve_all([scene.print_of("dev-2")], NOW_S)
    scene.broker.pump()
    assert asking.granted
    assert stays.take_grant(keys_left_for(scene, "dev-1"))
    assert stays.newest_generation == another(scene).roster.keys_since == drawn, "nothing is drawn again"


def test_no_secret_of_an_admission_is_logged(scene, caplog):
    caplog.set_level("DEBUG")
    scene.enrol("dev-1")
    scene.owner.take_run()
    scene.enrol("dev-2")
    secret = scene.owner.secrets.version_secret
    for text in (caplog.text, *scene.complaints, repr(DeviceMembership(scene.root / "dev-2").grant)):
        assert secret.hex() not in text
        assert repr(secret)[2:-1] not in text
