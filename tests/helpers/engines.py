"""An engine with devices that come, answer and go."""

from aggregator.rounds.duplicates_and_limits import Decision
from aggregator.rounds.engine import (
    CameOnline,
)
from tests.helpers.plans import KEY_VERSION, digest_of, engine_of, run_plan, stored, upload_of


class Name(str):
    """A device's name that counts how often names are compared or hashed."""

    looks = 0
    __slots__ = ()

    def __eq__(self, other):
        Name.looks += 1
        return str.__eq__(self, other)

    def __hash__(self):
        Name.looks += 1
        return str.__hash__(self)


DEVICES = ("dev-1", "dev-2", "dev-3", "dev-4", "dev-5")


def kinds(actions):
    return [type(a).__name__ for a in actions]


def online(engine, state, *devices):
    actions = ()
    for device in devices:
        state, more = engine.handle(state, CameOnline(device))
        actions += more
    return state, actions


def opened(devices=DEVICES, **changes):
    """Return (engine, state) with round 1 open for all devices."""
    engine = engine_of(run_plan(**changes))
    state, actions = engine.begin(devices, KEY_VERSION)
    assert kinds(actions) == ["Gather"]
    state, actions = online(engine, state, *devices)
    assert kinds(actions) == ["OpenRound"]
    return engine, state


def give(engine, state, *devices, **changes):
    actions = ()
    for device in devices:
        upload, body = upload_of(engine, state, device, **changes)
        assert engine.validate(state, upload, digest_of(upload, body)) == (Decision.STORE, "")
        state, more = engine.handle(state, stored(upload, body))
        actions += more
    return state, actions


def answered(*given, devices=DEVICES, **changes):
    """Return (engine, state) with round 1 open for all devices and answered by those ``given``."""
    engine, state = opened(devices, **changes)
    return engine, give(engine, state, *given)[0]


def mean_of(state):
    """Return the mean (d,) float32 of the last round of a run with one model."""
    (mean,) = state.held.steps[-1].means
    return mean.vector
