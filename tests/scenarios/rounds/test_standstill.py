"""A cluster that is too small to be averaged is in the record, in the log and in the status, with the reason and a way out."""

import logging

import pytest

from aggregator.rounds.standstill import MOVES_AGAIN, STANDS_STILL
from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    events,
    grouped_data,
    make_fleet,
    restart_aggregator,
    status_of,
)

QUICK = LocalTraining(epochs=0, steps=4, batch_size=0, lr=0.8)
ALONE = LocalTraining(epochs=0, steps=12, batch_size=0, lr=0.8)
ONE_SHOT = {"algorithm": "one-shot", "settings": {"k": "2"}, "local": QUICK, "pretrain": ALONE}
REASON = "it has 2 devices, and a mean takes 3"
KINDS = STANDS_STILL, MOVES_AGAIN
HINT = (
    "begin the next run with more devices like these, or with a --min-contributors of 2 "
    "(devices can then read means of so few)"
)


def warnings(caplog):
    return [r for r in caplog.records if r.getMessage() == STANDS_STILL]


def revoke_in_the_first_round(fleet, name):
    """Revoke a device once clusters are found: none is made that is too small for a mean."""
    fleet.run_until(lambda: fleet.closed() == 1, 100)
    fleet.stage.fleet.revoke(name)
    fleet.publish()


@pytest.fixture(autouse=True)
def everything(caplog):
    caplog.set_level(logging.INFO, "shoal.aggregator")


@pytest.mark.parametrize("killed_in", with_long([None, 5], 5))
def test_two_devices_without_a_mean_are_told(tmp_path, caplog, killed_in):
    """Of two groups of three devices one loses a device, and means are of at least three; a restart changes nothing."""
    data = grouped_data(6, 2)
    with make_fleet(tmp_path, data, rounds=7, min_contributors=3, **ONE_SHOT) as fleet:
        revoke_in_the_first_round(fleet, "dev-05")
        if killed_in is not None:
            fleet.run_until(lambda: fleet.closed() == killed_in, 100)
            restart_aggregator(fleet)
        records = fleet.run(600)
        text, (figures,) = status_of(fleet), status_of(fleet, "--json")["runs"]
    small = records[-1]["clusters"]["dev-01"]
    assert [r["round"] for r in records if r["still"]] == [4, 5, 6, 7, 8]
    assert [(e["round"], e["kind"]) for e in events(records, *KINDS)] == [(4, STANDS_STILL)]
    (warning,) = warnings(caplog)
    assert warning.levelno == logging.WARNING
    assert (warning.kv["cluster"], warning.kv["reason"], warning.kv["hint"]) == (small, REASON, HINT)
    (still,) = figures["still"]
    assert (still["cluster"], still["devices"], still["rounds"]) == (small, 2, 6)
    assert f"run 1 stands still: cluster {small} for 6 rounds: {REASON}\n  hint: {HINT}\n" in text


def test_device_that_comes_back_ends_report(tmp_path, caplog):
    with make_fleet(tmp_path, grouped_data(6, 2), rounds=12, min_contributors=3, **ONE_SHOT, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 100)
        fleet.kill_device("dev-05")
        fleet.run_until(lambda: fleet.records()[-1]["still"], 600)
        assert fleet.records()[-1]["still"][0]["reason"] == "2 of its 3 devices are online, and a mean takes 3"
        fleet.revive_device("dev-05")
        records = fleet.run(2000)
        text = status_of(fleet)
    assert [e["kind"] for e in events(records, *KINDS)] == [STANDS_STILL, MOVES_AGAIN]
    assert len(warnings(caplog)) == 1
    assert not records[-1]["still"]
    assert "stands still" not in text


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("cfl", {}), *with_long([("fedavg", {}), ("ifca", {"k": "2"}), ("one-shot", {"k": "2"})])],
)
def test_moving_clusters_say_nothing(tmp_path, caplog, algorithm, settings):
    """A run in which every cluster moves says nothing."""
    with make_fleet(tmp_path, grouped_data(6, 2), rounds=8, algorithm=algorithm, settings=settings) as fleet:
        records = fleet.run(600)
        text = status_of(fleet)
    assert not events(records, *KINDS)
    assert not any(r["still"] for r in records)
    assert "stands still" not in text
    assert not warnings(caplog)
