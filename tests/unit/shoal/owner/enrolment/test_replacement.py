"""A device that was installed again asks under its old name: the owner puts it in the old place, and burns the old keys."""

import pytest

from crypto.seal.identity import Identity, fingerprint
from shoal.errors import ConfigError, UntrustedError, UsageError
from shoal.membership.enrol_requests import make_request
from shoal.owner.keys.directory import FleetDirectory
from tests.helpers.enrolments import NOW_S, Scene
from tests.helpers.receiving import RECEIVING

PUMP = "pump-3"


@pytest.fixture
def scene(tmp_path):
    """A fleet with a device of which a second installation asks under the same name."""
    made = Scene(tmp_path)
    made.enrol("pump-1")
    made.enrol(PUMP)
    made.owner.label([PUMP], {"site": "berlin"})
    (tmp_path / PUMP).rename(tmp_path / "lost")
    made.line = made.token()
    made.asking = made.ask(made.line, PUMP)
    return made


def old(scene):
    return Identity.load(scene.root / "lost" / "identity.key")


def test_new_device_has_the_old_place(scene):
    """One roster, the same index and labels, new secrets for all; the old device is out and can't come back."""
    before, secrets = scene.owner.roster, scene.owner.secrets
    registrar = scene.sit()
    registrar.approve_all([registrar.give_way(PUMP, "", NOW_S)], NOW_S)
    scene.broker.pump()
    after = scene.owner.roster
    assert scene.asking.granted
    assert after.sequence == after.keys_since == before.sequence + 1
    assert [fingerprint(d) for d in after.devices] == [scene.print_of("pump-1"), scene.print_of(PUMP)]
    assert (after.revoked, after.labels_of(PUMP)) == ((), "site=berlin")
    assert scene.owner.secrets.version_secret != secrets.version_secret
    assert {"shoal/v1/reef/s/keys/pump-1", "shoal/v1/reef/s/keys/pump-3"} <= set(scene.broker.retained)
    token = scene.token()
    scene.leave_request(token, make_request(old(scene), token, NOW_S, RECEIVING.public))
    registrar = scene.sit()
    with pytest.raises(UntrustedError, match="was replaced, and they are never taken again"):
        registrar.approve_all([fingerprint(old(scene).member)], NOW_S)
    with pytest.raises(UntrustedError, match="was replaced"):
        registrar.give_way(PUMP, "", NOW_S)
    assert scene.owner.roster == after


def test_revoked_device_is_replaced(scene):
    scene.owner.revoke(PUMP)
    registrar = scene.sit()
    registrar.approve_all([registrar.give_way(PUMP, "", NOW_S)], NOW_S)
    assert scene.owner.roster.active() == ("pump-1", PUMP)


def test_next_command_finishes_a_replacement(scene):
    """A crash after the old keys were burned: the old device is still a member, and the same call goes on."""
    scene.sit().give_way(PUMP, "", NOW_S)
    fleet = FleetDirectory(scene.owner.path)
    assert fleet.listed(old(scene).member)
    registrar = scene.sit(fleet=fleet)
    registrar.approve_all([registrar.give_way(PUMP, "", NOW_S)], NOW_S)
    scene.broker.pump()
    assert scene.asking.granted
    assert not fleet.listed(old(scene).member)


def test_only_one_request_takes_the_place(scene):
    """Of two the owner names one by its fingerprint; without a request, or without a device, nobody is burned."""
    token = scene.token()
    stranger = Identity.generate(PUMP)
    scene.leave_request(token, make_request(stranger, token, NOW_S, RECEIVING.public))
    scene.ask(scene.token(), "pump-9")
    registrar = scene.sit()
    for name, print_ in ((PUMP, ""), (PUMP, "0" * 16), ("pump-1", ""), ("pump-9", "")):
        with pytest.raises(UsageError, match=r"and one must|not in the roster"):
            registrar.give_way(name, print_, NOW_S)
    with pytest.raises(UntrustedError, match="has expired"):
        registrar.give_way(PUMP, scene.print_of(PUMP), NOW_S + 10**6)
    with pytest.raises(ConfigError, match="another device called"):
        registrar.approve_all([fingerprint(stranger.member)], NOW_S)
    wanted = registrar.give_way(PUMP, scene.print_of(PUMP), NOW_S)
    assert registrar.approve_all([wanted], NOW_S)[0] == scene.owner.roster.device(PUMP)


def test_names_in_sight_are_one_device_each(scene):
    """A shown name can't be another device's, in any case, and no newcomer can have it as its own."""
    owner = scene.owner
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
    scene.ask(scene.token(), "pump-8")
    with pytest.raises(ConfigError, match="another device called 'pump-8'"):
        scene.sit().approve_all([scene.print_of("pump-8")], NOW_S)
    keys_since = owner.roster.keys_since
    owner.label([PUMP, "pump-1"], {"site": "", "line": "3"})
    assert owner.roster.labels == ("line=3,name=pump-8", "line=3")
    assert (owner.roster.keys_since, FleetDirectory(owner.path).roster) == (keys_since, owner.roster)


def test_another_password_at_the_broker(scene):
    scene.owner.users.make()
    before = scene.owner.broker_for(PUMP)
    scene.sit().give_way(PUMP, "", NOW_S)
    assert scene.owner.broker_for(PUMP) != before
    assert FleetDirectory(scene.owner.path).broker_for(PUMP) == scene.owner.broker_for(PUMP)
