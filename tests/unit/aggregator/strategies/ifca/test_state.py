"""IFCA's settings against the rest of a plan, and the choice of the best start."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.ifca.state import IfcaSettings, IfcaState, checked_settings
from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from tests.helpers.plans import FULL_BATCH, run_plan

SHARED = (SegmentSpec("shared", 2), SegmentSpec("cluster", 4))


def checked(changes=None, **settings):
    """Return the checked settings of a plan that ships as many origins as they need."""
    settings = {"k": 2, **settings}
    origins = 1 if isinstance(settings["k"], str) else settings["k"] * settings.get("restarts", 1)
    return checked_settings(run_plan("ifca", settings, **{"origins": origins, "rounds": 100, **(changes or {})}))


def local(**changes):
    return {"local": dataclasses.replace(FULL_BATCH, **changes)}


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"stable_rounds": -1}, {}, "stable_rounds is at least 0, probe_every at least 1"),
        ({"probe_every": 0}, {}, "stable_rounds is at least 0, probe_every at least 1"),
        ({"option": "both"}, {}, "option 'both' is neither model nor gradient"),
        (
            {"normalise": "none"},
            {},
            "normalise 'none' is none of auto, machines, participants, cluster, samples",
        ),
        ({"option": "gradient"}, local(epochs=1, batch_size=10), "option gradient takes one full-batch step a round"),
        ({"option": "gradient"}, local(steps=2), "option gradient takes one full-batch step a round"),
        ({"option": "gradient"}, local(momentum=0.5), "option gradient takes one full-batch step a round"),
        ({"k": 3}, {"origins": 2}, "1 starts of 3 models need 3 origins, the run ships 2"),
        ({"k": 2, "restarts": 3}, {"origins": 2}, "3 starts of 2 models need 6 origins, the run ships 2"),
        (
            {"restarts": 2, "restart_rounds": 5},
            {"rounds": 10},
            "2 starts of 5 rounds leave none of 10 to the kept one",
        ),
        (
            {},
            {"segments": (SegmentSpec("shared", 6),)},
            "ifca needs one cluster segment and at most one shared one",
        ),
        (
            {},
            {"segments": (SegmentSpec("cluster", 2), SegmentSpec("cluster", 4))},
            "ifca needs one cluster segment and at most one shared one",
        ),
        ({"k": 0}, {"origins": 1}, "k is at least 1, or auto"),
        ({"restart_rounds": 0}, {}, "k, restarts and restart_rounds are at least 1"),
        ({"restarts": 0}, {"origins": 1}, "k, restarts and restart_rounds are at least 1"),
        ({"k": "two"}, {}, "setting k is a whole number or auto, not 'two'"),
        ({"k": "auto"}, {"origins": 33}, "1 starts of 1 models need 1 origins, the run ships 33"),
        ({"k": "auto", "restarts": 2}, {}, "2 random starts of a number of models that is not given"),
        ({"k": "auto"}, {"segments": SHARED}, "ifca can't find the number of models of a task with a shared segment"),
    ],
)
def test_senseless_settings_are_refused(settings, changes, message):
    """Settings that make no sense are refused."""
    with pytest.raises(ConfigError) as caught:
        checked(changes, **settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"option": "gradient"}, {}),
        ({"restarts": 2, "restart_rounds": 5}, {"rounds": 11}),
        ({"restarts": 2, "restart_rounds": 5}, {"segments": SHARED}),
        ({"k": 1}, {}),
    ],
    ids=["one full-batch step", "one round left", "starts that share weights", "one model"],
)
def test_settings_at_the_edge_are_allowed(settings, changes):
    found = checked(changes, **settings)
    assert all(getattr(found, name) == value for name, value in settings.items())


def test_restarts_discard_all_but_one():
    """Restarts take origins and discard the rounds of all but one."""
    made = IfcaSettings(k=3, restarts=4, restart_rounds=5)
    assert (made.origins, made.discarded_rounds) == (12, 15)
    assert (IfcaSettings(k=3).origins, IfcaSettings(k=3).discarded_rounds) == (3, 0)


def test_best_finished_start_goes_on():
    """The models of the last start are dropped, and its choices with them."""
    best = tuple(ClusterModel(i, np.full(4, i, np.float32)) for i in (2, 3))
    shared = ClusterModel(2, np.ones(2, np.float32))
    last = IfcaState(
        devices=("dev-1",),
        slots=(ClusterModel(4), ClusterModel(5)),
        shared=ClusterModel(4),
        start=2,
        started=9,
        best=best,
        best_shared=shared,
        best_start=1,
        best_loss=0.25,
        best_choice={"dev-1": 1},
        choice={"dev-1": 0},
    )
    settled = last.settle()
    assert settled.slots is best
    assert settled.shared is shared
    assert (settled.start, settled.settled, settled.choice) == (1, True, {"dev-1": 1})
    assert (settled.best, settled.best_shared) == ((), None), "the store need not keep them twice"
    assert (settled.devices, settled.best_loss) == (last.devices, 0.25)
    assert not last.settled
