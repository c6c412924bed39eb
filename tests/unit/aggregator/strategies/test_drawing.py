"""The devices of a round under partial participation."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.strategies.drawing import POOL, budget, drawn, drawn_by_cluster, drawn_in_turn
from tests.helpers.plans import altered, run_plan

DEVICES = tuple(f"d{i}" for i in range(10))


def test_all_take_part_in_full_participation():
    assert drawn(run_plan(), 1, DEVICES) == DEVICES


@pytest.mark.parametrize(("participation", "count"), [(0.5, 5), (0.25, 2), (0.01, 1), (0.99, 10)])
def test_draw_has_its_share_in_order(participation, count):
    """The draw has its share at least one and keeps the order."""
    chosen = drawn(run_plan(participation=participation), 3, DEVICES)
    assert len(chosen) == len(set(chosen)) == count
    assert list(chosen) == [d for d in DEVICES if d in chosen]


def test_draw_depends_on_seed_and_round():
    """The draw depends on seed and round alone."""
    run = run_plan(participation=0.5)
    first = drawn(run, 3, DEVICES)
    assert drawn(dataclasses.replace(run, run=9, run_id=b"x" * 16), 3, DEVICES) == first
    assert len({drawn(run, r, DEVICES) for r in range(1, 9)}) > 4
    assert len({drawn(altered(run, seed=s), 3, DEVICES) for s in range(8)}) > 4


# ------------------------------------------------------------------------------------------------------------ by cluster


def clusters_of(*sizes):
    names = iter(range(1000))
    return {i: tuple(f"d{next(names):03}" for _ in range(size)) for i, size in enumerate(sizes)}


def turns(clusters, rounds, participation, least=3, seed=1):
    """Return the draw of each of so many rounds, each cluster's turns kept between them."""
    run, asked, found = run_plan(participation=participation, seed=seed), {}, []
    for round_ in range(1, rounds + 1):
        found.append(drawn_by_cluster(run, round_, clusters, asked, least))
        asked |= dict.fromkeys(found[-1], round_)
    return found


def test_full_participation_trains_all():
    """All devices of all clusters train under full participation."""
    clusters = clusters_of(5, 3)
    assert turns(clusters, 1, 1.0) == [clusters]


def test_one_cluster_is_drawn_plainly():
    """A fleet of one cluster is drawn as it is without clusters."""
    run = run_plan(participation=0.4)
    assert drawn_by_cluster(run, 7, {0: DEVICES}, {}, 3) == {0: drawn(run, 7, DEVICES)}


def test_clusters_take_turns_for_a_mean():
    """Clusters take turns that a mean can be made of."""
    found = turns(clusters_of(5, 5, 5, 5), 8, 0.2)
    assert [sorted(chosen) for chosen in found] == [[0], [1], [2], [3]] * 2
    assert all(len(members) == 4 for chosen in found for members in chosen.values())
    assert found[0] != found[4], "other members the next time"


def test_cluster_size_changes_no_frequency():
    """Devices of small and large clusters are drawn as often."""
    clusters = clusters_of(14, 4)
    found = Counter(d for chosen in turns(clusters, 200, 0.2) for members in chosen.values() for d in members)
    rates = [sum(found[d] for d in members) / len(members) / 200 for members in clusters.values()]
    assert rates == pytest.approx([0.2, 0.2], abs=0.05)


def test_enough_devices_train_every_cluster():
    for chosen in turns(clusters_of(100, 50, 10), 5, 0.3):
        assert {id_: len(members) for id_, members in chosen.items()} == {0: 30, 1: 15, 2: 3}


def test_too_small_cluster_is_left_out():
    """A cluster of too few devices is left out."""
    assert {id_ for chosen in turns(clusters_of(6, 2), 10, 0.5) for id_ in chosen} == {0}
    assert turns(clusters_of(2, 2), 2, 0.5) == [{}, {}]


def test_one_cluster_trains_at_any_budget():
    """One cluster trains even if the budget is less than a mean needs."""
    assert [len(members) for chosen in turns(clusters_of(5, 5), 2, 0.1) for members in chosen.values()] == [3, 3]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.floats(0.01, 1),
    st.integers(1, 6),
    st.integers(0, 2**32),
)
def test_any_draw_keeps_to_its_budget(sizes, participation, least, seed):
    """Any draw keeps to the budget and to the clusters."""
    clusters = clusters_of(*sizes)
    most = budget(run_plan(participation=participation), sum(sizes))
    for chosen in turns(clusters, 4, participation, least, seed):
        for id_, members in chosen.items():
            assert list(members) == sorted(set(members))
            assert set(members) <= set(clusters[id_])
            assert len(members) >= least or len(clusters) == 1 or most == sum(sizes)
        assert sum(map(len, chosen.values())) <= max(most, least)
        assert chosen or all(size < least for size in sizes)


# ------------------------------------------------------------------------------------------------------------ in turn

FOUR = {f"d{i:02}": i // 5 for i in range(20)}
TWENTY = tuple(sorted(FOUR))


@pytest.mark.parametrize("changes", [{"participation": 0.2}, {"min_contributors": 3}])
def test_means_of_one_are_drawn_plainly(changes):
    """The draw is the plain one for means of one and for all devices."""
    run = run_plan(**changes)
    assert drawn_in_turn(run, 3, TWENTY, FOUR, {}) == (drawn(run, 3, TWENTY), {})
    of_several = run_plan(participation=0.2, min_contributors=3)
    assert drawn_in_turn(of_several, 1, ("a", "b", "c"), {}, {})[0] == drawn(of_several, 1, ("a", "b", "c"))


def test_clusters_have_turns_of_several():
    """Clusters have their turn where a mean needs several devices."""
    run, asked, seen = run_plan(participation=0.2, min_contributors=3), {}, []
    for round_ in range(1, 5):
        chosen, asked = drawn_in_turn(run, round_, TWENTY, FOUR, asked)
        assert len(chosen) == 4
        seen.append({FOUR[d] for d in chosen})
    assert seen == [{0}, {1}, {2}, {3}]
    assert asked == {0: 1, 1: 2, 2: 3, 3: 4}


def test_unclustered_devices_have_a_turn():
    """Devices without a cluster or in a small one have a turn of their own."""
    run = run_plan(participation=0.2, min_contributors=3)
    known = {d: j for d, j in FOUR.items() if d not in ("d18", "d19")} | {"d17": 7, "d16": 7}
    asked, seen = {}, set()
    for round_ in range(1, 9):
        chosen, asked = drawn_in_turn(run, round_, TWENTY, known, asked)
        seen |= set(chosen)
        pooled = {"d15", "d16", "d17", "d18", "d19"} & set(chosen)
        assert not pooled or pooled == set(chosen)
    assert seen == set(TWENTY)
    assert asked.keys() == {0, 1, 2, POOL}


def test_single_unclustered_joins_first_turn():
    """A single device without a cluster joins the first clusters turn."""
    run = run_plan(participation=0.25, min_contributors=3)
    known = {d: j for d, j in FOUR.items() if d != "d19"}
    draws, asked = [], {}
    for round_ in range(1, 41):
        chosen, asked = drawn_in_turn(run, round_, TWENTY, known, asked)
        draws.append(set(chosen))
    assert any("d19" in chosen for chosen in draws)
    assert all({known[d] for d in chosen - {"d19"}} == {0} for chosen in draws if "d19" in chosen)
