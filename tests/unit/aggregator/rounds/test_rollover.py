"""What the aggregator can check of a fold and of a signature without reading either."""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.rollover import fold_plan, read_endorsement, read_proposal, sign_plan
from aggregator.strategies.base import ClusterModel
from aggregator.strategies.renewal import Carried, Inherited
from shoal.errors import IntegrityError, ShoalError, UntrustedError, WireError
from shoal.protocol.messages import CARRIED_FIRST, Phase
from tests.helpers.plans import D, contribution, run_plan
from tests.helpers.rollovers import NEXT_KEY, SEALED, endorsed, folded, make_checkpoint

RUN = run_plan(min_contributors=2)
RNG = np.random.default_rng(3)
FIRST, SECOND, OWN = (RNG.standard_normal(D).astype(np.float32) for _ in range(3))
SIGNATURE = bytes(range(64))


def inherited(**changes):
    fields = {
        "models": {0: ClusterModel(), 3: ClusterModel(version=2)},
        "carried": {"b": Carried(SECOND, 2), "a": Carried(FIRST, 5), "few": Carried(OWN, 1)},
        "own": {
            (2, 1, "dev-1"): contribution("dev-1", OWN, round=2),
            (1, 1, "dev-1"): contribution("dev-1", FIRST, round=1),
            (2, 1, "dev-2"): contribution("dev-2", SECOND, round=2),
        },
    }
    return Inherited(**{**fields, **changes})


def masked_anew(vector):
    """Return what stands for the same vector under another mask: as long, and otherwise different."""
    return vector[::-1]


def upload(attached, device="dev-1"):
    return contribution(device, round=2, phase=Phase.CHECKPOINT, attached=attached)


# ---------------------------------------------------------------------------------------------------- plans


def test_one_device_folds_all_models_and_takes_along_what_may_be_shown_to_it():
    plan = fold_plan(inherited(), RUN, 2, 1, "dev-1", keep=True)
    assert (plan.round, plan.step, plan.final) == (2, 1, False)
    assert plan.models == inherited().models
    assert list(plan.assignments) == ["dev-1"]
    assert (plan.assignments["dev-1"].phase, plan.assignments["dev-1"].candidates) == (Phase.CHECKPOINT, (0, 3))
    assert not plan.assignments["dev-1"].train
    assert [(i, s.offset.tobytes(), s.scale) for i, s in plan.carried.items()] == [
        (CARRIED_FIRST, FIRST.tobytes(), 0.0),
        (CARRIED_FIRST + 1, SECOND.tobytes(), 0.0),
    ]


def test_all_sign_and_each_masks_its_own_updates_anew():
    plan = sign_plan(inherited(), 2, 2, ("dev-1", "dev-2", "dev-3"), keep=True)
    assert {d: o.renew for d, o in plan.assignments.items()} == {"dev-1": (1, 2), "dev-2": (2,), "dev-3": ()}
    assert {o.phase for o in plan.assignments.values()} == {Phase.ENDORSE}


def test_under_fresh_secrets_nothing_is_masked_anew():
    assert fold_plan(inherited(), RUN, 2, 1, "dev-1", keep=False).carried == {}
    plan = sign_plan(inherited(), 2, 2, ("dev-1", "dev-2"), keep=False)
    assert {o.renew for o in plan.assignments.values()} == {()}


# ---------------------------------------------------------------------------------------------------- proposals


def read(attached, generation=0, current=0, **changes):
    return read_proposal(upload(attached), inherited(**changes), RUN, generation, current)


def good(**changes):
    return make_checkpoint(RUN, origins=2, **changes)


ANEW = [masked_anew(FIRST), masked_anew(SECOND)]


def test_a_fold_is_taken_apart():
    found = read(folded(good(), ANEW))
    assert (found.checkpoint, found.sealed) == (good(), SEALED)
    assert {k: v.tobytes() for k, v in found.carried.items()} == {"a": ANEW[0].tobytes(), "b": ANEW[1].tobytes()}


def test_a_fold_under_fresh_secrets_brings_no_vectors():
    fresh = good(generation=7, next_epoch=12)
    assert read(folded(fresh), generation=7).carried == {}
    with pytest.raises(UntrustedError, match="2 carried vectors"):
        read(folded(fresh, ANEW), generation=7)


NAN = np.full(D, np.nan, np.float32)
ANOTHER = "of another run, round or mask epoch"
BAD_FOLDS = {
    "another fleet": (folded(good(fleet="other"), ANEW), ANOTHER),
    "another run": (folded(good(run_id=bytes(16)), ANEW), ANOTHER),
    "another round": (folded(make_checkpoint(RUN, 3, origins=2), ANEW), ANOTHER),
    "another epoch": (folded(good(epoch=0), ANEW), ANOTHER),
    "an epoch too far": (folded(good(next_epoch=3), ANEW), "for mask epoch 3 of keys 0"),
    "other secrets": (folded(good(generation=7), ANEW), "for mask epoch 2 of keys 7"),
    "the old key": (folded(good(key_id=RUN.key_id), ANEW), "of 2 models where there are 2"),
    "one model too few": (folded(make_checkpoint(RUN, origins=1), ANEW), "of 1 models where there are 2"),
    "one model too many": (folded(make_checkpoint(RUN, origins=3), ANEW), "of 3 models where there are 2"),
    "another digest": (folded(good(digest=bytes(32)), ANEW), "does not name what is sealed"),
    "other sealed bytes": (folded(good(), ANEW, sealed=SEALED[:-1] + b"!"), "does not name what is sealed"),
    "one vector too few": (folded(good(), ANEW[:1]), "1 carried vectors"),
    "one vector too many": (folded(good(), [*ANEW, FIRST]), "3 carried vectors"),
    "fewer vectors than told": (folded(good(), ANEW[:1], told=2), "2 carried vectors"),
    "a byte too many": (folded(good(), ANEW) + b"x", "2 carried vectors"),
    "a vector that is not a number": (folded(good(), [ANEW[0], NAN]), "carried vector b has changed its length"),
    "a vector that overflows": (folded(good(), [ANEW[0], np.full(D, 3e38)]), "carried vector b has changed its length"),
    "a longer vector": (folded(good(), [1.001 * ANEW[0], ANEW[1]]), "carried vector a has changed its length"),
    "no vector": (folded(good(), [0 * ANEW[0], ANEW[1]]), "carried vector a has changed its length"),
    "nothing": (b"", "ends early"),
    "junk": (b"SHM1\x20junk", "kind 32 where Proposal"),
    "half of it": (folded(good(), ANEW)[:40], "ends early"),
}


@pytest.mark.parametrize("case", BAD_FOLDS)
def test_a_fold_that_is_not_what_was_asked_for(case):
    attached, reason = BAD_FOLDS[case]
    with pytest.raises(ShoalError, match=reason):
        read(attached)


def test_vectors_may_not_be_swapped_where_their_lengths_differ():
    with pytest.raises(UntrustedError, match="carried vector a has changed its length"):
        read(folded(good(), ANEW[::-1]))


def test_a_rounding_error_is_no_other_length():
    """Rotations are floating point."""
    found = read(folded(good(), [np.float32(1 + 5e-5) * ANEW[0], ANEW[1]]))
    assert sorted(found.carried) == ["a", "b"]


# ---------------------------------------------------------------------------------------------------- endorsements


def answer(attached, renew=(1, 2), device="dev-1"):
    assignment = dataclasses.replace(
        sign_plan(inherited(), 2, 2, (device,), keep=True).assignments[device], renew=tuple(renew)
    )
    return read_endorsement(upload(attached, device), assignment, inherited(), RUN, NEXT_KEY)


def test_a_signature_and_the_devices_own_updates():
    signature, own = answer(endorsed(SIGNATURE, {1: masked_anew(FIRST), 2: masked_anew(OWN)}))
    assert signature == SIGNATURE
    assert sorted(own) == [(1, 1, "dev-1"), (2, 1, "dev-1")]
    found = own[2, 1, "dev-1"]
    assert found.vector.tobytes() == masked_anew(OWN).tobytes()
    assert (found.key_id, found.round, found.samples) == (NEXT_KEY, 2, 10)
    assert found.norm == pytest.approx(float(np.linalg.norm(OWN)), rel=1e-6)


def test_a_device_may_have_lost_its_updates():
    assert answer(endorsed(SIGNATURE)) == (SIGNATURE, {})
    assert list(answer(endorsed(SIGNATURE, {2: masked_anew(OWN)}))[1]) == [(2, 1, "dev-1")]


OTHERS = "has masked other updates anew than it was asked for"
BAD_ANSWERS = {
    "an update of a round that was not asked for": ({3: FIRST}, b"", OTHERS),
    "a longer update": ({1: 1.001 * FIRST}, b"", "update of round 1 has changed its length"),
    "an update that is not a number": ({1: NAN}, b"", "update of round 1 has changed its length"),
    "another round's update": ({1: masked_anew(OWN)}, b"", "update of round 1 has changed its length"),
    "an update too many": ({1: masked_anew(FIRST)}, OWN.tobytes(), OTHERS),
    "a byte too many": ({}, b"x", OTHERS),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_an_answer_that_is_not_what_was_asked_for(case):
    renewed, more, reason = BAD_ANSWERS[case]
    with pytest.raises(UntrustedError, match=reason):
        answer(endorsed(SIGNATURE, renewed) + more)


def test_an_update_cut_short():
    with pytest.raises(UntrustedError):
        answer(endorsed(SIGNATURE, {1: masked_anew(FIRST)})[:-4])


def test_nobody_masks_anothers_update_anew():
    """dev-2 was asked for round 2 only, and its own of it."""
    with pytest.raises(UntrustedError):
        answer(endorsed(SIGNATURE, {1: masked_anew(FIRST)}), renew=(2,), device="dev-2")
    with pytest.raises(UntrustedError, match="has changed its length"):
        answer(endorsed(SIGNATURE, {2: masked_anew(OWN)}), renew=(2,), device="dev-2")


@pytest.mark.parametrize("junk", [b"", b"x", endorsed(SIGNATURE)[:-1], folded(good())])
def test_junk_is_no_answer(junk):
    with pytest.raises((WireError, IntegrityError, UntrustedError)):
        answer(junk)
