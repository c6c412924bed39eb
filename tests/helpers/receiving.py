"""Receiving keys for identities that have no directory."""

from crypto.seal.receiving import ReceivingSecrets
from shoal.membership.grants import DEVICE_ROLE, make_card, open_grant
from shoal.owner.keys.directory import GRANTS
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
