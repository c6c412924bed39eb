"""Identities that have no directory: a fleet's aggregator and devices, with receiving keys that they share."""

from crypto.seal.identity import Identity
from crypto.seal.receiving import ReceivingSecrets
from shoal.membership.grants import AGGREGATOR_ROLE, DEVICE_ROLE, make_card, open_grant
from shoal.owner.keys.directory import GRANTS, FleetDirectory
from shoal.protocol.documents import DeviceGrant

RECEIVING = ReceivingSecrets.generate()
"""Receiving keys that all such identities share."""


def device_card(identity):
    """Return the card of a device with the shared receiving keys."""
    return make_card(identity, DEVICE_ROLE, RECEIVING.public)


def opened(fleet, identity):
    """Open the grant file of a device in the owner's directory."""
    data = (fleet.path / GRANTS / f"{identity.name}.grant").read_bytes()
    return open_grant(identity, data, DeviceGrant, fleet.fingerprint, RECEIVING)


def founded(folder, broker="mqtts://broker.example", *devices, aggregator=None, fleet="reef"):
    """Return the owner's directory of a fleet with an aggregator and devices, given as identities."""
    made = FleetDirectory.create(folder, fleet, broker)
    made.add_aggregator(make_card(aggregator or Identity.generate("aggregator"), AGGREGATOR_ROLE))
    for identity in devices:
        made.add_device(device_card(identity))
    return made
