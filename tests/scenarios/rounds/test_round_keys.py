"""Runs with round keys on the loopback fleet: devices hold the models, and all hold the same bits."""

import pytest

from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    names,
    thetas,
)

ROTATION = {"mode": "rotation"}


def run_rounds(fleet, count, within_s=60.0):
    """Run until ``count`` rounds have closed."""
    fleet.run_until(lambda: fleet.closed() >= count, within_s)


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


def test_partial_draw_takes_devices_back_in(tmp_path):
    """Partial participation draws devices that missed rounds."""
    options = {"count": 6, "rounds": 12, "participation": 0.5, "min_contributors": 2, **ROTATION}
    with make_fleet(tmp_path / "fleet", **options) as fleet:
        records = fleet.run(60)
        assert [r["contributed"] for r in records[1:-1]] == [3] * 11
        assert not any(r["missing"] for r in records)
        assert len(set(thetas(fleet).values())) == 1


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
