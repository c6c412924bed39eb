"""Which uploads may be stored: what the engine says of each before it is."""

import dataclasses
import math

import numpy as np
import pytest

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.state import CameOnline, DeadlinePassed, Declined, Left, RoundClosed
from shoal.protocol.messages import DeclineReason, Phase
from tests.helpers.engines import DEVICES, answered, give, kinds, mean_of, opened
from tests.helpers.plans import KEY_VERSION, D, digest_of, stored, upload_of

DIGEST = b"d" * 32


REFUSALS = {
    "another run": ({"run_id": bytes(16)}, "of another run"),
    "another task": ({"task_digest": bytes(32)}, "of another run or task"),
    "another mode": ({"mode": "none"}, "another key or mode"),
    "an earlier key version": ({"key_version": KEY_VERSION - 1}, "another key or mode"),
    "a later key version": ({"key_version": KEY_VERSION + 1}, "another key or mode"),
    "a past round": ({"round": 0}, "not open"),
    "a later round": ({"round": 2}, "not open"),
    "another nonce": ({"nonce": bytes(16)}, "not open"),
    "another phase": ({"phase": int(Phase.TRIAL)}, "not asked for"),
    "a device without an order": ({"device": "dev-9"}, "not asked for"),
    "a model that was not offered": ({"model": 3}, "not offered"),
    "no vector": ({"length": 0}, "length 0"),
    "too long": ({"length": 7}, "length 7"),
    "a comparison that nobody asked for": ({"nearest": 1}, "nearest to model 1"),
    "margins": ({"margins": (0.0, 1.0)}, "2 margins"),
    "a norm that nobody asked for": ({"model_norm": 2.5}, "norm that was not asked for"),
    "more hits than tries": ({"correct": 1}, "impossible"),
    "hits that nobody asked for": ({"correct": 3, "tested": 4}, "impossible"),
    "tries that nobody asked for": ({"tested": 4}, "impossible"),
    "no samples": ({"samples": 0}, "impossible"),
    "a loss that no float32 holds": ({"loss": 1e300}, "beyond the limit for reports"),
    "a loss below what a float32 holds": ({"loss": -1e300}, "beyond the limit for reports"),
}


def says(engine, state, device="dev-1", **changes):
    """Return what the engine says of an upload of a device with these fields."""
    upload, _ = upload_of(engine, state, device, **changes)
    return engine.validate(state, upload, DIGEST)


STORED = (Decision.STORE, "")


@pytest.mark.parametrize("case", REFUSALS)
def test_validate_refuses(case):
    changes, expected = REFUSALS[case]
    engine, state = opened()
    upload, _ = upload_of(engine, state, "dev-1")
    verdict, reason = engine.validate(state, dataclasses.replace(upload, **changes), DIGEST)
    assert verdict is Decision.REFUSE
    assert expected in reason


def test_nothing_is_taken_between_rounds():
    """Validate refuses everything between rounds."""
    engine, state = opened(devices=("dev-1",))
    upload, _ = upload_of(engine, state, "dev-1")
    closed = dataclasses.replace(state, plan=None)
    assert engine.validate(closed, upload, DIGEST) == (Decision.REFUSE, "the round is not open")


def test_resend_is_no_second_upload():
    """Exactly once: the same bytes are a duplicate, other bytes are refused."""
    engine, state = answered("dev-1")
    again = upload_of(engine, state, "dev-1")
    other = upload_of(engine, state, "dev-1", values=np.zeros(6))
    assert engine.validate(state, again[0], digest_of(*again)) == (Decision.DUPLICATE, "")
    assert engine.validate(state, other[0], digest_of(*other)) == (Decision.REFUSE, "another upload was stored before")


def test_unordered_vector_is_refused():
    """Validate wants no vector where none was ordered."""
    engine, state = answered("dev-1", devices=("dev-1",), rounds=1)
    assert state.plan.final
    assert says(engine, state) == STORED
    assert says(engine, state, length=6) == (Decision.REFUSE, "a vector of length 6")


def test_counts_are_wanted_if_ordered():
    """Counts that were not asked for tell about a device's data; missing ones would falsify the accuracy."""
    engine, state = opened(devices=("dev-1",), evaluate_every=1)
    assert state.plan.assignments["dev-1"].evaluate
    assert says(engine, state) == STORED
    assert says(engine, state, correct=0, tested=0) == (Decision.REFUSE, "impossible counts")
    assert says(engine, state, correct=5, tested=4) == (Decision.REFUSE, "impossible counts")


def test_one_margin_a_candidate():
    """Validate wants as many margins as candidates."""
    engine, state = opened(devices=("dev-1",))
    assignment = dataclasses.replace(state.plan.assignments["dev-1"], candidates=(0, 1), train=False, margins=True)
    state = dataclasses.replace(state, plan=dataclasses.replace(state.plan, assignments={"dev-1": assignment}))
    assert says(engine, state) == STORED
    assert says(engine, state, margins=()) == (Decision.REFUSE, "0 margins")


def test_nearest_is_one_to_compare_with():
    """The nearest model is one of those to compare with."""
    engine, state = opened()
    assignment = dataclasses.replace(state.plan.assignments["dev-1"], compare=(1, 2))
    plan = dataclasses.replace(state.plan, assignments={**state.plan.assignments, "dev-1": assignment})
    state = dataclasses.replace(state, plan=plan)
    assert [model for model in range(4) if says(engine, state, nearest=model) == STORED] == [1, 2]


def test_stored_upload_counts_once():
    """A stored upload counts once even if it is told twice."""
    engine, state = opened()
    upload, body = upload_of(engine, state, "dev-1")
    event = stored(upload, body)
    once, _ = engine.handle(state, event)
    twice, _ = engine.handle(once, event)
    assert twice.contributions == once.contributions


def test_finished_run_knows_what_came_last():
    """Also in an aggregator that was started again: the same bytes are acknowledged, anything else comes too late."""
    engine, state = answered(*DEVICES, rounds=1)
    # A seal has other bytes each time.
    plain, *there, away = sorted(DEVICES, key=lambda device: state.plan.assignments[device].seal)
    state, _ = give(engine, state, plain, *there)
    last, late = (upload_of(engine, state, device) for device in (plain, away))
    received, metadata = dict(state.received), state.resume_metadata
    state, actions = engine.handle(state, DeadlinePassed(2))
    assert kinds(actions) == ["RoundClosed", "RunFinished"]
    for over in (state, engine.over(DEVICES, 2, metadata, received)):
        assert engine.validate(over, last[0], digest_of(*last)) == (Decision.DUPLICATE, "")
        assert engine.validate(over, last[0], DIGEST) == (Decision.REFUSE, "the run is over")
        assert engine.validate(over, late[0], digest_of(*late)) == (Decision.REFUSE, "the run is over")
        assert engine.handle(over, CameOnline(away)) == (over, ())


def test_every_round_has_its_own_key():
    """Every round has its own key whose id the aggregator does not know."""
    engine, state = opened()
    assert [says(engine, state, key_id=key_id) for key_id in (b"a" * 16, b"b" * 16)] == [STORED] * 2


def test_ordered_checkpoints_or_none():
    """A device may attach the checkpoints that were ordered or none."""
    engine, state = opened(participation=0.2)
    (device,) = state.plan.assignments
    most = engine.most_attached(state, device)
    assert state.plan.assignments[device].seal == (0,)
    assert 4 * engine.run.length < most < 100_000
    assert [n for n in (0, most, most + 1) if says(engine, state, device, attached=n) == STORED] == [0, most]
    assert says(*opened(), attached=1)[0] is Decision.REFUSE


# -- The engine leaves out updates of excessive norm when a round closes, and caps weights; records and resume metadata say so --


GIANT = DEVICES[-1]


def round_of(engine, state, *, factor=100.0, samples=10):
    """Answer the open round; the last device's update is ``factor`` times as long and has ``samples``."""
    for device in DEVICES:
        large = device == GIANT
        values = np.full(D, factor if large else 1.0, np.float32) / 100
        upload, body = upload_of(engine, state, device, values=values, samples=samples if large else 10)
        state, actions = engine.handle(state, stored(upload, body))
    (record,) = [a.record for a in actions if isinstance(a, RoundClosed)]
    return state, record


def test_hundredfold_update_is_left_out():
    """A hundredfold update is left out in the first round and in later ones."""
    engine, state = opened()
    for _ in range(3):
        state, record = round_of(engine, state)
        assert set(record.refused_norm) == {GIANT}
        assert record.refused_norm[GIANT] == pytest.approx(record.norms[GIANT])
        assert record.contributed == len(DEVICES)
        assert np.linalg.norm(mean_of(state)) == pytest.approx(np.sqrt(D) / 100, rel=1e-5)
        assert state.held.steps[-1].means[0].contributors == len(DEVICES) - 1


def test_weight_above_the_cap_is_reduced():
    """A weight above the cap is reduced and recorded."""
    engine, state = opened()
    _, record = round_of(engine, state, factor=1.0, samples=100_000)
    assert record.capped == {GIANT: 30.0}
    engine, state = opened(weight_cap=0.0)
    state, record = round_of(engine, state, factor=9.0, samples=100_000)
    assert (record.refused_norm, record.capped) == ({}, {})
    assert state.held.steps[-1].means[0].contributors == len(DEVICES), "nine times the median is within the limit"


def test_refused_upload_is_in_no_quorum():
    """With a quorum of .9 of 5 devices a round would otherwise wait for the refused one for ever."""
    engine, state = opened(quorum=0.9)
    state, _ = engine.handle(state, Declined(GIANT, engine.nonce(1), DeclineReason.UPLOAD))
    state, _ = give(engine, state, *DEVICES[:-1])
    assert state.round == 1
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert state.round == 2


def test_refused_and_revoked_counts_once():
    """Of 4 devices that remain, all must answer with a quorum of .8."""
    engine, state = opened(quorum=0.8)
    state, _ = engine.handle(state, Declined(GIANT, engine.nonce(1), DeclineReason.UPLOAD))
    state, _ = engine.handle(state, Left(GIANT))
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert state.able == len(DEVICES) - 1


def test_uniform_weighting_refuses_counts():
    """Under uniform weighting a sample count is refused."""
    engine, state = opened(weighting="uniform")
    assert says(engine, state, samples=1) == STORED
    for samples in (2, 2**32 - 1):
        verdict, reason = says(engine, state, samples=samples)
        assert verdict is Decision.REFUSE
        assert "uniform" in reason


# -- The norm of a device's model is taken exactly where it was asked for: FedGroup's inter-group aggregation --


THREE = ("dev-1", "dev-2", "dev-3")


def test_ordered_norm_is_wanted():
    """Validate wants a norm where the order asks for it."""
    engine, state = opened(THREE, algorithm="fedgroup", settings={"groups": 1, "alpha": 3, "eta_g": 0.1})
    for i, device in enumerate(THREE):
        state, _ = give(engine, state, device, values=[i + 1.0] * 6)
    assert state.plan.assignments["dev-1"].norm
    norms = (2.5, 0.0, -1.0, 1e200, math.nan, math.inf)
    assert [norm for norm in norms if says(engine, state, model_norm=norm) == STORED] == [2.5]
