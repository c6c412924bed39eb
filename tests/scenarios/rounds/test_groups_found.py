"""IFCA, FedGroup and one-shot clustering that find the number of groups, on the loopback fleet."""

import pytest

from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    LOST,
    all_but_the_first,
    events,
    grouped_data,
    make_exact_fleet,
    make_fleet,
    restart_aggregator,
    same_partition,
    thetas,
    truth_of,
)

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
FINDS = {"rounds": 7, "local": QUICK, "min_contributors": 3}
TRIALS = {"ifca": (4,), "fedgroup": (2,)}
"""The round of a trial in which the aggregator is killed; `make long` kills it in all five."""
ALGORITHMS = ("ifca", "fedgroup", "one-shot")


@pytest.mark.parametrize("algorithm", with_long(ALGORITHMS, "fedgroup", "one-shot"))
def test_groups_are_found_without_number(tmp_path, algorithm):
    """The hidden groups are found without their number."""
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), algorithm=algorithm, **FINDS) as fleet:
        records = fleet.run(30)
        tried, found = events(records, "groups-tried", "groups-found")
        assert (tried["round"], found["round"]) == (1, 5)
        assert (found["k"], found["sizes"]) == (2, [4, 4])
        assert found["silhouette"] > 0.25
        assert same_partition(records[-1]["clusters"], truth_of(8, 2))
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, truth_of(8, 2))
        assert {len(set(r["clusters"].values())) for r in records[:4]} == {1}


@pytest.mark.parametrize("algorithm", with_long(ALGORITHMS, "ifca"))
def test_a_fleet_of_one_kind_keeps_one_model(tmp_path, algorithm):
    with make_fleet(tmp_path / "fleet", grouped_data(8, 1), algorithm=algorithm, **FINDS) as fleet:
        records = fleet.run(30)
        assert not events(records, "groups-found")
        assert len(set(thetas(fleet).values())) == 1


@pytest.mark.parametrize("algorithm", with_long(ALGORITHMS, "ifca"))
def test_masks_change_no_group(tmp_path, algorithm):
    seen = []
    modes = ("rotation", "permutation", "none") if algorithm == "fedgroup" else ("rotation", "none")
    for mode in modes:
        with make_fleet(tmp_path / mode, grouped_data(6, 2), mode=mode, algorithm=algorithm, **FINDS) as fleet:
            records = fleet.run(30)
            found = events(records, "groups-found")
            seen.append((records[-1]["clusters"], [(e["k"], e["sizes"]) for e in found]))
    assert all(found == seen[0] for found in seen)
    assert seen[0][1] == [(2, [3, 3])]


def test_groups_take_turns_and_learn(tmp_path):
    """Two of eight devices a round, and a mean of two: a draw over the whole fleet would seldom hit one group twice."""
    options = {**FINDS, "rounds": 13, "participation": 0.25, "min_contributors": 2}
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), algorithm="fedgroup", **options) as fleet:
        records = fleet.run(60)
        clusters = records[-1]["clusters"]
        assert same_partition(clusters, truth_of(8, 2))
        later = [r for r in records[5:-1] if r["ordered"] == 2]
        trained = [{clusters[d] for d in r["norms"]} for r in later]
        assert all(len(groups) == 1 for groups in trained)
        assert {g for groups in trained for g in groups} == {0, 1}


@pytest.mark.parametrize("algorithm", with_long(("ifca", "fedgroup"), "ifca"))
def test_later_device_joins_its_group(tmp_path, algorithm):
    """A device that comes later joins its group."""
    data = grouped_data(9, 2)
    late = data.pop("dev-08")
    with make_fleet(tmp_path / "fleet", data, algorithm=algorithm, **{**FINDS, "rounds": 11}) as fleet:
        fleet.run_until(lambda: fleet.closed() == 6, 30)
        fleet.add_device("dev-08", late)
        records = fleet.run(200)
        assert same_partition(records[-1]["clusters"], truth_of(9, 2))


@pytest.fixture(scope="module")
def calm(request, tmp_path_factory):
    """(options, clusters and models that an undisturbed run ends with)."""
    options = {**FINDS, "quorum": 1.0, "algorithm": request.param}
    with make_exact_fleet(tmp_path_factory.mktemp("calm") / "fleet", grouped_data(6, 2), **options) as fleet:
        return options, fleet.run(30)[-1]["clusters"], thetas(fleet)


@pytest.mark.parametrize(
    ("calm", "round_"),
    [
        *((algorithm, round_) for algorithm, of in TRIALS.items() for round_ in of),
        *(
            pytest.param(algorithm, round_, marks=pytest.mark.long)
            for algorithm, of in TRIALS.items()
            for round_ in range(1, 6)
            if round_ not in of
        ),
    ],
    indirect=["calm"],
)
def test_crash_in_a_trial_changes_no_bit(tmp_path, calm, round_, tap):
    """A crash in any round of a trial changes no bit."""
    options, clusters, models = calm
    with make_exact_fleet(tmp_path / "fleet", grouped_data(6, 2), faults=tap, **options) as fleet:
        fleet.run_until(lambda: fleet.closed() == round_ - 1, 30)
        tap.rules.append(all_but_the_first(fleet))
        fleet.settle()
        assert (fleet.service.state.round, len(fleet.service.state.received)) == (round_, 1)
        restart_aggregator(fleet, steps=1)
        tap.rules.clear()
        records = fleet.run(100)
        assert records[-1]["clusters"] == clusters
        assert thetas(fleet) == models
    assert len(set(clusters.values())) == 2


def test_missed_trial_round_is_made_up_for(tmp_path, tap):
    """It lacks states of two rounds, and takes its group's model from a checkpoint."""
    options = {**FINDS, "quorum": 0.5, "deadline_s": 1.0, "rounds": 12}
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), faults=tap, algorithm="fedgroup", **options) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 30)
        tap.rules.append(lambda p: LOST if p.client == fleet.client_id("dev-07") else None)
        fleet.run_until(lambda: fleet.closed() == 3, 60)
        tap.rules.clear()
        records = fleet.run(200)
        assert events(records, "groups-found")
        assert same_partition(records[-1]["clusters"], truth_of(8, 2))
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, truth_of(8, 2))
