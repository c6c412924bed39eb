"""A run that can't go on for lack of devices says why, and what the operator can do."""

import dataclasses

from aggregator.persistent import PersistentSet
from aggregator.rounds.quorum_and_deadline import shortage
from aggregator.rounds.state import DeadlinePassed, Declined, Left, Order, Ordered, WentOffline
from shoal.protocol.messages import DeclineReason
from tests.helpers.engines import DEVICES, give, opened


def test_revocation_is_all_that_is_needed():
    """Where enough devices stay a revocation is all that is needed."""
    engine, state = opened(min_contributors=2, quorum=1.0)
    state, _ = engine.handle(state, WentOffline("dev-5"))
    state, _ = give(engine, state, "dev-1", "dev-2", "dev-3", "dev-4")
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert "--min-contributors" not in shortage(state).hint
    assert "shoal-fleet revoke" in shortage(state).hint


def test_unable_device_is_not_to_be_started():
    """A device that is there but can't take part is not to be started again."""
    engine, state = opened(min_contributors=4, quorum=1.0)
    state, _ = engine.handle(state, WentOffline("dev-5"))
    state, _ = give(engine, state, "dev-1", "dev-2")
    nonce = engine.nonce(state.round)
    for device, reason in (("dev-3", DeclineReason.TASK), ("dev-4", DeclineReason.DISK)):
        state, _ = engine.handle(state, Declined(device, nonce, reason))
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert shortage(state).unable == ("dev-3",)
    assert shortage(state).hint.startswith(
        "read the reason in the log of dev-3, and sign a run that avoids it; start dev-4, dev-5 again, or take them "
        "out of the fleet: shoal-fleet revoke FLEET_DIR NAME"
    )


def gathering(**changes):
    """Return (engine, state) of a run whose first round is closed, while all devices but the first two are offline."""
    engine, state = opened(**changes)
    for device in DEVICES[2:]:
        state, _ = give(engine, state, device)
        state, _ = engine.handle(state, WentOffline(device))
    return engine, give(engine, state, *DEVICES[:2])[0]


def test_a_small_fleet_may_end_its_run():
    """The final round makes no mean."""
    engine, state = opened(min_contributors=3, rounds=1)
    for device in DEVICES[2:]:
        state, _ = engine.handle(state, Left(device))
    state, (closed, _) = give(engine, state, *DEVICES[:2])
    assert closed.record.events == ()
    assert state.plan.final
    assert shortage(state) is None


def test_devices_without_models_are_too_few():
    """Three newcomers are online, and one device that can't certify its model alone."""
    engine, state = gathering(min_contributors=3, quorum=1.0)
    newcomers = ("dev-6", "dev-7", "dev-8")
    state = dataclasses.replace(state, online=PersistentSet(("dev-1", *newcomers)))
    state = dataclasses.replace(state, devices=PersistentSet((*DEVICES, *newcomers)))
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    found = shortage(state)
    assert found.reason == "4 devices online, and 1 of them holds its models: 3 must, to certify them for the others"
    assert found.hint.startswith("start dev-2, dev-3, dev-4, dev-5 again, or end the run")
    alone = dataclasses.replace(state, devices=PersistentSet(("dev-1", *newcomers)))
    assert shortage(alone).reason.endswith("2 must, to certify them for the others")
    assert shortage(alone).hint.startswith("end the run")


def test_a_paused_run_lacks_no_device():
    engine, state = opened()
    state, _ = engine.handle(state, Ordered(Order.PAUSE))
    state, _ = give(engine, state, *state.waiting)
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert shortage(state) is None
