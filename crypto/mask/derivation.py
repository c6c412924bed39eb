"""Derive the key of a mask from a secret and a context: in a fleet, the key of one round (`crypto.mask.schedule`)."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn

from crypto.mask.kdf import SECRET_BYTES, expand
from crypto.mask.modes import registry
from crypto.mask.modes.base import Transform
from crypto.mask.secret import MaskSecret
from shoal import limits
from shoal.errors import UsageError
from shoal.types import DIGEST_BYTES, KEY_ID_BYTES, Float32Vector, Segment, check_name

MAX_RUN_ID_BYTES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskContext:
    """The public inputs of a mask's derivation; the secret is the other one.

    Attributes:
        fleet: the fleet's name.
        run_id: 1 to 64 bytes, random for each run. If an owner's directory is restored from a backup, a run number and a key
            version may be used again; the run id still gives another mask.
        task_digest: 32 bytes.
        mode: a name that ``crypto.mask.modes.registry`` lists.
        segments: layout of the vector, in order; at most one segment of each name.
        key_version, round: of the round key. Benchmarks, which have none, may tell several masks of a run apart by them.
    """

    fleet: str
    run_id: bytes
    task_digest: bytes
    mode: str
    segments: tuple[Segment, ...]
    key_version: int = 0
    round: int = 0

    def __post_init__(self) -> None:
        check_name(self.fleet, "fleet")
        registry.find(self.mode)
        if not 1 <= len(self.run_id) <= MAX_RUN_ID_BYTES:
            raise UsageError(f"the run id has {len(self.run_id)} bytes, not 1 to {MAX_RUN_ID_BYTES}")
        for what, number in (("key version", self.key_version), ("round", self.round)):
            if not 0 <= number < 1 << 63:
                raise UsageError(f"{what} {number} is out of range", hint="it counts up from 0")
        if len(self.task_digest) != DIGEST_BYTES:
            raise UsageError(f"the task digest has {len(self.task_digest)} bytes, not {DIGEST_BYTES}")
        names = [segment.name for segment in self.segments]
        if not names or len(set(names)) != len(names):
            raise UsageError(f"segments {names} are not one or two of different names")
        if self.length > limits.MAX_COORDINATES:
            raise UsageError(f"the segments have {self.length} coordinates, more than {limits.MAX_COORDINATES}")

    @property
    def length(self) -> int:
        """Coordinates of all segments together."""
        return sum(segment.length for segment in self.segments)

    @property
    def times(self) -> bytes:
        """Zero, key version and round as one field of the derivation: 8 bytes each, big-endian.

        The zero is part of the wire format; without it all masks would differ.
        """
        return struct.pack(">QQQ", 0, self.key_version, self.round)


@dataclass(frozen=True, slots=True, eq=False)
class MaskKey:
    """A derived mask, ready to use; as secret as the mask secret.

    Attributes:
        context: the context that it was derived from.
        key_id: 16 bytes that may be sent in clear and reveal nothing about the mask.
        length: number of coordinates.
        transforms: one for each segment, in order.
        matrix: rows of the dense matrix before the mask (`crypto.mask.dense`); 0 without one.
    """

    context: MaskContext
    key_id: bytes
    length: int
    transforms: tuple[Transform, ...] = field(repr=False)
    matrix: int = 0

    @property
    def exact(self) -> bool:
        """Whether unmasking restores the same bits; otherwise it restores the vector to a relative l2 error of 1e-6."""
        return not self.matrix and registry.find(self.context.mode).exact

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the masked ``source`` to ``out``, both shape (length,), float32, C-contiguous, not overlapping."""
        start = 0
        for transform in self.transforms:
            stop = start + transform.length
            transform.apply(source[start:stop], out[start:stop])
            start = stop

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the unmasked ``source`` to ``out``, both shape (length,), float32, C-contiguous, not overlapping."""
        start = 0
        for transform in self.transforms:
            stop = start + transform.length
            transform.invert(source[start:stop], out[start:stop])
            start = stop

    def __repr__(self) -> str:
        return f"MaskKey(key_id={self.key_id.hex()}, mode={self.context.mode}, length={self.length}, mask=<redacted>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a mask key can't be pickled or copied; derive it again from the secret")


def derive(secret: MaskSecret, context: MaskContext) -> MaskKey:
    """Derive the mask of ``secret`` and ``context``.

    HKDF-SHA256 over fleet, run id, `MaskContext.times`, task digest, segment and purpose, each with its length, gives every
    segment its own keys. It takes 15 to 40 ns a coordinate, and up to 10 bytes a coordinate
    while it runs for long vectors. The key then holds 4 bytes a coordinate, and a bit for each of its signs.
    """
    mode = registry.find(context.mode)

    def transform_of(segment: Segment) -> Transform:
        return mode.build(partial(subkey, secret, context, segment.name, segment.length), segment.length)

    return MaskKey(
        context=context,
        key_id=key_id(secret, context),
        length=context.length,
        transforms=tuple(transform_of(segment) for segment in context.segments),
    )


def subkey(secret: MaskSecret, context: MaskContext, part: str, length: int, purpose: str) -> bytes:
    """Return the 32-byte key of one purpose for a part of the vectors, such as a segment of ``length`` coordinates."""
    # The mode is not among these fields: each mode has purposes of its own.
    place = (context.fleet.encode(), context.run_id, context.times, context.task_digest, f"{part}:{length}".encode())
    return expand(secret.reveal(), SECRET_BYTES, *place, purpose.encode())


def segment_keys(key: MaskKey) -> dict[str, MaskKey]:
    """Return the mask of each segment by its name, and the whole mask under the empty name; all have the same key id."""
    names = (segment.name for segment in key.context.segments)
    parts = {n: MaskKey(key.context, key.key_id, t.length, (t,)) for n, t in zip(names, key.transforms, strict=True)}
    return {"": key, **parts}


def key_id(secret: MaskSecret, context: MaskContext) -> bytes:
    """Return the 16 bytes that name the mask of ``secret`` and ``context``, without deriving the mask."""
    return expand(
        secret.reveal(),
        KEY_ID_BYTES,
        b"key-id",
        context.fleet.encode(),
        context.run_id,
        context.times,
        context.task_digest,
        context.mode.encode(),
        b",".join(_segment_field(segment) for segment in context.segments),
    )


def _segment_field(segment: Segment) -> bytes:
    return f"{segment.name}:{segment.length}".encode()
