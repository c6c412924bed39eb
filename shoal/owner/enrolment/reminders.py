"""Reminders of steps outside this program that a change of the fleet requires."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.util.console import note

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


def broker_users(fleet: FleetDirectory, effect: str) -> None:
    """If the broker has users, print how to update them; ``effect`` completes the sentence "the broker ..."."""
    if fleet.users:
        note(
            f"next: shoal-fleet broker-config {fleet.path} --out FOLDER again (with the same --installed), then "
            "copy the files to the broker's host and send mosquitto a SIGHUP: only then "
            f"the broker {effect}"
        )
