"""One upload between its last chunk and the disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shoal.protocol.messages import Upload

NOTHING: Final = memoryview(b"")


class UploadRef(NamedTuple):
    """Identity of an upload.

    The transfer id alone is not enough: a device could name the transfer of another.
    """

    device: str
    transfer: bytes


@dataclass(frozen=True, slots=True)
class OpenedUpload:
    """An authentic upload within the plan's limits.

    Attributes:
        header: its header.
        ref: its identity.
        digest: the hash that its device signed; two uploads with one digest are the same.
        norm: the vector's l2 norm; of an upload in parts 0 until the workers have reported theirs.
        body: the vector as float32 little-endian, whatever its precision on the wire, and any attached bytes after it; without
            the vector if workers hold its parts; empty once it is written, or is not to be.
        start: offset of the vector in the file of its round; None while it is not written.
        checksum: of the vector and the attached bytes, once it is written.
    """

    header: Upload
    ref: UploadRef
    digest: bytes
    norm: float
    body: memoryview = field(default=NOTHING, repr=False)
    start: int | None = None
    checksum: int = 0
