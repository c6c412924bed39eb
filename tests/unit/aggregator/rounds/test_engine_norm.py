"""The norm of a device's model is taken exactly where it was asked for: FedGroup's inter-group aggregation."""

import dataclasses
import math

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.state import CameOnline
from tests.helpers.plans import engine_of, run_plan, stored, upload_of

DEVICES = ("dev-1", "dev-2", "dev-3")
DIGEST = b"d" * 32


def second_round(eta):
    """Return (engine, state) of FedGroup with the first round of training open."""
    engine = engine_of(run_plan("fedgroup", {"groups": 1, "alpha": 3, "eta_g": eta}))
    state, _ = engine.begin(DEVICES)
    for device in DEVICES:
        state, _ = engine.handle(state, CameOnline(device))
    for i, device in enumerate(DEVICES):
        upload, body = upload_of(engine, state, device, values=[i + 1.0] * 6)
        assert engine.validate(state, upload, DIGEST) == (Decision.STORE, "")
        state, _ = engine.handle(state, stored(upload, body))
    assert state.round == 2
    return engine, state


def test_ordered_norm_is_wanted():
    """Validate wants a norm where the order asks for it."""
    engine, state = second_round(0.1)
    assert state.plan.assignments["dev-1"].norm
    upload, _ = upload_of(engine, state, "dev-1", model_norm=2.5)
    assert engine.validate(state, upload, DIGEST) == (Decision.STORE, "")
    for norm in (0.0, -1.0, 1e200, math.nan, math.inf):
        assert engine.validate(state, dataclasses.replace(upload, model_norm=norm), DIGEST)[0] is Decision.REFUSE


def test_unordered_norm_is_refused():
    """Validate wants none where it does not."""
    engine, state = second_round(0)
    upload, _ = upload_of(engine, state, "dev-1")
    assert engine.validate(state, upload, DIGEST) == (Decision.STORE, "")
    verdict, reason = engine.validate(state, dataclasses.replace(upload, model_norm=2.5), DIGEST)
    assert verdict is Decision.REFUSE
    assert "not asked for" in reason
