"""A fleet of two devices in the owner's directory."""

import pytest

from crypto.seal.identity import Identity
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.keys.directory import FleetDirectory
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.receiving import device_card


@pytest.fixture
def broker(tmp_path):
    """A real broker."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    with start_broker("mosquitto", tmp_path / "broker") as made:
        yield made


@pytest.fixture
def devices():
    return {name: Identity.generate(name) for name in ("dev-1", "dev-2")}


@pytest.fixture
def fleet(tmp_path, devices):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    made.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    for identity in devices.values():
        made.add_device(device_card(identity))
    return made
