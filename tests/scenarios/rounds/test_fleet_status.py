"""`shoal-aggregator status` tells the state of a fleet truly: devices that die, a broker that is away, a wrong clock."""

import dataclasses
import json

import numpy as np
import pytest

from aggregator.status import watch as watches
from aggregator.status.record import RETURN_S
from edge_client.learning.data import Dataset
from edge_client.learning.reading import LeftOut
from edge_client.protocol import presence
from edge_client.storage.state import DeviceState
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    restart_device,
    status_of,
)


def reasons(data):
    return {d["name"]: d["reason"] for d in data["devices"] if d["reason"]}


@pytest.fixture
def fleet(tmp_path, tap):
    """A fleet of three in which one round is closed, and the next waits for dev-02 for 20 s."""
    options = {"quorum": 1.0, "min_contributors": 3, "deadline_s": 20.0, "rounds": 30}
    with make_fleet(tmp_path / "fleet", faults=tap, **options) as made:
        made.run_until(lambda: made.closed() == 1, 10)
        tap.lose(client=made.client_id("dev-02"), ending="/up")
        made.run_until(lambda: "2 of 3" in made.service.status(), 10)
        yield made


def test_owner_learns_of_damaged_samples(tmp_path):
    """The number, and nothing of what is in them: the device's own status names the first."""
    data = grouped_data(3)
    damage = LeftOut(2, 62, "sensor.csv, line 62: 2 columns instead of 4")
    data["dev-01"] = dataclasses.replace(data["dev-01"], left_out=damage)
    with make_fleet(tmp_path / "fleet", data, rounds=1) as fleet:
        fleet.run(60)
        document = status_of(fleet, "--json")
        assert {d["name"]: d["left_out"] for d in document["devices"]} == {"dev-00": 0, "dev-01": 2, "dev-02": 0}
        assert "sensor.csv" not in json.dumps(document)
        assert "dev-01 leaves out 2 damaged samples" in status_of(fleet)
        own = DeviceState(fleet.stage.device_dir("dev-01")).load_status()
        assert own["left_out"] == {**dataclasses.asdict(damage), "words": str(damage)}


def test_owner_learns_whose_model_is_a_guess(tmp_path):
    """The labels of dev-03 are those of the others, each moved on by one: the model of most devices is wrong there."""
    data = grouped_data(4)
    data["dev-03"] = dataclasses.replace(data["dev-03"], y=(data["dev-03"].y + 1) % 3)
    with make_fleet(tmp_path / "fleet", data, rounds=10) as fleet:
        fleet.run_until(lambda: fleet.closed() == 9, 60)
        assert status_of(fleet, "--json")["problems"] == []
        fleet.run(60)
        (problem,) = status_of(fleet, "--json")["problems"]
        assert problem["reason"] == "1 of 4 devices do no better than their most common label: dev-03"
        fleet.kill_device("dev-03")
        fleet.settle()
        assert status_of(fleet, "--json")["problems"] == [problem], (
            "it is told by the last presence that the device signed"
        )


def test_dead_device_is_offline_at_once(fleet):
    """A device that dies is offline at once and what to do comes with the deadline."""
    fleet.kill_device("dev-02")
    fleet.settle()
    data = status_of(fleet, "--json")
    assert reasons(data) == {"dev-02": "offline"}
    assert data["devices"][2]["online"] is False
    assert data["problems"] == []
    fleet.run_until(lambda: fleet.service.state.deadline_passed, 60)
    data = status_of(fleet, "--json")
    (problem,) = data["problems"]
    assert "its deadline has passed, 2 answered and 3 must" in problem["reason"]
    assert "start dev-02 again" in problem["advice"]
    assert data["run"]["deadline_passed"] is True
    fleet.stage.fleet.revoke("dev-02")
    fleet.publish()
    fleet.settle()
    data = status_of(fleet, "--json")
    assert reasons(data) == {"dev-02": "revoked by the owner"}
    assert "dev-02" not in [m["device"] for m in (data["run"]["missing"])]


def test_broker_away_blames_no_device(fleet):
    """Not even after the deadline; the log's line says the same."""
    fleet.broker.disconnect(fleet.client_id("aggregator"))
    fleet.run_until(lambda: fleet.service.state.deadline_passed, 60)
    fleet.run_until(lambda: status_of(fleet, "--json")["runs"][0]["waiting"], 10)
    data = status_of(fleet, "--json")
    assert (data["running"], data["connected"], reasons(data), data["run"]["missing"]) == (True, False, {}, [])
    assert {d["online"] for d in data["devices"]} == {None}
    assert "no connection to the broker" in data["problems"][0]["reason"]
    assert "waiting for the broker" in data["runs"][0]["waiting"]
    assert data["runs"][0]["shortage"] is None
    fleet.broker.reconnect(fleet.client_id("aggregator"))
    fleet.settle()
    data = status_of(fleet, "--json")
    assert (data["connected"], data["problems"]) == (True, []), f"devices may take {RETURN_S} s to return"


def test_a_device_whose_data_do_not_fit(tmp_path):
    data = grouped_data(3)
    odd = data["dev-01"]
    data["dev-01"] = Dataset(np.ascontiguousarray(odd.x[:, 1:]), odd.y)
    with make_fleet(tmp_path / "fleet", data, quorum=0.5, rounds=30) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        found = status_of(fleet, "--json")
        assert reasons(found) == {"dev-01": "data do not fit the task"}
        assert found["devices"][1]["online"] is True
        assert found["devices"][1]["advice"]


def test_a_wrong_clock_of_one_device(fleet, monkeypatch):
    """Only the device's own clock is wrong here; both run in one process."""
    monkeypatch.setattr(watches, "SETTLED_S", -1.0)
    real = presence.time.time
    monkeypatch.setattr(presence, "time", type("Time", (), {"time": staticmethod(lambda: real() - 7200)}))
    restart_device(fleet, "dev-01")
    fleet.settle()
    assert reasons(status_of(fleet, "--json")) == {"dev-01": "its clock is 2 h behind the aggregator's"}


def test_a_killed_aggregator_is_not_running(fleet):
    """Before, its fleet is at work."""
    data = status_of(fleet, "--json")
    assert (data["running"], data["connected"], data["problems"], reasons(data)) == (True, True, [], {})
    run = data["run"]
    assert (run["run"], run["algorithm"], run["round"], run["rounds"], run["phase"]) == (1, "fedavg", 2, 30, "round")
    assert (run["quorum"], run["received"]) == (3, 2)
    assert [(m["device"], m["reason"]) for m in run["missing"]] == [("dev-02", "has not uploaded yet")]
    assert [c["members"] for c in run["clusters"]] == [["dev-00", "dev-01", "dev-02"]]
    assert run["clusters"][0]["loss"] == pytest.approx(fleet.records()[-1]["loss"])
    first = data["devices"][0]
    assert (first["name"], first["online"], first["cluster"]) == ("dev-00", True, 0)
    assert first["version"]
    assert first["last_upload"] == first["last_seen"]
    fleet.kill_aggregator()
    data = status_of(fleet, "--json")
    assert (data["running"], data["connected"], reasons(data)) == (False, False, {})
    assert data["since"] is not None
    assert "killed" in data["problems"][0]["reason"]
    assert data["run"]["phase"] == "not_served"
