"""A short run of the benchmark: its rows, and what the filter does against reversed updates."""

import pytest
from shoal_lab.bench.poison.benchmark import Options, data, measure

from shoal import limits
from shoal.errors import UsageError

pytestmark = pytest.mark.torch
KEYS = {"attack", "rule", "data", "accuracy", "error", "mode"}


def run(**changes):
    return measure(Options(**{"data": ("digits",), "rounds": 15} | changes), lambda _: None)


@pytest.mark.slow
def test_the_filter_stands_what_the_plain_mean_does_not():
    rows = run(attacks=("absent", "none", "boosted-flip"), rules=("off", "filter"))
    accuracy = {(r.attack, r.rule): r.accuracy for r in rows}
    assert len(rows) == 5
    assert accuracy["none", "filter"] == accuracy["none", "off"]
    assert accuracy["boosted-flip", "filter"] > accuracy["absent", "off"] - 3
    assert accuracy["boosted-flip", "off"] < accuracy["absent", "off"] - 10
    flipped = next(r for r in rows if (r.attack, r.rule) == ("boosted-flip", "filter"))
    assert (flipped.named, flipped.accused, flipped.mode) == (3, 0, "rotation")
    assert 0 < max(r.error for r in rows) < 1e-6


@pytest.mark.long
def test_a_stretched_backdoor_passes_the_filter_and_not_nnm():
    rows = run(attacks=("backdoor-0", "backdoor-cap-3"), rules=("filter", "nnm"), rounds=50)
    success = {(r.attack, r.rule): r.success for r in rows}
    assert success["backdoor-0", "filter"] < 5
    assert success["backdoor-cap-3", "filter"] > 50
    assert success["backdoor-cap-3", "nnm"] < 5
    assert min(r.accuracy for r in rows) > 85


def test_every_rule_runs_in_every_mode_it_is_given():
    rows = run(attacks=("sign-flip",), modes=("none", "permutation"), rounds=2)
    assert [(r.rule, r.mode) for r in rows] == [(r, m) for r in limits.ROBUST_RULES for m in ("none", "permutation")]
    found = data(rows, Options(rounds=2))
    assert all(row.keys() >= KEYS for row in found["rows"])
    clear, masked = ([r for r in rows if r.mode == mode] for mode in ("none", "permutation"))
    assert [r.accuracy for r in clear] == pytest.approx([r.accuracy for r in masked], abs=1.0)


@pytest.mark.parametrize("changes", [{"attacks": ("x",)}, {"rules": ("krum",)}, {"data": ("letters",)}])
def test_unknown_names_are_refused(changes):
    with pytest.raises(UsageError, match=r"^no "):
        run(**changes)
