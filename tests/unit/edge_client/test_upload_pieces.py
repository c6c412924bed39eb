"""An upload in pieces is stored as one, and a torn piece is found."""

import pytest

from crypto.seal.envelope import SealedMessage
from edge_client.upload_pieces import joined, pieces_of, transfer_of
from shoal.errors import WireError
from shoal.protocol.chunking import Fingerprint, transfer_id


def sealed(payload):
    return SealedMessage(payload, transfer_id(payload), Fingerprint.of(payload).signed)


HEADER, PARTS = sealed(b"SHE1 header"), [sealed(b"SHE1 first part"), sealed(b"SHE1 second")]


def test_pieces_come_back_in_order():
    whole = joined(HEADER, PARTS)
    assert whole.transfer_id == transfer_of(whole.payload) == HEADER.transfer_id
    assert [bytes(p.payload) for p in pieces_of(whole.payload)] == [p.payload for p in (HEADER, *PARTS)]
    assert [p.transfer for p in pieces_of(whole.payload)] == [p.transfer_id for p in (HEADER, *PARTS)]


def test_an_upload_of_one_piece_is_stored_as_it_is():
    assert joined(HEADER, []) is HEADER
    assert bytes(pieces_of(HEADER.payload)[0].payload) == HEADER.payload
    assert transfer_of(HEADER.payload) == HEADER.transfer_id


def test_torn_pieces_are_found():
    whole = joined(HEADER, PARTS).payload
    assert transfer_of(whole[:-1] + b"?") == b""
    assert transfer_of(whole[:-1]) == b""
    with pytest.raises(WireError, match="does not fit"):
        pieces_of(whole + b"more")
