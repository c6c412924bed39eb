"""Where the broker listens: as the fleet reaches it, and nowhere else."""

from pathlib import Path

import pytest

from fleet.broker_config import config
from wire.address import BrokerAddress


@pytest.mark.parametrize(
    ("url", "listener"),
    [
        ("mqtt://127.0.0.1:1884", "listener 1884 127.0.0.1"),
        ("mqtt://localhost", "listener 1883 localhost"),
        ("mqtt://[::1]:1884", "listener 1884 ::1"),
        ("mqtts://127.0.0.1", "listener 8883 127.0.0.1"),
        ("mqtt://192.168.1.7", "listener 1883"),
        ("mqtts://broker.example", "listener 8883"),
    ],
)
def test_a_broker_for_one_machine_is_not_open_to_others(url, listener):
    lines = config(BrokerAddress.parse(url), Path("/etc/mosquitto")).splitlines()
    assert [line for line in lines if line.startswith("listener")] == [listener]
