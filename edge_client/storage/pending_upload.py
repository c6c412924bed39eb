"""A device's stored upload: the sealed bytes that it sends in a round, with the replay watermark of that round.

``pending.0.bin`` and ``pending.1.bin`` are written in turn. A slot is durable before the first byte of its upload is sent, so
that a restart sends the same bytes. Once a final round's upload was answered, only its transfer id is stored. The device's
private values (`edge_client.models.private_values`) and the residual that the upload leaves (`edge_client.learning.feedback`)
follow it in its slot: all are stored by one write, or none.

An upload that travels in several sealed pieces, the header to the coordinator and one part to each worker, is stored as one
(`stored`), behind a list of their transfer ids and sizes; after a restart `pieces_of` gives them back. An upload of one piece is
stored as it is.

The residual is the rounding error of a clear update. It is stored as ``int8`` itself, in a quarter of the memory and of the flash
that float32 takes: the device adds what it has stored, so that rounding once more costs 1 % of an error of a few percent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from crypto.seal.envelope import SealedMessage
from crypto.seal.replay import ReplayWatermark
from shoal.digests import before_digest, sha256
from shoal.errors import IntegrityError, WireError
from shoal.protocol.chunking import Fingerprint
from shoal.protocol.codec import MAGIC, U16, U32, ArrayU32, Fixed16, Fixed32, decode_prefix, encode, message
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.transport.stored import STORED_FROM_BYTES, StoredBytes
from shoal.types import DIGEST_BYTES, Float32Vector
from shoal.util.files import open_own, read_private, sync_directory, write_failed

LOG = logging.getLogger("shoal.edge")
PENDING_FILES: Final = ("pending.0.bin", "pending.1.bin")


@message(77)
@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The head of a pending slot; its SHA-256, the sealed upload and ``private`` bytes of private values follow.

    ``transfer`` is all zero if there is no upload. If only ``length`` is zero, the upload was answered and its bytes dropped.
    """

    roster: U32
    run: U32
    round: U32
    nonce: Fixed16
    transcript: Fixed32
    transfer: Fixed16
    length: U32
    private: U32 = 0


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """The contents of a pending slot: a replay watermark, and the transfer id and bytes of the upload of its round.

    ``residual`` is the upload's; None if it left none, or a power cut tore it. ``private`` are the private values, as stored.
    """

    mark: ReplayWatermark
    transfer: bytes
    sealed: bytes
    residual: Residual | None = None
    private: bytes = b""

    @property
    def answered(self) -> bool:
        """Whether the upload was answered, so that no reminder is due."""
        return any(self.transfer) and not self.sealed


class PendingUploadFiles:
    """The two slots in a device's private directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._slots = tuple(str(directory / name) for name in PENDING_FILES)
        self._next_slot = 0

    def save(
        self,
        mark: ReplayWatermark,
        transfer: bytes,
        sealed: bytes,
        residual: Residual | None = None,
        private: bytes = b"",
    ) -> bytes | StoredBytes:
        """Store the watermark, the upload of its round, the residual that it leaves and the private values, durably.

        Returns the upload, of which a long one is read from its slot: it stays there until the save after the next one.

        The two slots are overwritten in turn. That takes a quarter of the time of creating and syncing a new file, and wears
        flash less. A power cut during the write leaves the other slot intact, and no newer upload has been sent by then.
        """
        head = encode(
            Mark(
                roster=mark.roster,
                run=mark.run,
                round=mark.round,
                nonce=mark.nonce.ljust(16, b"\0"),
                transcript=mark.transcript,
                transfer=transfer.ljust(16, b"\0"),
                length=len(sealed),
                private=len(private),
            )
        )
        path = self._slots[self._next_slot]
        kept: bytes | StoredBytes = sealed
        try:
            left = b"" if residual is None else residual.to_bytes()
            new = self._write_slot(path, (head, sha256(head), sealed, private, left))
            if len(sealed) >= STORED_FROM_BYTES:
                kept = StoredBytes.of_file(path, len(head) + DIGEST_BYTES, len(sealed))
        except OSError as error:
            raise write_failed(Path(path), error) from error
        if new:
            sync_directory(self._directory)
        self._next_slot = 1 - self._next_slot
        return kept

    @staticmethod
    def _write_slot(path: str, pieces: tuple[bytes, ...]) -> bool:
        """Overwrite a slot, durably; return whether its file is new."""
        handle = open_own(path)
        try:
            new = os.fstat(handle).st_size == 0
            ends = tuple(accumulate(map(len, pieces)))
            # The head last: a process that is killed before leaves a slot that is not valid.
            for piece, end in reversed(tuple(zip(pieces, ends, strict=True))):
                view, at = memoryview(piece), end - len(piece)
                while view:  # pwrite may write less than it was given
                    written = os.pwrite(handle, view, at)
                    view, at = view[written:], at + written
            # Not fdatasync: where a file system has one journal, as ext4 and XFS have, this makes all earlier renames durable,
            # those of `edge_client.models.store` in this round among them.
            os.fsync(handle)
        finally:
            os.close(handle)
        return new

    def load(self) -> PendingUpload:
        """Return the newest pending slot; it is empty for a device that has not taken part in a round yet.

        Raises:
            IntegrityError: both slots are damaged, or an earlier version of Shoal wrote them.
        """
        if not any((self._directory / name).exists() for name in PENDING_FILES):
            # Create both slots now: later saves overwrite them and need no sync of the directory.
            for _ in PENDING_FILES:
                self.save(ReplayWatermark(), b"", b"")
        found = [self._load_slot(name) for name in PENDING_FILES]
        whole = [(i, p) for i, p in enumerate(found) if p is not None]
        if not whole:
            raise IntegrityError(
                f"{self._directory}: {' and '.join(PENDING_FILES)} are damaged, or of an earlier version of Shoal",
                hint="init or enrol a new directory under another name; or remove the two files, if the fleet is trusted: they "
                "guard against replayed announcements",
            )
        # Two slots of one round hold the same upload with and without its bytes: the answered one was written later.
        slot, newest = max(whole, key=lambda item: (item[1].mark.place, item[1].answered))
        self._next_slot = 1 - slot
        return newest

    def _load_slot(self, name: str) -> PendingUpload | None:
        path = self._directory / name
        if not path.exists():
            return None
        try:
            mark, rest = decode_prefix(read_private(path), Mark)
        except WireError as error:
            LOG.warning("a slot is damaged", extra={"kv": {"file": name, "reason": error}})
            return None
        middle, end = DIGEST_BYTES + mark.length, DIGEST_BYTES + mark.length + mark.private
        digest, sealed, private = bytes(rest[:DIGEST_BYTES]), bytes(rest[DIGEST_BYTES:middle]), bytes(rest[middle:end])
        residual = parse_residual(rest[end:], mark.transfer) if mark.length else None
        # The digest covers the head alone; the transfer id is a digest of the upload, and the values end with theirs.
        torn = len(sealed) and transfer_of(sealed) != mark.transfer
        torn = torn or (mark.private and before_digest(private) is None)
        if digest != sha256(encode(mark)) or len(sealed) != mark.length or torn:
            LOG.warning("a slot is damaged", extra={"kv": {"file": name, "reason": "cut short or torn"}})
            return None
        known = ReplayWatermark(mark.roster, mark.run, mark.round, mark.nonce, mark.transcript)
        return PendingUpload(known, mark.transfer, sealed, residual, private)


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


STORED: Final = "int8"


@message(82)
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualHead:
    """The head of a residual: its upload's run, round, model and transfer id, and its coordinates, 0 if absent."""

    run_id: Fixed16
    round: U32
    model: U16
    transfer: Fixed16
    length: U32


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual of one upload.

    Attributes:
        head: its upload's, and d.
        data: the clear vector, encoded as `STORED`.
    """

    head: ResidualHead
    data: bytes

    def __repr__(self) -> str:
        return f"Residual(round={self.head.round}, model={self.head.model}, length={self.head.length})"

    @classmethod
    def of(cls, vector: Float32Vector, *, run_id: bytes, round_: int, model: int, transfer: bytes) -> Residual:
        """Return the residual of a clear vector (d,) float32."""
        from shoal.protocol.precision.codec import encode as encode_vector

        data = encode_vector(vector, STORED, _seed(run_id, round_))
        return cls(ResidualHead(run_id=run_id, round=round_, model=model, transfer=transfer, length=len(vector)), data)

    def vector(self) -> Float32Vector:
        """Return the vector as stored, (d,) float32."""
        from shoal.protocol.precision.codec import decode as decode_vector

        return decode_vector(self.data, self.head.length, STORED)

    def to_bytes(self) -> bytes:
        """Return the residual as it is stored: head, vector, and the SHA-256 of both."""
        plain = encode(self.head) + self.data
        return plain + sha256(plain)


def parse_residual(data: bytes | memoryview, transfer: bytes) -> Residual | None:
    """Return the residual of an upload at the beginning of ``data``.

    A slot is overwritten in place, so it may hold other data: None then, or if a power cut tore it.

    Args:
        data: the bytes of a pending slot after the upload.
        transfer: the upload's transfer id.
    """
    try:
        head, rest = decode_prefix(data, ResidualHead)
        size = encoded_bytes(head.length, STORED)
    except IntegrityError:
        return None
    body, digest = bytes(rest[:size]), bytes(rest[size : size + DIGEST_BYTES])
    if head.transfer != transfer or sha256(encode(head), body) != digest:
        return None
    return Residual(head, body)


def _seed(run_id: bytes, round_: int) -> bytes:
    return b"residual\0" + run_id + round_.to_bytes(4, "little")
