"""Groups against one model by losses made by hand."""

import math

import pytest

from aggregator.strategies.grouping.search import GAIN, gain_of_groups

TWO = {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 1}
ONE = {"a": 1.0, "b": 1.1, "c": 0.9, "d": 2.0, "e": 2.1, "f": 1.9}


@pytest.mark.parametrize(
    ("shares", "least", "most"),
    [
        ([0.9] * 6, 100 * GAIN, math.inf),
        # As under label skew: the mean gain is the same.
        ([0.5, 1.1, 1.1, 0.5, 1.1, 1.1], 0, GAIN),
        ([1.001, 1.0, 1.0, 0.5005, 0.5, 0.5], -GAIN, GAIN),
    ],
    ids=["all gain", "unlike gains", "the group that gains least decides"],
)
def test_what_gains_count(shares, least, most):
    own = {d: share * loss for share, (d, loss) in zip(shares, ONE.items(), strict=True)}
    assert least < gain_of_groups(ONE, own, TWO) < most


def test_the_gain_by_hand():
    """Gains .1 and .3, and twice .4: means .2 and .4, two degrees of freedom."""
    own = {
        "a": (2 - 0.1) / (2 + 0.1),
        "b": (2 - 0.3) / (2 + 0.3),
        "c": (2 - 0.4) / (2 + 0.4),
        "d": (2 - 0.4) / (2 + 0.4),
    }
    one = dict.fromkeys(own, 1.0)
    assert gain_of_groups(one, own, {"a": 0, "b": 0, "c": 1, "d": 1}) == pytest.approx(0.2 / (0.02 / 2) ** 0.5)


def test_equal_rounded_losses_show_no_gain():
    """Losses that are equal as rounded show no gain."""
    assert gain_of_groups(ONE, ONE, TWO) == 0.0
    assert gain_of_groups(dict.fromkeys(ONE, 0.0), dict.fromkeys(ONE, 0.0), TWO) == 0.0
    slight = {d: loss - 1e-4 for d, loss in dict.fromkeys(ONE, 1.0).items()}
    assert gain_of_groups(dict.fromkeys(ONE, 1.0), slight, TWO) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("lie", [(0.0, 1.0), (1.0, 0.0), (3.4e38, 1.0), (1.0, -0.999999), (0.0, 1e-9), (-1.0, -2.0)])
def test_one_false_pair_decides_nothing(lie):
    """One false pair of losses decides nothing in groups of five."""
    groups = {f"dev-{i}": i // 5 for i in range(10)}
    one = {d: 1.0 + 0.02 * i for i, d in enumerate(groups)}
    gain, none = ({d: loss * (f + 0.01 * (i % 3)) for i, (d, loss) in enumerate(one.items())} for f in (0.8, 1.02))
    for liar in ("dev-0", "dev-7", "dev-9"):
        told = {**one, liar: lie[0]}
        assert gain_of_groups(told, {**gain, liar: lie[1]}, groups) > GAIN
        assert gain_of_groups(told, {**none, liar: lie[1]}, groups) < 0


@pytest.mark.parametrize("absent", [("d", "e", "f"), ("b", "c", "e", "f")])
def test_too_few_answers_decide_nothing(absent):
    assert gain_of_groups(ONE, {d: loss / 2 for d, loss in ONE.items() if d not in absent}, TWO) is None
