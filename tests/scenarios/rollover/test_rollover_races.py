"""Mask epochs and bad luck: uploads that come too late, letters that overtake each other, power cuts between two writes."""

import pytest

from aggregator.membership import AggregatorMembership
from aggregator.publisher import Publisher
from aggregator.storage.fsync_worker import InlineSyncer
from aggregator.storage.store import Store
from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from edge_client.membership import DeviceMembership
from shoal.protocol.messages import Action, Phase
from shoal.transport.base import Message
from shoal.transport.faults import Hop
from tests.helpers.fleets import Wiretap, aggregator_identity, answers, grouped_data, make_one_key_fleet
from tests.helpers.takeovers import open_round, open_step, stop_at
from tests.scenarios.revocation.test_revocation import broadcasts, publish
from tests.scenarios.rollover.test_rollover import close_to, events_of, models_of


class Crash(BaseException):
    """The power is cut."""


class SlowDisk:
    """A syncer whose disk takes until `done`: uploads that arrive meanwhile wait for the next batch."""

    def __init__(self):
        self.waiting = []

    def submit(self, job, done):
        job()
        self.waiting.append(done)

    def done(self):
        waiting, self.waiting = self.waiting, []
        for finish in waiting:
            finish()

    def close(self):
        pass


def work(fleet, *devices):
    """Let devices do their assignments, and deliver their answers."""
    fleet.broker.pump()
    for device in devices:
        fleet.devices[device].worker.work()
    fleet.broker.pump()


# ---------------------------------------------------------------------------------------------------- late uploads


@pytest.mark.parametrize("when", ["round", "fold", "signing"])
def test_an_upload_and_the_will_of_its_device_arrive_together(tmp_path, when):
    """The upload arrived first and counts; it must not be on its way to a file that the end of the round has closed."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=4, epoch_rounds=2, quorum=0.6, deadline_s=5.0) as fleet:
        open_round(fleet, 1) if when == "round" else open_step(
            fleet, Phase.CHECKPOINT if when == "fold" else Phase.ENDORSE
        )
        asked = list(fleet.service.state.plan.assignments)
        work(fleet, *asked[:-1])
        fleet.service.flush(fleet.now_s)
        fleet.broker.pump()
        fleet.devices[asked[-1]].worker.work()
        fleet.kill_device(asked[-1])
        fleet.settle()
        fleet.revive_device(asked[-1])
        records = fleet.run(100)
        if when == "round":
            assert records[0]["contributed"] == 3
        (event,) = events_of(records)
        assert when != "signing" or event["signatures"] == 3


@pytest.mark.parametrize("when", ["round", "signing", "signing in vain"])
def test_an_upload_that_is_not_durable_when_its_round_closes_is_refused(tmp_path, when):
    """A slow disk has just finished the last upload that was waited for; another has come meanwhile, of a device that is gone."""
    tap = Wiretap()
    with make_one_key_fleet(
        tmp_path / "fleet", faults=tap, count=5, rounds=4, epoch_rounds=2, quorum=0.4, deadline_s=5.0
    ) as fleet:
        open_round(fleet, 1) if when == "round" else open_step(fleet, Phase.ENDORSE)
        in_time, late, *more = ["dev-00", "dev-01"], "dev-02", "dev-03", "dev-04"
        if when == "signing":
            in_time.append(more.pop())
        rule = tap.lose(client=fleet.client_id(late), ending="/up")
        before = len(tap.sent(client=fleet.client_id(late), ending="/up"))
        work(fleet, late)
        chunks = tap.sent(client=fleet.client_id(late), ending="/up")[before:]
        tap.forgive(rule)
        for device in (late, *more):
            fleet.kill_device(device)
        fleet.broker.pump()
        disk = fleet.service.uploads._queue._syncer = SlowDisk()
        work(fleet, *in_time)
        fleet.service.flush(fleet.now_s)
        for chunk in chunks:
            fleet.broker.submit("late", Message(chunk.topic, chunk.payload), lambda: None)
        fleet.broker.pump()
        assert fleet.service.uploads._queue.of(late) is not None
        closing = fleet.service.state.plan
        disk.done()
        assert fleet.service.state.plan is not closing
        assert not fleet.service.uploads.committing
        fleet.broker.pump()
        assert answers(fleet, tap, late)[-1].action == Action.REFUSED
        fleet.service.uploads._queue._syncer = InlineSyncer()
        for device in (late, *more):
            fleet.revive_device(device)
        records = fleet.run(100)
        assert len(events_of(records)) == 1
        assert len(events_of(records, "rollover-failed")) == (when == "signing in vain")
        assert records[-1]["contributed"] == 5


# ---------------------------------------------------------------------------------------------------- overtaking


def test_newer_keys_that_overtake_the_certificate_stop_nobody(tmp_path):
    """The epoch was certified, and the owner rotates before any device knows: devices enter the epoch and then leave it."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=4, epoch_rounds=2, deadline_s=5.0) as fleet:
        hold = tap.lose(client=fleet.client_id("aggregator"), ending="/s/checkpoint")
        stop_at(fleet, lambda: fleet.service.state.run.epoch == 2)
        fleet.stage.fleet.rotate()
        publish(fleet)
        fleet.settle()
        assert {d.runtime._run.plan.epoch for d in fleet.devices.values()} == {1}
        tap.forgive(hold)
        fleet.kill_aggregator()
        fleet.revive_aggregator()
        records = fleet.run(100)
        assert [e["epoch"] for e in events_of(records)] == [2, fleet.stage.fleet.secrets.mask_epoch]
        assert records[-1]["contributed"] == 3


def test_a_second_revocation_overtakes_the_certificate_of_the_first(tmp_path):
    """Devices have signed for secrets that are replaced before they enter them: they keep both until they are through."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, count=5, rounds=4, quorum=0.5, deadline_s=5.0) as fleet:
        open_round(fleet, 2)
        hold = tap.lose(client=fleet.client_id("aggregator"), ending="/s/checkpoint")
        fleet.stage.fleet.revoke("dev-04")
        publish(fleet)
        stop_at(fleet, lambda: fleet.service.state.run.epoch > 1)
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        fleet.settle()
        tap.forgive(hold)
        fleet.kill_aggregator()
        fleet.revive_aggregator()
        records = fleet.run(100)
        assert [e["devices"] for e in events_of(records)] == [4, 3]
        assert set(records[-1]["clusters"]) == {"dev-00", "dev-01", "dev-02"}
        for device in ("dev-00", "dev-01", "dev-02"):
            member = DeviceMembership(fleet.stage.device_dir(device))
            assert member.later == []
            assert member.grant.mask_secret == fleet.stage.fleet.secrets.mask_secret


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.ENDORSE], ids=lambda p: p.name)
def test_a_second_revocation_in_the_middle_of_the_first_ones_rollover(tmp_path, phase):
    with make_one_key_fleet(tmp_path / "fleet", count=5, rounds=3, quorum=0.5, deadline_s=5.0) as fleet:
        open_round(fleet, 2)
        fleet.stage.fleet.revoke("dev-04")
        publish(fleet)
        open_step(fleet, phase)
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        started_s, records = fleet.now_s, fleet.run(100)
        (event,) = events_of(records)
        assert (event["signatures"], event["devices"]) == (3, 3)
        assert event["epoch"] == fleet.stage.fleet.secrets.mask_epoch
        assert fleet.now_s - started_s <= fleet.plan.deadline_s


def test_a_device_that_was_away_for_two_changes_of_the_secrets_catches_up(tmp_path):
    with make_one_key_fleet(tmp_path / "fleet", count=6, rounds=8, quorum=0.5, deadline_s=5.0) as fleet:
        open_round(fleet, 2)
        fleet.kill_device("dev-00")
        for gone in ("dev-05", "dev-04"):
            fleet.stage.fleet.revoke(gone)
            publish(fleet)
            stop_at(fleet, lambda n=fleet.service.state.run.epoch: fleet.service.state.run.epoch > n)
        fleet.revive_device("dev-00")
        records = fleet.run(100)
        assert len(events_of(records)) == 2
        assert records[-1]["contributed"] == 4
        assert fleet.model("dev-00").theta.tobytes() == fleet.model("dev-01").theta.tobytes()
        assert DeviceMembership(fleet.stage.device_dir("dev-00")).later == []


def test_a_revocation_finds_a_fleet_that_has_just_restarted(tmp_path):
    """In a later epoch: every device takes up its own mask epoch, though the owner has replaced its keys meanwhile."""
    with make_one_key_fleet(tmp_path / "fleet", count=4, rounds=6, epoch_rounds=2, quorum=0.5, deadline_s=5.0) as fleet:
        open_round(fleet, 4)
        fleet.kill_aggregator()
        fleet.settle()
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        fleet.settle()
        for device in ("dev-00", "dev-01", "dev-02"):
            fleet.kill_device(device)
            fleet.revive_device(device)
            assert fleet.devices[device].runtime.following == fleet.plan.run
        fleet.revive_aggregator()
        records = fleet.run(100)
        assert events_of(records)[-1]["devices"] == 3
        assert records[-1]["contributed"] == 3


# ---------------------------------------------------------------------------------------------------- the rest of a fleet


def test_a_newcomer_in_the_middle_of_a_rotation_costs_one_deadline_at_most(tmp_path):
    """It has the fresh keys only: it is there, is asked to sign and can't; with the next round it takes part."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=4, quorum=0.6, deadline_s=30.0) as fleet:
        open_round(fleet, 2)
        fleet.kill_aggregator()
        fleet.stage.fleet.rotate()
        fleet.add_device("dev-03", grouped_data(4)["dev-03"])
        publish(fleet)
        started_s = fleet.now_s
        fleet.revive_aggregator()
        fleet.run_until(lambda: fleet.service.state.run.epoch > 1, 100)
        assert fleet.now_s - started_s <= fleet.plan.deadline_s + 1
        packages = tap.sent(client=fleet.client_id("dev-03"), ending="/s/plan", hop=Hop.DOWN)
        assert len(packages) <= 6, "waiting, it does not have the run sent to it over and over"
        records = fleet.run(100)
        assert [e["signatures"] for e in events_of(records)] == [3]
        assert events_of(records, "rollover-failed") == []
        assert "dev-03" in records[-2]["norms"]


def test_a_device_that_dies_after_a_revocation_is_not_waited_for(tmp_path):
    """Its will is sealed under the replaced secrets: a device whose presence can't be opened counts as offline."""
    with make_one_key_fleet(tmp_path / "fleet", count=4, rounds=6, quorum=0.6, deadline_s=30.0) as fleet:
        open_round(fleet, 2)
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        stays = [fleet.devices[d] for d in ("dev-00", "dev-01", "dev-02")]
        stop_at(fleet, lambda: all(d.runtime._run.plan.epoch > 1 for d in stays))
        started_s = fleet.now_s
        fleet.kill_device("dev-02")
        records = fleet.run(200)
        assert fleet.now_s - started_s < fleet.plan.deadline_s
        assert records[-1]["contributed"] == 2


def test_a_device_that_died_so_is_back_when_it_has_the_newer_keys(tmp_path):
    with make_one_key_fleet(tmp_path / "fleet", count=4, rounds=8, quorum=0.6, deadline_s=30.0) as fleet:
        open_round(fleet, 2)
        fleet.kill_device("dev-02")
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        stop_at(fleet, lambda: fleet.service.state.run.epoch > 1)
        fleet.revive_device("dev-02")
        records = fleet.run(200)
        assert records[-1]["contributed"] == 3
        assert fleet.model("dev-02").theta.tobytes() == fleet.model("dev-00").theta.tobytes()


# ---------------------------------------------------------------------------------------------------- power cuts


@pytest.fixture(scope="module")
def undivided(tmp_path_factory):
    """Device -> model after four rounds under one mask."""
    with make_one_key_fleet(tmp_path_factory.mktemp("undivided") / "fleet", rounds=4) as fleet:
        fleet.run(60)
        return models_of(fleet)


CUTS = {
    "before the epoch is durable": (Store, "renew", "before"),
    "between the epoch and the keys": (Store, "renew", "after"),
    "while the keys come in force": (AggregatorMembership, "promote", "before"),
    "between the keys and telling": (AggregatorMembership, "promote", "after"),
    "before it is told": (Publisher, "epoch", "before"),
    "after it is told": (Publisher, "epoch", "after"),
}


@pytest.mark.parametrize(
    ("case", "change"),
    [(c, change) for c, (_, name, _) in CUTS.items() for change in ("scheduled", "rotated")[name == "promote" :]],
)
def test_the_aggregator_dies_at_the_turn(tmp_path, monkeypatch, case, change, undivided):
    """After a power cut at any step, the fleet continues in the old epoch or the new one, and ends with the same models."""
    owner, name, side = CUTS[case]
    with make_one_key_fleet(
        tmp_path / "fleet", rounds=4, epoch_rounds=2 if change == "scheduled" else 0, deadline_s=5.0
    ) as fleet:
        if change == "rotated":
            open_round(fleet, 2)
            fleet.stage.fleet.rotate()
            publish(fleet)
        original = getattr(owner, name)

        def cut(self, *args):
            if name == "epoch" and not args[0]:
                return original(self, *args)
            if side == "after":
                original(self, *args)
            raise Crash

        open_step(fleet, Phase.ENDORSE)
        monkeypatch.setattr(owner, name, cut)
        with pytest.raises(Crash):
            fleet.run(60)
        monkeypatch.undo()
        fleet.kill_aggregator()
        fleet.revive_aggregator()
        records = fleet.run(100)
        assert len(events_of(records)) == 1
        if change == "scheduled":
            assert close_to(models_of(fleet), undivided)
        else:
            server = AggregatorMembership(fleet.stage.aggregator_dir)
            assert server.grant.broadcast_key == fleet.stage.fleet.secrets.broadcast_key
            assert server.later == []


def opens(fleet, secret, sealed):
    """Whether a broadcast of the aggregator is under the key ``secret``."""
    head, at = read_head(sealed)
    try:
        open_from_group(
            GroupKey("demo", "broadcast", secret), sealed, head, at, aggregator_identity(fleet).member.sign_key
        )
    except SealError:
        return False
    return True


def test_an_aggregator_that_comes_back_speaks_under_the_newer_key_only(tmp_path, monkeypatch):
    """The epoch is durable, its keys not yet in force: a revoked device can read no message after the restart either."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=4, quorum=0.6, deadline_s=5.0) as fleet:
        open_round(fleet, 2)
        old = fleet.stage.fleet.secrets.broadcast_key
        fleet.stage.fleet.revoke("dev-02")
        publish(fleet)
        open_step(fleet, Phase.ENDORSE)

        def cut(*_):
            raise Crash

        monkeypatch.setattr(AggregatorMembership, "promote", cut)
        with pytest.raises(Crash):
            fleet.run(60)
        monkeypatch.undo()
        fleet.kill_aggregator()
        heard = len(tap.heard)
        fleet.revive_aggregator()
        assert len(events_of(fleet.run(100))) == 1
        told = broadcasts(tap.heard[heard:])
        assert len(told) > 4
        assert not any(opens(fleet, old, m) for m in told)
