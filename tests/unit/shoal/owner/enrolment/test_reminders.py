"""Reminders after a change of the fleet."""

from shoal.owner.enrolment.reminders import broker_users
from shoal.owner.keys.directory import FleetDirectory


def test_a_broker_with_users_has_to_be_updated_and_one_without_has_not(tmp_path, capsys):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    broker_users(fleet, "accepts dev-1")
    assert capsys.readouterr() == ("", "")
    fleet.users.make()
    broker_users(fleet, "accepts dev-1")
    out, err = capsys.readouterr()
    assert out == "", "stdout is for data"
    assert err.startswith(f"next: shoal-fleet broker-config {fleet.path} --out FOLDER again")
    assert err.endswith("send mosquitto a SIGHUP: only then the broker accepts dev-1\n")
