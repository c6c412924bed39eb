"""The newest standing order at the aggregator: by a request, as a file, and in a grant."""

import dataclasses

import pytest
from shoal_lab.loopback.fleet import EPOCH_S

from edge_client.run.jobs import JobFactory
from shoal.errors import UntrustedError
from shoal.owner.keys.vault import run_file
from shoal.owner.runs.standing import sign_again
from shoal.protocol.documents import Schedule
from tests.helpers.fleets import make_fleet


@pytest.fixture
def fleet(tmp_path):
    order = Schedule(order=bytes(16), count=3, interval_s=60, until_s=EPOCH_S + 90_000)
    with make_fleet(tmp_path / "fleet", rounds=1, schedule=order) as made:
        yield made


def test_an_older_order_is_refused(fleet):
    """Of one order the newer signature is in force, also if the older one comes last."""
    old = run_file(fleet.stage.fleet.path, 1).read_bytes()
    fleet.stage.fleet.rotate()
    new = sign_again(fleet.stage.fleet)
    fleet.standing.take(run_file(fleet.stage.fleet.path, 1).read_bytes(), new)
    assert fleet.standing.plan == new
    with pytest.raises(UntrustedError, match="older than that from 1 on"):
        fleet.standing.take(old, fleet.plan)
    assert fleet.standing.plan == new


def test_models_that_do_not_fit(fleet):
    fleet.run(100)
    for device, held in list(fleet._watch.held.items()):
        fleet._watch.held[device] = dataclasses.replace(held, models=2)
    fleet.rest(100)
    assert fleet.standing.entry().waits == "fedavg can't begin with the 2 models of run 1"
    assert not fleet.standing.begin_next()


def test_another_order_of_these_numbers(fleet):
    """Models of runs that are not the order's do not count."""
    fleet.run(100)
    for device, held in list(fleet._watch.held.items()):
        fleet._watch.held[device] = dataclasses.replace(held, run_id=bytes(16))
    fleet.rest(100)
    assert fleet.standing.entry().waits == "0 devices online with the models of the run before, and 1 must be"


def test_data_have_to_grow(tmp_path, monkeypatch):
    """A run waits for the data of as many devices as a mean takes; each tells one bit."""
    order = Schedule(order=bytes(16), count=3, interval_s=60, until_s=EPOCH_S + 90_000, growth=20)
    grown = set()
    monkeypatch.setattr(JobFactory, "has_grown", lambda jobs, _: jobs._membership.name in grown)
    with make_fleet(tmp_path / "fleet", rounds=1, min_contributors=2, schedule=order) as fleet:
        fleet.run(100)
        grown.add("dev-00")
        fleet.rest(100)
        fleet.settle()
        assert fleet.standing.entry().waits == "the data of 1 device have grown by 20 %, and 2 must"
        grown.add("dev-02")
        fleet.rest_until_next(9000)
        grown.clear()
        fleet.run(100)
        fleet.rest(100)
        assert fleet.standing.entry().waits == "the data of 0 devices have grown by 20 %, and 2 must"


def test_who_keeps_an_earlier_model(fleet):
    """Devices whose newest model is worse than the one before answer with that, and the owner is told."""
    fleet.run(100)
    fleet.rest_until_next(9000)
    fleet.run(100)
    assert fleet.standing.entry().kept == ()
    facts = fleet._watch.devices._devices
    facts["dev-01"] = dataclasses.replace(facts["dev-01"], model_run=1)
    assert fleet.standing.entry().kept == ("dev-01",)
