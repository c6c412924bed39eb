"""An aggregator that oversteps: its key and the group's key are in the wrong hands, and still devices hold it to the plan."""

import dataclasses

import numpy as np
import pytest

from crypto.seal.identity import Identity, sign_document
from edge_client.models.checkpoints import seal_checkpoint
from edge_client.models.states import ModelState
from shoal.membership.statements import sign_statement
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage
from shoal.protocol.messages import NO_ASSIGNMENT, SHARED_MODEL, Phase
from shoal.protocol.recipe import Recipe
from shoal.protocol.states import CheckpointRef, HeldState, MeanRef, Offer, StateId, Statement, checkpoint_number
from shoal.protocol.topics import Topics
from tests.helpers.fleets import (
    Wiretap,
    aggregator_identity,
    announce,
    device_identity,
    group_key,
    make_fleet,
    reasons,
    tell,
    uploads_of,
)
from tests.helpers.plans import altered
from tests.scenarios.round_fleets import (
    continued,
    moved,
    publish_mean,
    round_keys,
    taken_over,
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

    def announce(self, announcement, **changes):
        """Announce a round so that the run's transcript is continued: devices must find another reason to refuse it."""
        if announcement.round != self.first.round:
            announcement = continued(announcement, self.first.held)
        announce(self.fleet, announcement, **changes)

    def sent(self):
        """How many uploads each device has sent since the takeover."""
        self.fleet.settle()
        return [len(uploads_of(self.fleet, self.tap, d)) - 1 for d in self.fleet.stage.devices]


@pytest.fixture
def rogue(tmp_path, caplog, tap):
    with make_fleet(tmp_path / "fleet", faults=tap, count=2, rounds=2, min_contributors=2) as fleet:
        first = taken_over(fleet, tap)
        caplog.clear()
        yield Rogue(fleet, tap, first)


def with_held(**fields):
    """Alter what is announced about models."""
    return lambda a: dataclasses.replace(a, held=dataclasses.replace(a.held, **fields))


def with_offers(*states):
    return with_held(offers=tuple(Offer(model, StateId(*at)) for model, at in enumerate(states)))


def after_a_step(mean, **changes):
    """Alter the models as if one step had moved model 0 by a mean."""
    return lambda a: dataclasses.replace(a, held=moved(a.held, mean, **changes))


def with_order(**fields):
    return lambda a: dataclasses.replace(a, assignments=(dataclasses.replace(a.assignments[0], **fields),))


def changed(**fields):
    return lambda a: dataclasses.replace(a, **fields)


MEAN = MeanRef(model=0, label="x", transfer=b"\1" * 16, contributors=2)


def checkpoint(state, round_):
    return CheckpointRef(StateId(*state), round_, 1, "x", b"\1" * 16)


SCORING = {"phase": int(Phase.SCORE), "train": False}

OVERSTEPS = {
    "another fleet": (changed(fleet="other"), "an announcement of another run"),
    "another run number": (changed(run=7), "an announcement of another run"),
    "round 0": (changed(round=0), "round 0 of a run of 2"),
    "a round too many": (changed(round=3), "round 3 of a run of 2"),
    "an end before its time": (changed(finished=True), "round 2 of a run of 2"),
    "an end after the end": (changed(round=4, finished=True), "round 4 of a run of 2|finished"),
    "more models than the plan allows": (with_offers((0, 0), (0, 0)), "2 models where"),
    "a shared part": (with_held(offers=(Offer(SHARED_MODEL, StateId(0, 0)),)), "a shared part that the plan does not"),
    "an origin that does not exist": (with_offers((1, 0)), "state 0 of model 1 in round 2"),
    "a state that does not exist yet": (with_offers((0, 2)), "state 2 of model 0 in round 2"),
    "a mean of one device": (after_a_step(dataclasses.replace(MEAN, contributors=1)), "a mean of 1 devices"),
    "twice a mean": (after_a_step(MEAN, added=2.0), "adds 2 times the mean update"),
    "the step of a later round": (after_a_step(MEAN, round_=2), "the step of round 2 in round 2"),
    "a checkpoint of a later round": (with_held(checkpoints=(checkpoint((0, 1), 3),)), "sealed in a later round"),
    "a checkpoint before its state": (with_held(checkpoints=(checkpoint((0, 1), 1),)), "before its state existed"),
    "an older roster": (changed(roster_sequence=1), "an announcement under roster 1"),
    "an order for an unknown model": (with_order(candidates=(3,)), "a model that is not announced"),
    "an order that repeats a candidate": (with_order(candidates=(0, 0)), "a candidate twice"),
    "pre-training": (with_order(phase=int(Phase.PRETRAIN)), "to pre-train, which the plan does not allow"),
    "margins": (with_order(**SCORING, margins=True), "to report margins, which the plan does not allow"),
    "the norm of the trained model": (with_order(norm=True), "to report a model's norm, which the plan does not allow"),
    "keeping a path of models": (
        with_order(**{**SCORING, "phase": int(Phase.KEEP)}),
        "to keep a path of models, which the plan does not allow",
    ),
    "a multiple of a model": (after_a_step(MEAN, weight=2.0), "a recipe whose weights add up to 2"),
    "an order to seal an unknown model": (with_order(seal=(3,)), "to seal a model that is not announced"),
    "an order to compare with an unknown model": (with_order(compare=(3,)), "to compare with a model that is not"),
    "an order to compare": (with_order(compare=(0,)), "to compare models, which the plan does not allow"),
    "training that reports margins": (with_order(margins=True), "train and report margins"),
    "training in a scoring phase": (with_order(phase=int(Phase.SCORE)), "nothing to train for"),
    "training in the final round": (changed(round=3, finished=True), "nothing to train for"),
    "an order that is not there": (changed(assignment_of=(5, 5)), "an order that it does not hold"),
}


def test_faultless_announcement_is_followed(rogue):
    """The control: each announcement refused below differs from this one in one place."""
    rogue.announce(rogue.round_2)
    assert rogue.sent() == [1, 1]


@pytest.mark.parametrize("case", OVERSTEPS)
def test_announcement_beyond_plan_is_refused(rogue, caplog, case):
    alter, expected = OVERSTEPS[case]
    altered = alter(rogue.round_2)
    rogue.announce(altered)
    assert rogue.sent() == [0, 0]
    found = reasons(caplog)
    assert len(found) == 2
    assert any(part in found[0] for part in expected.split("|"))
    rogue.announce(rogue.round_2)
    assert rogue.sent() == [1, 1], "a refused announcement must leave no trace"


def test_no_training_under_undrawn_keys(rogue, caplog):
    """No device trains under keys that the owner has not drawn."""
    rogue.announce(with_held(key_version=9)(rogue.round_2))
    assert rogue.sent() == [0, 0]
    assert len(reasons(caplog)) == 2
    assert reasons(caplog)[0] == "no keys of roster 9 have come yet"


def test_no_training_under_replaced_keys(rogue):
    """A revoked device has them. The aggregator has got its new keys and does not use them for the round."""
    owner, before = rogue.fleet.stage.fleet, rogue.first.held.key_version
    owner.rotate()
    rogue.fleet.publish()
    rogue.announce(rogue.round_2)
    assert rogue.sent() == [0, 0]
    rogue.announce(with_held(key_version=owner.roster.keys_since)(rogue.round_2))
    assert rogue.sent() == [1, 1]
    assert owner.roster.keys_since > before


def test_a_device_without_an_order_sits_out(rogue):
    rogue.announce(dataclasses.replace(rogue.round_2, assignment_of=(NO_ASSIGNMENT, 0)))
    assert rogue.sent() == [0, 1]


def test_unknown_runs_are_not_followed(rogue):
    """An announcement of an unknown run is not followed."""
    rogue.announce(dataclasses.replace(rogue.round_2, run_id=bytes(16)))
    assert rogue.sent() == [0, 0]


def test_old_announcement_is_refused(rogue, caplog):
    """Also after a restart: the high-water mark is on disk before the first byte of an upload is sent."""
    rogue.announce(rogue.round_2)
    assert rogue.sent() == [1, 1]
    rogue.announce(rogue.first)
    assert rogue.sent() == [1, 1]
    assert "run 1 round 1 announced after run 1 round 2" in reasons(caplog)[0]
    caplog.clear()
    rogue.fleet.kill_device("dev-00")
    rogue.announce(rogue.first)
    rogue.fleet.revive_device("dev-00")
    assert rogue.sent() == [1, 1]
    assert any("round 1 announced after" in r for r in reasons(caplog))


def test_one_round_is_not_announced_twice(rogue, caplog):
    """A second task under the same number would let two updates of one round be compared."""
    rogue.announce(rogue.round_2)
    assert rogue.sent() == [1, 1]
    rogue.announce(dataclasses.replace(rogue.round_2, nonce=b"\3" * 16))
    assert rogue.sent() == [1, 1]
    assert "announced twice, differently" in reasons(caplog)[0]


@pytest.mark.parametrize("who", ["a device", "the owner"])
def test_only_the_aggregator_announces(rogue, caplog, who):
    """A device holds the group's key and still can't speak for the aggregator; nor does the owner's key do."""
    signer = device_identity(rogue.fleet, "dev-01") if who == "a device" else rogue.fleet.stage.fleet.owner
    rogue.announce(rogue.round_2, signer=signer)
    assert rogue.sent() == [0, 0]
    assert "a sealed message was refused" in reasons(caplog)[0]


def test_a_message_means_what_its_seal_says(rogue, caplog):
    rogue.announce(rogue.round_2, purpose="roster")
    assert rogue.sent() == [0, 0]
    assert reasons(caplog)[0] == "a message of purpose 'roster' on the channel 'announcement'"


def package_of(fleet):
    return decode((fleet.stage.fleet.path / "runs" / "000001.run").read_bytes(), RunPackage)


@pytest.mark.parametrize("change", [{"mode": "none"}, {"max_models": 9}, {"min_contributors": 1}, {"rounds": 1}])
def test_unsigned_plan_is_refused(rogue, caplog, change):
    """No downgrade: the aggregator can't take the mask away, name more models, or average fewer devices."""
    fleet = rogue.fleet
    plan = altered(fleet.plan, run=2, run_id=b"\7" * 16, **change)
    package = dataclasses.replace(package_of(fleet), plan=sign_document(aggregator_identity(fleet), plan))
    tell(fleet, Topics("demo").plan, "run", encode(package), ChunkKind.PLAN)
    fleet.settle()
    assert "the signature on this document/RunPlan is not its sender's" in reasons(caplog)[0]
    rogue.announce(rogue.round_2)
    assert rogue.sent() == [1, 1], "the true run goes on"


def test_earlier_run_is_not_taken_up_again(rogue, caplog):
    fleet = rogue.fleet
    topic, first = Topics("demo").plan, encode(package_of(fleet))
    recipe = Recipe("fedavg", rounds=2, min_contributors=1, seed=0)
    second = fleet.stage.add_run(fleet.bundle, np.zeros((1, fleet.plan.length), np.float32), recipe)
    tell(fleet, topic, "run", (fleet.stage.fleet.path / "runs" / "000002.run").read_bytes(), ChunkKind.PLAN)
    fleet.settle()
    assert second.run == 2
    tell(fleet, topic, "run", first, ChunkKind.PLAN)
    fleet.settle()
    assert "run 1 after run" in reasons(caplog)[0]


D = 28
SMALL = np.full(D, 0.01)
BAD_MEANS = {
    "of another run": ({"fleet": "other"}, SMALL, "a mean of another run"),
    "under another key": ({"key_id": b"\1" * 16}, SMALL, "the vector is under mask 0101"),
    "of another round": ({"round": 2}, SMALL, "the mean of model 0 in round 2 is not the announced one"),
    "of another model": ({"model": 1}, SMALL, "the mean of model 1 in round 1 is not the announced one"),
    "of a segment": ({"segment": "shared"}, SMALL, "segment 'shared'"),
    "too short": ({}, SMALL[1:], "a mean of 27 coordinates in 108 bytes"),
    "shorter than it says": ({"length": D}, SMALL[1:], "a mean of 28 coordinates in 108 bytes"),
    "NaN": ({}, np.full(D, np.nan), "a coordinate is NaN or infinite"),
    "infinite": ({}, np.full(D, np.inf), "a coordinate is NaN or infinite"),
    "overflowing": ({}, np.full(D, 3e38), "norm inf"),
    "longer than any update may be": (
        {},
        np.full(D, 1000.0),
        "a mean update of norm 5.29e+03, where at most 10 is allowed for one step",
    ),
}


@pytest.mark.parametrize("case", [*BAD_MEANS, "none of these"])
def test_mean_is_added_as_the_plan_describes(rogue, caplog, case):
    """A mean is added only as the plan describes it."""
    header, values, expected = BAD_MEANS.get(case, ({}, SMALL, ""))
    mean = publish_mean(rogue.fleet, values, **header)
    rogue.announce(after_a_step(mean)(rogue.round_2))
    if not expected:
        assert rogue.sent() == [1, 1]
        assert not reasons(caplog)
        return
    assert rogue.sent() == [0, 0]
    assert len(reasons(caplog)) == 2
    assert expected in reasons(caplog)[0]


def stated(announcement, signers, state, digest):
    """Return the statements of identities that a state has a digest, and that they know the announcement's history."""
    about, named = (announcement.fleet, announcement.run_id, 2), (HeldState(state.model, state.round, digest),)
    head = announcement.held.transcript
    return tuple(sign_statement(who, Statement(*about, who.name, named, transcript=head)) for who in signers)


def sealed_state(fleet, sealer, state, theta):
    """Return (envelope, digest) of a made-up state, sealed by a device in round 2 as a true one would be."""
    digest_key = round_keys(fleet, state.round).digest_key
    made = ModelState.of(state, theta, run_id=fleet.plan.run_id, digest_key=digest_key)
    sealed = seal_checkpoint(sealer, round_keys(fleet, 2), made, fleet.bundle.to_bytes())
    return sealed.payload, made.digest


SIGNERS = {
    "nobody": lambda _: (),
    "one device of two": lambda fleet: (device_identity(fleet, "dev-00"),),
    "one device twice": lambda fleet: (device_identity(fleet, "dev-00"),) * 2,
    "strangers": lambda _: (Identity.generate("dev-00"), Identity.generate("dev-01")),
    "enough devices": lambda fleet: tuple(device_identity(fleet, name) for name in ("dev-00", "dev-01")),
}


@pytest.mark.parametrize("case", SIGNERS)
def test_checkpoint_needs_enough_signatures(rogue, caplog, case):
    """One device helps the aggregator: it seals a state that it has made up. Otherwise nobody could make a checkpoint."""
    fleet, state = rogue.fleet, StateId(0, 1)
    envelope, digest = sealed_state(fleet, device_identity(fleet, "dev-00"), state, np.full(D, 0.5, np.float32))
    label = group_key(fleet).topic_label(fleet.plan.run_id, checkpoint_number(0))
    transfer = tell(fleet, Topics("demo").model(label), "checkpoint", envelope, ChunkKind.CHECKPOINT, round_=2)
    ref = CheckpointRef(state, 2, rogue.first.held.key_version, label, transfer)
    offered = with_held(offers=(Offer(0, state),), checkpoints=(ref,))(rogue.round_2)
    offered = continued(offered, rogue.first.held)
    rogue.announce(with_held(statements=stated(offered, SIGNERS[case](fleet), state, digest))(offered))
    enough = case == "enough devices"
    assert rogue.sent() == ([1, 1] if enough else [0, 0])
    refused = [reason for reason in reasons(caplog) if "states 1 of model 0 can't be made" in reason]
    assert len(refused) == (0 if enough else 2)
