"""Two rosters of one sequence: every party reports it, and a restored owner signs one above the sequence on the broker."""

from __future__ import annotations

import logging
import shutil

import pytest
from shoal_lab.loopback.transport import LoopbackTransport

from aggregator import membership as aggregators
from aggregator.membership import AggregatorMembership
from edge_client.membership import DeviceMembership
from edge_client.protocol.inbound import allowed
from shoal import limits
from shoal.errors import IntegrityError, UntrustedError
from shoal.membership.directory import LEAST_FILE
from shoal.membership.grants import AGGREGATOR_ROLE
from shoal.membership.roster_changes import roster_change
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import ROSTER_FILE
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.reassembly import Reassembler
from shoal.util.files import write_private
from tests.helpers.enrolments import NOW_S, ROSTER_TOPIC, TOPICS, Scene
from tests.helpers.refusals import refused
from tests.helpers.sessions import hand_over, new_runtime

FORK = "two different rosters of sequence"


@pytest.fixture
def scene(tmp_path):
    """A fleet whose aggregator and one device have the newest roster."""
    made = Scene(tmp_path)
    made.device = made.enrol("dev-1")
    made.server.adopt(made.owner.roster_bytes)
    made.device.adopt(made.owner.roster_bytes)
    return made


@pytest.fixture
def restored(scene):
    """The owner's directory as a backup has it, after which the true one has signed another roster that all parties have."""
    shutil.copytree(scene.owner.path, scene.root / "restored")
    scene.owner.renew()
    scene.publish()
    scene.take_roster()
    scene.device.adopt(scene.owner.roster_bytes)
    return FleetDirectory(scene.root / "restored")


def fork(owner):
    """Let the restored owner sign a roster of the sequence that the fleet has already; return it."""
    owner.rotate()
    return owner.roster_bytes


def alarms(caplog):
    return [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("party", ["server", "device"])
@pytest.mark.parametrize("way", ["network", "file", "file before a start"])
def test_second_roster_of_a_sequence(scene, restored, party, way):
    """A second roster of one sequence is refused."""
    member = getattr(scene, party)
    other, before = fork(restored), member.roster_bytes
    assert restored.roster.sequence == member.roster.sequence
    if way != "network":
        write_private(member.directory / ROSTER_FILE, other)
    takes = {"network": lambda: member.adopt(other), "file": member.reload}
    start = AggregatorMembership if party == "server" else DeviceMembership
    with refused(UntrustedError, FORK, hint="shoal-fleet publish"):
        takes.get(way, lambda: start(member.directory))()
    assert member.roster_bytes == before


def test_copied_fork_is_told_when_healed(scene, restored, caplog):
    """A fork that was copied by hand is told when a newer roster heals it."""
    write_private(scene.device.directory / ROSTER_FILE, fork(restored))
    scene.owner.renew()
    assert scene.device.adopt(scene.owner.roster_bytes)
    (alarm,) = alarms(caplog)
    assert FORK in str(alarm.kv["reason"])
    assert DeviceMembership(scene.device.directory).roster_bytes == scene.owner.roster_bytes


def test_a_grant_of_the_fork_is_refused(scene, restored):
    fork(restored)
    (card,) = [c for c in restored.cards() if c.role == AGGREGATOR_ROLE]
    with restored.changing():
        grant = restored.grant_for(card)
    with pytest.raises(UntrustedError, match=FORK):
        aggregators.join(scene.server.directory, grant, restored.fingerprint)


def test_aggregator_raises_the_alarm(scene, restored, caplog):
    """A restored owner of an earlier version publishes without reading the broker's roster first."""
    fork(restored)
    scene.sit(fleet=restored).publish_roster()
    scene.broker.pump()
    with pytest.raises(UntrustedError, match=FORK):
        scene.take_roster()
    (alarm,) = alarms(caplog)
    assert "restored from a backup" in alarm.kv["hint"]
    assert scene.server.roster_bytes == scene.owner.roster_bytes


def test_device_raises_the_alarm(scene, restored, caplog):
    """A device asks for the whole of a fork, takes its chunks meanwhile, and raises the alarm: once, also if it is repeated."""
    other = fork(restored)
    transport = LoopbackTransport(scene.broker, "dev-1", lambda _: None)
    transport.start()
    device, topic = new_runtime(scene.device, transport), TOPICS.parse(TOPICS.roster)
    hand_over(device, channels.ROSTER_CHANGE, roster_change(None, scene.owner.roster, scene.owner.roster_bytes))
    assert f"{TOPICS.roster}/#" not in transport.filters
    assert not allowed(topic, device.session, 1)
    hand_over(device, channels.ROSTER_CHANGE, roster_change(None, restored.roster, other))
    assert f"{TOPICS.roster}/#" in transport.filters
    assert allowed(topic, device.session, 1)[ChunkKind.ROSTER] > len(other) + 1148
    for _ in range(3):
        with pytest.raises(UntrustedError, match=FORK):
            hand_over(device, channels.ROSTER, other)
    assert f"{TOPICS.roster}/#" not in transport.filters
    assert not allowed(topic, device.session, 1)
    assert [r.getMessage() for r in alarms(caplog)] == ["two rosters of one sequence"]
    assert scene.device.roster_bytes == scene.owner.roster_bytes


@pytest.mark.parametrize("later", [0, 1, 3], ids=["of our sequence", "a newer one", "a much newer one"])
def test_restored_owner_signs_beyond_broker(scene, restored, later):
    """Otherwise the fleet would refuse every roster until the restored owner has caught up, revocations among them."""
    for _ in range(later):
        scene.owner.renew()
        scene.publish()
        scene.take_roster()
    if not later:
        fork(restored)
    on_broker, before = scene.server.roster.sequence, restored.secrets
    assert restored.roster.sequence <= on_broker
    scene.publish(restored)
    assert restored.roster.sequence == restored.roster.keys_since == on_broker + 1
    told = "\n".join(scene.complaints)
    assert f"the broker holds roster {on_broker}, signed by this owner" in told
    assert f"signed roster {on_broker + 1}, beyond roster {on_broker}" in told
    scene.take_roster()
    assert scene.server.roster == restored.roster
    assert scene.device.adopt(restored.roster_bytes)
    again = FleetDirectory(restored.path)
    assert again.roster == restored.roster
    assert again.secrets.version_secret != before.version_secret
    assert again.secrets.broadcast_key != before.broadcast_key
    assert again.take_run() > before.next_run


def test_restored_owners_approval_counts_on(scene, restored):
    """An approval by a restored owner counts on too."""
    on_broker = scene.server.roster.sequence
    token = scene.token()
    asking = scene.ask(token, "dev-2")
    registrar = scene.sit(fleet=FleetDirectory(scene.owner.path))
    assert not [c for c in scene.complaints if "the broker holds roster" in c]
    shutil.copytree(scene.owner.path / "tokens", restored.path / "tokens", dirs_exist_ok=True)
    registrar = scene.sit(fleet=restored, look=True)
    registrar.approve_all([scene.print_of("dev-2")], NOW_S)
    assert restored.roster.sequence > on_broker
    assert asking.granted
    assert DeviceMembership(scene.root / "dev-2").roster == restored.roster


def test_publishing_signs_nothing_new(scene, restored):
    """Not for its own roster, nor for an older one on the broker, nor for one that another program has just signed."""
    registrar = scene.sit(fleet=FleetDirectory(scene.owner.path))
    scene.owner.renew()
    scene.publish()
    registrar.look_for_roster()
    scene.broker.pump()
    registrar.publish_roster()
    scene.publish()
    assert FleetDirectory(scene.owner.path).roster == scene.owner.roster
    assert scene.complaints == []


def test_unsigned_roster_moves_nobody(scene, restored):
    """A stranger at an open broker changes the number in the clear head, which the signature covers."""
    before = scene.owner.roster
    chunks = Reassembler(limits.MAX_GRANT_BYTES, limits.MAX_GRANT_BYTES)
    honest = bytes(chunks.add("roster", scene.broker.retained[ROSTER_TOPIC], 0.0).payload)
    number = str(before.sequence).encode()
    at = honest.index(b"roster/" + number) + len(b"roster/")
    forged = honest[:at] + b"9" * len(number) + honest[at + len(number) :]
    (chunk,) = split(forged, kind=ChunkKind.ROSTER, round=0)
    registrar = scene.sit(look=True)
    with pytest.raises(UntrustedError, match="did not sign"):
        scene.leave(ROSTER_TOPIC, chunk)
    registrar.publish_roster()
    assert scene.owner.roster == before


def test_earlier_directory_is_refused(scene):
    """A state directory of an earlier version is refused."""
    write_private(scene.device.directory / LEAST_FILE, str(scene.device.roster.sequence).encode())
    with refused(IntegrityError, "of an earlier version", hint="remove it only if"):
        DeviceMembership(scene.device.directory)
