"""Which uploads may be stored: what the engine says of each before it is."""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.engine import (
    CameOnline,
    DeadlinePassed,
)
from shoal.protocol.messages import Phase
from tests.helpers.engines import DEVICES, give, kinds, opened
from tests.helpers.plans import KEY_VERSION, digest_of, stored, upload_of

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
    "more hits than tries": ({"correct": 1}, "impossible"),
    "hits that nobody asked for": ({"correct": 3, "tested": 4}, "impossible"),
    "tries that nobody asked for": ({"tested": 4}, "impossible"),
    "no samples": ({"samples": 0}, "impossible"),
}


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
    engine, state = opened()
    state, _ = give(engine, state, "dev-1")
    again = upload_of(engine, state, "dev-1")
    other = upload_of(engine, state, "dev-1", values=np.zeros(6))
    assert engine.validate(state, again[0], digest_of(*again)) == (Decision.DUPLICATE, "")
    assert engine.validate(state, other[0], digest_of(*other)) == (Decision.REFUSE, "another upload was stored before")


def test_unordered_vector_is_refused():
    """Validate wants no vector where none was ordered."""
    engine, state = opened(devices=("dev-1",), rounds=1)
    state, _ = give(engine, state, "dev-1")
    assert state.plan.final
    report, _ = upload_of(engine, state, "dev-1")
    assert engine.validate(state, report, DIGEST) == (Decision.STORE, "")
    assert engine.validate(state, dataclasses.replace(report, length=6), DIGEST)[1] == "a vector of length 6"


def test_counts_are_wanted_if_ordered():
    """Counts that were not asked for tell about a device's data; missing ones would falsify the accuracy."""
    engine, state = opened(devices=("dev-1",), evaluate_every=1)
    assert state.plan.assignments["dev-1"].evaluate
    upload, _ = upload_of(engine, state, "dev-1")
    assert engine.validate(state, upload, DIGEST) == (Decision.STORE, "")
    for counts in ({"correct": 0, "tested": 0}, {"correct": 5, "tested": 4}):
        changed = dataclasses.replace(upload, **counts)
        assert engine.validate(state, changed, DIGEST) == (Decision.REFUSE, "impossible counts")


def test_one_margin_a_candidate():
    """Validate wants as many margins as candidates."""
    engine, state = opened(devices=("dev-1",))
    assignment = dataclasses.replace(state.plan.assignments["dev-1"], candidates=(0, 1), train=False, margins=True)
    state = dataclasses.replace(state, plan=dataclasses.replace(state.plan, assignments={"dev-1": assignment}))
    upload, _ = upload_of(engine, state, "dev-1")
    assert engine.validate(state, upload, DIGEST) == (Decision.STORE, "")
    assert engine.validate(state, dataclasses.replace(upload, margins=()), DIGEST)[1] == "0 margins"


def test_nearest_is_one_to_compare_with():
    """The nearest model is one of those to compare with."""
    engine, state = opened()
    assignment = dataclasses.replace(state.plan.assignments["dev-1"], compare=(1, 2))
    plan = dataclasses.replace(state.plan, assignments={**state.plan.assignments, "dev-1": assignment})
    state = dataclasses.replace(state, plan=plan)
    upload, _ = upload_of(engine, state, "dev-1")
    for model, decision in ((0, Decision.REFUSE), (1, Decision.STORE), (2, Decision.STORE), (3, Decision.REFUSE)):
        assert engine.validate(state, dataclasses.replace(upload, nearest=model), DIGEST)[0] is decision


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
    devices = DEVICES
    engine, state = opened(devices=devices, rounds=1)
    state, _ = give(engine, state, *devices)
    # A seal has other bytes each time.
    plain, *others = sorted(devices, key=lambda device: state.plan.assignments[device].seal)
    *there, away = others
    state, _ = give(engine, state, plain, *there)
    last, late = (upload_of(engine, state, device) for device in (plain, away))
    received, metadata = dict(state.received), state.resume_metadata
    state, actions = engine.handle(state, DeadlinePassed(2))
    assert kinds(actions) == ["RoundClosed", "RunFinished"]
    for over in (state, engine.over(devices, 2, metadata, received)):
        assert engine.validate(over, last[0], digest_of(*last)) == (Decision.DUPLICATE, "")
        assert engine.validate(over, last[0], DIGEST) == (Decision.REFUSE, "the run is over")
        assert engine.validate(over, late[0], digest_of(*late)) == (Decision.REFUSE, "the run is over")
        assert engine.handle(over, CameOnline(away)) == (over, ())


def test_every_round_has_its_own_key():
    """Every round has its own key whose id the aggregator does not know."""
    engine, state = opened()
    upload, _ = upload_of(engine, state, "dev-1")
    for key_id in (b"a" * 16, b"b" * 16):
        given = dataclasses.replace(upload, key_id=key_id)
        assert engine.validate(state, given, DIGEST) == (Decision.STORE, "")


def test_ordered_checkpoints_or_none():
    """A device may attach the checkpoints that were ordered or none."""
    engine, state = opened(participation=0.2)
    (device,) = state.plan.assignments
    upload, _ = upload_of(engine, state, device)
    most = engine.most_attached(state, device)
    assert state.plan.assignments[device].seal == (0,)
    assert 4 * engine.run.length < most < 100_000
    for size, expected in ((0, Decision.STORE), (most, Decision.STORE), (most + 1, Decision.REFUSE)):
        assert engine.validate(state, dataclasses.replace(upload, attached=size), DIGEST)[0] is expected
    engine, state = opened()
    upload, _ = upload_of(engine, state, "dev-1")
    assert engine.validate(state, dataclasses.replace(upload, attached=1), DIGEST)[0] is Decision.REFUSE
