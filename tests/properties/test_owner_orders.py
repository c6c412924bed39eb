"""The owner's orders at any time, between any events of a run and with restarts of the aggregator: nothing is lost."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.rounds.state import (
    CameOnline,
    DeadlinePassed,
    OpenRound,
    Order,
    Ordered,
    RoundClosed,
    WentOffline,
    newest,
)
from tests.helpers.plans import KEY_VERSION, engine_of, run_plan, stored, upload_of

DEVICES = ("dev-1", "dev-2", "dev-3")
ROUNDS = 3
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from(DEVICES)),
        st.tuples(st.just("go"), st.sampled_from(DEVICES)),
        st.tuples(st.just("upload"), st.sampled_from(DEVICES)),
        st.tuples(st.just("all upload"), st.none()),
        st.tuples(st.just("all come"), st.none()),
        st.tuples(st.just("order"), st.sampled_from(Order)),
        st.tuples(st.just("deadline"), st.none()),
        st.tuples(st.just("restart"), st.none()),
    ),
    max_size=60,
)


class Run:
    """A run as `RunService` drives it, and what is durable of it."""

    def __init__(self):
        self.engine = engine_of(run_plan(rounds=ROUNDS, quorum=1.0))
        self.order = Order.GO
        self.opened = None
        self.uploads = []
        self.online = set()
        self.rounds = []
        self.closed = []
        self.state, _ = self.engine.begin(DEVICES, KEY_VERSION)

    def feed(self, event):
        before = self.state
        self.state, actions = self.engine.handle(before, event)
        for action in actions:
            if isinstance(action, RoundClosed):
                assert action.record.contributed == len(self.uploads)
                self.closed.append(action.record)
            if isinstance(action, OpenRound):
                assert self.order is not Order.PAUSE
                assert action.plan.final is (self.order.stops or action.plan.round > ROUNDS)
                self.opened, self.uploads = action, []
                self.rounds.append(action.plan.round)

    def take(self, kind, value):
        """Take one step of the test."""
        match kind:
            case "come":
                self.online.add(value)
                self.feed(CameOnline(value))
            case "go":
                self.online.discard(value)
                self.feed(WentOffline(value))
            case "deadline":
                self.feed(DeadlinePassed(self.state.round))
            case "all upload" | "all come":
                for device in DEVICES:
                    self.take(kind.removeprefix("all "), device)
            case "upload" if value in self.state.waiting:
                upload, body = upload_of(self.engine, self.state, value)
                event = stored(upload, body)
                self.uploads.append(event)
                self.feed(event)
            case "order":
                self.order = newest(self.order, value)
                self.feed(Ordered(self.order))
            case "restart" if not self.state.finished:
                self.restart()

    def restart(self):
        """Begin again from what is durable, in the order of `RunService.start`."""
        before = self.state
        if self.opened is None:
            self.state, _ = self.engine.begin(DEVICES, KEY_VERSION)
            self.feed(Ordered(self.order))
        else:
            o, uploads = self.opened, self.uploads
            open_again = self.engine.resume(
                DEVICES, o.before, o.held, o.plan.round, o.available, before.resume_metadata
            )
            self.state, (again,) = open_again
            assert (again.plan, again.nonce) == (o.plan, o.nonce)
            closed = len(self.closed)
            self.uploads = []
            self.feed(Ordered(Order.STOP if self.order.stops else self.order))
            for event in uploads:
                self.uploads.append(event)
                self.feed(event)
            self.feed(Ordered(self.order))
            if len(self.closed) > closed and before.round == o.plan.round and before.plan is None:
                self.closed.pop()  # closed again, with the same uploads, since no later round was durable
        for device in DEVICES:
            self.feed(CameOnline(device) if device in self.online else WentOffline(device))


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_no_upload_and_no_round_is_lost(steps):
    run = Run()
    for kind, value in steps:
        run.take(kind, value)
        assert run.state.order is run.order or run.state.finished
    last = next((at for at, number in enumerate(run.rounds) if number == ROUNDS + 1), len(run.rounds))
    assert run.rounds[:last] == list(range(1, last + 1))
    assert len(run.rounds) <= last + 1


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_stopped_run_ends_once_devices_come(steps):
    """A stopped run ends once devices are there."""
    run = Run()
    for kind, value in steps:
        run.take(kind, value)
    run.take("order", Order.STOP)
    for device in DEVICES:
        run.take("come", device)
    for _ in range(2):
        for device in DEVICES:
            run.take("upload", device)
    assert run.state.finished
