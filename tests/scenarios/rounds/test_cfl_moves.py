"""Devices change clusters in a running fleet: their data have become another group's."""

import pytest

from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_exact_fleet,
    make_fleet,
    restart_aggregator,
    restart_device,
    same_partition,
    thetas,
    truth_of,
)

COUNT, EVERY = 8, 7
OPTIONS = {
    "algorithm": "cfl",
    "rounds": 2 * EVERY + 2,
    "local": LocalTraining(epochs=2, batch_size=10, lr=0.5),
    "settings": {"look_every": str(EVERY)},
    "quorum": 1.0,
}


def drift(fleet):
    """Restart a device with data of the other group; return what it measures now."""
    restart_device(fleet, "dev-02", grouped_data(COUNT, 2)["dev-03"])
    return {**truth_of(COUNT, 2), "dev-02": 1}


def moves(records):
    return [(r["round"], e["device"]) for r in records for e in r["events"] if e["kind"] == "moved"]


@pytest.mark.parametrize("mode", with_long(["permutation", "rotation"], "permutation"))
def test_changed_data_change_the_cluster(tmp_path, mode):
    """A device whose data have changed changes clusters."""
    with make_fleet(tmp_path / "fleet", grouped_data(COUNT, 2), **OPTIONS, mode=mode) as fleet:
        fleet.run_until(lambda: fleet.closed() == EVERY, 10)
        assert same_partition(fleet.records()[-1]["clusters"], truth_of(COUNT, 2))
        truth = drift(fleet)
        records = fleet.run(10)
        assert moves(records) == [(2 * EVERY, "dev-02")]
        assert same_partition(records[-1]["clusters"], truth)
        models = thetas(fleet)
        assert same_partition({d: hash(m) for d, m in models.items()}, truth)


def before_the_move(fleet):
    """Run to the round in which the device whose data have changed moves."""
    fleet.run_until(lambda: fleet.closed() == EVERY, 10)
    drift(fleet)
    fleet.run_until(lambda: fleet.closed() == 2 * EVERY - 1, 10)


def end_of(fleet):
    """Run to the end, and return the clusters and models after the one move."""
    records = fleet.run(10)
    assert len(moves(records)) == 1
    return records[-1]["clusters"], thetas(fleet)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The clusters and models that an undisturbed run ends with."""
    with make_exact_fleet(tmp_path_factory.mktemp("calm") / "fleet", grouped_data(COUNT, 2), **OPTIONS) as fleet:
        before_the_move(fleet)
        return end_of(fleet)


@pytest.mark.parametrize("answered", with_long([0, 3], 3))
def test_death_in_a_move_changes_no_model(tmp_path, calm, answered):
    """An aggregator that dies in the round of a move ends with the same models."""
    with make_exact_fleet(tmp_path / "fleet", grouped_data(COUNT, 2), **OPTIONS) as fleet:
        before_the_move(fleet)
        for _ in range(answered):
            fleet.step()
        restart_aggregator(fleet, steps=1)
        assert end_of(fleet) == calm
