"""FeSEM under round keys: devices hold all centres, measure the distances, and report the nearest."""

import pytest

from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    all_but_the_first,
    events,
    grouped_data,
    make_fleet,
    restart_aggregator,
    restart_device,
    same_partition,
    thetas,
    truth_of,
)
from tests.scenarios.rounds.test_strategies import FESEM

OPTIONS = {**FESEM, "quorum": 1.0}


@pytest.fixture(scope="module")
def unmasked(tmp_path_factory):
    """Clusters of each round of the run without a mask."""
    with make_fleet(tmp_path_factory.mktemp("run") / "fleet", grouped_data(8, 2), mode="none", **OPTIONS) as fleet:
        return [r["clusters"] for r in fleet.run(20)]


@pytest.mark.parametrize("mode", with_long(["permutation", "signed-permutation", "rotation"], "rotation"))
def test_clusters_are_those_without_a_mask(tmp_path, unmasked, mode):
    """The clusters are those of a run without a mask."""
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), mode=mode, **OPTIONS) as fleet:
        records = fleet.run(20)
        assert [r["clusters"] for r in records] == unmasked
        assert events(records, "reassigned"), "a centre was made from models of both"
        assert records[-1]["correct"] / records[-1]["tested"] > 0.75
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, truth_of(8, 2))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Clusters that an undisturbed run ends with."""
    with make_fleet(tmp_path_factory.mktemp("calm") / "fleet", grouped_data(6, 2), mode="rotation", **OPTIONS) as fleet:
        return fleet.run(20)[-1]["clusters"]


def check(fleet, records, clusters):
    """Check that all devices took part in all rounds, and that those of a cluster end with the same bits."""
    assert [r["contributed"] for r in records] == [6] * 6
    assert not [r["out_of_step"] for r in records if r.get("out_of_step")]
    assert records[-1]["clusters"] == clusters
    assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, clusters)


@pytest.mark.parametrize("round_", with_long([1, 2, 3], 2))
def test_killed_aggregator_resumes_the_round(tmp_path, calm, round_, tap):
    """Killed when one upload of the round, with the nearest centre in it, is durable."""
    with make_fleet(tmp_path / "fleet", grouped_data(6, 2), mode="rotation", faults=tap, **OPTIONS) as fleet:
        fleet.run_until(lambda: fleet.closed() == round_ - 1, 20)
        tap.rules.append(all_but_the_first(fleet))
        fleet.settle()
        assert len(fleet.service.state.received) == 1
        restart_aggregator(fleet, steps=1)
        tap.rules.clear()
        check(fleet, fleet.run(100), calm)


def test_kills_in_every_round_lose_nothing(tmp_path, calm):
    """Devices killed in every round lose nothing."""
    with make_fleet(tmp_path / "fleet", grouped_data(6, 2), mode="rotation", **OPTIONS) as fleet:
        for done in range(1, 6):
            for name in ("dev-01", "dev-04"):
                restart_device(fleet, name)
            fleet.run_until(lambda count=done: fleet.closed() >= count, 60)
        check(fleet, fleet.run(60), calm)


def test_away_device_takes_all_checkpoints(tmp_path):
    """They differ by then, and it needs the other one for the distance."""
    options = {**OPTIONS, "quorum": 0.5, "rounds": 12, "deadline_s": 30}
    with make_fleet(tmp_path / "fleet", grouped_data(6, 2), mode="rotation", **options) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        fleet.kill_device("dev-02")
        fleet.run_until(lambda: fleet.closed() >= 6, 200)
        fleet.revive_device("dev-02")
        back = len(fleet.records())
        records = fleet.run(300)
        assert [r["round"] for r in records if "dev-02" in r["norms"] and back < r["round"] <= back + 3]
        assert same_partition(records[-1]["clusters"], truth_of(6, 2))
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, truth_of(6, 2))
