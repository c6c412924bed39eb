"""An upload that travels in several sealed pieces: the header to the coordinator, and one part to each worker.

They are stored as one, behind a list of their transfer ids and sizes. An upload of one piece is stored as it is.

Example: `stored` of a header and three parts; after a restart `pieces_of` gives the four back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from crypto.seal.envelope import SealedMessage
from shoal.errors import WireError
from shoal.protocol.chunking import Fingerprint
from shoal.protocol.codec import MAGIC, ArrayU32, Fixed16, decode_prefix, encode, message


@message(84)
@dataclass(frozen=True, slots=True)
class Pieces:
    """Head of a stored upload in pieces, which follow: their transfer ids and sizes in bytes, the header's first."""

    transfers: tuple[Fixed16, ...]
    sizes: ArrayU32


def stored(pieces: Sequence[SealedMessage]) -> bytes:
    """Return the pieces of an upload, the header's first, as one."""
    if len(pieces) == 1:
        return pieces[0].payload
    head = encode(Pieces(tuple(p.transfer_id for p in pieces), tuple(len(p.payload) for p in pieces)))
    return b"".join((head, *(p.payload for p in pieces)))


def pieces_of(sealed: bytes) -> list[SealedMessage]:
    """Return the pieces of a stored upload, the header's first.

    Raises:
        WireError: the list of the pieces does not fit them, or one is torn.
    """
    if not sealed.startswith(MAGIC):
        return [_piece(sealed)]
    head, rest = decode_prefix(sealed, Pieces)
    if len(head.transfers) != len(head.sizes) or sum(head.sizes) != len(rest) or not head.sizes:
        raise WireError("the list of an upload's pieces does not fit them")
    ends = list(accumulate(head.sizes))
    found = [_piece(bytes(rest[end - size : end])) for size, end in zip(head.sizes, ends, strict=True)]
    if tuple(piece.transfer_id for piece in found) != head.transfers:
        raise WireError("a piece of an upload is torn")
    return found


def _piece(payload: bytes) -> SealedMessage:
    found = Fingerprint.of(payload)
    return SealedMessage(payload, found.transfer_id, found.signed)


def transfer_of(sealed: bytes) -> bytes:
    """Return the transfer id of a stored upload; empty bytes if a piece of it is torn."""
    try:
        return pieces_of(sealed)[0].transfer_id
    except WireError:
        return b""
