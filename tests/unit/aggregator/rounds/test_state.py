"""The state of a run: devices that come, go, decline and are revoked, and the record of a round."""

import dataclasses

import numpy as np
import pytest

from aggregator.persistent import PersistentList, PersistentSet
from aggregator.rounds.closing import Watched
from aggregator.rounds.duplicates_and_limits import MAX_FIGURE
from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.snapshot import ResumeMetadata
from aggregator.rounds.state import (
    EngineState,
    on_declined,
    on_offline,
    on_online,
    on_revoked,
    opened,
    record_of,
    too_late,
)
from aggregator.strategies.base import ClusterModel, Event, Outcome, RoundPlan, train_assignment
from shoal.protocol.messages import DeclineReason, Phase
from tests.helpers.plans import contribution, run_plan

FLEET = ("a", "b", "c", "d")
DATA, UPLOAD, KEYS, STATE = DeclineReason.DATA, DeclineReason.UPLOAD, DeclineReason.KEYS, DeclineReason.STATE
MOST = (1 << 32) - 1


def fleet(online=FLEET, **changes):
    return EngineState(PersistentSet(FLEET), None, run_plan(), HeldModels.none(3), PersistentSet(online), **changes)


def plan_for(*devices, **changes):
    order = train_assignment((0,), evaluate=False)
    return RoundPlan(7, {0: ClusterModel()}, dict.fromkeys(devices, order), **changes)


def asking(*devices, online=FLEET, **changes):
    """Return the state in which round 7 is open for ``devices``."""
    return dataclasses.replace(opened(fleet(online), plan_for(*devices)), **changes)


def received(state, device):
    return dataclasses.replace(state, received=state.received.adding(device, (Phase.TRAIN, bytes(32))))


def counts(state):
    """Return the figures that are updated in constant time, and the same counted from the sets."""
    orders = state.plan.assignments
    plain = (
        sum(d in state.online and d not in state.received and d not in state.declined for d in orders),
        sum(d not in orders for d in state.online),
    )
    return (state.awaited, state.unasked), plain


# --------------------------------------------------------------------------------------------------- a round opens


def test_absent_or_revoked_are_not_awaited():
    """Devices that are offline or revoked when a round opens are not waited for."""
    state = opened(fleet(online=("a", "c")), plan_for("a", "b", "x"))
    assert set(state.unavailable) == {"b", "x"}
    assert set(state.removed) == {"x"}
    assert (state.awaited, state.asked, state.unasked) == (1, 2, 1)
    assert state.waiting == ("a", "b", "x")


@pytest.mark.parametrize(("finished", "reason"), [(True, "the run is over"), (False, "the round is not open")])
def test_the_reason_of_a_late_upload(finished, reason):
    assert too_late(fleet(finished=finished)) == reason


# ------------------------------------------------------------------------------------------------- devices move


def test_offline_device_is_awaited_once_back():
    """A device that goes offline is not waited for until it is back."""
    state = asking("a", "b")
    off = on_offline(state, "a")
    assert (off.awaited, off.asked, off.present) == (1, 2, ("b", "c", "d"))
    assert on_offline(off, "a").awaited == 1, "twice is once"
    back = on_online(off, "a")
    assert (back.awaited, back.present) == (2, FLEET)
    assert on_online(back, "a").unasked == back.unasked == 2


@pytest.mark.parametrize("device", ["c", "stranger"])
def test_needless_decline_changes_nothing(device):
    """A decline of a device that owes nothing changes nothing."""
    state = asking("a", "b")
    assert on_declined(state, device, DATA) is state
    done = received(state, "a")
    assert on_declined(done, "a", DATA) is done


def test_revoked_device_counts_no_more():
    """A revoked device no longer counts at all."""
    state = on_declined(asking("a", "b", "c"), "a", UPLOAD)
    gone = on_revoked(state, "a")
    assert "a" not in gone.devices
    assert (gone.asked, gone.awaited, gone.present) == (2, 2, ("b", "c", "d"))
    for late in (gone, on_declined(gone, "a", UPLOAD), on_declined(gone, "a", DATA)):
        assert dataclasses.replace(late, deadline_passed=True).able == 2, "it is taken off once, not twice"


def test_revoked_after_upload_still_counts():
    """The upload of a device that is revoked afterwards still counts."""
    gone = on_revoked(received(asking("a", "b"), "a"), "a")
    assert (gone.asked, set(gone.removed)) == (2, set())


# ------------------------------------------------------------------------------------------------------ the end


def test_false_counts_decide_no_accuracy():
    """One device with false counts of tests does not decide the accuracy."""
    honest = [contribution(d, np.ones(6), samples=10, correct=8, tested=10) for d in "abcde"]
    liar = contribution("f", np.ones(6), samples=10, correct=0, tested=4_000_000_000)
    state = dataclasses.replace(asking(*"abcdef"), contributions=PersistentList([*honest, liar]))
    record = record_of(state, state.plan, Outcome(dict.fromkeys("abcdef", 0)))
    assert (record.correct, record.tested) == (40, 80)
    assert record.device_accuracy["f"] == (0, 30)
    assert record.cluster_tests == {0: (40, 80)}


@pytest.mark.parametrize("count", [5, 7, 12])
@pytest.mark.parametrize("lie", [-MAX_FIGURE, 0.0, MAX_FIGURE])
def test_false_figure_of_five_is_bounded(count, lie):
    """The loss stays within those of the others, and false counts weigh as much as `weight_cap` median devices."""
    all_ = [f"{i:02}" for i in range(count)]
    honest = [contribution(d, samples=10 + i, loss=1 + i / 10, correct=8, tested=10) for i, d in enumerate(all_[1:])]
    for name in ("", "99"):
        for correct in (0, MOST):
            liar = contribution(name, samples=MOST, loss=lie, correct=correct, tested=MOST)
            state = asking(*all_[1:], name, contributions=PersistentList([*honest, liar]))
            record = record_of(state, state.plan, Outcome(dict.fromkeys([*all_[1:], name], 0)))
            losses = [c.loss for c in honest]
            assert min(losses) <= record.loss <= max(losses)
            assert record.cluster_losses == {0: record.loss}
            assert record.tested == 10 * (count - 1) + 10 * state.run.recipe.weight_cap
            share = state.run.recipe.weight_cap / (count - 1 + state.run.recipe.weight_cap)
            assert abs(record.correct / record.tested - 0.8) <= 0.8 * share + 1e-9


def test_the_record_of_a_round():
    updates = [
        contribution("b", [3, 4, 0, 0, 0, 0], samples=30, loss=2.0, correct=3, tested=4),
        contribution("a", [1, 0, 0, 0, 0, 0], samples=10, loss=1.0),
    ]
    state = on_declined(asking("a", "b", "c"), "c", DATA)
    state = received(received(state, "a"), "b")
    news = (Event(7, "model_went_back", {"model": 0, "to": 2}),)
    state = dataclasses.replace(state, contributions=PersistentList(updates), news=news)
    outcome = Outcome({"a": 0, "b": 1}, (Event(7, "split", {"cluster": 0}),), {"b": 20.0, "a": 5.0})
    record = record_of(state, state.plan, outcome)
    assert (record.round, record.final, record.ordered, record.contributed) == (7, False, 3, 2)
    assert (record.missing, record.declined) == (("c",), {"c": "data"})
    assert record.loss == pytest.approx((1.0 * 10 + 2.0 * 30) / 40)
    assert (record.correct, record.tested, record.device_accuracy) == (3, 4, {"b": (3, 4)})
    assert list(record.norms.items()) == [("a", 1.0), ("b", 5.0)]
    assert list(record.capped) == ["a", "b"]
    assert record.cluster_tests == {1: (3, 4)}
    assert record.cosines.devices == ("a", "b")
    assert record.clusters == {"a": 0, "b": 1}
    assert record.events == (
        {"round": 7, "kind": "model_went_back", "model": 0, "to": 2},
        {"round": 7, "kind": "split", "cluster": 0},
    )


def test_metadata_name_what_a_restart_needs():
    """The metadata of a restart name the key version the levels and the events to record."""
    news = (Event(1, "x", {}),)
    watched = Watched({"0": 1.5})
    assert fleet(watched=watched, news=news, newest=4).resume_metadata == ResumeMetadata(3, watched, news)
