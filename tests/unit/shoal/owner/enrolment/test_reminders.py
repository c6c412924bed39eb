"""Reminders after a change of the fleet."""

from shoal.owner.cli.pairs import broker_users
from shoal.owner.keys.directory import FleetDirectory


def test_broker_with_users_is_updated(tmp_path, capsys):
    """A broker with users has to be updated and one without has not."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    broker_users(fleet, "accepts dev-1", published=False)
    assert capsys.readouterr() == ("", "")
    fleet.users.make()
    broker_users(fleet, "accepts dev-1", published=True)
    out, err = capsys.readouterr()
    assert out == "", "stdout is for data"
    assert err.startswith(f"next: shoal-fleet broker-config {fleet.path} FOLDER again")
    assert err.endswith("send mosquitto a SIGHUP: only then the broker accepts dev-1\n")


def test_dynamic_broker_has_users_at_once(tmp_path, capsys):
    """A broker that takes users while it runs has them once they are published."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    fleet.users.make()
    fleet.users.set_dynamic(True)
    broker_users(fleet, "accepts dev-1", published=True)
    assert capsys.readouterr() == ("", "")
    broker_users(fleet, "accepts dev-1", published=False)
    assert capsys.readouterr().err == f"next: shoal-fleet publish {fleet.path}: only then the broker accepts dev-1\n"
