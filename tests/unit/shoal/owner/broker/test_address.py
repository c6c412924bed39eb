"""The owner's address at the broker."""

from shoal.owner.broker.address import owner_address
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.settings import CA_FILE


def test_without_tls_fleets_ca_is_left_out(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://broker.example")
    (fleet.path / CA_FILE).write_text("a certificate")
    assert owner_address(fleet).ca_file is None
