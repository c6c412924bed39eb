"""The device's policy, rule by rule; tests/scenarios/hostile/test_rogue_aggregator.py tests it end to end."""

import dataclasses

import numpy as np
import pytest

from edge_client.run.policy import check_announcement, check_assignment, check_model, check_plan
from shoal.errors import UntrustedError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import SHARED_MODEL, Announcement, Assignment, ModelHeader, ModelRef, Phase, Share
from tests.helpers.plans import D, run_plan

PLAN = run_plan(origins=2, max_models=2, min_contributors=3, rounds=4, norm_limit=10.0)
ORDER = Assignment(int(Phase.TRAIN), (0, 1), int(Share.TRAIN), train=True, evaluate=False, margins=False)
MODELS = (
    ModelRef(model=0, origin=0, label="aa", transfer=bytes(16), contributors=0, norm=0.0),
    ModelRef(model=1, origin=1, label="bb", transfer=b"\1" * 16, contributors=3, norm=1.0),
)
ROUND = Announcement(
    fleet="demo",
    run=1,
    run_id=PLAN.run_id,
    epoch=1,
    key_id=PLAN.key_id,
    roster_sequence=3,
    round=2,
    nonce=bytes(16),
    deadline_s=60.0,
    finished=False,
    models=MODELS,
    assignments=(ORDER,),
    assignment_of=(0,),
    mode="permutation",
)
HEADER = ModelHeader(
    fleet="demo", run_id=PLAN.run_id, epoch=1, key_id=PLAN.key_id, model=1, origin=1, round=3, length=D
)


def test_an_announcement_within_the_plan_is_accepted():
    check_plan(PLAN, fleet="demo", modes=("permutation", "none"))
    check_announcement(ROUND, PLAN)
    check_assignment(ORDER, ROUND, PLAN)
    check_model(HEADER, PLAN, 4 * D, 30.0)


@pytest.mark.parametrize(
    ("changes", "match"), [({"fleet": "other"}, "a run plan of fleet"), ({"mode": "rotation"}, "mask mode 'rotation'")]
)
def test_plans(changes, match):
    with pytest.raises(UntrustedError, match=match):
        check_plan(dataclasses.replace(PLAN, **changes), fleet="demo", modes=("permutation", "none"))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"fleet": "other"}, "of another run"),
        ({"run": 2}, "of another run"),
        ({"run_id": bytes(16)}, "of another run"),
        ({"epoch": 2}, "another mask key"),
        ({"key_id": bytes(16)}, "another mask key"),
        ({"round": 0}, "round 0 of a run of 4"),
        ({"round": 5}, "round 5 of a run of 4"),
        ({"round": 6, "finished": True}, "round 6 of a run of 4"),
        ({"finished": True}, "round 2 of a run of 4"),
        ({"models": (*MODELS, dataclasses.replace(MODELS[0], model=2))}, "3 models where the plan allows 2"),
        ({"models": (MODELS[0], MODELS[0])}, "names a model twice"),
        ({"models": (dataclasses.replace(MODELS[0], origin=2),)}, "origin 2 of 2"),
        ({"models": (dataclasses.replace(MODELS[1], contributors=2),)}, "a mean of 2 devices, the plan wants 3"),
    ],
)
def test_announcements(changes, match):
    with pytest.raises(UntrustedError, match=match):
        check_announcement(dataclasses.replace(ROUND, **changes), PLAN)


def test_a_model_at_its_origin_needs_no_contributors():
    check_announcement(dataclasses.replace(ROUND, models=MODELS[:1]), PLAN)


@pytest.mark.parametrize(
    ("assignment", "round_", "match"),
    [
        ({"candidates": (2,)}, {}, "not announced"),
        ({"candidates": (1, 1)}, {}, "twice"),
        ({"phase": int(Phase.SCORE)}, {}, "nothing to train for"),
        ({"phase": int(Phase.CHECKPOINT)}, {}, "a rollover in a round"),
        ({}, {"round": 5, "finished": True}, "nothing to train for"),
        ({"margins": True}, {}, "at once"),
    ],
)
def test_orders(assignment, round_, match):
    with pytest.raises(UntrustedError, match=match):
        check_assignment(dataclasses.replace(ORDER, **assignment), dataclasses.replace(ROUND, **round_), PLAN)


@pytest.mark.parametrize(
    ("header", "body_bytes", "norm", "match"),
    [
        ({"fleet": "other"}, 4 * D, 1.0, "of another run"),
        ({"run_id": bytes(16)}, 4 * D, 1.0, "of another run"),
        ({"epoch": 2}, 4 * D, 1.0, "another mask key"),
        ({"key_id": bytes(16)}, 4 * D, 1.0, "another mask key"),
        ({"length": D - 1}, 4 * D - 4, 1.0, "a model of 5 coordinates"),
        ({}, 4 * D + 4, 1.0, "in 28 bytes"),
        ({}, 4 * D - 1, 1.0, "in 23 bytes"),
        ({"origin": 2}, 4 * D, 1.0, "origin 2 of 2"),
        ({"round": 0}, 4 * D, 1.0, "round 0 of 4"),
        ({"round": 6}, 4 * D, 1.0, "round 6 of 4"),
        ({}, 4 * D, 30.1, "norm 30.1"),
        ({}, 4 * D, np.nan, "norm nan"),
        ({}, 4 * D, np.inf, "norm inf"),
    ],
)
def test_models(header, body_bytes, norm, match):
    with pytest.raises(UntrustedError, match=match):
        check_model(dataclasses.replace(HEADER, **header), PLAN, body_bytes, norm)


PARTED = dataclasses.replace(PLAN, segments=(SegmentSpec("shared", 4), SegmentSpec("cluster", 2)))
SHARED = ModelRef(model=SHARED_MODEL, origin=0, label="ss", transfer=b"\2" * 16, contributors=3, norm=1.0)
OF_SHARED = dataclasses.replace(HEADER, model=SHARED_MODEL, origin=0, length=4, segment="shared")
OF_CLUSTER = dataclasses.replace(HEADER, length=2, segment="cluster")


def test_a_plan_with_two_segments_may_travel_in_parts_or_whole():
    check_announcement(dataclasses.replace(ROUND, shared=SHARED), PARTED)
    check_announcement(ROUND, PARTED)
    check_model(OF_SHARED, PARTED, 16, 30.0)
    check_model(OF_CLUSTER, PARTED, 8, 30.0)
    check_model(HEADER, PARTED, 4 * D, 30.0)


@pytest.mark.parametrize(
    ("changes", "plan", "match"),
    [
        ({"shared": SHARED}, PLAN, "that the plan does not have"),
        ({"shared": dataclasses.replace(SHARED, model=0)}, PARTED, "that the plan does not have"),
        ({"shared": dataclasses.replace(SHARED, origin=2)}, PARTED, "the shared part starts from origin 2 of 2"),
        ({"shared": dataclasses.replace(SHARED, contributors=2)}, PARTED, "the shared part is a mean of 2 devices"),
        ({"models": (dataclasses.replace(MODELS[0], model=SHARED_MODEL),)}, PARTED, "with the shared part's number"),
    ],
)
def test_shared_parts(changes, plan, match):
    with pytest.raises(UntrustedError, match=match):
        check_announcement(dataclasses.replace(ROUND, **changes), plan)


@pytest.mark.parametrize(
    ("header", "body_bytes", "plan", "match"),
    [
        (dataclasses.replace(OF_SHARED, length=D), 4 * D, PARTED, "6 coordinates in 24 bytes"),
        (OF_SHARED, 12, PARTED, "4 coordinates in 12 bytes"),
        (dataclasses.replace(OF_CLUSTER, length=4), 16, PARTED, "4 coordinates in 16 bytes"),
        (dataclasses.replace(OF_SHARED, segment="cluster", length=2), 8, PARTED, "segment 'cluster' of model 65535"),
        (dataclasses.replace(OF_CLUSTER, segment="shared", length=4), 16, PARTED, "segment 'shared' of model 1"),
        (dataclasses.replace(OF_SHARED, segment="", length=D), 4 * D, PARTED, "segment '' of model 65535"),
        (dataclasses.replace(OF_CLUSTER, segment="head"), 8, PARTED, "segment 'head'"),
        (OF_SHARED, 16, PLAN, "segment 'shared' of model 65535"),
        (dataclasses.replace(HEADER, segment="cluster"), 4 * D, PLAN, "segment 'cluster' of model 1"),
        (dataclasses.replace(OF_SHARED, key_id=bytes(16)), 16, PARTED, "another mask key"),
    ],
)
def test_parts_of_models(header, body_bytes, plan, match):
    with pytest.raises(UntrustedError, match=match):
        check_model(header, plan, body_bytes, 1.0)


def test_each_part_is_bound_in_norm():
    with pytest.raises(UntrustedError, match=r"norm 30\.1"):
        check_model(OF_SHARED, PARTED, 16, 30.1)
