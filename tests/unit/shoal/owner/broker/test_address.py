"""The owner's address at the broker."""

from shoal.owner.broker.address import beside_client_id, owner_address
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.settings import CA_FILE


def test_owner_connects_as_its_own_user(tmp_path):
    """The owner connects as its own user with the fleets ca."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    assert owner_address(fleet).ca_file is None
    fleet.users.make()
    (fleet.path / CA_FILE).write_text("a certificate")
    address = owner_address(fleet)
    assert (address.username, address.ca_file) == ("owner", fleet.path / CA_FILE)


def test_without_tls_fleets_ca_is_left_out(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://broker.example")
    (fleet.path / CA_FILE).write_text("a certificate")
    assert owner_address(fleet).ca_file is None


def test_each_client_id_is_another():
    ids = {beside_client_id("reef") for _ in range(20)}
    assert len(ids) == 20
    assert all(each.startswith("shoal-reef-owner-") for each in ids)
