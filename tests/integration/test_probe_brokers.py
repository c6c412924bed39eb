"""What `doctor` finds out about a broker."""

import pytest

from shoal.address import BrokerAddress
from shoal.transport.local_broker import find_mosquitto, start_broker
from shoal.transport.probe import survey
from tests.helpers.mqtt_clients import Client
from tests.integration.other_brokers import missing, running

pytestmark = pytest.mark.broker
OWN = ("e/+", "e/doctor-1")


def test_complete_broker_is_left_as_it_was(tmp_path):
    """A broker that has everything is left as it was."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    with start_broker("mosquitto", tmp_path) as broker:
        found = survey(BrokerAddress.parse(broker.url), "doctor", (), OWN)
        assert (found.session, found.retained, found.wildcards, found.large, found.ordered) == (True,) * 5
        reader = Client(broker.url, "reader")
        reader.transport.subscribe("#")
        reader.transport.start(require=True)
        reader.transport.publish("last", b"x")
        assert reader.message().topic == "last", "nothing is retained any more"
        reader.transport.close()


@pytest.mark.long
def test_rabbitmq_ignores_wildcards(tmp_path):
    """Rabbitmq sends nothing retained to wildcards."""
    if missing("rabbitmq"):
        pytest.skip(missing("rabbitmq"))
    with running("rabbitmq", tmp_path / "broker") as (url, _):
        found = survey(BrokerAddress.parse(url), "doctor", (), OWN)
        assert (found.retained, found.wildcards) == (True, False)
