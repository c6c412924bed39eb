"""The relative norm limit: what is left out of a round, and the level that the next one is compared with."""

import pytest

from aggregator.rounds.screening import NORM_LIMIT_RATIO, screen
from shoal.protocol.messages import Phase
from tests.helpers.plans import contribution


def update(device, norm, **changes):
    return contribution(device, [norm, 0, 0, 0, 0, 0], **changes)


def of(*norms, **changes):
    return [update(f"dev-{i}", norm, **changes) for i, norm in enumerate(norms)]


def refused(given, levels=None):
    return set(screen(given, levels or {}).refused)


def test_first_round_has_its_own_median():
    """The first round is compared with its own median."""
    done = screen(of(1.0, 2.0, 3.0, 100.0), {})
    assert done.refused == {"dev-3": 100.0}
    assert [c.device for c in done.accepted] == ["dev-0", "dev-1", "dev-2"]
    assert done.levels == {"train": 2.0, "train/0": 2.0}
    backward = screen(of(1.0, 2.0, 3.0, 100.0)[::-1], {})
    assert (backward.refused, backward.levels) == (done.refused, done.levels)


@pytest.mark.parametrize(("norm", "passes"), [(20.0, True), (20.1, False)])
def test_limit_is_ten_times_the_median(norm, passes):
    """Ten times the median of the last round is the limit."""
    assert NORM_LIMIT_RATIO == 10.0
    assert (not refused([update("dev-0", norm)], {"train": 2.0})) is passes


def test_two_updates_are_no_median():
    """Two updates are no median of their own."""
    assert not refused(of(1.0, 100.0))
    assert refused(of(1.0, 100.0), {"train": 1.0}) == {"dev-1"}


def test_tiny_update_shuts_nobody_out():
    """Of two devices neither can shut the other out with a tiny update."""
    levels = {}
    for tiny in (0.0, 1e-6, 1e-5):
        done = screen(of(tiny, 1.0), levels)
        assert not done.refused
        levels = done.levels
    assert levels["train"] == 1.0


def test_pair_can_not_raise_the_level():
    """Of two devices in a cluster of a larger fleet none can raise the level."""
    levels = {}
    for _ in range(5):
        long = 9.9 * max(levels.get("train/1", 1.0), 1.0)
        pair = [update("one", 1.0, model=1), update("two", long, model=1)]
        levels = screen([*of(1.0, 1.0, 1.0), *pair], levels).levels
        assert levels["train"] == levels["train/1"] == 1.0


def test_one_large_update_raises_no_level():
    """One large update in each round never raises the level."""
    levels = {}
    for _ in range(5):
        levels = screen(of(1.0, 1.0, 9.9 * levels.get("train", 1.0)), levels).levels
        assert levels["train"] == 1.0


def test_change_of_most_devices_is_accepted():
    """A change that most devices show is accepted."""
    assert not refused(of(50.0, 60.0, 1.0), {"train": 1.0, "train/0": 1.0})


def test_cluster_of_longer_updates_passes():
    """A cluster with longer updates than the others is accepted."""
    small = of(*[0.01] * 9)
    large = [update(f"big-{i}", 1.0, model=1) for i in range(3)]
    assert not refused(small + large, {"train": 0.01})
    assert refused([*small, large[0]], {"train": 0.01}) == {"big-0"}


def test_pre_training_has_its_own_level():
    """Pre training is compared with pre training only."""
    levels = screen(of(1.0, 1.0, 1.0), {}).levels
    first = screen(of(40.0, 50.0, phase=Phase.PRETRAIN), levels)
    assert not first.refused
    assert (first.levels["train"], first.levels["pretrain"]) == (1.0, 50.0)
    assert refused(of(501.0, phase=Phase.PRETRAIN), first.levels) == {"dev-0"}


def test_scores_are_not_limited():
    score = contribution("dev-9", None, phase=Phase.SCORE)
    assert score in screen([*of(1.0, 1.0, 1.0), score], {}).accepted


def test_a_median_of_zero_is_no_reference():
    done = screen(of(0.0, 0.0, 0.0, 5.0), {})
    assert not done.refused
    assert done.levels == {}
    assert screen(of(0.0, 0.0, 0.0), {"train": 2.0}).levels["train"] == 2.0


def test_changed_pair_is_refused_once():
    """A fleet of two whose data have changed is refused for one round only."""
    done = screen(of(50.0, 50.0), {"train": 1.0})
    assert set(done.refused) == {"dev-0", "dev-1"}
    assert not refused(of(50.0, 50.0), done.levels)


@pytest.mark.parametrize(
    ("given", "levels", "limit"),
    [
        (of(1.0, 2.0, 3.0, 100.0), {}, 20.0),
        (of(1.0, 2.0), {"train": 5.0}, 50.0),
        (of(1.0, 2.0), {}, 20.0),
        (of(0.0, 0.0, 0.0, 5.0), {}, 50.0),
        ([*of(1.0, 1.0, 1.0), update("dev-8", 9.0, model=1)], {"train/1": 4.0}, 40.0),
        ((), {"train": 1.0}, 0.0),
    ],
)
def test_limit_of_means_is_the_longest(given, levels, limit):
    """The limit for the means of a round is that of its longest allowed update."""
    done = screen(given, levels)
    assert done.limit == limit
    assert all(c.norm <= limit for c in done.accepted)
