"""Runs with round keys on the loopback fleet: devices hold the models, and all hold the same bits."""

import pytest

from tests.helpers.cases import with_long
from tests.helpers.fleets import grouped_data, make_fleet, names, publish, thetas

ROTATION = {"mode": "rotation"}
GAP_S = 5.0


def run_rounds(fleet, count, within_s=60.0):
    """Run until ``count`` rounds have closed."""
    fleet.run_until(lambda: fleet.closed() >= count, within_s)


def left_out(records):
    """Return (round, device) of each device that an assignment asked and that did not contribute."""
    return [(r["round"], name) for r in records for name in r["missing"]]


@pytest.mark.parametrize("mode", ["none", "permutation", "signed-permutation", "rotation"])
def test_all_devices_end_with_the_same_bits(tmp_path, mode):
    with make_fleet(tmp_path / "fleet", count=4, rounds=4, mode=mode) as fleet:
        records = fleet.run(10)
        assert [r["contributed"] for r in records] == [4] * 5
        assert records[3]["loss"] < records[0]["loss"]
        assert len(set(thetas(fleet).values())) == 1


@pytest.mark.parametrize("away", with_long([1, 2, 5], 2, 5))
def test_away_device_is_back_in_one_round(tmp_path, away):
    """A device that was away takes part again within one round."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=14, quorum=0.5, deadline_s=30, **ROTATION) as fleet:
        run_rounds(fleet, 3)
        fleet.kill_device("dev-02")
        run_rounds(fleet, len(fleet.records()) + away)
        fleet.revive_device("dev-02")
        back = len(fleet.records())
        records = fleet.run(200)
        took_part = [r["round"] for r in records if "dev-02" in r["norms"] and r["round"] > back]
        assert took_part[0] <= back + 3, "one round may be open already when it returns"
        assert len(set(thetas(fleet).values())) == 1


def test_restarts_in_all_rounds_lose_nothing(tmp_path):
    """A device that restarts in every round loses nothing."""
    with make_fleet(tmp_path / "fleet", count=3, rounds=5, **ROTATION) as fleet:
        for done in range(1, 6):
            fleet.kill_device("dev-01")
            fleet.revive_device("dev-01")
            run_rounds(fleet, done)
        records = fleet.run(20)
        assert [r["contributed"] for r in records] == [3] * 6
        assert len(set(thetas(fleet).values())) == 1


def test_killed_aggregator_gives_same_models(tmp_path):
    """An aggregator that is killed in every round gives the same models."""
    found = []
    for kills in (False, True):
        with make_fleet(tmp_path / str(kills), count=3, rounds=5, **ROTATION) as fleet:
            for done in range(1, 6) if kills else ():
                run_rounds(fleet, done)
                fleet.kill_aggregator()
                fleet.revive_aggregator()
            fleet.run(30)
            found.append(set(map(len, [set(thetas(fleet).values())])))
            assert [r["contributed"] for r in fleet.records()] == [3] * 6
    assert found == [{1}, {1}]


def test_partial_draw_takes_devices_back_in(tmp_path):
    """Partial participation draws devices that missed rounds."""
    options = {"count": 6, "rounds": 12, "participation": 0.5, "min_contributors": 2, **ROTATION}
    with make_fleet(tmp_path / "fleet", **options) as fleet:
        records = fleet.run(60)
        assert [r["contributed"] for r in records[1:-1]] == [3] * 11
        assert not left_out(records)
        assert len(set(thetas(fleet).values())) == 1


def test_revocation_holds_from_next_round(tmp_path, tap):
    """A revocation takes effect at the next round."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=8, faults=tap, **ROTATION) as fleet:
        run_rounds(fleet, 2)
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        records = fleet.run(60)
        assert fleet.devices["dev-03"].runtime.revoked
        last = max(r["round"] for r in records if "dev-03" in r["norms"])
        assert last <= 4
        assert len({fleet.model(name).theta.tobytes() for name in names(3)}) == 1


def test_newcomer_joins_run_with_checkpoint(tmp_path):
    data = grouped_data(5)
    first = {name: data[name] for name in names(4)}
    with make_fleet(tmp_path / "fleet", first, rounds=12, **ROTATION) as fleet:
        run_rounds(fleet, 3)
        fleet.add_device("dev-04", data["dev-04"])
        records = fleet.run(200)
        joined = [r["round"] for r in records if "dev-04" in r["norms"]]
        assert joined, "it took part"
        assert joined[0] <= 7
        assert len(set(thetas(fleet).values())) == 1
