"""The end of a mask epoch in the engine: when it is due, who is asked, what counts, and what happens when it fails."""

import numpy as np
import pytest

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.engine import ATTACHED_HEAD_BYTES
from aggregator.rounds.events import DeadlinePassed, KeysHeld, Left
from aggregator.rounds.rollover import HASTY_TRIES
from aggregator.rounds.state import NEWS_KEPT
from aggregator.run_log import waiting_for
from shoal.membership.certificates import check_certificate
from shoal.protocol.codec import encode
from shoal.protocol.messages import CARRIED_FIRST, Phase
from tests.helpers.plans import D, digest_of
from tests.helpers.rollovers import DEVICES, OWNER, SEALED, Scene, changed, endorsed, folded


def steps_of(scene):
    """Return (round, step) of everything that was opened."""
    return [(a.plan.round, a.plan.step) for a in scene.seen if type(a).__name__ == "OpenRound"]


# ---------------------------------------------------------------------------------------------------- when


def test_it_is_due_when_the_epoch_has_had_its_rounds():
    scene = Scene().due()
    assert scene.place == (2, 1)
    assert [o.phase for o in scene.state.plan.assignments.values()] == [Phase.CHECKPOINT]


def test_it_is_not_due_after_the_last_round():
    """The final round follows under the same mask: nobody trains any more."""
    scene = Scene(rounds=2, epoch_rounds=2).due()
    assert (scene.place, scene.state.plan.final) == ((3, 0), True)


def test_newer_secrets_close_the_open_round_at_once():
    """Whoever was revoked still reads what is open."""
    scene = Scene(epoch_rounds=6)
    scene.send("dev-1")
    scene.draw(4)
    assert scene.kinds == ["RoundClosed", "OpenRound"]
    assert scene.actions[0].record.contributed == 1
    assert scene.place == (1, 1)
    assert scene.opened.generation == 4


def test_newer_secrets_before_the_first_round_come_first():
    scene = Scene(begin=False)
    scene.state, _ = scene.engine.begin(DEVICES, 0, scene.roster, scene.roster_bytes)
    scene.draw(4)
    scene.online(*DEVICES)
    assert scene.place == (0, 1)


def test_newer_secrets_leave_the_final_round_alone():
    scene = Scene(rounds=2, epoch_rounds=2).due()
    scene.draw(4)
    assert scene.kinds == []
    assert scene.state.plan.final


def test_a_roster_that_tells_of_newer_secrets_stops_rounds_until_they_come():
    """Nothing more is announced under keys that a revoked device holds."""
    scene = Scene(epoch_rounds=6)
    scene.draw(4, devices=DEVICES, revoked=("dev-4",), keys=False)
    scene.feed(Left("dev-4"))
    scene.train("dev-1", "dev-2", "dev-3")
    assert scene.kinds == ["RoundClosed", "Gather"]
    assert "newer ones have not arrived" in waiting_for(scene.state)
    assert scene.deadline() == []
    scene.draw(4, devices=DEVICES, revoked=("dev-4",))
    assert scene.place == (1, 1)


def test_newer_secrets_wait_for_the_roster_that_goes_with_them():
    """It says who may sign what the next mask epoch begins with: by the one before, whoever was revoked still could."""
    scene = Scene(epoch_rounds=6)
    scene.feed(KeysHeld(4))
    assert scene.kinds == ["RoundClosed", "Gather"]
    assert "the roster that belongs to them has not arrived" in waiting_for(scene.state)
    assert scene.deadline() == []
    scene.draw(4, devices=DEVICES, revoked=("dev-4",))
    assert scene.place == (1, 1)
    assert "dev-4" not in scene.state.plan.assignments


def test_more_than_half_of_the_roster_must_be_there():
    """The roster counts, not those who ever came: 2 of 4 are too few however long they wait, 3 are enough."""
    scene = Scene(quorum=0.5)
    scene.train()
    scene.offline("dev-3", "dev-4")
    scene.train("dev-1", "dev-2")
    assert scene.kinds == ["RoundClosed", "Gather"]
    for _ in range(3):
        assert scene.deadline() == []
    scene.online("dev-4")
    assert scene.place == (2, 1)


# ---------------------------------------------------------------------------------------------------- the two steps


def test_the_next_epoch_begins_with_the_signatures_of_more_than_half():
    scene = Scene().due()
    folder = scene.fold()
    assert scene.place == (2, 2)
    assert {o.phase for o in scene.state.plan.assignments.values()} == {Phase.ENDORSE}
    assert set(scene.state.plan.assignments) == set(DEVICES)
    assert folder in scene.state.plan.assignments, "also the device that folded signs"
    scene.sign(*DEVICES[:3])
    assert scene.kinds == [], "the fourth is there and waited for"
    scene.sign(DEVICES[3])
    assert scene.kinds == ["Renewed", "OpenRound"]
    done = scene.actions[0]
    c, roster = check_certificate(done.certificate, owner_key=OWNER.member.sign_key, fleet="demo", least_sequence=3)
    assert (c, roster) == (scene.folded, scene.roster)
    assert done.sealed == SEALED
    run = scene.state.run
    assert (run.epoch, run.key_id, scene.state.since, scene.place) == (2, c.key_id, 2, (3, 0))
    assert scene.state.strategy.slot.offset is None, "the model is at an origin of its own"


def test_signing_shows_the_devices_what_was_folded():
    scene = Scene().due()
    scene.fold()
    assert scene.opened.proposal == encode(scene.folded) + SEALED


def test_a_deadline_cuts_the_signing_short():
    scene = Scene().due()
    scene.fold()
    scene.sign(*DEVICES[:3])
    assert scene.deadline() == ["Renewed", "OpenRound"]
    assert len(scene.actions[0].certificate.signatures) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.object_("dev-3", "dev-4"),
        lambda s: s.sign("dev-3", "dev-4", checkpoint=s.checkpoint(digest=bytes(32))),
        lambda s: [s.send(d, endorsed(bytes(range(64)))) for d in ("dev-3", "dev-4")],
        lambda s: [s.send(d, b"junk") for d in ("dev-3", "dev-4")],
        lambda s: s.offline("dev-3", "dev-4"),
    ],
    ids=["objections", "signatures of something else", "forged signatures", "junk", "absence"],
)
def test_half_is_not_enough(spoil):
    scene = Scene().due()
    scene.fold()
    scene.sign("dev-1", "dev-2")
    spoil(scene)
    assert scene.kinds[:1] == ["RolloverFailed"] or scene.deadline()[:1] == ["RolloverFailed"]
    assert (scene.state.run.epoch, scene.state.since) == (1, 0)
    assert scene.state.rollover.tries == 1


def test_a_signature_of_somebody_who_was_revoked_does_not_count():
    """Keys and roster as before; only the certificate's roster is newer (a roster by hand, before the keys come)."""
    scene = Scene().due()
    scene.fold()
    scene.roster = changed(scene.roster, revoked=("dev-3", "dev-4"))
    scene.state = changed(scene.state, roster=scene.roster)
    scene.sign("dev-1", "dev-3", "dev-4")
    scene.object_("dev-2")
    assert scene.kinds[0] == "RolloverFailed"


def test_uploads_of_a_step_say_which_step():
    """The fold of the first try is no answer to the second."""
    scene = Scene().due()
    (folder,) = scene.state.plan.assignments
    early, body = scene.upload(folder, folded(scene.checkpoint()))
    scene.deadline()
    late = digest_of(early, body)
    assert scene.place == (2, 2)
    assert scene.engine.validate(scene.state, early, late) == (Decision.REFUSE, "the round is not open")


@pytest.mark.parametrize(
    ("excess", "accepted"), [(ATTACHED_HEAD_BYTES + 4 * D, True), (ATTACHED_HEAD_BYTES + 4 * D + 1, False), (0, False)]
)
def test_a_fold_is_no_larger_than_its_models_and_the_task(excess, accepted):
    """Whatever one device attaches is handed on to all others."""
    scene = Scene().due()
    (folder,) = scene.state.plan.assignments
    upload, _ = scene.upload(folder, attached=b"")
    upload = changed(upload, attached=excess)
    assert (scene.engine.validate(scene.state, upload, b"")[0] is Decision.STORE) == accepted
    scene.engine.task_bytes = 1
    bigger = changed(upload, attached=excess + 1)
    assert (scene.engine.validate(scene.state, bigger, b"")[0] is Decision.STORE) == (accepted or excess == 0)


@pytest.mark.parametrize(("attached", "accepted"), [(0, False), (68, True), (ATTACHED_HEAD_BYTES + 1, False)])
def test_a_signature_brings_no_vectors_that_nobody_asked_for(attached, accepted):
    scene = Scene().due()
    scene.fold()
    upload, _ = scene.upload("dev-1", attached=b"")
    verdict = scene.engine.validate(scene.state, changed(upload, attached=attached), b"")[0]
    assert (verdict is Decision.STORE) == accepted


def test_a_round_takes_nothing_attached():
    scene = Scene()
    upload, _ = scene.upload("dev-1")
    assert scene.engine.validate(scene.state, changed(upload, attached=1), b"")[0] is Decision.REFUSE


# ---------------------------------------------------------------------------------------------------- failures


def test_the_first_to_fold_is_one_who_has_just_answered():
    """A newcomer that is online may hold no secret of this mask epoch."""
    for present in (("dev-2",), ("dev-3",)):
        scene = Scene(quorum=0.25)
        scene.train()
        scene.send(*present)
        scene.deadline()
        assert set(scene.state.plan.assignments) == set(present)


def test_a_fold_that_is_refused_leads_to_another_device():
    """Each device gets its turn."""
    scene, asked = Scene().due(), []
    for _ in DEVICES:
        asked.append(scene.fold(digest=bytes(32)))
        assert scene.kinds[0] == "RolloverFailed"
        if scene.state.plan is None:
            scene.deadline()
    assert len(set(asked)) >= 3
    assert len(scene.events("rollover-failed")) == len(DEVICES)
    assert "does not name what is sealed" in scene.events("rollover-failed")[0].detail["reason"]


def test_after_some_hasty_tries_each_waits_for_the_deadline():
    scene = Scene().due()
    for tries in range(1, HASTY_TRIES + 1):
        scene.fold(digest=bytes(32))
        assert scene.state.rollover.tries == tries
        assert (scene.state.plan is None) == (tries == HASTY_TRIES)
    assert scene.kinds == ["RolloverFailed", "Gather"]
    scene.online("dev-1")
    assert scene.state.plan is None, "whoever comes does not make it hasty again"
    assert scene.deadline() == ["OpenRound"]
    scene.fold(digest=bytes(32))
    assert scene.kinds == ["RolloverFailed", "Gather"]


def test_a_device_that_never_folds_costs_one_deadline():
    scene = Scene().due()
    (first,) = scene.state.plan.assignments
    assert scene.deadline() == ["RolloverFailed", "OpenRound"]
    assert set(scene.state.plan.assignments) != {first}


def test_a_folder_that_goes_offline_costs_nothing():
    scene = Scene().due()
    (first,) = scene.state.plan.assignments
    scene.offline(first)
    assert scene.kinds == ["RolloverFailed", "OpenRound"]
    assert set(scene.state.plan.assignments) != {first}


def test_the_deadline_of_the_round_before_is_not_that_of_the_step():
    """It was on its way when the step opened: both have the round's number."""
    scene = Scene().due()
    assert scene.feed(DeadlinePassed(2)) == []
    assert scene.feed(DeadlinePassed(2, 1))[0] == "RolloverFailed"


def test_a_rollover_may_fail_as_often_as_it_likes():
    """Steps are counted without end, and each has a nonce of its own; what is told of the failures stays short."""
    scene, nonces = Scene().due(), set()
    for _ in range(300):
        while scene.state.plan is None:
            scene.deadline()
        nonces.add(scene.opened.nonce)
        scene.deadline()
    assert scene.state.step > 299
    assert len(nonces) == 300
    assert len(scene.state.news) == NEWS_KEPT
    scene.deadline()
    scene.fold()
    scene.sign(*DEVICES)
    assert scene.kinds == ["Renewed", "OpenRound"]
    scene.train()
    assert len(scene.actions[0].record.events) == NEWS_KEPT
    assert scene.actions[0].record.events[-1]["kind"] == "mask-epoch"


def test_secrets_that_are_newer_still_begin_it_anew():
    """A second revocation in the middle of the first one's rollover."""
    scene = Scene(epoch_rounds=6)
    scene.draw(4)
    scene.fold()
    scene.draw(5)
    assert scene.kinds == ["RolloverFailed", "OpenRound"]
    assert (scene.opened.generation, scene.state.rollover.generation) == (5, 5)
    scene.fold()
    scene.sign(*DEVICES)
    assert scene.kinds == ["Renewed", "OpenRound"]
    assert (scene.state.generation, scene.state.run.epoch) == (5, 11)


def test_a_fold_for_the_older_secrets_is_refused():
    scene = Scene(epoch_rounds=6)
    scene.draw(4)
    scene.fold(generation=0, next_epoch=2)
    assert scene.kinds[0] == "RolloverFailed"


def test_what_happened_is_told_when_the_next_round_closes():
    scene = Scene().due()
    scene.deadline()
    scene.fold()
    scene.sign(*DEVICES)
    scene.train()
    (closed,) = [a for a in scene.actions if type(a).__name__ == "RoundClosed"]
    assert [e["kind"] for e in closed.record.events] == ["rollover-failed", "mask-epoch"]
    assert closed.record.events[1]["signatures"] == 4
    assert scene.state.news == ()


# ---------------------------------------------------------------------------------------------------- what goes along


def test_directions_go_along_in_a_scheduled_rollover_and_not_under_fresh_secrets():
    """Whoever was revoked knows the old mask: the same vectors under both would give the new one away."""
    plans = []
    for fresh in (False, True):
        scene = Scene(algorithm="one-shot", settings={"k": 2}, epoch_rounds=2)
        scene.draw(4) if fresh else scene.due()
        while not scene.state.plan.step:
            scene.train()
        plans.append(scene.state.plan)
    scheduled, after = plans
    assert sorted(scheduled.carried) == [CARRIED_FIRST]
    assert all(np.any(s.offset) and s.scale == 0 for s in scheduled.carried.values())
    assert after.carried == {}
