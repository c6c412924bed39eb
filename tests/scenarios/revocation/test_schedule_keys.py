"""A standing order under newer keys: after a revocation, a rotation and a new device, and at another aggregator."""

import dataclasses
import shutil

import pytest
from shoal_lab.loopback.fleet import EPOCH_S, LoopbackError

from aggregator import membership as aggregators
from aggregator.status.watch import FleetWatch
from shoal.owner.keys.vault import run_file
from shoal.owner.runs.standing import note_stopped, order_in_force, sign_again
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, Schedule
from shoal.protocol.requests import Outcome, RequestAction
from shoal.protocol.topics import Topics
from tests.helpers.fleets import grouped_data, make_fleet, tell, thetas

DAY_S = 24 * 3600


@pytest.fixture
def fleet(tmp_path):
    """Four devices that have done the first of nine runs."""
    order = Schedule(order=bytes(range(16)), count=9, interval_s=DAY_S, until_s=EPOCH_S + 30 * DAY_S)
    with make_fleet(
        tmp_path / "fleet", count=4, rounds=2, quorum=1.0, min_contributors=2, deadline_s=5.0, shards=1, schedule=order
    ) as found:
        found.run(100)
        yield found


def next_run(fleet):
    """Let the next run begin and end; return its records."""
    fleet.rest_until_next(2 * DAY_S)
    return fleet.run(5000)


def renew(fleet):
    """Let the owner sign the order again and send it, as the commands that draw keys do."""
    owner = fleet.stage.fleet
    with owner.changing():
        plan = sign_again(owner)
    answer = fleet.ask(RequestAction.START, package=run_file(owner.path, plan.run).read_bytes()).answer
    assert answer.outcome is Outcome.DONE
    return plan


def test_a_revoked_device_opens_no_later_run(fleet):
    """Under the old signature no run begins any more, and under the new one the device has no keys."""
    owner = fleet.stage.fleet
    owner.revoke("dev-03")
    fleet.publish()
    with pytest.raises(LoopbackError, match="the owner has drawn new keys and not signed the order under them"):
        fleet.rest_until_next(2 * DAY_S)
    before = fleet.plan.key_version
    assert renew(fleet).key_version > before
    assert renew(fleet).run == 1, "the same call again changes nothing"
    next_run(fleet)
    assert (fleet.plan.run, fleet.plan.key_version) == (2, owner.roster.keys_since)
    assert fleet.devices["dev-03"].runtime.following == 1
    assert {fleet.model(f"dev-0{i}").run for i in range(3)} == {2}


def test_an_old_signature_opens_nothing(fleet):
    """An aggregator that starts the order under the keys that a revoked device has: no device begins without a checkpoint."""
    fleet.rest(DAY_S)
    held, package = fleet._watch.held["dev-00"], run_file(fleet.stage.fleet.path, 1).read_bytes()
    fleet.stage.fleet.rotate()
    fleet.publish()
    late = dataclasses.replace(
        decode(package, RunPackage), turn=1, models=1, before=1, transcript=held.transcript, origins=b""
    )
    tell(fleet, Topics("demo").plan, "run", encode(late), ChunkKind.PLAN)
    fleet.settle()
    for device in fleet.devices.values():
        assert device.runtime.following == 1
        assert device.runtime._following.late.plan.run == 2


def test_a_new_device_and_a_long_sleeper(fleet):
    """One is admitted, one sleeps over two key versions: both take part in the next run from a checkpoint."""
    fleet.kill_device("dev-00")
    fleet.stage.fleet.rotate()
    fleet.publish()
    renew(fleet)
    next_run(fleet)
    fleet.add_device("dev-04", grouped_data(5)["dev-04"])
    renew(fleet)
    fleet.revive_device("dev-00")
    fleet.rest(1)
    fleet.rest(DAY_S)
    records = next_run(fleet)
    assert [record["contributed"] for record in records][1:] == [5, 5]
    assert len(set(thetas(fleet).values())) == 1


def test_new_keys_before_the_first_round(fleet):
    """A run whose devices have not begun it is dropped, and the next one begins under the new keys."""
    fleet.kill_device("dev-00")
    fleet.rest_until_next(2 * DAY_S)
    assert fleet.closed() == 0
    fleet.stage.fleet.rotate()
    fleet.publish()
    fleet.run(10)
    assert fleet.records() == []
    renew(fleet)
    next_run(fleet)
    assert (fleet.plan.run, len(fleet.records())) == (3, 3)


def replace_aggregator(fleet):
    """Lose the aggregator, and let the owner put another in its place, whose grant has the order."""
    owner = fleet.stage.fleet
    fleet.kill_aggregator()
    shutil.rmtree(fleet.stage.aggregator_dir)
    card = aggregators.init(fleet.stage.aggregator_dir, "aggregator").read_bytes()
    owner.replace_aggregator(card)
    with owner.changing():
        plan = sign_again(owner)
    grant = owner.replace_aggregator(card, "", run_file(owner.path, plan.run).read_bytes())
    aggregators.join(fleet.stage.aggregator_dir, grant.read_bytes(), owner.fingerprint)
    fleet._watch = FleetWatch(clock=fleet._clock)
    fleet.publish()
    fleet.start_idle_aggregator()


def test_another_aggregator_goes_on(fleet):
    next_run(fleet)
    first = fleet.records()
    replace_aggregator(fleet)
    records = next_run(fleet)
    assert fleet.plan.run == 3
    assert records[0]["loss"] < first[0]["loss"]
    assert len(set(thetas(fleet).values())) == 1
    assert fleet.standing.entry().begun == 3


def test_a_run_that_was_cut_short(fleet):
    """The aggregator is lost in a run: the next one begins with the models of its newest round."""
    fleet.rest_until_next(2 * DAY_S)
    fleet.run_until(lambda: fleet.closed() >= 1, 100)
    assert not fleet.finished
    replace_aggregator(fleet)
    next_run(fleet)
    assert fleet.plan.run == 3
    assert len(set(thetas(fleet).values())) == 1


def test_the_order_in_force(fleet):
    """A stopped order is not signed again, nor one that another run has ended."""
    owner = fleet.stage.fleet
    plan = order_in_force(owner)
    assert plan.run == 1
    owner.rotate()
    note_stopped(owner, plan)
    assert order_in_force(owner) is None
    assert sign_again(owner) is None
