"""An aggregator that oversteps: its key and the group's key are in the wrong hands, and still devices hold it to the plan."""

import dataclasses

import numpy as np
import pytest

from crypto.seal.signed import sign_document
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage
from shoal.protocol.messages import NO_ASSIGNMENT, Assignment, ModelHeader, ModelRef, Phase, Share
from shoal.protocol.topics import Topics
from tests.helpers.fleets import (
    Wiretap,
    aggregator_identity,
    announce,
    announcements,
    device_identity,
    make_fleet,
    reasons,
    tell,
    uploads_of,
)

ROUND_2 = {"round": 2, "nonce": b"\2" * 16}


@dataclasses.dataclass
class Rogue:
    """A fleet that has served round 1 of two and whose aggregator is now an attacker."""

    fleet: object
    tap: Wiretap
    first: object

    @property
    def round_2(self):
        """Return an announcement of the next round: train from the origin."""
        return dataclasses.replace(self.first, **ROUND_2)

    def sent(self):
        """How many uploads each device has sent since the takeover."""
        self.fleet.settle()
        return [len(uploads_of(self.fleet, self.tap, d)) - 1 for d in self.fleet.stage.devices]


@pytest.fixture
def rogue(tmp_path, caplog):
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", faults=tap, count=2, rounds=2, min_contributors=2) as fleet:
        fleet.broker.pump()
        for device in fleet.devices.values():
            device.worker.work()
        fleet.broker.pump()
        fleet.kill_aggregator()
        (first,) = announcements(fleet, tap)
        caplog.clear()
        yield Rogue(fleet, tap, first)


def with_models(*models):
    return lambda a: dataclasses.replace(a, models=models)


def with_order(**fields):
    return lambda a: dataclasses.replace(a, assignments=(dataclasses.replace(a.assignments[0], **fields),))


def changed(**fields):
    return lambda a: dataclasses.replace(a, **fields)


ORIGIN = ModelRef(model=0, origin=0, label="x", transfer=bytes(16), contributors=0, norm=0.0)
OFFSET = ModelRef(model=0, origin=0, label="x", transfer=b"\1" * 16, contributors=2, norm=1.0)
SCORING = {"phase": int(Phase.SCORE), "train": False}

OVERSTEPS = {
    "another fleet": (changed(fleet="other"), "an announcement of another run"),
    "another run number": (changed(run=7), "an announcement of another run"),
    "another mask key": (changed(key_id=bytes(16)), "under another mask key"),
    "a mask epoch that is over": (changed(epoch=0), "under another mask key"),
    "another mask mode": (changed(mode="none"), "under another mask key or mode"),
    "round 0": (changed(round=0), "round 0 of a run of 2"),
    "a round too many": (changed(round=3), "round 3 of a run of 2"),
    "an end before its time": (changed(finished=True), "round 2 of a run of 2"),
    "an end after the end": (changed(round=4, finished=True), "round 4 of a run of 2|finished"),
    "more models than the plan allows": (with_models(ORIGIN, dataclasses.replace(ORIGIN, model=1)), "2 models where"),
    "an origin that does not exist": (with_models(dataclasses.replace(ORIGIN, origin=1)), "origin 1 of 1"),
    "a mean of one device": (with_models(dataclasses.replace(OFFSET, contributors=1)), "a mean of 1 devices"),
    "an older roster": (changed(roster_sequence=1), "an announcement under roster 1"),
    "an order for an unknown model": (with_order(candidates=(3,)), "a model that is not announced"),
    "an order that repeats a candidate": (with_order(candidates=(0, 0)), "a candidate twice"),
    "pre-training": (with_order(phase=int(Phase.PRETRAIN)), "to pre-train, which the plan does not allow"),
    "margins": (with_order(**SCORING, margins=True), "to report margins, which the plan does not allow"),
    "the norm of the trained model": (with_order(norm=True), "to report a model's norm, which the plan does not allow"),
    "keeping an update in clear": (with_order(keep=1), "to keep updates, which the plan does not allow"),
    "keeping a path of models": (
        with_order(**{**SCORING, "phase": int(Phase.KEEP)}),
        "to keep a path of models, which the plan does not allow",
    ),
    "a multiple of an origin": (with_models(dataclasses.replace(OFFSET, scale=2.0)), "is 2 times its origin"),
    "training that reports margins": (with_order(margins=True), "train and report margins"),
    "training in a scoring phase": (with_order(phase=int(Phase.SCORE)), "nothing to train for"),
    "training at a checkpoint": (with_order(phase=int(Phase.CHECKPOINT)), "a rollover in a round"),
    "training in the final round": (changed(round=3, finished=True), "nothing to train for"),
    "an order that is not there": (changed(assignment_of=(5, 5)), "an order that it does not hold"),
}


def test_the_same_announcement_without_a_fault_is_followed(rogue):
    """The control: each announcement refused below differs from this one in one place."""
    announce(rogue.fleet, rogue.round_2)
    assert rogue.sent() == [1, 1]


@pytest.mark.parametrize("case", OVERSTEPS)
def test_an_announcement_beyond_the_plan_is_refused(rogue, caplog, case):
    alter, expected = OVERSTEPS[case]
    altered = alter(rogue.round_2)
    announce(rogue.fleet, altered)
    assert rogue.sent() == [0, 0]
    found = reasons(caplog)
    assert len(found) == 2
    assert any(part in found[0] for part in expected.split("|"))
    announce(rogue.fleet, rogue.round_2)
    assert rogue.sent() == [1, 1], "a refused announcement must leave no trace"


def test_an_announcement_of_a_later_mask_epoch_waits_for_its_certificate(rogue):
    """No device trains under a key that is not certified; the true announcement is followed all the same."""
    announce(rogue.fleet, dataclasses.replace(rogue.round_2, epoch=9))
    assert rogue.sent() == [0, 0]
    announce(rogue.fleet, rogue.round_2)
    assert rogue.sent() == [1, 1]


def test_several_models_twice_are_refused(tmp_path, caplog):
    """Under a plan that allows two models one name may still stand for one model only."""
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", faults=tap, count=2, algorithm="ifca", rounds=2) as fleet:
        fleet.broker.pump()
        (first,) = announcements(fleet, tap)
        fleet.kill_aggregator()
        twice = (first.models[0], first.models[0])
        announce(fleet, dataclasses.replace(first, **ROUND_2, models=twice))
        fleet.settle()
        assert "names a model twice" in reasons(caplog)[0]


def test_a_device_without_an_order_sits_out(rogue):
    announce(rogue.fleet, dataclasses.replace(rogue.round_2, assignment_of=(NO_ASSIGNMENT, 0)))
    assert rogue.sent() == [0, 1]


def test_an_announcement_of_an_unknown_run_is_not_followed(rogue):
    announce(rogue.fleet, dataclasses.replace(rogue.round_2, run_id=bytes(16)))
    assert rogue.sent() == [0, 0]


def test_an_old_announcement_is_refused_after_a_newer_one(rogue, caplog):
    announce(rogue.fleet, rogue.round_2)
    assert rogue.sent() == [1, 1]
    announce(rogue.fleet, rogue.first)
    assert rogue.sent() == [1, 1]
    assert "run 1 round 1 announced after run 1 round 2" in reasons(caplog)[0]


def test_an_old_announcement_is_refused_after_a_restart_too(rogue, caplog):
    """The high-water mark is on disk before the first byte of an upload is sent."""
    announce(rogue.fleet, rogue.round_2)
    assert rogue.sent() == [1, 1]
    rogue.fleet.kill_device("dev-00")
    announce(rogue.fleet, rogue.first)
    rogue.fleet.revive_device("dev-00")
    assert rogue.sent() == [1, 1]
    assert any("round 1 announced after" in r for r in reasons(caplog))


def test_one_round_is_not_announced_twice_differently(rogue, caplog):
    """A second task under the same number would let two updates of one round be compared."""
    announce(rogue.fleet, rogue.round_2)
    assert rogue.sent() == [1, 1]
    announce(rogue.fleet, dataclasses.replace(rogue.round_2, nonce=b"\3" * 16))
    assert rogue.sent() == [1, 1]
    assert "announced twice, differently" in reasons(caplog)[0]


@pytest.mark.parametrize("who", ["a device", "the owner"])
def test_only_the_aggregator_announces(rogue, caplog, who):
    """A device holds the group's key and still can't speak for the aggregator; nor does the owner's key do."""
    signer = device_identity(rogue.fleet, "dev-01") if who == "a device" else rogue.fleet.stage.fleet.owner
    announce(rogue.fleet, rogue.round_2, signer=signer)
    assert rogue.sent() == [0, 0]
    assert "a sealed message was refused" in reasons(caplog)[0]


def test_a_message_means_what_its_seal_says(rogue, caplog):
    announce(rogue.fleet, rogue.round_2, purpose="roster")
    assert rogue.sent() == [0, 0]
    assert reasons(caplog)[0] == "a message of purpose 'roster' on the channel 'announcement'"


def package_of(fleet):
    return decode((fleet.stage.fleet.path / "runs" / "000001.run").read_bytes(), RunPackage)


@pytest.mark.parametrize("change", [{"mode": "none"}, {"max_models": 9}, {"min_contributors": 1}, {"rounds": 1}])
def test_a_plan_that_the_owner_did_not_sign_is_refused(rogue, caplog, change):
    """No downgrade: the aggregator can't take the mask away, name more models, or average fewer devices."""
    fleet = rogue.fleet
    plan = dataclasses.replace(fleet.plan, run=2, run_id=b"\7" * 16, **change)
    package = dataclasses.replace(package_of(fleet), plan=sign_document(aggregator_identity(fleet), plan))
    tell(fleet, Topics("demo").plan, "run", encode(package), ChunkKind.PLAN)
    fleet.settle()
    assert "the signature on this document/RunPlan is not its sender's" in reasons(caplog)[0]
    announce(fleet, rogue.round_2)
    assert rogue.sent() == [1, 1], "the true run goes on"


def test_an_earlier_run_is_not_taken_up_again(rogue, caplog):
    fleet = rogue.fleet
    topic, first = Topics("demo").plan, encode(package_of(fleet))
    options = rogue.fleet.plan
    second = fleet.stage.add_run(fleet.bundle, np.zeros((1, options.length), np.float32), rogue_options())
    tell(fleet, topic, "run", (fleet.stage.fleet.path / "runs" / "000002.run").read_bytes(), ChunkKind.PLAN)
    fleet.settle()
    assert second.run == 2
    tell(fleet, topic, "run", first, ChunkKind.PLAN)
    fleet.settle()
    assert "run 1 after run" in reasons(caplog)[0]


def rogue_options():
    from shoal.owner.runs.plan import RunOptions

    return RunOptions("fedavg", rounds=2, min_contributors=1, seed=0)


def masked(plan, values, **header):
    fields = {
        "fleet": "demo",
        "run_id": plan.run_id,
        "epoch": plan.epoch,
        "key_id": plan.key_id,
        "model": 0,
        "origin": 0,
        "round": 2,
        "length": plan.length,
        **header,
    }
    return encode(ModelHeader(**fields)) + np.asarray(values, "<f4").tobytes()


D = 28
SMALL = np.full(D, 0.01)
BAD_MODELS = {
    "of another run": ({"fleet": "other"}, SMALL, "a model of another run"),
    "under another key": ({"key_id": bytes(16)}, SMALL, "under another mask key"),
    "under another epoch": ({"epoch": 9}, SMALL, "under another mask key"),
    "from an unknown origin": ({"origin": 1}, SMALL, "from origin 1 of 1"),
    "under another label": ({"model": 1}, SMALL, "under another model's label"),
    "too short": ({"length": D - 1}, SMALL[1:], "27 coordinates"),
    "shorter than it says": ({}, SMALL[1:], "28 coordinates in 108 bytes"),
    "NaN": ({}, np.full(D, np.nan), "norm nan"),
    "infinite": ({}, np.full(D, np.inf), "norm inf"),
    "overflowing": ({}, np.full(D, 3e38), "norm inf"),
    "of a round that can't be": ({"round": 10**6}, np.full(D, 1000.0), "a model of round 1000000 of 2"),
    "of round 0": ({"round": 0}, SMALL, "a model of round 0 of 2"),
    "longer than all rounds could make it": ({}, np.full(D, 1000.0), "beyond 1e+03 a round"),
}


@pytest.mark.parametrize("case", [*BAD_MODELS, "none of these"])
def test_a_model_is_taken_only_as_the_plan_describes_it(rogue, caplog, case):
    fleet = rogue.fleet
    header, values, expected = BAD_MODELS.get(case, ({}, SMALL, ""))
    group_label = rogue.first.models[0].label
    assignment = Assignment(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)
    topic = Topics("demo").model(group_label)
    transfer = tell(fleet, topic, "model", masked(fleet.plan, values, **header), ChunkKind.MODEL, round_=2)
    ref = ModelRef(model=0, origin=0, label=group_label, transfer=transfer, contributors=2, norm=1.0)
    announce(fleet, dataclasses.replace(rogue.round_2, models=(ref,), assignments=(assignment,)))
    if not expected:
        assert rogue.sent() == [1, 1]
        assert not reasons(caplog)
        return
    assert rogue.sent() == [0, 0]
    assert len(reasons(caplog)) == 2
    assert expected in reasons(caplog)[0]
