"""What the owner still has to do elsewhere after a change of the fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.util.console import note

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


def broker_users(fleet: FleetDirectory, effect: str) -> None:
    """Say, where the broker has users, what brings it those of the changed fleet; ``effect`` is what it does then."""
    if fleet.users:
        note(
            f"next: shoal-fleet broker-config {fleet.path} --out FOLDER again (with the same --installed), then "
            "copy the files to the broker's host and send mosquitto a SIGHUP: only then "
            f"the broker {effect}"
        )
