"""A short run of the benchmark: its rows, what the filter does against reversed updates, and its fleets."""

import numpy as np
import pytest
from shoal_lab.bench.poison import benchmark as fleets
from shoal_lab.bench.poison.benchmark import attacked, measure

from shoal import limits

pytestmark = pytest.mark.torch


def run(**options):
    return measure(**{"data": ("digits",), "rounds": 15} | options, progress=print)["rows"]


@pytest.mark.slow
def test_filter_stands_what_a_mean_does_not():
    """The filter stands what the plain mean does not."""
    rows = run(attacks=("absent", "none", "boosted-flip"), rules=("off", "filter"))
    accuracy = {(r["attack"], r["rule"]): r["accuracy"] for r in rows}
    assert len(rows) == 5
    assert accuracy["none", "filter"] == accuracy["none", "off"]
    assert accuracy["boosted-flip", "filter"] > accuracy["absent", "off"] - 3
    assert accuracy["boosted-flip", "off"] < accuracy["absent", "off"] - 10
    flipped = next(r for r in rows if (r["attack"], r["rule"]) == ("boosted-flip", "filter"))
    assert (flipped["named"], flipped["accused"], flipped["mode"]) == (3, 0, "rotation")
    assert 0 < max(r["error"] for r in rows) < 1e-6


@pytest.mark.long
def test_stretched_backdoor_passes_filter():
    """And not nnm."""
    rows = run(attacks=("backdoor-0", "backdoor-cap-3"), rules=("filter", "nnm"), rounds=50)
    success = {(r["attack"], r["rule"]): r["success"] for r in rows}
    assert success["backdoor-0", "filter"] < 5
    assert success["backdoor-cap-3", "filter"] > 50
    assert success["backdoor-cap-3", "nnm"] < 5
    assert min(r["accuracy"] for r in rows) > 85


def test_every_rule_runs():
    rows = run(attacks=("sign-flip",), rounds=2)
    assert [(r["rule"], r["mode"]) for r in rows] == [(rule, "rotation") for rule in limits.ROBUST_RULES]
    assert 0 < max(r["error"] for r in rows) < 1e-6


def test_digits_are_dealt_without_a_file():
    """No image twice; the seed decides."""
    one, same, other = (fleets.deal("digits", seed, None, 10).population for seed in (1, 1, 2))
    shares = (one.train, one.validation, one.test)
    assert [{len(s) for s in share} for share in shares] == [{90}, {30}, {50}]
    assert len(np.unique(np.vstack([s.x for share in shares for s in share]), axis=0)) > 1690
    assert one.train[0].y.tolist() == same.train[0].y.tolist() != other.train[0].y.tolist()
    assert "digits" in fleets.present(None)


def test_attackers_are_left_out_or_lie():
    population = fleets.deal("digits", 0, None, 10).population
    false = population.names[:3]
    assert attacked(population, "absent").names == population.names[3:]
    assert attacked(population, "sign-flip") is population
    flipped = attacked(population, "label-flip")
    for before, after, name in zip(population.train, flipped.train, population.names, strict=True):
        assert (after.y == (9 - before.y if name in false else before.y)).all()


def test_backdoor_is_white_corner_with_label():
    """On a part of an attacker's images; success is measured on all images of other classes."""
    population = fleets.deal("digits", 0, None, 20).population
    share, test = population.train[0], population.test[0]
    poisoned, triggered = fleets.poisoned(share), fleets.triggered(test)
    assert len(triggered) == np.count_nonzero(test.y != fleets.TARGET) < len(test)
    painted = np.arange(len(share)) % fleets.PAINTED == 0
    for found in (triggered.x, poisoned.x[painted]):
        assert (found.reshape(-1, 8, 8)[:, -2:, -2:] == 1.0).all()
    assert (np.concatenate([triggered.y, poisoned.y[painted]]) == fleets.TARGET).all()
    assert (poisoned.x[~painted] == share.x[~painted]).all()
    assert (poisoned.y[~painted] == share.y[~painted]).all()
