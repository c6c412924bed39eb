"""Receiving keys for identities that have no directory."""

from crypto.seal.receiving import ReceivingSecrets
from shoal.membership.grants import DEVICE_ROLE, make_card

RECEIVING = ReceivingSecrets.generate()
"""Receiving keys that all such identities share."""


def device_card(identity):
    """Return the card of a device with the shared receiving keys."""
    return make_card(identity, DEVICE_ROLE, RECEIVING.public)
