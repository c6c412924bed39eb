"""Multiples of origins and norms of models: only where the owner's plan has inter-group aggregation."""

import dataclasses

import pytest

from edge_client.run.policy import adds_models, check_announcement, check_model, check_order
from shoal.errors import UntrustedError
from shoal.protocol.messages import Announcement, ModelHeader, ModelRef, Order, Phase, Share
from tests.helpers.plans import D, run_plan

PLAIN = run_plan("fedgroup", {"groups": 2}, norm_limit=10.0)
ADDING = run_plan("fedgroup", {"groups": 2, "eta_g": 0.01}, norm_limit=10.0)
ORDER = Order(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)
REPORT = dataclasses.replace(ORDER, norm=True)
HEADER = ModelHeader("demo", PLAIN.run_id, 1, PLAIN.key_id, 0, 0, 3, D)


def announcement(scale):
    ref = ModelRef(0, 0, "aa", b"\1" * 16, 3, 1.0, scale)
    fields = ("demo", 1, PLAIN.run_id, 1, PLAIN.key_id, 3, 3, bytes(16), 60.0)
    return Announcement(*fields, finished=False, models=(ref,), orders=(ORDER,), order_of=(0,), mode="permutation")


@pytest.mark.parametrize(("eta", "adds"), [("0", False), ("0.0", False), ("0.5", True), ("1", True), ("1e-3", True)])
def test_the_plan_says_whether_models_are_added(eta, adds):
    assert adds_models(run_plan("fedgroup", {"eta_g": eta})) is adds
    assert not adds_models(PLAIN)


def test_a_plan_with_inter_group_aggregation_allows_multiples():
    check_announcement(announcement(1.25), ADDING)
    check_model(dataclasses.replace(HEADER, scale=1.25), ADDING, 4 * D, 1.0)
    check_order(REPORT, announcement(1.25), ADDING)


@pytest.mark.parametrize("scale", [0.0, 0.5, -1.0, 1e7, float("inf"), float("nan")])
def test_a_multiple_that_adding_up_can_not_give_is_refused(scale):
    with pytest.raises(UntrustedError, match="times its origin"):
        check_announcement(announcement(scale), ADDING)
    with pytest.raises(UntrustedError, match="times its origin"):
        check_model(dataclasses.replace(HEADER, scale=scale), ADDING, 4 * D, 1.0)


def test_any_multiple_is_refused_without_it():
    with pytest.raises(UntrustedError, match="times its origin"):
        check_announcement(announcement(1.25), PLAIN)
    with pytest.raises(UntrustedError, match="times its origin"):
        check_model(dataclasses.replace(HEADER, scale=1.25), PLAIN, 4 * D, 1.0)
    check_announcement(announcement(1.0), PLAIN)


def test_a_norm_is_told_only_where_the_plan_has_a_use_for_it():
    with pytest.raises(UntrustedError, match="no use"):
        check_order(REPORT, announcement(1.0), PLAIN)
    scoring = dataclasses.replace(REPORT, train=False, phase=int(Phase.SCORE))
    with pytest.raises(UntrustedError, match="no use"):
        check_order(scoring, announcement(1.0), ADDING)
