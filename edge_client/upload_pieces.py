"""An upload that travels in several sealed pieces: the header to the coordinator, and one part to each worker.

The pieces are stored as one, behind a list of their transfer ids and sizes. An upload of one piece is stored as it is.

Example: `joined` of a header and three parts; `pieces_of` gives the four back, and `transfer_of` the header's transfer id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Piece:
    """One sealed message of an upload."""

    transfer: bytes
    payload: memoryview


def joined(header: SealedMessage, parts: Sequence[SealedMessage]) -> SealedMessage:
    """Return the pieces as one message, named by its header's transfer id; the header alone if there are no parts."""
    if not parts:
        return header
    every = (header, *parts)
    head = encode(Pieces(tuple(p.transfer_id for p in every), tuple(len(p.payload) for p in every)))
    return SealedMessage(b"".join((head, *(p.payload for p in every))), header.transfer_id, header.signed)


def pieces_of(sealed: bytes | memoryview, transfer: bytes | None = None) -> list[Piece]:
    """Return the pieces of a stored upload, the header's first.

    Args:
        sealed: the stored bytes.
        transfer: the upload's transfer id if it is known, which saves hashing.

    Raises:
        WireError: the list of the pieces does not fit them.
    """
    view = memoryview(sealed)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        return [Piece(transfer or Fingerprint.of(view).transfer_id, view)]
    head, rest = decode_prefix(view, Pieces)
    if len(head.transfers) != len(head.sizes) or sum(head.sizes) != len(rest) or not head.sizes:
        raise WireError("the list of an upload's pieces does not fit them")
    found, at = [], 0
    for name, size in zip(head.transfers, head.sizes, strict=True):
        found.append(Piece(name, rest[at : at + size]))
        at += size
    return found


def transfer_of(sealed: bytes | memoryview) -> bytes:
    """Return the transfer id of a stored upload; empty bytes if a piece of it is torn."""
    try:
        pieces = pieces_of(sealed)
    except WireError:
        return b""
    whole = all(Fingerprint.of(piece.payload).transfer_id == piece.transfer for piece in pieces)
    return pieces[0].transfer if whole else b""
