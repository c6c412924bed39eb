"""Pre-training and keeping a path: only where the owner's plan has them."""

import dataclasses

import pytest

from edge_client.run.policy import check_order
from shoal.errors import UntrustedError
from shoal.protocol.messages import Announcement, ModelRef, Order, Phase, Share
from tests.helpers.plans import run_plan

PRETRAIN = Order(int(Phase.PRETRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)
KEEP = Order(int(Phase.KEEP), (0,), int(Share.TRAIN), train=False, evaluate=True, margins=False)


def announcement(plan, finished=False):
    ref = ModelRef(0, 0, "aa", b"\1" * 16, 3, 1.0)
    round_ = plan.rounds + 1 if finished else 3
    fields = ("demo", 1, plan.run_id, 1, plan.key_id, 3, round_, bytes(16), 60.0)
    return Announcement(*fields, finished=finished, models=(ref,), orders=(KEEP,), order_of=(0,), mode="permutation")


@pytest.mark.parametrize("algorithm", ["fedgroup", "fedgrouprox", "one-shot"])
def test_cold_starts_pretrain(algorithm):
    plan = run_plan(algorithm)
    check_order(PRETRAIN, announcement(plan), plan)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "local", "ifca", "cfl", "fesem"])
def test_others_do_not(algorithm):
    """An aggregator could otherwise have devices work by the heavier recipe in every round."""
    plan = run_plan(algorithm)
    with pytest.raises(UntrustedError, match="pre-train"):
        check_order(PRETRAIN, announcement(plan), plan)


def test_a_path_is_kept_at_the_end_of_a_run_that_asks_for_it():
    plan = run_plan("cfl", {"path": "on"})
    check_order(KEEP, announcement(plan, finished=True), plan)
    with pytest.raises(UntrustedError, match="path"):
        check_order(KEEP, announcement(plan), plan)


@pytest.mark.parametrize("plan", [run_plan("cfl"), run_plan("cfl", {"path": "off"}), run_plan("ifca", {"path": "on"})])
def test_no_path_is_kept_otherwise(plan):
    """Each model kept is a file on the device."""
    with pytest.raises(UntrustedError, match="path"):
        check_order(dataclasses.replace(KEEP), announcement(plan, finished=True), plan)
