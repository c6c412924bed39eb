"""The state of a run: devices that come, go, decline and are revoked, and the record of a round."""

import dataclasses

import numpy as np
import pytest

from aggregator.persistent import PersistentList, PersistentMap, PersistentSet
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

OUTCOME = Outcome(clusters={"a": 0, "b": 0})


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
        sum(d in state.devices or d in state.received for d in orders),
        sum(d not in orders for d in state.online),
    )
    return (state.awaited, state.asked, state.unasked), plain


def test_opened_round_forgets_answers():
    """An opened round forgets the answers of the one before."""
    before = fleet(
        received=PersistentMap({"a": (Phase.TRAIN, b"")}),
        contributions=PersistentList([contribution("a")]),
        declined=PersistentMap({"b": DATA}),
        refused=PersistentSet("c"),
        unfit=PersistentSet("d"),
        deadline_passed=True,
    )
    state = opened(before, plan_for("a", "b"))
    assert state.round == 7
    assert not any((state.received, state.contributions, state.declined, state.deadline_passed))
    assert not any((state.refused, state.unfit))
    assert (state.waiting, state.awaited, state.asked, state.unasked) == (("a", "b"), 2, 2, 2)


def test_nothing_is_asked_between_rounds():
    """While no round is open nothing is asked or awaited."""
    state = fleet()
    assert (state.waiting, state.awaited, state.asked, state.present) == ((), 0, 0, FLEET)


def test_record_has_losses_of_clusters():
    """Without updates that were left out; a cluster without any has none."""
    given = PersistentList(contribution(d, loss=loss) for d, loss in zip(FLEET, (1.0, 3.0, 5.0, 9.0), strict=True))
    state = asking(*FLEET, contributions=given)
    outcome = Outcome(clusters={"a": 0, "b": 0, "c": 4, "d": 5})
    assert record_of(state, state.plan, outcome, refused_norm={"d": 99.0}).cluster_losses == {0: 2.0, 4: 5.0}


# --------------------------------------------------------------------------------------------------- a round opens


def test_absent_or_revoked_are_not_awaited():
    """Devices that are offline or revoked when a round opens are not waited for."""
    state = opened(fleet(online=("a", "c")), plan_for("a", "b", "x"))
    assert (set(state.unavailable), set(state.removed)) == ({"b", "x"}, {"x"})
    assert (state.awaited, state.asked, state.unasked, state.waiting) == (1, 2, 1, ("a", "b", "x"))


@pytest.mark.parametrize(("finished", "reason"), [(True, "the run is over"), (False, "the round is not open")])
def test_the_reason_of_a_late_upload(finished, reason):
    assert too_late(fleet(finished=finished)) == reason


def test_declined_is_not_awaited_online():
    """A device that declined is not waited for though it is online."""
    state = on_declined(asking("a", "b"), "a", DATA)
    assert (state.awaited, state.asked, state.unable) == (1, 2, {"a": "data"})
    assert on_online(on_offline(state, "a"), "a").awaited == 1


@pytest.mark.parametrize(
    ("reason", "asked", "able", "late"), [(DATA, 3, 2, 2), (UPLOAD, 3, 3, 2), (KEYS, 3, 3, 2), (STATE, 2, 2, 2)]
)
def test_declined_does_not_count_as_able(reason, asked, able, late):
    """One device must not stop the run; until the deadline, one that lacks keys or had an upload refused may still send it."""
    state = on_declined(asking("a", "b", "c"), "a", reason)
    assert (state.asked, state.able, state.unable) == (asked, able, {"a": reason.name.lower()})
    assert dataclasses.replace(state, deadline_passed=True).able == late
    assert on_declined(state, "a", KEYS).able == 3, "its newest word counts"


def test_counts_are_those_of_the_sets():
    """The counts are those of the sets whatever happens."""
    state = asking("a", "b", "d")
    for move, device in (
        (on_offline, "a"),
        (on_online, "x"),
        (on_online, "x"),
        (on_offline, "c"),
        (on_offline, "c"),
        (lambda s, d: on_declined(s, d, DATA), "b"),
        (on_online, "a"),
        (received, "a"),
        (on_offline, "a"),
        (on_online, "c"),
        (on_revoked, "a"),
        (on_offline, "x"),
        (on_revoked, "d"),
        (on_online, "d"),
        (on_revoked, "d"),
    ):
        state = move(state, device)
        found, plain = counts(state)
        assert found == plain, (move, device)
        assert state.unavailable <= set(state.waiting), (move, device)
    assert "x" in state.devices, "a device that joins during the run belongs to the fleet"


# ------------------------------------------------------------------------------------------------- devices move


def test_offline_device_is_awaited_once_back():
    """A device that goes offline is not waited for until it is back."""
    off = on_offline(asking("a", "b"), "a")
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
    gone = on_revoked(on_declined(asking("a", "b", "c"), "a", UPLOAD), "a")
    assert "a" not in gone.devices
    assert (gone.asked, gone.awaited, gone.present) == (2, 2, ("b", "c", "d"))
    for late in (gone, on_declined(gone, "a", UPLOAD), on_declined(gone, "a", DATA)):
        assert dataclasses.replace(late, deadline_passed=True).able == 2, "it is taken off once, not twice"


# ------------------------------------------------------------------------------------------------------ the end


def test_false_counts_decide_no_accuracy():
    """One device with false counts of tests does not decide the accuracy."""
    honest = [contribution(d, np.ones(6), samples=10, correct=8, tested=10) for d in "abcde"]
    liar = contribution("f", np.ones(6), samples=10, correct=0, tested=4_000_000_000)
    state = dataclasses.replace(asking(*"abcdef"), contributions=PersistentList([*honest, liar]))
    record = record_of(state, state.plan, Outcome(dict.fromkeys("abcdef", 0)))
    assert (record.correct, record.tested, record.device_accuracy["f"]) == (40, 80, (0, 30))
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
    assert (list(record.norms.items()), list(record.capped)) == ([("a", 1.0), ("b", 5.0)], ["a", "b"])
    assert (record.cluster_tests, record.cosines.devices) == ({1: (3, 4)}, ("a", "b"))
    assert record.clusters == {"a": 0, "b": 1}
    assert record.events == (
        {"round": 7, "kind": "model_went_back", "model": 0, "to": 2},
        {"round": 7, "kind": "split", "cluster": 0},
    )


def test_refused_norm_has_no_part_in_loss():
    """Updates left out because of their norm have no part in the loss."""
    updates = [contribution("a", loss=1.0), contribution("b", loss=1e9, norm=99.0)]
    state = asking("a", "b", contributions=PersistentList(updates))
    record = record_of(state, state.plan, OUTCOME, {"b": 99.0})
    assert (record.loss, record.refused_norm, record.contributed) == (1.0, {"b": 99.0}, 2)


def test_no_uploads_have_no_loss():
    """A round without uploads has a loss of zero."""
    state = asking("a")
    record = record_of(state, state.plan, Outcome({}))
    assert (record.loss, record.contributed, record.missing) == (0.0, 0, ("a",))


def test_metadata_name_what_a_restart_needs():
    """The metadata of a restart name the key version the levels and the events to record."""
    news = (Event(1, "x", {}),)
    watched = Watched({"0": 1.5})
    assert fleet(watched=watched, news=news, newest=4).resume_metadata == ResumeMetadata(3, watched, news)
