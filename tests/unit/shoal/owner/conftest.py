"""A fleet of two devices in the owner's directory."""

import pytest

from crypto.seal.identity import Identity
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.receiving import founded


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
    return founded(tmp_path / "owner", "mqtts://broker.example", *devices.values())
