"""The stored residual of an upload: the rounding error of a clear update.

It is stored as ``int8`` itself, in a quarter of the memory and of the flash that float32 takes: the device adds what it has
stored, so that rounding once more costs 1 % of an error of a few percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal.digests import sha256
from shoal.errors import IntegrityError
from shoal.protocol.codec import U16, U32, Fixed16, decode_prefix, encode, message
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.types import DIGEST_BYTES, Float32Vector

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
