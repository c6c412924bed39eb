"""The owner at the broker beside other programs of the owner's, and after crashes: who gets which secrets, and who hears."""

from __future__ import annotations

import pytest

from crypto.seal.identity import Identity, fingerprint
from edge_client.membership import DeviceMembership
from shoal import limits
from shoal.errors import BrokerUnreachableError, ConfigError, UntrustedError, UsageError
from shoal.membership.directory import load_receiving
from shoal.membership.enrol_requests import make_request, token_id
from shoal.membership.grants import open_grant
from shoal.owner.enrolment.tokens import FORGOTTEN_AFTER_S, TOKENS
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.documents import DeviceGrant
from shoal.protocol.reassembly import Reassembler
from shoal.util.files import exclusive
from tests.helpers.enrolments import NOW_S, ROSTER_TOPIC, TOPICS, Scene
from tests.helpers.power_cuts import PowerCut, cut
from tests.helpers.receiving import RECEIVING


def another(scene):
    """The fleet as another program of the owner's opens it now."""
    return FleetDirectory(scene.owner.path)


def granted(scene, token, held, name="dev-1"):
    """Return the opened grant on the broker for a device under its token, or None.

    ``held`` are the device's receiving keys before it had a grant.
    """
    chunk = scene.broker.retained.get(TOPICS.grant(token_id(token.secret)))
    if chunk is None:
        return None
    found = Reassembler(limits.MAX_GRANT_BYTES).add("grant", chunk, 0.0)
    return open_grant(scene.identity(name), bytes(found.payload), DeviceGrant, scene.owner.fingerprint, held)


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


def test_open_program_sends_revoked_nothing(scene):
    """`devices --watch` in one terminal, `revoke` in another: the device's old request is refused, not answered again."""
    token, held = approved(scene)
    watching = scene.sit(fleet=another(scene))
    another(scene).revoke("dev-1")
    scene.leave_request(token, make_request(scene.identity(), token, NOW_S, held.public))
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


def test_approving_twice_publishes_again(scene):
    """Though the request is gone: the broker may have lost both."""
    token, held = approved(scene)
    scene.leave(ROSTER_TOPIC, b"")
    scene.sit(fleet=another(scene)).approve_all([scene.print_of().upper()], NOW_S + 10**6)
    assert granted(scene, token, held).version_secret == scene.owner.secrets.version_secret
    assert scene.take_roster() == ["dev-1"]


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
    """Also of who was revoked while the broker was away. Before the first run an approval leaves the keys as they are."""
    scene.enrol("dev-1")
    scene.enrol("dev-2")
    assert scene.owner.roster.keys_since == 0
    keys = lambda: {name for name in ("dev-1", "dev-2") if TOPICS.keys(name) in scene.broker.retained}  # noqa: E731
    assert keys() == set()
    scene.publish()
    assert keys() == {"dev-1", "dev-2"}
    another(scene).revoke("dev-1")
    scene.publish()
    assert keys() == {"dev-2"}


def test_tokens_stay_until_cleared(scene, token):
    """They are swept a week after they expired; a command that never reached the broker leaves them for the next one."""
    scene.ask(token)
    late_s = token.expires_at_s + FORGOTTEN_AFTER_S

    def drain():
        raise BrokerUnreachableError("away")

    scene.sit(late_s)
    with pytest.raises(BrokerUnreachableError):
        scene.sit(late_s + 1, drain=drain)
    assert scene.tokens.find(token_id(token.secret)).token == token
    scene.sit(late_s + 1)
    assert TOPICS.enrol(token_id(token.secret)) not in scene.broker.retained
    with pytest.raises(UntrustedError, match="did not issue"):
        scene.tokens.find(token_id(token.secret))


def test_damaged_token_affects_no_other(scene, token):
    """A request with it is refused; other devices are admitted."""
    file = scene.owner.path / TOKENS / f"{token_id(token.secret)}.token"
    file.write_bytes(b"")
    scene.enrol("dev-2")
    assert {str(file) in complaint for complaint in scene.complaints} == {True}
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
    """Newcomers, the other device and the aggregator get the same secrets, drawn once for several newcomers."""
    stays = scene.enrol("dev-1")
    scene.owner.take_run()
    sequence, old = scene.owner.roster.sequence, stays.grant
    asking, registrar = waiting_for(scene, "dev-2", "dev-3")
    members = registrar.approve_all(map(scene.print_of, ("dev-3", "dev-2")), NOW_S)
    assert [m.name for m in members] == ["dev-3", "dev-2"]
    assert [a.granted for a in asking] == [True, True]
    assert not registrar.pending
    assert scene.owner.roster.keys_since == scene.owner.roster.sequence == sequence + 1
    assert stays.take_grant(keys_left_for(scene, "dev-1"))
    assert scene.server.take_grant(keys_left_for(scene, "aggregator"))
    newcomer, other = (DeviceMembership(scene.root / name) for name in ("dev-2", "dev-3"))
    assert newcomer.grant.version_secret == stays.next.version_secret == scene.owner.secrets.version_secret
    assert newcomer.grant.version_secret == other.grant.version_secret != old.version_secret
    assert scene.server.next.broadcast_key == newcomer.grant.broadcast_key
    assert not newcomer.take_grant(keys_left_for(scene, "dev-2")), "its grant had them"
    assert scene.take_roster() == ["dev-1", "dev-3", "dev-2"]


def test_one_unknown_approves_none(scene):
    """Of several approvals none counts where one is unknown."""
    (asking,), registrar = waiting_for(scene, "dev-2")
    before = scene.owner.roster
    with pytest.raises(UntrustedError, match="no request of fingerprint nobody waits on the broker"):
        registrar.approve_all([scene.print_of("dev-2"), "nobody"], NOW_S)
    assert (another(scene).roster, list(registrar.pending)) == (before, [scene.print_of("dev-2")])
    registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    assert asking.granted


@pytest.mark.parametrize("again", ["devices", "approve"])
def test_next_command_finishes_an_approval(scene, monkeypatch, again):
    """The device is in the roster, but nothing is published: the next command publishes grant, keys and roster."""
    stays = scene.enrol("dev-1")
    scene.owner.take_run()
    (asking,), registrar = waiting_for(scene, "dev-2")
    with monkeypatch.context() as patched:
        patched.setattr(registrar, "_answer", cut)
        with pytest.raises(PowerCut):
            registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    assert not asking.granted
    drawn = another(scene).roster.keys_since
    later = scene.sit(fleet=another(scene))
    if again == "approve":
        assert later.approve_all([scene.print_of("dev-2")], NOW_S)[0].name == "dev-2"
    scene.broker.pump()
    assert asking.granted
    assert scene.take_roster() == ["dev-1", "dev-2"]
    assert stays.take_grant(keys_left_for(scene, "dev-1"))
    assert stays.newest_generation == another(scene).roster.keys_since == drawn, "nothing is drawn again"


def test_no_secret_of_an_admission_is_logged(scene, caplog):
    caplog.set_level("DEBUG")
    scene.enrol("dev-1")
    scene.owner.take_run()
    scene.enrol("dev-2")
    secret = scene.owner.secrets.version_secret
    told = "\n".join((caplog.text, *scene.complaints, repr(DeviceMembership(scene.root / "dev-2").grant)))
    assert secret.hex() not in told
    assert repr(secret)[2:-1] not in told


# -- A device that was installed again asks under its old name: the owner puts it in the old place, and burns the old keys --


PUMP = "pump-3"


@pytest.fixture
def anew(tmp_path):
    """A fleet with a device of which a second installation asks under the same name."""
    made = Scene(tmp_path)
    made.enrol("pump-1")
    made.enrol(PUMP)
    made.owner.label([PUMP], {"site": "berlin"})
    (tmp_path / PUMP).rename(tmp_path / "lost")
    made.line = made.token()
    made.asking = made.ask(made.line, PUMP)
    return made


def old(anew):
    return anew.identity("lost")


@pytest.mark.parametrize("revoked", [False, True])
def test_new_device_has_the_old_place(anew, revoked):
    """One roster, the same index and labels, new secrets for all; the old device is out and can't come back."""
    if revoked:
        anew.owner.revoke(PUMP)
    before, secrets = anew.owner.roster, anew.owner.secrets
    registrar = anew.sit()
    registrar.approve_all([registrar.give_way(PUMP, "", NOW_S)], NOW_S)
    after = anew.owner.roster
    assert anew.asking.granted
    assert after.sequence == after.keys_since == before.sequence + 1
    assert [fingerprint(d) for d in after.devices] == [anew.print_of("pump-1"), anew.print_of(PUMP)]
    assert (after.revoked, after.labels_of(PUMP)) == ((), "site=berlin")
    assert anew.owner.secrets.version_secret != secrets.version_secret
    assert {"shoal/v1/reef/s/keys/pump-1", "shoal/v1/reef/s/keys/pump-3"} <= set(anew.broker.retained)
    token = anew.token()
    anew.leave_request(token, make_request(old(anew), token, NOW_S, RECEIVING.public))
    registrar = anew.sit()
    with pytest.raises(UntrustedError, match="was replaced, and they are never taken again"):
        registrar.approve_all([fingerprint(old(anew).member)], NOW_S)
    with pytest.raises(UntrustedError, match="was replaced"):
        registrar.give_way(PUMP, "", NOW_S)
    assert anew.owner.roster == after


def test_next_command_finishes_a_replacement(anew):
    """A crash after the old keys were burned: the old device is still a member, and the same call goes on."""
    anew.owner.users.make()
    before = anew.owner.broker_for(PUMP)
    anew.sit().give_way(PUMP, "", NOW_S)
    fleet = FleetDirectory(anew.owner.path)
    assert fleet.broker_for(PUMP) == anew.owner.broker_for(PUMP) != before, "another password"
    assert fleet.listed(old(anew).member)
    registrar = anew.sit(fleet=fleet)
    registrar.approve_all([registrar.give_way(PUMP, "", NOW_S)], NOW_S)
    assert anew.asking.granted
    assert not fleet.listed(old(anew).member)


def test_only_one_request_takes_the_place(anew):
    """Of two the owner names one by its fingerprint; without a request, or without a device, nobody is burned."""
    token = anew.token()
    stranger = Identity.generate(PUMP)
    anew.leave_request(token, make_request(stranger, token, NOW_S, RECEIVING.public))
    anew.ask(anew.token(), "pump-9")
    registrar = anew.sit()
    for name, print_ in ((PUMP, ""), (PUMP, "0" * 16), ("pump-1", ""), ("pump-9", "")):
        with pytest.raises(UsageError, match=r"and one must|not in the roster"):
            registrar.give_way(name, print_, NOW_S)
    with pytest.raises(UntrustedError, match="has expired"):
        registrar.give_way(PUMP, anew.print_of(PUMP), NOW_S + 10**6)
    with pytest.raises(ConfigError, match="another device called"):
        registrar.approve_all([fingerprint(stranger.member)], NOW_S)
    wanted = registrar.give_way(PUMP, anew.print_of(PUMP), NOW_S)
    assert registrar.approve_all([wanted], NOW_S)[0] == anew.owner.roster.device(PUMP)


def test_names_in_sight_are_one_device_each(anew):
    """A shown name can't be another device's, in any case, and no newcomer can have it as its own."""
    owner = anew.owner
    owner.label(["pump-1"], {"name": "Gate 7"})
    assert (owner.named("gate 7"), owner.named("pump-1"), owner.named("x")) == ("pump-1", "pump-1", "x")
    for name in ("GATE 7", "pump-1"):
        with pytest.raises(UsageError, match="another device is called"):
            owner.label([PUMP], {"name": name})
    for changes in ({"name": "a\x07"}, {"site": "x" * 200}, {"Site": "x"}, {"": "x"}):
        with pytest.raises(UsageError, match="labels"):
            owner.label([PUMP], changes)
    with pytest.raises(UsageError, match="not in the roster"):
        owner.label(["pump-7"], {"site": "x"})
    owner.label(["pump-1"], {"name": "pump-8"})
    anew.ask(anew.token(), "pump-8")
    with pytest.raises(ConfigError, match="another device called 'pump-8'"):
        anew.sit().approve_all([anew.print_of("pump-8")], NOW_S)
    keys_since = owner.roster.keys_since
    owner.label([PUMP, "pump-1"], {"site": "", "line": "3"})
    assert owner.roster.labels == ("line=3,name=pump-8", "line=3")
    assert (owner.roster.keys_since, FleetDirectory(owner.path).roster) == (keys_since, owner.roster)
