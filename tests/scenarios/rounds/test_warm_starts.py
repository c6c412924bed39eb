"""A run that begins with the models of an earlier one's clusters keeps these, on the loopback fleet."""

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    restart_aggregator,
    same_partition,
    thetas,
    truth_of,
)

COUNT = 8
OPTIONS = {"local": LocalTraining(epochs=2, batch_size=10, lr=0.5), "quorum": 1.0, "min_contributors": 2}
NOW = {**truth_of(COUNT + 2, 2), "dev-02": 1}
"""Two devices are new, and another one has data of the other group."""
ALGORITHMS = [
    ("cfl", {}),
    ("fedgroup", {}),
    ("ifca", {}),
    ("one-shot", {}),
    ("fesem", {"k": "2"}),
    ("ifca", {"k": "2"}),
]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The models (2, d) of two groups, as a run of CFL ends with them."""
    root = tmp_path_factory.mktemp("earlier") / "fleet"
    with make_fleet(root, grouped_data(COUNT, 2), algorithm="cfl", rounds=7, **OPTIONS) as fleet:
        fleet.run(20)
        models = sorted(set(thetas(fleet).values()))
        assert len(models) == 2
        return np.stack([np.frombuffer(model, np.float32) for model in models])


def moved_data():
    data = grouped_data(COUNT + 2, 2)
    return {**data, "dev-02": data["dev-03"]}


@pytest.mark.parametrize(("algorithm", "settings"), with_long(ALGORITHMS, ALGORITHMS[0], ALGORITHMS[1]))
def test_groups_are_those_of_the_run_before(tmp_path, earlier, algorithm, settings):
    """Devices keep their group, one whose data moved changes it, and new ones find theirs, from the first round on."""
    options = {**OPTIONS, "algorithm": algorithm, "settings": settings, "rounds": 3}
    with make_fleet(tmp_path / "fleet", moved_data(), origins=earlier, **options) as fleet:
        records = fleet.run(20)
        assert all(same_partition(r["clusters"], NOW) for r in records)
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, NOW)
        assert not any(e["kind"] in ("split", "groups-tried", "clustered") for r in records for e in r["events"])


@pytest.mark.parametrize("algorithm", with_long(["cfl", "fedgroup"], "fedgroup"))
def test_a_late_device_finds_its_group(tmp_path, earlier, algorithm):
    """A device that is off in the first rounds chooses in the last one, or in the final round."""
    options = {**OPTIONS, "algorithm": algorithm, "rounds": 3}
    with make_fleet(tmp_path / "fleet", moved_data(), origins=earlier, **options) as fleet:
        fleet.kill_device("dev-08")
        fleet.run_until(lambda: fleet.closed() == 2, 600)
        fleet.revive_device("dev-08")
        fleet.run(20)
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, NOW)


@pytest.mark.parametrize("algorithm", with_long(["cfl", "ifca"], "ifca"))
def test_a_death_in_round_one_is_harmless(tmp_path, earlier, algorithm):
    """The models are the same as if it had not."""
    ends = []
    for dies in (False, True):
        options = {**OPTIONS, "algorithm": algorithm, "rounds": 2, "mode": "permutation"}
        with make_fleet(tmp_path / str(dies), moved_data(), origins=earlier, **options) as fleet:
            fleet.step()
            if dies:
                restart_aggregator(fleet, steps=1)
            fleet.run(20)
            ends.append(thetas(fleet))
    assert ends[0] == ends[1]
