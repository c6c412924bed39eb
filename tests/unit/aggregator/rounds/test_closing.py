"""The close of a round without an engine: which updates are used, and what is remembered."""

import numpy as np

from aggregator.rounds.closing import Watched, close_round
from aggregator.strategies.registry import make_strategy
from tests.helpers.plans import D, contribution, run_plan

DEVICES = tuple(f"dev-{i}" for i in range(1, 6))


def closed(**options):
    """Close a round in which the last device's update is a hundred times as long as the others'."""
    run = run_plan()
    strategy = make_strategy(run)
    state, plan = strategy.plan(strategy.init(DEVICES), 1, DEVICES)
    updates = [contribution(d, np.full(D, 100.0 if d == DEVICES[-1] else 1.0, np.float32)) for d in DEVICES]
    rest = {"run": run, "average": None, "fleet": DEVICES, "there": DEVICES, **options}
    return close_round(strategy, state, plan, updates, Watched(), **rest)


def test_long_update_is_left_out():
    """A long update is left out and the level of the others is remembered."""
    _, outcome, watched, screened = closed()
    assert set(screened.refused) == {DEVICES[-1]}
    assert watched.levels
    assert set(outcome.clusters) == set(DEVICES)


def test_without_screen_every_update_is_used():
    _, _, watched, screened = closed(screens=False)
    assert [c.device for c in screened.accepted] == list(DEVICES)
    assert watched.levels == {}
