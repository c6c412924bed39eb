"""Closing a device: every step is taken after a failure, and no error is hidden."""

import pytest

from shoal.errors import ConfigError
from shoal.transport.loopback import LoopbackTransport
from tests.helpers.fleets import make_fleet


def test_a_device_that_was_taken_over_ends_without_a_word(tmp_path):
    with make_fleet(tmp_path / "fleet") as fleet:
        fleet.run(100)
        device = fleet.devices["dev-01"]
        twin = LoopbackTransport(fleet.broker, fleet.client_id("dev-01"), lambda _event: None)
        twin.start()
        fleet.broker.pump()
        device.runtime.close()
        twin.close()


def test_a_device_says_goodbye_even_if_its_model_can_t_be_written(tmp_path, monkeypatch):
    with make_fleet(tmp_path / "fleet") as fleet:
        fleet.run_until(lambda: fleet.records(), 100)
        device = fleet.devices["dev-01"]

        def full(*_arguments, **_options):
            raise ConfigError("no space left")

        monkeypatch.setattr(device.runtime._files, "save_model", full)
        with pytest.raises(ConfigError, match="no space left"):
            device.runtime.close()
        assert fleet.client_id("dev-01") not in fleet.broker.connected()
        del fleet.devices["dev-01"]
