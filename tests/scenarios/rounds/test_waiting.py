"""`shoal-aggregator status` reports on the open round."""

import logging
import re

import numpy as np
import pytest

from shoal.protocol.recipe import Recipe
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    make_fleet,
    restart_aggregator,
    status_of,
)


def waiting(fleet):
    return status_of(fleet, "--json")["runs"][0]["waiting"]


@pytest.fixture
def fleet(tmp_path, tap):
    with make_fleet(tmp_path / "fleet", faults=tap, quorum=1.0, deadline_s=1e6) as made:
        yield made


def test_waiting_round_says_for_whom(fleet, tap):
    """Nothing at first: most rounds never wait."""
    fleet.run_until(lambda: fleet.closed() == 1, 10)
    hold = tap.lose(client=fleet.client_id("dev-02"), ending="/up")
    fleet.run_until(lambda: "2 of 3" in fleet.service.status(), 10)
    assert waiting(fleet) == ""
    fleet.run_until(lambda: waiting(fleet), 10)
    assert waiting(fleet) == "round 2: 2 of 3, waiting for dev-02"
    assert "; waiting for dev-02" in status_of(fleet).splitlines()[-1]
    tap.forgive(hold)
    fleet.run_until(lambda: fleet.closed() == 2, 100)
    assert waiting(fleet) == ""


def test_before_round_1_it_says_who_is_here(fleet):
    """Before the first round it says who is here."""
    for name in fleet.stage.devices:
        fleet.kill_device(name)
    fleet.run_until(lambda: fleet.now_s > 5, 10)
    assert waiting(fleet).startswith("gathering: 0 of 3 devices are here")
    for name in fleet.stage.devices:
        fleet.revive_device(name)
    fleet.run(100)
    assert waiting(fleet) == ""


def test_a_run_in_the_queue_hides_nothing(fleet, tap):
    tap.lose(client=fleet.client_id("dev-02"), ending="/up")
    fleet.run_until(lambda: waiting(fleet), 10)
    fleet.stage.add_run(fleet.bundle, np.zeros((1, fleet.plan.length), np.float32), Recipe("fedavg", rounds=2))
    lines = [line[:10] for line in status_of(fleet).splitlines()]
    assert [line for line in lines if line.startswith("run")] == ["run 1: fed", "run 1 now:", "run 2: fed"]


def test_killed_aggregators_line_is_gone(fleet, tap):
    """What a killed aggregator left is gone with its next life."""
    tap.lose(client=fleet.client_id("dev-02"), ending="/up")
    fleet.run_until(lambda: fleet.now_s > 5, 10)
    assert waiting(fleet)
    restart_aggregator(fleet)
    assert waiting(fleet) == ""


def test_nobody_waits_where_nobody_serves(fleet, tap):
    tap.lose(client=fleet.client_id("dev-02"), ending="/up")
    fleet.run_until(lambda: fleet.now_s > 5, 10)
    fleet.kill_aggregator()
    told = status_of(fleet)
    assert "not running" in told
    assert "waiting" not in told


STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.mark.parametrize("quorum", with_long([0.8, 0.5], 0.8), ids=["in a round", "between rounds"])
def test_dead_needed_device_is_named(tmp_path, quorum, caplog):
    """The run waited for ever, and nothing said that the deadline had passed or how to go on."""
    caplog.set_level(logging.INFO, "shoal.aggregator")
    options = {"min_contributors": 3, "quorum": quorum, "deadline_s": 20.0, "rounds": 30}
    with make_fleet(tmp_path / "fleet", count=3, **options) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 10)
        fleet.kill_device("dev-02")
        fleet.run_until(lambda: waiting(fleet), 60)
        assert "deadline" not in waiting(fleet)
        assert status_of(fleet, "--json")["runs"][0]["shortage"] is None
        fleet.run_until(lambda: "deadline passed" in waiting(fleet), 60)
        run = status_of(fleet, "--json")["runs"][0]
        needed = "must be (min_contributors 3)" if quorum == 0.5 else "must (quorum 0.8)"
        assert re.search(rf"the deadline passed at {STAMP}, 2 .* and 3 {re.escape(needed)}", run["waiting"])
        assert re.search(r"\(.*\); start dev-02 again", run["waiting"])
        assert "shoal-fleet revoke FLEET_DIR NAME" in run["waiting"]
        assert "sign a run with a smaller --min-contributors" in run["waiting"]
        short = run["shortage"]
        assert [m["device"] for m in short["missing"]] == ["dev-02"]
        assert all(re.fullmatch(STAMP, m["since"]) for m in short["missing"])
        assert re.fullmatch(STAMP, short["deadline_passed_at"])
        assert (short["deadline_passed"], short["here"], short["needed"], short["min_contributors"]) == (True, 2, 3, 3)
        assert short["hint"] in status_of(fleet)
        assert run["waiting"] in [r.getMessage() for r in caplog.records]
        fleet.revive_device("dev-02")
        closed = len(fleet.records())
        fleet.run_until(lambda: fleet.closed() > closed + 1, 30)
        fleet.run_until(lambda: not waiting(fleet), 10)
        assert status_of(fleet, "--json")["runs"][0]["shortage"] is None
