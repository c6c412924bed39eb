"""Multiples of origins and norms of models are refused unless the owner's plan has the capability ``scale``."""

import dataclasses

import pytest

from edge_client.run.policy import check_announcement, check_assignment, check_model
from shoal.errors import UntrustedError
from shoal.protocol.documents import Capabilities
from shoal.protocol.messages import Announcement, Assignment, ModelHeader, ModelRef, Phase, Share
from tests.helpers.plans import D, run_plan

PLAIN = run_plan("fedgroup", {"eta_g": 0.01}, norm_limit=10.0)
ADDING = run_plan("fedavg", norm_limit=10.0, capabilities=Capabilities(scale=True))
ORDER = Assignment(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)
REPORT = dataclasses.replace(ORDER, norm=True)
HEADER = ModelHeader(
    fleet="demo", run_id=PLAIN.run_id, epoch=1, key_id=PLAIN.key_id, model=0, origin=0, round=3, length=D
)


def announcement(scale):
    ref = ModelRef(model=0, origin=0, label="aa", transfer=b"\1" * 16, contributors=3, norm=1.0, scale=scale)
    return Announcement(
        fleet="demo",
        run=1,
        run_id=PLAIN.run_id,
        epoch=1,
        key_id=PLAIN.key_id,
        roster_sequence=3,
        round=3,
        nonce=bytes(16),
        deadline_s=60.0,
        finished=False,
        models=(ref,),
        assignments=(ORDER,),
        assignment_of=(0,),
        mode="permutation",
    )


def test_a_plan_with_the_capability_allows_multiples():
    check_announcement(announcement(1.25), ADDING)
    check_model(dataclasses.replace(HEADER, scale=1.25), ADDING, 4 * D, 1.0)
    check_assignment(REPORT, announcement(1.25), ADDING)


@pytest.mark.parametrize("scale", [0.0, 0.5, -1.0, 1e7, float("inf"), float("nan")])
def test_a_multiple_that_adding_up_can_not_give_is_refused(scale):
    with pytest.raises(UntrustedError, match="times its origin"):
        check_announcement(announcement(scale), ADDING)
    with pytest.raises(UntrustedError, match="times its origin"):
        check_model(dataclasses.replace(HEADER, scale=scale), ADDING, 4 * D, 1.0)


def test_any_multiple_is_refused_without_it():
    """Even if the algorithm's settings suggest it: devices do not read them."""
    with pytest.raises(UntrustedError, match="times its origin"):
        check_announcement(announcement(1.25), PLAIN)
    with pytest.raises(UntrustedError, match="times its origin"):
        check_model(dataclasses.replace(HEADER, scale=1.25), PLAIN, 4 * D, 1.0)
    check_announcement(announcement(1.0), PLAIN)


def test_a_norm_is_reported_only_of_a_trained_model_and_with_the_capability():
    with pytest.raises(UntrustedError, match="a model's norm, which the plan does not allow"):
        check_assignment(REPORT, announcement(1.0), PLAIN)
    scoring = dataclasses.replace(REPORT, train=False, phase=int(Phase.SCORE))
    with pytest.raises(UntrustedError, match="a model's norm, which the plan does not allow"):
        check_assignment(scoring, announcement(1.0), ADDING)
