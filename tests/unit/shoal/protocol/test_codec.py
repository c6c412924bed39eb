"""The codec: exact bytes, canonical and bounded, and a WireError for everything else."""

import struct
from dataclasses import dataclass

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol import codec
from shoal.protocol.codec import (
    MAX_LATER_BYTES,
    U8,
    U16,
    U32,
    U64,
    ArrayU16,
    ArrayU32,
    Fixed16,
    LaterFields,
    decode,
    decode_prefix,
    encode,
    message,
)


@message(200)
@dataclass(frozen=True, slots=True)
class Point:
    x: U8
    y: U16


@message(201)
@dataclass(frozen=True, slots=True)
class Everything:
    a: U8
    b: U16
    c: U32
    d: U64
    e: float
    f: bool
    g: str
    h: bytes
    i: Fixed16
    j: ArrayU16
    k: ArrayU32
    m: tuple[Point, ...]
    n: Point | None
    o: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.a == 13:
            raise WireError("thirteen")


SAMPLE = Everything(
    1, 2, 3, 4, -0.5, True, "h\u00e9", b"raw", b"0123456789abcdef", (5, 6), (7,), (Point(8, 9),), None, (1.0,)
)
HEAD = b"SHM1" + bytes([201])
SAMPLE_BYTES = HEAD + b"".join(
    (
        struct.pack("<BHIQd", 1, 2, 3, 4, -0.5),
        b"\x01",
        b"\x03\x00h\xc3\xa9",
        b"\x03\x00\x00\x00raw",
        b"0123456789abcdef",
        b"\x02\x00\x00\x00\x05\x00\x06\x00",
        b"\x01\x00\x00\x00\x07\x00\x00\x00",
        b"\x01\x00\x00\x00\x08\x09\x00",
        b"\x00",
        b"\x01\x00\x00\x00" + struct.pack("<d", 1.0),
    )
)


def test_the_bytes_are_these():
    """A known answer: another implementation can be written from it. What follows the message is handed out uncopied."""
    assert encode(SAMPLE) == SAMPLE_BYTES
    assert decode(SAMPLE_BYTES, Everything) == SAMPLE
    data = SAMPLE_BYTES + b"vector"
    value, rest = decode_prefix(data, Everything)
    assert (value, bytes(rest)) == (SAMPLE, b"vector")
    assert rest.obj is data


@pytest.mark.parametrize("length", range(len(SAMPLE_BYTES)))
def test_every_truncation_is_refused(length):
    with pytest.raises(WireError):
        decode(SAMPLE_BYTES[:length], Everything)


@pytest.mark.parametrize(("length", "wanted"), [(3, 4), (4, 1), (5, 1), (7, 2), (10, 4)])
def test_early_end_names_the_field(length, wanted):
    """Consecutive fields of a fixed size are read in one piece, and the error is still that of one field."""
    with pytest.raises(WireError, match=f"ends early: {wanted} bytes wanted at .* of {length}$"):
        decode(SAMPLE_BYTES[:length], Everything)


def swap(at, new):
    return SAMPLE_BYTES[:at] + new + SAMPLE_BYTES[at + len(new) :]


AT = {"float": 20, "bool": 28, "string": 29, "blob": 34, "array": 57, "optional": 80}
LONG_LIST = SAMPLE_BYTES[: AT["array"]] + struct.pack("<I", codec.MAX_ITEMS + 1) + bytes(2 * codec.MAX_ITEMS + 2)
"""Also where every item could be empty: the count alone must not make us work."""


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (swap(AT["bool"], b"\x02"), "truth value of 2"),
        (swap(AT["optional"], b"\xff"), "truth value of 255"),
        (swap(AT["float"], struct.pack("<d", float("nan"))), "not finite"),
        (swap(AT["float"], struct.pack("<d", float("-inf"))), "not finite"),
        (swap(AT["string"] + 2, b"\xff"), "not UTF-8"),
        (swap(AT["string"], b"\xff\xff"), "a string of 65535 bytes"),
        (swap(AT["blob"], b"\xff\xff\xff\xff"), "ends early"),
        (swap(AT["array"], b"\xff\xff\xff\x7f"), "a list of 2147483647 items"),
        (swap(AT["array"], b"\x00\x01\x00\x00"), "a list of 256 items does not fit"),
        (swap(5, b"\x0d"), "thirteen"),  # the message's own rule
        (LONG_LIST, "a list of"),
        (SAMPLE_BYTES + b"\0", "1 bytes too many"),
        (encode(Point(1, 2)), "kind 200 where Everything"),
        (b"SHM2" + SAMPLE_BYTES[4:], "wrong magic"),
        (b"SHM1" + bytes([199]), "kind 199"),
    ],
)
def test_other_or_malformed_is_refused(data, match):
    with pytest.raises(WireError, match=match):
        decode(data, Everything)


def test_offsets_above_are_right():
    """The table of positions that the malformed cases use points to what it says."""
    there = {
        "float": struct.pack("<d", -0.5),
        "bool": b"\1",
        "string": b"\3\0",
        "blob": b"\3\0\0\0",
        "array": b"\2\0\0\0",
    }
    there["optional"] = b"\0"
    assert {name: SAMPLE_BYTES[at : at + len(there[name])] for name, at in AT.items()} == there


def altered(**fields):
    values = {name: getattr(SAMPLE, name) for name in SAMPLE.__slots__}
    return Everything(**{**values, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"a": 256},
        {"a": -1},
        {"b": 65536},
        {"c": 1 << 32},
        {"d": 1 << 64},
        {"e": float("nan")},
        {"e": float("inf")},
        {"g": "x" * 4097},
        {"g": "\ud800"},
        {"i": b"short"},
        {"j": (65536,)},
        {"k": (-1,)},
        {"m": (SAMPLE,)},
        {"a": "text"},
        {"o": (float("nan"),)},
    ],
)
def test_unreadable_is_not_written(fields):
    """What can't be read back is not written."""
    with pytest.raises(WireError, match="can't be encoded"):
        encode(altered(**fields))


def test_header_longer_than_limit_is_refused():
    long = altered(h=bytes(limits.MAX_HEADER_BYTES))
    assert decode(encode(long), Everything) == long
    with pytest.raises(WireError, match="header is too long"):
        decode_prefix(encode(long) + b"vector", Everything)


@pytest.mark.parametrize("kind", [201, 256, 0])
def test_a_kind_is_given_once(kind):
    with pytest.raises(ValueError, match="taken or out of range"):
        message(kind)(Point)


@message(206)
@dataclass(frozen=True, slots=True)
class Open:
    x: U8
    later: LaterFields = ()


OPEN = b"SHM1\xce\x07"


@pytest.mark.parametrize(
    ("later", "section"),
    [
        ((), "0000"),
        (((1, b"abc"), (0x209, b"")), "0b00 0100 0300 616263 0902 0000"),
        (((1, bytes(MAX_LATER_BYTES - 4)),), "0001 0100 fc00" + "00" * (MAX_LATER_BYTES - 4)),
    ],
    ids=["none", "two", "the longest"],
)
def test_later_fields_are_kept_as_they_came(later, section):
    """Fields that this version does not know; the message encodes to the bytes that its sender signed."""
    raw = OPEN + bytes.fromhex(section.replace(" ", ""))
    assert decode(raw, Open) == Open(7, later)
    assert encode(Open(7, later)) == raw


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("", "ends early"),
        ("0100", "ends early"),
        ("0600 0100 0100 61 62", "ends early"),  # of the next field there is one byte
        ("0400 0100 0100", "ends early"),  # the value would be beyond the fields
        ("0400 0000 0000", "later field 0 after 0"),
        ("0800 0200 0000 0100 0000", "later field 1 after 2"),
        ("0800 0200 0000 0200 0000", "later field 2 after 2"),
        ("0101" + "00" * 257, "later fields of 257 bytes"),
        ("0000 00", "1 bytes too many"),
    ],
)
def test_malformed_later_fields_are_refused(section, reason):
    with pytest.raises(WireError, match=reason):
        decode(OPEN + bytes.fromhex(section.replace(" ", "")), Open)


@pytest.mark.parametrize(
    "later",
    [((1, bytes(MAX_LATER_BYTES - 3)),), ((0, b""),), ((2, b""), (1, b"")), ((1, b""), (1, b"")), ((1 << 16, b""),)],
)
def test_unreadable_later_fields_stay_here(later):
    """Later fields that no receiver would take are not sent."""
    with pytest.raises(WireError, match="can't be encoded"):
        encode(Open(7, later))
