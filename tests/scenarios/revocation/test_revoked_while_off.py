"""A device that is revoked while it is off learns so at its next start, by the owner's signature alone."""

import dataclasses
import logging
import math

import pytest
from shoal_lab.loopback.transport import Hop, LoopbackTransport

from aggregator.publisher import FIRST_PAUSE_S, MAX_PAUSE_S
from crypto.seal.envelope import seal_to_member
from crypto.seal.identity import sign_document
from edge_client.membership import DeviceMembership
from shoal.errors import UntrustedError
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.codec import encode
from shoal.protocol.documents import Roster
from shoal.protocol.messages import Sealed
from shoal.protocol.topics import Topics
from tests.helpers.fleets import aggregator_identity, make_fleet
from tests.helpers.sessions import hand_over

OFF = "dev-03"


@pytest.fixture
def scene(tmp_path, tap):
    """A run that went on under new secrets while dev-03 was off; yields (fleet, its wiretap)."""
    with make_fleet(tmp_path / "fleet", faults=tap, count=4, rounds=20, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        fleet.kill_device(OFF)
        fleet.stage.fleet.revoke(OFF)
        fleet.publish()
        fleet.run_until(lambda: fleet.service.state.held.key_version == fleet.stage.fleet.roster.keys_since, 60)
        # A broker forgets a session, with all that it has queued, when the device is away for ten minutes.
        fleet.broker._sessions[fleet.client_id(OFF)].backlog.clear()
        yield fleet, tap


def sent_rosters(fleet, tap):
    """Return the messages on the device's own topic since it was switched off."""
    return tap.sent(client=fleet.client_id("aggregator"), ending=f"{OFF}/ctl")


def test_it_is_told_and_ends(scene, caplog):
    """It looped for ever: nothing that the aggregator says is sealed under a key that the device has."""
    fleet, tap = scene
    before = len(sent_rosters(fleet, tap))
    fleet.revive_device(OFF)
    device = fleet.devices[OFF].runtime
    fleet.run_until(lambda: device.revoked, 5)
    assert not DeviceMembership(fleet.stage.device_dir(OFF)).listed
    assert len(sent_rosters(fleet, tap)) == before + 1
    reasons = [r.kv["reason"] for r in caplog.records if r.getMessage() == "refused"]
    assert not [reason for reason in reasons if reason.endswith(": ")]


def test_told_again_where_roster_is_lost(scene):
    """It is told again where the roster is lost."""
    fleet, tap = scene
    tap.lose(client=fleet.client_id(OFF), ending=f"{OFF}/ctl", hop=Hop.DOWN, times=1)
    fleet.revive_device(OFF)
    fleet.run_until(lambda: fleet.devices[OFF].runtime.revoked, 30)


def test_told_after_aggregators_restart_too(scene):
    """After a restart of the aggregator it is told as well."""
    fleet, _ = scene
    fleet.kill_aggregator()
    fleet.revive_device(OFF)
    fleet.broker.pump()
    fleet.revive_aggregator()
    fleet.run_until(lambda: fleet.devices[OFF].runtime.revoked, 30)


def test_unsigned_message_gets_no_answer(scene):
    """Another client that writes on its topic makes the aggregator send nothing."""
    fleet, tap = scene
    before = len(sent_rosters(fleet, tap))
    forger = LoopbackTransport(fleet.broker, "forger", lambda _event: None)
    forger.start()
    topics = Topics(fleet.plan.fleet)
    aggregator = aggregator_identity(fleet)
    head = Sealed(fleet.plan.fleet, "reminder", OFF, "aggregator")
    forged = seal_to_member(aggregator, aggregator.member.seal_key, head, b"hello")
    for payload in (b"junk", *split(forged, kind=ChunkKind.REMINDER, round=0)):
        forger.publish(topics.up(OFF), payload)
        forger.publish(topics.state(OFF), payload)
    fleet.broker.pump()
    assert len(sent_rosters(fleet, tap)) == before
    forger.close()


def test_endless_requests_get_few_answers(scene, caplog):
    """A roster of 5000 devices is 425 KB: a signed message that is replayed must not become many of them."""
    fleet, tap = scene
    caplog.set_level(logging.INFO, "shoal.aggregator")
    tap.lose(client=fleet.client_id(OFF), ending=f"{OFF}/ctl", hop=Hop.DOWN)
    before = len(sent_rosters(fleet, tap))
    fleet.revive_device(OFF)
    fleet.broker.pump()
    said = tap.sent(client=fleet.client_id(OFF), ending=f"{OFF}/state")[-1]
    started_s = fleet.now_s
    while fleet.now_s < started_s + 300:
        fleet.service._revocations.look(OFF, said.payload, fleet.now_s)
        fleet.broker.advance(1.0)
        fleet.broker.pump()
    told = len(sent_rosters(fleet, tap)) - before
    growing = math.log2(MAX_PAUSE_S / FIRST_PAUSE_S) + 1
    assert 300 / MAX_PAUSE_S <= told <= 300 / MAX_PAUSE_S + growing


def roster_for(fleet, signed, sender):
    """Return the chunks in which the aggregator sends a roster to dev-03."""
    member = next(d for d in fleet.stage.fleet.roster.devices if d.name == OFF)
    sealed = seal_to_member(sender, member.seal_key, Sealed(fleet.plan.fleet, "roster", sender.name, OFF), signed)
    return split(sealed, kind=ChunkKind.ROSTER, round=0)


def test_aggregator_can_t_make_device_leave(tmp_path):
    """A roster without the owner's signature changes nothing, with a valid seal too."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=400) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        device = fleet.devices[OFF].runtime
        aggregator = aggregator_identity(fleet)
        roster: Roster = fleet.stage.fleet.roster
        forged = dataclasses.replace(roster, sequence=roster.sequence + 1, revoked=(OFF,))
        forger = LoopbackTransport(fleet.broker, "forger", lambda _event: None)
        forger.start()
        for signed in (sign_document(aggregator, forged), bytes(64) + encode(forged)):
            for chunk in roster_for(fleet, signed, aggregator):
                forger.publish(Topics(fleet.plan.fleet).ctl(OFF), chunk)
            fleet.broker.pump()
            assert not device.revoked
        with pytest.raises(UntrustedError):
            hand_over(device, channels.ROSTER, sign_document(aggregator, forged))
        forger.close()
        fleet.run_until(lambda: fleet.closed() >= 3, 30)
        assert OFF in fleet.records()[-1]["norms"]
