"""The mean of a cluster under the run's robust rule: which updates are compared, and what is told of the devices."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies import robust
from aggregator.strategies.base import mean_update
from aggregator.strategies.registry import STRATEGIES, make_strategy
from aggregator.strategies.robust import Finding, RobustMean, Standings
from shoal.protocol.documents import Capabilities, SegmentSpec
from shoal.protocol.recipe import DEFAULTS
from tests.helpers.plans import contribution, run_plan

D = 30
LENGTH = (SegmentSpec("cluster", D),)


def plan(**changes):
    return run_plan(**{"robust": "filter", "segments": LENGTH} | changes)


def given(factors, model=0, seed=0, first=0, common=1.0):
    """Return contributions with a common part, times a factor each."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(D)
    rows = [f * (common * base + 0.3 * rng.standard_normal(D)) for f in factors]
    return [contribution(f"dev-{first + i:02}", row, model=model) for i, row in enumerate(rows)]


FLIPPED = [1.0] * 7 + [-1.0] * 3


@pytest.mark.parametrize(
    "changes", [{"robust": "off"}, {"capabilities": Capabilities(scale=True)}], ids=["off", "lengths are computed"]
)
def test_plain_mean_tells_nothing(changes):
    updates, mean = given(FLIPPED), RobustMean(plan(**changes))
    assert mean(updates, "uniform").tobytes() == mean_update(updates, "uniform").tobytes()
    assert mean.take() == {}


def test_honest_mean_has_bits_of_plain_one():
    updates = given([1.0] * 10)
    assert RobustMean(plan())(updates, "samples", 3.0).tobytes() == mean_update(updates, "samples", 3.0).tobytes()


def test_reversed_updates_are_left_out():
    """Reversed updates are left out and told."""
    updates, mean = given(FLIPPED), RobustMean(plan())
    np.testing.assert_allclose(mean(updates, "uniform"), mean_update(updates[:7], "uniform"), rtol=1e-5)
    found = mean.take()
    assert {d for d, one in found.items() if one.apart} == {"dev-07", "dev-08", "dev-09"}
    assert found["dev-09"] == Finding(True, {0: True})
    assert found["dev-00"] == Finding(False, {0: False})
    assert mean.take() == {}


def test_mean_keeps_the_plans_fewest_devices():
    """A mean never has fewer devices than the plan allows."""
    updates = given(FLIPPED)
    strict = RobustMean(plan(min_contributors=8))
    assert strict(updates, "uniform").tobytes() == mean_update(updates, "uniform").tobytes()
    assert RobustMean(plan(min_contributors=7))(updates, "uniform").tobytes() != strict(updates, "uniform").tobytes()


def test_no_rule_shows_a_single_update():
    """The geometric median of updates one of which lies at their centre is that update."""
    around = np.random.default_rng(1).standard_normal((4, D))
    rows = np.vstack([around, -around, np.full((1, D), 1e-6)]) + 1.0
    updates = [contribution(f"dev-{i}", row) for i, row in enumerate(rows)]
    mean = RobustMean(plan(robust="rfa"))(updates, "uniform").astype(float)
    # At three times the median weight the central update has 3 of 11 parts, and the others cancel out.
    weights = np.linalg.lstsq(rows.T, mean, rcond=None)[0]
    assert weights.max() <= DEFAULTS.weight_cap * np.median(weights) * 1.01


def test_large_cluster_is_weighed_in_blocks(monkeypatch):
    """A large cluster is weighed in blocks."""
    monkeypatch.setattr(robust, "BLOCK_UPDATES", 10)
    updates = given(FLIPPED + FLIPPED)
    found = RobustMean(plan())
    np.testing.assert_allclose(
        found(updates, "uniform"),
        mean_update([c for c, f in zip(updates, FLIPPED * 2, strict=True) if f > 0], "uniform"),
        rtol=1e-4,
    )
    assert sum(one.apart for one in found.take().values()) == 6


def test_unlike_models_are_not_compared():
    """FeSEM averages devices that trained from different centres, whose weights must stay what they are together."""
    one, other = given([1.0] * 6, model=1), given([-1.0] * 4, model=2, first=6)
    mean = RobustMean(plan())
    assert mean([*one, *other], "uniform").tobytes() == mean_update([*one, *other], "uniform").tobytes()
    assert not any(finding.apart for finding in mean.take().values())


def test_left_out_is_remembered_by_model():
    """What was left out is remembered for its model alone."""
    scattered = given([1.0] * 10, common=0.0)
    mean = RobustMean(plan())
    mean.begin(Standings({}, {"dev-08": (0,), "dev-09": (3,)}))
    moved = mean(scattered, "uniform")
    kept = [c for c in scattered if c.device != "dev-08"]
    np.testing.assert_allclose(moved, mean_update(kept, "uniform"), rtol=1e-4, atol=1e-6)
    assert mean.take()["dev-08"].against == {0: True}


def test_updates_of_length_zero_stay():
    updates = [dataclasses.replace(c, vector=np.zeros(D, np.float32), norm=0.0) for c in given([1.0] * 5)]
    assert not RobustMean(plan())(updates, "uniform").any()


@pytest.mark.parametrize("algorithm", sorted(STRATEGIES))
def test_every_strategy_follows_the_rule(algorithm):
    """Every strategy forms its means by the rule."""
    settings = {
        "ifca": {"k": 1},
        "fesem": {"k": 1},
        "one-shot": {"k": 1},
        "fedgroup": {"groups": 1},
        "fedgrouprox": {"groups": 1},
    }
    local = dataclasses.replace(plan().local, prox_mu=0.1)
    changes = {"local": local} if algorithm in ("fedprox", "fedgrouprox") else {}
    strategy = make_strategy(plan(algorithm=algorithm, settings=settings.get(algorithm), **changes))
    assert isinstance(strategy.average, RobustMean)
    assert strategy.average.rule == "filter"
