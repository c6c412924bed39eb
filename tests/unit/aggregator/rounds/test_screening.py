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


def test_the_first_round_is_compared_with_its_own_median():
    done = screen(of(1.0, 2.0, 3.0, 100.0), {})
    assert done.refused == {"dev-3": 100.0}
    assert [c.device for c in done.accepted] == ["dev-0", "dev-1", "dev-2"]
    assert done.levels == {"train": 2.0, "train/0": 2.0}


@pytest.mark.parametrize(("norm", "passes"), [(20.0, True), (20.1, False)])
def test_ten_times_the_median_of_the_last_round_is_the_limit(norm, passes):
    assert NORM_LIMIT_RATIO == 10.0
    assert (not refused([update("dev-0", norm)], {"train": 2.0})) is passes


def test_two_updates_are_no_median_of_their_own():
    assert not refused(of(1.0, 100.0))
    assert refused(of(1.0, 100.0), {"train": 1.0}) == {"dev-1"}


def test_of_two_devices_neither_can_shut_the_other_out_with_a_tiny_update():
    levels = {}
    for tiny in (0.0, 1e-6, 1e-5):
        done = screen(of(tiny, 1.0), levels)
        assert not done.refused
        levels = done.levels
    assert levels["train"] == 1.0


def test_of_two_devices_in_a_cluster_of_a_larger_fleet_none_can_raise_the_level():
    levels = {}
    for _ in range(5):
        long = 9.9 * max(levels.get("train/1", 1.0), 1.0)
        pair = [update("one", 1.0, model=1), update("two", long, model=1)]
        levels = screen([*of(1.0, 1.0, 1.0), *pair], levels).levels
        assert levels["train"] == levels["train/1"] == 1.0


def test_one_large_update_in_each_round_never_raises_the_level():
    levels = {}
    for _ in range(5):
        done = screen(of(1.0, 1.0, 9.9 * levels.get("train", 1.0)), levels)
        levels = done.levels
        assert levels["train"] == 1.0


def test_a_change_that_most_devices_show_is_accepted():
    assert not refused(of(50.0, 60.0, 1.0), {"train": 1.0, "train/0": 1.0})


def test_a_cluster_with_longer_updates_than_the_others_is_accepted():
    small = of(*[0.01] * 9)
    large = [update(f"big-{i}", 1.0, model=1) for i in range(3)]
    assert not refused(small + large, {"train": 0.01})
    assert refused([*small, large[0]], {"train": 0.01}) == {"big-0"}


def test_pre_training_is_compared_with_pre_training_only():
    levels = screen(of(1.0, 1.0, 1.0), {}).levels
    first = screen(of(40.0, 50.0, phase=Phase.PRETRAIN), levels)
    assert not first.refused
    assert first.levels["train"] == 1.0
    assert first.levels["pretrain"] == 50.0
    assert refused(of(501.0, phase=Phase.PRETRAIN), first.levels) == {"dev-0"}


def test_scores_are_not_limited():
    score = contribution("dev-9", None, phase=Phase.SCORE)
    assert score in screen([*of(1.0, 1.0, 1.0), score], {}).accepted


def test_a_median_of_zero_is_no_reference():
    done = screen(of(0.0, 0.0, 0.0, 5.0), {})
    assert not done.refused
    assert done.levels == {}
    assert screen(of(0.0, 0.0, 0.0), {"train": 2.0}).levels["train"] == 2.0


def test_a_fleet_of_two_whose_data_have_changed_is_refused_for_one_round_only():
    done = screen(of(50.0, 50.0), {"train": 1.0})
    assert set(done.refused) == {"dev-0", "dev-1"}
    assert not refused(of(50.0, 50.0), done.levels)


def test_what_arrives_first_makes_no_difference():
    given = of(1.0, 2.0, 300.0, 3.0, 40.0, 2.5)
    forward, backward = screen(given, {}), screen(given[::-1], {})
    assert forward.refused == backward.refused
    assert forward.levels == backward.levels


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
def test_the_limit_for_the_means_of_a_round_is_that_of_its_longest_allowed_update(given, levels, limit):
    done = screen(given, levels)
    assert done.limit == limit
    assert all(c.norm <= limit for c in done.accepted)
