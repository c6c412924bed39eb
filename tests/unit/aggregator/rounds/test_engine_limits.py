"""The engine leaves out updates of excessive norm when a round closes, and caps weights; records and resume metadata say so."""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.state import DeadlinePassed, Declined, Left, RoundClosed
from shoal.protocol.messages import DeclineReason
from tests.helpers.engines import DEVICES, mean_of, opened
from tests.helpers.plans import D, digest_of, engine_of, stored, upload_of

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


def test_an_honest_round_is_complete():
    engine, state = opened()
    state, record = round_of(engine, state, factor=9.0)
    assert (record.refused_norm, record.capped) == ({}, {})
    assert state.held.steps[-1].means[0].contributors == len(DEVICES)


def test_weight_above_the_cap_is_reduced():
    """A weight above the cap is reduced and recorded."""
    engine, state = opened()
    _, record = round_of(engine, state, factor=1.0, samples=100_000)
    assert record.capped == {GIANT: 30.0}
    engine, state = opened(weight_cap=0.0)
    _, record = round_of(engine, state, factor=1.0, samples=100_000)
    assert record.capped == {}


def test_level_outlives_a_restart():
    """The level of the last round outlives a restart."""
    engine, state = opened()
    state, _ = round_of(engine, state, factor=1.0)
    again = engine_of(engine.run)
    resumed, _ = again.resume(DEVICES, state.strategy, state.held, 2, DEVICES, state.resume_metadata)
    assert resumed.watched.levels == state.watched.levels == state.resume_metadata.watched.levels
    first, one = round_of(engine, state)
    second, two = round_of(again, resumed)
    assert one.refused_norm == two.refused_norm
    assert mean_of(first).tobytes() == mean_of(second).tobytes()


def test_refused_upload_is_in_no_quorum():
    """With a quorum of .9 of 5 devices a round would otherwise wait for the refused one for ever."""
    engine, state = opened(quorum=0.9)
    state, _ = engine.handle(state, Declined(GIANT, engine.nonce(1), DeclineReason.UPLOAD))
    for device in DEVICES[:-1]:
        upload, body = upload_of(engine, state, device)
        state, _ = engine.handle(state, stored(upload, body))
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
    upload, body = upload_of(engine, state, GIANT, samples=1)
    assert engine.validate(state, upload, digest_of(upload, body))[0] is Decision.STORE
    for samples in (2, 2**32 - 1):
        lie = dataclasses.replace(upload, samples=samples)
        verdict, reason = engine.validate(state, lie, digest_of(lie, body))
        assert verdict is Decision.REFUSE
        assert "uniform" in reason
