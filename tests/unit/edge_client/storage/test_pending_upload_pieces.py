"""An upload in pieces is stored as one, and a torn piece is found."""

import pytest

from crypto.seal.envelope import SealedMessage
from edge_client.storage.pending_upload import pieces_of, stored, transfer_of
from shoal.errors import WireError
from shoal.protocol.chunking import Fingerprint, transfer_id


def sealed(payload):
    return SealedMessage(payload, transfer_id(payload), Fingerprint.of(payload).signed)


PIECES = [sealed(b"SHE1 header"), sealed(b"SHE1 first part"), sealed(b"SHE1 second")]


@pytest.mark.parametrize("pieces", [PIECES, PIECES[:1]])
def test_pieces_come_back_in_order(pieces):
    assert pieces_of(stored(pieces)) == pieces
    assert transfer_of(stored(pieces)) == pieces[0].transfer_id


def test_torn_pieces_are_found():
    whole = stored(PIECES)
    assert transfer_of(whole[:-1] + b"?") == b""
    assert transfer_of(whole[:-1]) == b""
    with pytest.raises(WireError, match="does not fit"):
        pieces_of(whole + b"more")
