"""One event costs the engine the same in a large fleet as in one of 150 devices.

Seconds differ from machine to machine, so these tests count: looks at device names, calls, and bytes taken from the
allocator. A copy of a set of names looks at no name and is one call, but it takes bytes.
"""

import gc
import sys
import tracemalloc

import pytest

from aggregator.rounds.engine import CameOnline, DeadlinePassed, Declined, Engine, Left, WentOffline
from aggregator.strategies.base import ClientUpdate
from aggregator.strategies.registry import make_strategy
from shoal.protocol.messages import DeclineReason, Phase
from tests.helpers.engines import Name
from tests.helpers.plans import ROUND_KEY, run_plan

pytestmark = pytest.mark.slow
SMALL = 150
LARGE = [1_000, pytest.param(10_000, marks=pytest.mark.long)]
MOST = 1.5
"""A device of the large fleet may cost this many times one of the small fleet."""
DIGEST = b"d" * 32
CASES = {
    "fedavg": ({}, {}),
    "ifca": ({"k": 2}, {"origins": 2, "max_models": 2}),
    "cfl": ({}, {}),
    "fedgroup": ({"groups": 3, "alpha": 10_000}, {}),
    "fesem": ({"k": 3}, {}),
    "one-shot": ({"k": 3}, {}),
}


class Cost:
    """Looks, calls and bytes that events took, each summed over all of them."""

    def __init__(self):
        self.looks = self.calls = self.bytes = self.events = 0

    def feed(self, engine, state, event, *, quiet=True):
        """Return the state after one event, which leads to nothing if ``quiet``."""
        calls = [0]

        def count(_frame, kind, _argument):
            calls[0] += kind in ("call", "c_call")

        Name.looks = 0
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        sys.setprofile(count)
        try:
            state, actions = engine.handle(state, event)
        finally:
            sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        assert not (quiet and actions)
        self.looks += Name.looks
        self.calls += calls[0]
        self.bytes += max(0, peak - before)
        self.events += 1
        return state

    def each(self):
        """Return the means over all events."""
        return {what: getattr(self, what) / self.events for what in ("looks", "calls", "bytes")}


@pytest.fixture(autouse=True)
def _traced():
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.fixture(params=LARGE)
def compare(request):
    """Return a function that checks that ``measured(count)``, a `Cost`, is about the same for both fleets."""

    def check(measured):
        small, large = measured(SMALL).each(), measured(request.param).each()
        for what, most in small.items():
            assert large[what] <= MOST * most, (what, small, large)

    return check


def names(count):
    return tuple(Name(f"dev-{i:05}") for i in range(count))


def begun(count, algorithm="fedavg", **changes):
    """Return (engine, state before round 1, devices)."""
    settings, own = CASES[algorithm]
    run = run_plan(algorithm, settings, quorum=1.0, **{**own, **changes})
    engine = Engine(run, make_strategy(run), bytes(16))
    devices = names(count)
    state, _ = engine.begin(devices)
    return engine, state, devices


def opened(count, algorithm="fedavg", **changes):
    """Return (engine, state with round 1 open, devices)."""
    engine, state, devices = begun(count, algorithm, **changes)
    for device in devices:
        state, _ = engine.handle(state, CameOnline(device))
    assert state.round == 1
    return engine, state, devices


def given(state, device):
    assignment = state.plan.assignments[device]
    return ClientUpdate(
        round=1,
        phase=Phase(assignment.phase),
        device=device,
        model=assignment.candidates[0],
        samples=10,
        loss=1.0,
        key_id=ROUND_KEY,
        digest=DIGEST,
        nearest=min(assignment.compare, default=0),
    )


def test_the_presences_before_round_1(compare):
    def measured(count):
        engine, state, devices = begun(count)
        cost = Cost()
        for device in devices[:-1]:
            state = cost.feed(engine, state, CameOnline(device))
        state, actions = engine.handle(state, CameOnline(devices[-1]))
        assert len(actions) == 1
        assert len(state.plan.assignments) == count
        return cost

    compare(measured)


@pytest.mark.parametrize("algorithm", CASES)
def test_the_uploads_of_a_round(compare, algorithm):
    def measured(count):
        engine, state, _ = opened(count, algorithm)
        asked = list(state.plan.assignments)
        assert len(asked) == count
        cost = Cost()
        for device in asked[:-1]:
            state = cost.feed(engine, state, given(state, device))
        assert (len(state.received), len(state.contributions), state.awaited) == (count - 1, count - 1, 1)
        return cost

    compare(measured)


def declining(engine, devices):
    return [Declined(device, engine.nonce(1), DeclineReason.DATA) for device in devices]


SCRIPTS = {
    "departures and returns": lambda _engine, devices: [
        move(d) for move in (WentOffline, CameOnline) for d in devices[1:]
    ],
    "declines": lambda engine, devices: declining(engine, devices[: len(devices) // 2]),
    "revocations": lambda _engine, devices: [Left(device) for device in devices[:-1]],
    "newcomers": lambda _engine, devices: [CameOnline(Name(f"new-{i:05}")) for i in range(len(devices))],
    "presences after a declined deadline": lambda _engine, devices: [CameOnline(device) for device in devices],
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_events_while_a_round_is_open(compare, case):
    def measured(count):
        engine, state, devices = opened(count)
        for event in (*declining(engine, devices), DeadlinePassed(1)) if "deadline" in case else ():
            state, _ = engine.handle(state, event)
        cost = Cost()
        for event in SCRIPTS[case](engine, devices):
            state = cost.feed(engine, state, event)
        assert state.round == 1
        return cost

    compare(measured)


def test_earlier_states_stay_as_they_were():
    engine, first, devices = opened(6)
    second, _ = engine.handle(first, given(first, devices[0]))
    third, _ = engine.handle(second, WentOffline(devices[1]))
    other, _ = engine.handle(second, given(second, devices[2]))
    assert [len(s.received) for s in (first, second, third, other)] == [0, 1, 1, 2]
    assert [len(s.contributions) for s in (first, second, third, other)] == [0, 1, 1, 2]
    assert [s.awaited for s in (first, second, third, other)] == [6, 5, 4, 4]
    assert devices[1] in second.online
    assert devices[1] not in third.online
    assert third.unavailable == {devices[1]}
    assert not other.unavailable
