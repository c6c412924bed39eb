"""A run whose fleet has fallen below ``min_contributors`` waits, says so, and goes on once a device is admitted or returns."""

import logging

import pytest

from aggregator.rounds.quorum_and_deadline import FLEET_TOO_SMALL, TOO_SMALL_HINT
from shoal.protocol.requests import RequestAction
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    restart_aggregator,
    status_of,
    thetas,
)

REASON = "the fleet has 2 devices, and a mean takes 3 (min_contributors)"
LONG_S = 500.0


def small_fleet(root, **options):
    """Return a fleet of three, of which a mean takes all three, with one closed round."""
    fields = {"min_contributors": 3, "quorum": 0.5, "deadline_s": 20.0, "rounds": 8, **options}
    fleet = make_fleet(root / "fleet", grouped_data(3), **fields)
    fleet.run_until(lambda: fleet.closed() == 1, 10)
    return fleet


def revoke(fleet, name="dev-02"):
    fleet.stage.fleet.revoke(name)
    fleet.publish()
    fleet.run_until(lambda: name not in fleet.service.state.devices, 60)


def restart(fleet):
    restart_aggregator(fleet)
    fleet.run_until(lambda: fleet.service.state.plan is None, 60)


def waits(fleet):
    """Run for a long time, and return how many rounds have closed before it: none closes in it."""
    fleet.run_until(lambda: fleet.service.state.plan is None, 60)
    closed, end_s = len(fleet.records()), fleet.now_s + LONG_S
    fleet.run_until(lambda: fleet.now_s >= end_s, 2 * LONG_S)
    assert len(fleet.records()) == closed
    return closed


def moved(fleet):
    """Return the rounds of training whose mean has changed the model."""
    return [r["round"] for r in fleet.records() if not r["final"] and len(r["norms"]) >= 3]


@pytest.mark.parametrize("restarted", with_long([False, True], True), ids=["", "over a restart"])
def test_revocation_waits_for_an_admission(tmp_path, restarted, caplog):
    """After a revocation the run waits until a device is admitted."""
    caplog.set_level(logging.INFO, "shoal.aggregator")
    with small_fleet(tmp_path) as fleet:
        revoke(fleet)
        closed = waits(fleet)
        assert closed <= 2, "one round may have been open"
        if restarted:
            restart(fleet)
            assert waits(fleet) == closed
        text, data = status_of(fleet), status_of(fleet, "--json")
        (problem,) = data["problems"]
        assert problem == {"reason": f"run 1 can't go on: {REASON}", "advice": TOO_SMALL_HINT}
        assert f"problem: run 1 can't go on: {REASON}\n  hint: {TOO_SMALL_HINT}\n" in text
        run = data["run"]
        assert (run["phase"], run["quorum"], run["received"]) == ("gathering", 3, 2)
        assert (run["deadline_passed"], run["deadline_at"], run["missing"]) == (False, None, [])
        assert "gathering: 2 devices online, 3 needed" in text
        short = data["runs"][0]["shortage"]
        assert (short["reason"], short["hint"], short["here"], short["needed"]) == (REASON, TOO_SMALL_HINT, 2, 3)
        assert short["deadline_passed"] is False
        last = fleet.records()[-1]
        assert [e for e in last["events"] if e["kind"] == FLEET_TOO_SMALL] == [
            {"round": closed, "kind": FLEET_TOO_SMALL, "devices": 2, "min_contributors": 3}
        ]
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert FLEET_TOO_SMALL in warned
        assert any(REASON in line and TOO_SMALL_HINT in line for line in warned)
        fleet.add_device("dev-03", grouped_data(4)["dev-03"])
        records = fleet.run(2000)
        assert status_of(fleet, "--json")["problems"] == []
    assert [r["round"] for r in records] == list(range(1, 10))
    handed = [e["round"] for r in records for e in r["events"] if e["kind"] == "checkpoints_ordered"]
    assert handed == [closed + 1], "the two others hand the newcomer their model in a round of its own"
    assert set(moved(fleet)) >= set(range(closed + 2, 9)), "every later round moves the model"
    assert not any(r["still"] for r in records)
    assert len({thetas(fleet)[name] for name in ("dev-00", "dev-01", "dev-03")}) == 1


@pytest.mark.parametrize("restarted", with_long([False, True], True), ids=["", "over a restart"])
def test_run_waits_for_a_device_that_is_off(tmp_path, restarted):
    """Without a device that is off the run waits until it returns."""
    with small_fleet(tmp_path) as fleet:
        fleet.kill_device("dev-02")
        closed = waits(fleet)
        if restarted:
            restart(fleet)
            assert waits(fleet) == closed
        (problem,) = status_of(fleet, "--json")["problems"]
        assert problem["reason"] == (
            "run 1 can't go on: its deadline has passed, 2 here and 3 must be (min_contributors 3)"
        )
        for way in ("start dev-02 again", "shoal-fleet revoke", "admit another device"):
            assert way in problem["advice"]
        fleet.revive_device("dev-02")
        records = fleet.run(2000)
    assert [r["round"] for r in records] == list(range(1, 10))
    assert set(moved(fleet)) >= set(range(closed + 1, 9))


def test_admitted_device_is_the_one_to_start(tmp_path):
    """An admitted device that has not connected is the one to start."""
    with small_fleet(tmp_path) as fleet:
        revoke(fleet)
        waits(fleet)
        fleet.add_device("dev-03", grouped_data(4)["dev-03"])
        fleet.kill_device("dev-03")  # before it could say a word
        waits(fleet)
        data = status_of(fleet, "--json")
        assert [m["device"] for m in data["run"]["missing"]] == ["dev-03"]
        assert "start dev-03 again" in data["problems"][0]["advice"]


def test_the_owner_may_end_a_run_that_waits(tmp_path):
    """The final round makes no mean, so two devices are enough for it."""
    with small_fleet(tmp_path) as fleet:
        revoke(fleet)
        closed = waits(fleet)
        assert fleet.ask(RequestAction.STOP, 1).answer is not None
        records = fleet.run(200)
    assert [r["final"] for r in records[closed:]] == [True]
    assert records[-1]["contributed"] == 2


def test_means_of_two_need_no_third(tmp_path):
    """A run for whose means two are enough does not wait."""
    with small_fleet(tmp_path, min_contributors=2) as fleet:
        revoke(fleet)
        records = fleet.run(500)
    assert [r["round"] for r in records] == list(range(1, 10))
    assert FLEET_TOO_SMALL not in [e["kind"] for r in records for e in r["events"]]


def test_another_device_takes_the_place(tmp_path):
    """Another device takes the place of one that is off for good."""
    with small_fleet(tmp_path) as fleet:
        fleet.kill_device("dev-02")
        closed = waits(fleet)
        fleet.add_device("dev-03", grouped_data(4)["dev-03"])
        records = fleet.run(2000)
    assert set(moved(fleet)) >= set(range(closed + 3, 9))
    assert set(records[-1]["clusters"]) >= {"dev-00", "dev-01", "dev-03"}


def test_two_admitted_at_once_join(tmp_path):
    """Two holders are more than half of the three other devices."""
    with small_fleet(tmp_path) as fleet:
        revoke(fleet)
        closed = waits(fleet)
        for name in ("dev-03", "dev-04"):
            fleet.add_device(name, grouped_data(5)[name])
        records = fleet.run(2000)
    assert set(moved(fleet)) >= set(range(closed + 3, 9))
    assert set(records[-1]["clusters"]) == {"dev-00", "dev-01", "dev-03", "dev-04"}


def test_status_names_the_missing_holders(tmp_path):
    """One device can't certify its model alone: the run waits, and the way out is another run."""
    with small_fleet(tmp_path) as fleet:
        for name in ("dev-01", "dev-02"):
            revoke(fleet, name)
        for name in ("dev-03", "dev-04"):
            fleet.add_device(name, grouped_data(5)[name])
        waits(fleet)
        (problem,) = status_of(fleet, "--json")["problems"]
        assert problem["reason"] == (
            "run 1 can't go on: its deadline has passed, 3 devices online, and 1 of them holds its models: "
            "2 must, to certify them for the others"
        )
        assert "shoal-fleet run stop" in problem["advice"]
        fleet.ask(RequestAction.STOP, 1)
        records = fleet.run(200)
    assert records[-1]["final"]
