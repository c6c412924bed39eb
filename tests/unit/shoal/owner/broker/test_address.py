"""The owner's address at the broker."""

from shoal.owner.broker.address import beside_client_id, owner_address
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.settings import CA_FILE


def test_owner_connects_as_its_own_user(tmp_path):
    """With the fleet's CA, which is left out without TLS; each client id is another."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    assert owner_address(fleet).ca_file is None
    fleet.users.make()
    (fleet.path / CA_FILE).write_text("a certificate")
    address = owner_address(fleet)
    assert (address.username, address.ca_file) == ("owner", fleet.path / CA_FILE)
    plain = FleetDirectory.create(tmp_path / "plain", "reef", "mqtt://broker.example")
    (plain.path / CA_FILE).write_text("a certificate")
    assert owner_address(plain).ca_file is None
    ids = {beside_client_id("reef") for _ in range(20)}
    assert len(ids) == 20
    assert [each for each in ids if not each.startswith("shoal-reef-owner-")] == []
