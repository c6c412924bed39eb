"""Encoding of messages: a fixed, canonical, bounded binary format.

A message is a frozen dataclass whose annotations are the field types below, registered under a kind number. Its encoding
is ``magic "SHM1" | kind u8 | fields in order``, integers little-endian. Every length is checked against the
remaining bytes before memory is allocated, every value has exactly one encoding, and any bytes give either a message or a
WireError. docs/wire-format.md has the table.

Messages that a party signs by themselves end with `LaterFields`: fields that a later version may add. A receiver of an earlier
version keeps them as they are, so that encoding the message again gives the signed bytes, and does nothing else with them.

Example: `Setting("k", "2")` is ``SHM1``, kind 5, and two strings with 2-byte lengths: 11 bytes in all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Final, TypeVar, cast, get_args, get_origin

from shoal import limits
from shoal.errors import WireError
from shoal.hints import field_hints, is_enum, optional_of

MAGIC: Final = b"SHM1"
MAX_STRING_BYTES: Final = 4096
MAX_BLOB_BYTES: Final = limits.MAX_TRANSFER_BYTES
MAX_ITEMS: Final = 1 << 20
MAX_LATER_BYTES: Final = 256
"""Most bytes of a message's later fields, numbers and lengths among them: they fit the sizes of `shoal.protocol.sizes`."""


@dataclass(frozen=True, slots=True)
class _Int:
    code: str


@dataclass(frozen=True, slots=True)
class _Fixed:
    length: int


@dataclass(frozen=True, slots=True)
class _Array:
    """A tuple of integers written in one piece."""

    code: str


@dataclass(frozen=True, slots=True)
class _Later:
    """The fields that later versions add at the end of a message."""


U8 = Annotated[int, _Int("B")]
U16 = Annotated[int, _Int("H")]
U32 = Annotated[int, _Int("I")]
U64 = Annotated[int, _Int("Q")]
Fixed16 = Annotated[bytes, _Fixed(16)]
Fixed32 = Annotated[bytes, _Fixed(32)]
Fixed64 = Annotated[bytes, _Fixed(64)]
ArrayU16 = Annotated[tuple[int, ...], _Array("H")]
ArrayU32 = Annotated[tuple[int, ...], _Array("I")]
LaterFields = Annotated[tuple[tuple[int, bytes], ...], _Later()]
"""Pairs of a field's number, at least 1, and its value, by ascending number. This version knows none of them and skips all."""

M = TypeVar("M")
_BY_KIND: dict[int, type[Any]] = {}
_KIND_OF: dict[type[Any], int] = {}
_RECORDS: dict[type[Any], _Coder] = {}


class _Reader:
    """A cursor over received bytes that never reads past the end."""

    __slots__ = ("data", "end", "pos")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.pos = 0
        self.end = len(data)

    def take(self, count: int) -> memoryview:
        start = self.pos
        if count > self.end - start:
            raise WireError(f"message ends early: {count} bytes wanted at {start} of {self.end}")
        self.pos = start + count
        return self.data[start : self.pos]

    def unpack(self, packer: struct.Struct) -> tuple[Any, ...]:
        if packer.size > self.end - self.pos:
            self.take(packer.size)  # raises
        values = packer.unpack_from(self.data, self.pos)
        self.pos += packer.size
        return values

    @property
    def left(self) -> int:
        return self.end - self.pos


@dataclass(frozen=True, slots=True)
class _Coder:
    """Writes and reads the values of one type.

    Attributes:
        code: struct's code if every value of the type has the same size, else empty. A record reads such fields in one piece.
        made: the value from the one that struct gives; None if they are the same.
    """

    write: Callable[[bytearray, Any], None]
    read: Callable[[_Reader], Any]
    code: str = ""
    made: Callable[[Any], Any] | None = None


_U8: Final = struct.Struct("<B")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_LATER_HEAD: Final = struct.Struct("<HH")
"""Of each later field: its number, and the bytes of its value."""


def message(kind: int) -> Callable[[type[M]], type[M]]:
    """Register a frozen dataclass as the message type ``kind`` (1 to 255)."""

    def register(cls: type[M]) -> type[M]:
        if kind in _BY_KIND or not 0 < kind < 256:
            raise ValueError(f"message kind {kind} is taken or out of range")
        _BY_KIND[kind] = cls
        _KIND_OF[cls] = kind
        return cls

    return register


def encode(value: Any) -> bytes:
    """Return the canonical bytes of a registered message.

    Raises:
        WireError: a field is out of its type's range.
    """
    out = bytearray(MAGIC)
    out.append(_KIND_OF[type(value)])
    try:
        _record_of(type(value)).write(out, value)
    except (struct.error, OverflowError, TypeError, ValueError) as error:
        raise WireError(f"{type(value).__name__} can't be encoded: {error}") from error
    return bytes(out)


def decode(data: bytes | memoryview, expected: type[M]) -> M:
    """Return the message of type ``expected`` that ``data`` encodes completely.

    Raises:
        WireError: the bytes are of another type, malformed, too long or too short.
    """
    value, rest = decode_prefix(data, expected)
    if len(rest):
        raise WireError(f"{expected.__name__} is followed by {len(rest)} bytes too many")
    return value


def decode_prefix(data: bytes | memoryview, expected: type[M]) -> tuple[M, memoryview]:
    """Return the message at the start of ``data`` and the bytes after it (a vector, not copied)."""
    reader = _Reader(memoryview(data))
    if bytes(reader.take(len(MAGIC))) != MAGIC:
        raise WireError("not a message: wrong magic")
    (kind,) = reader.unpack(_U8)
    if _BY_KIND.get(kind) is not expected:
        raise WireError(f"message of kind {kind} where {expected.__name__} was expected")
    value = _record_of(expected).read(reader)
    if reader.pos > limits.MAX_HEADER_BYTES and reader.left:
        raise WireError("message header is too long")
    return cast(M, value), reader.data[reader.pos :]


def _record_of(cls: type[Any]) -> _Coder:
    coder = _RECORDS.get(cls)
    if coder is None:
        coder = _RECORDS[cls] = _record(cls)
    return coder


def _record(cls: type[Any]) -> _Coder:
    """Build the coder of a dataclass, field by field; its own ``__post_init__`` checks run on decoding."""
    coders = [(name, _coder(hint)) for name, hint in field_hints(cls).items()]

    def write(out: bytearray, value: Any) -> None:
        # Not isinstance: a subclass may have other fields, and the receiver decodes those of cls.
        if type(value) is not cls:
            raise TypeError(f"{type(value).__name__} where {cls.__name__} belongs")
        for name, coder in coders:
            coder.write(out, getattr(value, name))

    pieces = [
        _in_one_piece(list(run)) if of_one_size else _one_by_one(list(run))
        for of_one_size, run in itertools.groupby((coder for _, coder in coders), key=lambda coder: coder.code != "")
    ]
    made = _constructor(cls)
    if len(pieces) == 1:
        (whole,) = pieces
        return _Coder(write, lambda reader: made(*whole(reader)))

    def read(reader: _Reader) -> Any:
        values: list[Any] = []
        for piece in pieces:
            values += piece(reader)
        return made(*values)

    return _Coder(write, read)


def _constructor(cls: type[Any]) -> Callable[..., Any]:
    """Return the function that makes a ``cls`` of its fields' values in order."""
    fields = dataclasses.fields(cls)
    if not any(field.kw_only for field in fields):
        return cls
    names = [field.name for field in fields]
    return lambda *values: cls(**dict(zip(names, values, strict=True)))


def _one_by_one(coders: Sequence[_Coder]) -> Callable[[_Reader], Sequence[Any]]:
    return lambda reader: [coder.read(reader) for coder in coders]


def _in_one_piece(coders: Sequence[_Coder]) -> Callable[[_Reader], Sequence[Any]]:
    """Return a function that reads consecutive values, each of a fixed size, with one call of struct."""
    packer = struct.Struct("<" + "".join(coder.code for coder in coders))
    made = [(place, coder.made) for place, coder in enumerate(coders) if coder.made is not None]

    def read(reader: _Reader) -> Sequence[Any]:
        if packer.size > reader.left:
            return [coder.read(reader) for coder in coders]  # the first that is wrong or does not fit raises
        read_values = reader.unpack(packer)
        if not made:
            return read_values
        values = list(read_values)
        for place, of in made:
            values[place] = of(values[place])
        return values

    return read


def _fixed_size(write: Callable[[bytearray, Any], None], code: str, made: Callable[[Any], Any] | None = None) -> _Coder:
    """Return the coder of a type whose values struct reads by ``code``; ``made`` checks or converts them."""
    packer = struct.Struct("<" + code)

    def read(reader: _Reader) -> Any:
        (value,) = reader.unpack(packer)
        return value if made is None else made(value)

    return _Coder(write, read, code, made)


def _coder(hint: Any) -> _Coder:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(args[1])
    if origin is tuple:
        return _sequence(_coder(args[0]))
    # Before the table at the end, which has no entries for unions.
    inner = optional_of(hint)
    if inner is not None:
        return _optional(_coder(inner))
    if is_enum(hint):
        return _enum(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record_of(hint)
    return {str: _STRING, bytes: _BLOB, float: _FLOAT, bool: _BOOL}[hint]


def _annotated(mark: Any) -> _Coder:
    if isinstance(mark, _Int):
        pack = struct.Struct("<" + mark.code).pack
        return _fixed_size(lambda out, v: out.extend(pack(v)), mark.code)
    if isinstance(mark, _Array):
        return _array(mark.code)
    if isinstance(mark, _Later):
        return _LATER
    length: int = mark.length

    def write_fixed(out: bytearray, value: bytes) -> None:
        if len(value) != length:
            raise TypeError(f"{len(value)} bytes where {length} belong")
        out.extend(value)

    return _fixed_size(write_fixed, f"{length}s")


def _array(code: str) -> _Coder:
    size = struct.calcsize("<" + code)

    def write(out: bytearray, values: tuple[int, ...]) -> None:
        out.extend(struct.pack("<I", len(values)))
        out.extend(struct.pack(f"<{len(values)}{code}", *values))

    def read(reader: _Reader) -> tuple[int, ...]:
        count = _count(reader, size)
        return struct.unpack(f"<{count}{code}", reader.take(count * size))

    return _Coder(write, read)


def _enum(kind: type[IntEnum]) -> _Coder:
    """Return the coder of an enumeration: members as u8; encoding and decoding refuse other numbers."""

    def made(value: int) -> IntEnum:
        try:
            return kind(value)
        except ValueError as error:
            raise WireError(f"{value} is not a {kind.__name__}") from error

    return _fixed_size(lambda out, value: out.append(kind(value)), "B", made)


def _count(reader: _Reader, item_bytes: int) -> int:
    (count,) = reader.unpack(_U32)
    # Checked before reading: 4 bytes could otherwise claim memory for 2^32 items.
    if count > MAX_ITEMS or count * item_bytes > reader.left:
        raise WireError(f"a list of {count} items does not fit in {reader.left} bytes")
    return cast(int, count)


def _sequence(item: _Coder) -> _Coder:
    def write(out: bytearray, values: tuple[Any, ...]) -> None:
        out.extend(struct.pack("<I", len(values)))
        for value in values:
            item.write(out, value)

    # Every item takes at least one byte, which bounds the count by the bytes that are left.
    return _Coder(write, lambda r: tuple([item.read(r) for _ in range(_count(r, 1))]))


def _optional(item: _Coder) -> _Coder:
    def write(out: bytearray, value: Any) -> None:
        out.append(value is not None)
        if value is not None:
            item.write(out, value)

    return _Coder(write, lambda r: item.read(r) if _BOOL.read(r) else None)


def _write_string(out: bytearray, value: str) -> None:
    raw = value.encode("utf-8")
    if len(raw) > MAX_STRING_BYTES:
        raise OverflowError(f"a string of {len(raw)} bytes")
    out.extend(struct.pack("<H", len(raw)) + raw)


def _read_string(reader: _Reader) -> str:
    (length,) = reader.unpack(_U16)
    if length > MAX_STRING_BYTES:
        raise WireError(f"a string of {length} bytes")
    try:
        return str(reader.take(length), "utf-8")
    except UnicodeDecodeError as error:
        raise WireError("a string is not UTF-8") from error


def _write_blob(out: bytearray, value: bytes) -> None:
    if len(value) > MAX_BLOB_BYTES:
        raise OverflowError(f"a blob of {len(value)} bytes")
    out.extend(struct.pack("<I", len(value)))
    out.extend(value)


def _write_later(out: bytearray, values: Sequence[tuple[int, bytes]]) -> None:
    raw = b"".join(_LATER_HEAD.pack(number, len(value)) + value for number, value in values)
    numbers = [0, *(number for number, _ in values)]
    if len(raw) > MAX_LATER_BYTES or any(a >= b for a, b in itertools.pairwise(numbers)):
        raise OverflowError(f"later fields of {len(raw)} bytes with the numbers {numbers[1:]}")
    out.extend(_U16.pack(len(raw)) + raw)


def _read_later(reader: _Reader) -> tuple[tuple[int, bytes], ...]:
    (length,) = reader.unpack(_U16)
    if length > MAX_LATER_BYTES:
        raise WireError(f"later fields of {length} bytes")
    fields = _Reader(reader.take(length))
    found: list[tuple[int, bytes]] = []
    last = 0
    while fields.left:
        number, size = fields.unpack(_LATER_HEAD)
        # One order and each number once, since signatures are over the encoding.
        if number <= last:
            raise WireError(f"later field {number} after {last}")
        last = number
        found.append((number, bytes(fields.take(size))))
    return tuple(found)


def _write_float(out: bytearray, value: float) -> None:
    if not math.isfinite(value):
        raise TypeError(f"{value} where a finite number belongs")
    out.extend(struct.pack("<d", value))


def _finite(value: float) -> float:
    # NaN compares false with every limit, so it would pass the checks that follow.
    if not math.isfinite(value):
        raise WireError("a number is not finite")
    return value


def _write_bool(out: bytearray, value: bool) -> None:
    out.append(1 if value else 0)


def _truth(value: int) -> bool:
    # Other numbers would give one value several encodings, and signatures are over the encoding.
    if value > 1:
        raise WireError(f"a truth value of {value}")
    return bool(value)


_STRING = _Coder(_write_string, _read_string)
_BLOB = _Coder(_write_blob, lambda r: bytes(r.take(r.unpack(_U32)[0])))
_LATER = _Coder(_write_later, _read_later)
_FLOAT = _fixed_size(_write_float, "d", _finite)
_BOOL = _fixed_size(_write_bool, "B", _truth)
