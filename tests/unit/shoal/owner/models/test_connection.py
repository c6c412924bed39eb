"""`read_models` on a real broker: it ends when all is there, and soon where nothing comes."""

import time

import pytest

from shoal.errors import NotReadyError
from shoal.owner.models.reader import read_models
from shoal.transport.mqtt import MqttTransport
from tests.helpers.fleets import make_fleet
from tests.helpers.receiving import founded
from tests.helpers.waiting import until

pytestmark = pytest.mark.broker
WAIT_S = 30.0


def copied(fleet, broker):
    """Retain on a real broker what a loopback fleet's broker retains, and return the owner's directory with its address."""
    transport = MqttTransport(broker.url, "copier", lambda _: None)
    transport.start(require=True)
    for topic, payload in fleet.broker.retained.items():
        transport.publish(topic, payload, retain=True)
    until(lambda: not transport.pending())
    transport.close()
    owner = fleet.stage.fleet
    owner.broker_for = lambda _user: broker.url
    return owner


def test_it_ends_as_soon_as_all_is_there(tmp_path, broker):
    with make_fleet(tmp_path / "fleet", mode="rotation") as fleet:
        fleet.run(20)
        owner, began = copied(fleet, broker), time.monotonic()
        reader = read_models(owner, WAIT_S, lambda _: None)
        assert time.monotonic() - began < WAIT_S / 2
        (model,) = reader.finished_run().models
        assert model.theta.tobytes() == fleet.model("dev-00").theta.tobytes()


def test_broker_without_a_run_is_left(tmp_path, broker):
    """A broker without a run is left after the wait."""
    told = []
    reader = read_models(founded(tmp_path / "owner", broker.url), 2.5, told.append)
    assert told == ["waiting for the announcement of the last round"]
    with pytest.raises(NotReadyError, match="no round is announced"):
        reader.finished_run()
