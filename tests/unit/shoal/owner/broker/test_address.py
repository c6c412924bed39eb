"""The owner's address at the broker, and client ids that take over no other connection."""

from shoal.owner.broker.address import CA_FILE, Tls, beside_client_id, owner_address
from shoal.owner.keys.directory import FleetDirectory


def test_the_owner_connects_as_its_own_user_with_the_fleets_ca(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    assert owner_address(fleet, Tls()).ca_file is None
    fleet.users.make()
    (fleet.path / CA_FILE).write_text("a certificate")
    address = owner_address(fleet, Tls())
    assert (address.username, address.ca_file) == ("owner", fleet.path / CA_FILE)
    assert owner_address(fleet, Tls(ca=tmp_path / "mine.crt")).ca_file == tmp_path / "mine.crt"


def test_without_tls_the_fleets_ca_is_left_out(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://broker.example")
    (fleet.path / CA_FILE).write_text("a certificate")
    assert owner_address(fleet, Tls()).ca_file is None


def test_each_client_id_is_another():
    ids = {beside_client_id("reef") for _ in range(20)}
    assert len(ids) == 20
    assert all(each.startswith("shoal-reef-owner-") for each in ids)
