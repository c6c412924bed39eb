"""The aggregator is lost with its directory in the middle of a run: another one takes its place, or a backup is restored."""

import dataclasses
import shutil

import numpy as np
import pytest
from shoal_lab.loopback.fleet import draw_origins

from aggregator import membership as aggregators
from aggregator.membership import AggregatorMembership
from aggregator.rounds.state import Order
from aggregator.storage.backup import restore, save
from crypto.seal.identity import Identity
from edge_client.membership import DeviceMembership
from edge_client.models.store import StateFile, certified_file
from edge_client.protocol.round_state import Stage
from shoal.errors import IntegrityError, ShoalError, TaskError, UntrustedError
from shoal.membership.directory import KEY_FILE
from shoal.membership.roster_changes import ReplacedError
from shoal.owner.cli.runs import _earlier_models
from shoal.owner.models.files import MAX_CERTIFIED, read_certified
from shoal.protocol import channels
from shoal.protocol.codec import decode, decode_prefix, encode
from shoal.protocol.recipe import Recipe
from shoal.protocol.states import StateCertificate
from tests.helpers import calls
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    FULL_BATCH,
    announce,
    make_fleet,
    names,
    restart_device,
)
from tests.helpers.sessions import hand_over
from tests.helpers.tasks import logistic_bundle

ASLEEP = "dev-02"


def lose_aggregator(fleet, tmp_path, name="aggregator"):
    """Remove the aggregator's directory after a copy was made, and let the owner replace it; return the copy."""
    old = tmp_path / "old"
    shutil.copytree(fleet.stage.aggregator_dir, old)
    fleet.kill_aggregator()
    shutil.rmtree(fleet.stage.aggregator_dir)
    card = aggregators.init(fleet.stage.aggregator_dir, name)
    grant = fleet.stage.fleet.replace_aggregator(card.read_bytes())
    aggregators.join(fleet.stage.aggregator_dir, grant.read_bytes(), fleet.stage.fleet.fingerprint)
    return old


def next_run(fleet):
    """Sign another run of two rounds, carry it to the new aggregator and start that."""
    chosen = Recipe("fedavg", rounds=2, local=FULL_BATCH, seed=2, min_contributors=1, quorum=0.5)
    fleet.plan = fleet.stage.add_run(fleet.bundle, draw_origins(fleet.bundle.manifest, 1, 7), chosen)
    fleet.revive_aggregator()


def aggregator_known_to(fleet, name):
    return DeviceMembership(fleet.stage.device_dir(name)).roster.aggregator


@pytest.mark.parametrize(
    "name", with_long(["aggregator", "aggregator-2"], "aggregator-2"), ids=["same name", "another name"]
)
@pytest.mark.parametrize("count", with_long([4, 12], 4))
def test_devices_go_over_to_the_new_one(tmp_path, name, count):
    """One of them is off all the time, and all end the new run with one model; the run before ends with its newest."""
    with make_fleet(tmp_path / "fleet", count=count, rounds=50, shards=1, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        fleet.kill_device(ASLEEP)
        fleet.run_until(lambda: fleet.closed() >= 4, 400)
        lose_aggregator(fleet, tmp_path, name)
        fleet.publish()
        first = fleet.plan.run
        next_run(fleet)
        fleet.run_until(lambda: fleet.closed() >= 1, 400)
        online = [each for each in names(count) if each != ASLEEP]
        for each in online:
            assert aggregator_known_to(fleet, each) == fleet.stage.fleet.roster.aggregator
        fleet.revive_device(ASLEEP)
        fleet.run(600)
        assert fleet.plan.run > first
        assert aggregator_known_to(fleet, ASLEEP) == fleet.stage.fleet.roster.aggregator
        assert len({fleet.model(each).theta.tobytes() for each in online}) == 1
        assert {fleet.model(each).run for each in online} == {fleet.plan.run}


def test_sleeper_takes_part_in_the_next_run(tmp_path):
    """A device that slept through a whole run of the new one takes part in the next."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=50, shards=1, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 60)
        fleet.kill_device(ASLEEP)
        lose_aggregator(fleet, tmp_path)
        fleet.publish()
        next_run(fleet)
        fleet.run(900)
        fleet.kill_aggregator()
        fleet.stage.fleet.rotate()
        fleet.publish()
        fleet.broker._sessions[fleet.client_id(ASLEEP)].backlog.clear()
        fleet.revive_device(ASLEEP)
        next_run(fleet)
        fleet.run(900)
        assert any(ASLEEP in record["norms"] for record in fleet.records())
        assert fleet.model(ASLEEP).run == fleet.plan.run


def test_run_in_progress_ends_keeping_models(tmp_path):
    """Also on a device that was training, or waited for an answer."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=50, shards=1, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 3, 60)
        lose_aggregator(fleet, tmp_path)
        fleet.run_until(lambda: all(d.runtime.session.round.stage is Stage.SENDING for d in fleet.devices.values()), 60)
        fleet.publish()
        next_run(fleet)
        fleet.run_until(lambda: aggregator_known_to(fleet, ASLEEP) == fleet.stage.fleet.roster.aggregator, 30)
        held = {name: fleet.model(name) for name in names(4)}
        assert len({(m.round, m.theta.tobytes()) for m in held.values()}) == 1
        assert all(m.round >= 3 for m in held.values())
        fleet.run(600)


def test_run_begins_with_a_certified_model(tmp_path):
    """A run begins with the certified model of a device."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=50, shards=1, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        fleet.kill_device(ASLEEP)
        fleet.run_until(lambda: fleet.closed() >= 5, 400)
        restart_device(fleet, "dev-01")
        closed = fleet.closed()
        lose_aggregator(fleet, tmp_path)
        directory, file = fleet.stage.device_dir("dev-01"), tmp_path / "dev-01.models"
        done = calls.call("shoal-edge", ["export", str(directory), str(file), "--certified"], tmp_path, {})
        assert done.status == 0, done.err
        owner = fleet.stage.fleet
        plan, round_, models = read_certified(file, fleet.bundle, owner)
        assert (plan.run, models.keys()) == (fleet.plan.run, {0})
        assert 3 <= round_ <= closed
        begins = _earlier_models(owner, str(file), fleet.bundle)
        assert begins.keys() == {0}
        assert begins[0].tobytes() == models[0].tobytes()
        assert np.any(begins[0])
        data = file.read_bytes()

        def refused(data, error, words):
            file.write_bytes(data)
            with pytest.raises(error, match=words):
                read_certified(file, fleet.bundle, owner)

        size = 4 + int.from_bytes(data[:4], "little")
        assert decode(data[4:size], StateCertificate).statements
        unsigned = encode(StateCertificate(()))
        refused(data[:-1] + bytes([data[-1] ^ 1]), UntrustedError, "0 devices of the roster have signed")
        refused(len(unsigned).to_bytes(4, "little") + unsigned + data[size:], UntrustedError, "are needed")
        refused(data[:size], IntegrityError, "no certified models")
        refused(bytes(4) + data[size:], IntegrityError, "is damaged")
        refused(b"\xff" * 4 + data[4:], IntegrityError, "is damaged")
        refused(data[:-1], IntegrityError, "is cut short")
        refused(b"", IntegrityError, "is damaged")
        # A state that no other device has signed is left out.
        head, values = decode_prefix(data[size:], StateFile)
        own = encode(dataclasses.replace(head, model=1)) + bytes(values)
        file.write_bytes(data + own)
        assert read_certified(file, fleet.bundle, owner)[2].keys() == {0}
        refused(data + own * MAX_CERTIFIED + own, IntegrityError, "too many")
        file.write_bytes(data)
        with pytest.raises(TaskError, match="another task"):
            read_certified(file, logistic_bundle(5, 2), owner)
        # The signatures of devices that the owner has revoked since count for nothing.
        owner.revoke("dev-00")
        owner.revoke("dev-03")
        refused(data, UntrustedError, "are needed")


def test_device_without_certificates_says_so(tmp_path):
    with pytest.raises(IntegrityError, match="holds no certified model"):
        certified_file(tmp_path)


def test_the_old_one_is_refused_by_devices(tmp_path):
    """It comes back with its disk, and announces its next round as if nothing had happened; nor is a device believed."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=50, shards=1, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        announcement = fleet.devices[ASLEEP].runtime.session.latest
        old = lose_aggregator(fleet, tmp_path)
        rogue = Identity.load(old / KEY_FILE)
        fleet.publish()
        next_run(fleet)
        fleet.run_until(lambda: fleet.closed() >= 1, 200)
        run = fleet.plan
        announce(fleet, announcement, signer=rogue)
        fleet.settle()
        assert all(d.runtime.following == run.run for d in fleet.devices.values())
        # A device holds the newest broadcast key, and the owner has not signed the roster that it makes.
        device = fleet.devices[ASLEEP].runtime
        roster, liar = device._membership.roster, Identity.load(fleet.stage.device_dir("dev-01") / KEY_FILE)
        forged = bytes(64) + encode(dataclasses.replace(roster, sequence=99, aggregator=liar.member))
        with pytest.raises(ShoalError):
            hand_over(device, channels.ROSTER, forged)
        assert device._membership.roster == roster
        fleet.run(600)


def test_old_one_ends_at_the_owners_roster(tmp_path):
    """The old one ends when it sees the owners roster."""
    with make_fleet(tmp_path / "fleet", count=3, rounds=50, shards=1, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        first = fleet.plan
        old = lose_aggregator(fleet, tmp_path)
        fleet.publish()
        new, fleet.stage.aggregator_dir = fleet.stage.aggregator_dir, old
        fleet.revive_aggregator()
        with pytest.raises(ReplacedError, match="does not name this aggregator") as caught:
            fleet.run_until(lambda: fleet.closed() > 40, 60)
        assert "init in a new directory" in caught.value.hint
        fleet.service = None
        # With the roster carried by hand it ends before it connects.
        shutil.copy(fleet.stage.fleet.path / "roster.signed", old)
        with pytest.raises(ReplacedError):
            AggregatorMembership(old)
        fleet.stage.aggregator_dir = new
        fleet.broker.disconnect(fleet.client_id("aggregator"))
        next_run(fleet)
        fleet.run(600)
        assert fleet.plan.run > first.run


# -- The aggregator's directory is lost in the middle of a run and restored from a backup, which may be older than the fleet --


@pytest.fixture
def fleet(tmp_path):
    """Five devices in round 2 of a long run, and a backup of the aggregator from before its first round."""
    with make_fleet(tmp_path / "fleet", count=5, rounds=50, shards=1, quorum=0.5, min_contributors=3) as made:
        save(made.stage.aggregator_dir, tmp_path / "file")
        made.run_until(lambda: made.closed() >= 2, 60)
        yield made


def lose_and_restore(fleet, tmp_path):
    fleet.kill_aggregator()
    shutil.rmtree(fleet.stage.aggregator_dir)
    restore(tmp_path / "file", fleet.stage.aggregator_dir)


def test_the_fleet_goes_on_with_the_next_run(fleet, tmp_path):
    """A device was revoked and secrets were drawn since the backup; another was off for the whole change."""
    fleet.kill_device(ASLEEP)
    fleet.stage.fleet.revoke("dev-04")
    fleet.publish()
    fleet.run_until(lambda: fleet.closed() >= 5, 400)
    first, newest = fleet.plan.run, fleet.stage.fleet.roster
    lose_and_restore(fleet, tmp_path)
    next_run(fleet)  # its loop takes the owner's newest roster and keys from the broker
    fleet.run_until(lambda: fleet.closed() >= 1, 400)
    assert fleet.service._membership.roster == newest
    fleet.revive_device(ASLEEP)
    fleet.run(600)
    assert fleet.plan.run > first
    left = [name for name in names(5) if name != "dev-04"]
    assert {DeviceMembership(fleet.stage.device_dir(name)).roster.sequence for name in left} == {newest.sequence}
    assert len({fleet.model(name).theta.tobytes() for name in left if name != ASLEEP}) == 1
    assert all("dev-04" not in record["norms"] for record in fleet.records())


def test_lost_run_again_blames_the_server(fleet, tmp_path, caplog):
    """The owner, or who has recorded the request, sends the old run again: no device computes a round twice."""
    package = next((fleet.stage.aggregator_dir / "runs").glob("*.run")).read_bytes()
    lose_and_restore(fleet, tmp_path)
    (fleet.stage.aggregator_dir / "runs" / "000001.run").write_bytes(package)
    fleet.revive_aggregator()
    fleet.run_until(lambda: fleet.service.odd, 400)
    facts = fleet.service.facts()
    assert "have signed another history of run 1 than this aggregator has" in facts.shortage
    assert "backup" in facts.advice
    assert not any(name in facts.shortage + facts.advice for name in names(5))
    assert facts.waiting == facts.not_waited_for == ()
    assert fleet.closed() == 0
    assert "odd one" in caplog.text
    fleet.service.obey(Order.STOP_NOW, fleet.now_s)  # the daemon drops it then: no device would end it
    fleet.run_until(lambda: fleet.now_s > 500, 600)
    assert fleet.service.odd
    assert not fleet.service.finished
    assert fleet.closed() == 0


def test_devices_refuse_the_old_roster(fleet, tmp_path):
    """The broker has lost the owner's newest one, so that the restored aggregator publishes its own."""
    fleet.stage.fleet.revoke("dev-04")
    fleet.publish()
    fleet.run_until(lambda: fleet.closed() >= 5, 400)
    newest = fleet.stage.fleet.roster
    lose_and_restore(fleet, tmp_path)
    old = AggregatorMembership(fleet.stage.aggregator_dir).roster_bytes
    runtime = fleet.devices["dev-00"].runtime
    with pytest.raises(UntrustedError, match="refused as a rollback"):
        runtime._membership.adopt(old)
    with pytest.raises(ShoalError):
        hand_over(runtime, channels.ROSTER, old)
    assert runtime._membership.roster == newest
    assert "dev-04" in DeviceMembership(fleet.stage.device_dir("dev-00")).roster.revoked
