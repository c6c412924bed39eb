"""Reminders of steps outside this program that a change of the fleet requires."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.util.console import note

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


def broker_users(fleet: FleetDirectory, effect: str, *, published: bool) -> None:
    """If the broker has users, print how to update them.

    Args:
        fleet: the owner's directory.
        effect: completes the sentence "the broker ...".
        published: whether this command publishes, which updates the users of a broker that takes them while it runs.
    """
    if fleet.users.dynamic:
        if not published:
            note(f"next: shoal-fleet publish {fleet.path}: only then the broker {effect}")
    elif fleet.users:
        note(
            f"next: shoal-fleet broker-config {fleet.path} FOLDER again, then "
            "copy the files to the broker's host and send mosquitto a SIGHUP: only then "
            f"the broker {effect}"
        )
