"""False values for each field of the messages that a device signs, made from the fields' types.

`falsehoods` gives the false values of a field: its limits, zero, NaN, huge, repeated, the device's own last value and another
device's. `with_false` encodes a message with one false field, whether the codec would or not.
"""

import dataclasses
import struct
import typing
from typing import Annotated

from shoal.hints import field_hints, is_enum, optional_of
from shoal.protocol import codec
from shoal.protocol.codec import MAGIC

HUGE_ITEMS = 300
LONGEST_TEXT = "x" * 4096
WIDTHS = {"B": 8, "H": 16, "I": 32, "Q": 64}


@dataclasses.dataclass(frozen=True)
class Raw:
    """Bytes in place of a field's encoding, which the codec would not write."""

    data: bytes


@dataclasses.dataclass(frozen=True)
class Falsehood:
    """A false value: ``make(true, last, other)`` returns it, None if absent.

    ``last`` is the field's value in the device's last message of the kind, ``other`` that in another device's; both may be None.
    """

    name: str
    make: typing.Callable[[object, object, object], object]


def kind_of(hint):
    """Return (name of a field's kind, details)."""
    if typing.get_origin(hint) is Annotated:
        mark = typing.get_args(hint)[1]
        if isinstance(mark, codec._Int):
            return "int", WIDTHS[mark.code]
        if isinstance(mark, codec._Array):
            return "array", mark.code
        return ("later", None) if isinstance(mark, codec._Later) else ("fixed", mark.length)
    if typing.get_origin(hint) is tuple:
        return "list", typing.get_args(hint)[0]
    if optional_of(hint) is not None:
        return "optional", optional_of(hint)
    if is_enum(hint):
        return "enum", hint
    if dataclasses.is_dataclass(hint):
        return "record", hint
    return {str: "text", bytes: "blob", float: "float", bool: "truth"}[hint], None


def nested(hint):
    """Return the message type in a field, None if it has none."""
    kind, of = kind_of(hint)
    if kind == "record":
        return of
    return nested(of) if kind in ("list", "optional") else None


def _fixed(value):
    return lambda *_: value


def _last(_true, last, _other):
    return last


def _other(_true, _last, other):
    return other


def _flipped(data):
    return bytes([data[0] ^ 1, *data[1:]]) if data else b"\0"


def _same_twice(true, *_):
    return (true[0], true[0], *true[1:]) if true else None


def _many(true, *_):
    return (true[0],) * HUGE_ITEMS if true else None


def _own(kind, of):  # noqa: PLR0912 - a table
    """Return the false values of a kind of field, by name."""
    match kind:
        case "int":
            most = (1 << of) - 1
            return {
                "zero": _fixed(0),
                "one": _fixed(1),
                "largest": _fixed(most),
                "next": lambda t, *_: min(t + 1, most),
            }
        case "float":
            return {
                "zero": _fixed(0.0),
                "NaN": _fixed(Raw(struct.pack("<d", float("nan")))),
                "infinite": _fixed(Raw(struct.pack("<d", float("inf")))),
                "huge": _fixed(1.7e308),
                "huge and negative": _fixed(-1.7e308),
                "tiny": _fixed(5e-324),
                "largest float32": _fixed(3.4e38),
                "at the margin's limit": _fixed(-5.0),
            }
        case "truth":
            return {"the other": lambda t, *_: not t, "two": _fixed(Raw(b"\2"))}
        case "text":
            return {
                "empty": _fixed(""),
                "longest": _fixed(LONGEST_TEXT),
                "too long": _fixed(Raw(struct.pack("<H", 65535) + b"x" * 65535)),
                "control characters": _fixed("\x1b[2J\x00\u202e"),
                "no UTF-8": _fixed(Raw(b"\2\0\xff\xfe")),
            }
        case "fixed":
            return {"zero": _fixed(bytes(of)), "ones": _fixed(b"\xff" * of), "one bit": lambda t, *_: _flipped(t)}
        case "blob":
            return {
                "empty": _fixed(b""),
                "huge": _fixed(bytes(1 << 16)),
                "longer than the message": _fixed(Raw(struct.pack("<I", 1 << 30))),
                "one bit": lambda t, *_: _flipped(t),
                "cut": lambda t, *_: t[:-1] if t else None,
                "repeated": lambda t, *_: t + t if t else None,
            }
        case "enum":
            each = {f"{m.name.lower()}": lambda *_, m=m: Raw(bytes([m])) for m in of}
            return {**each, "zero": _fixed(Raw(b"\0")), "unknown": _fixed(Raw(b"\xff"))}
        case "later":
            return {
                "unknown": _fixed(((7, b"x" * 200),)),
                "the first, huge": _fixed(((1, b"\xff" * 200),)),
                "the first, empty": _fixed(((1, b""),)),
                "two of one number": _fixed(Raw(struct.pack("<HHHHH", 8, 7, 0, 7, 0))),
                "too long": _fixed(Raw(struct.pack("<H", 4000) + bytes(4000))),
            }
        case "array":
            size = struct.calcsize("<" + of)
            return {
                "empty": _fixed(()),
                "one more": lambda t, *_: (*t, 1),
                "repeated": _same_twice,
                "huge": _fixed((1,) * HUGE_ITEMS),
                "largest": lambda t, *_: tuple((1 << 8 * size) - 1 for _ in t) or None,
                "longer than the message": _fixed(Raw(struct.pack("<I", 1 << 20))),
            }
        case "list":
            inner = kind_of(of)[0]
            values = {
                "empty": _fixed(()),
                "repeated": _same_twice,
                "huge": _many,
                "longer than the message": _fixed(Raw(struct.pack("<I", 1 << 20))),
                "backwards": lambda t, *_: t[::-1] if len(t) > 1 else None,
            }
            if inner == "float":
                values |= {
                    name: lambda t, *_, v=v: tuple(v for _ in t) or None
                    for name, v in {
                        "zeros": 0.0,
                        "huge numbers": 1.7e308,
                        "at the limit": -5.0,
                        "positive limit": 5.0,
                    }.items()
                }
                values["unasked"] = lambda t, *_: None if t else (0.5,)
                values["NaN"] = lambda t, *_: Raw(
                    struct.pack(f"<I{len(t) or 1}d", len(t) or 1, *[float("nan")] * (len(t) or 1))
                )
            if inner == "fixed":
                length = kind_of(of)[1]
                values["zeros"] = lambda t, *_: tuple(bytes(length) for _ in t) or None
                values["unasked"] = lambda t, *_: None if t else (bytes(length),)
            return values
        case "record":
            return {"nothing": _fixed(Raw(b""))}
        case "optional":
            inner = kind_of(of)
            values = {"missing": lambda t, *_: None if t is None else Raw(b"\0")}
            for name, make in ({} if inner[0] == "record" else _own(*inner)).items():
                values[name] = make
            return values
    raise AssertionError(kind)


def falsehoods(hint):
    """Return the false values of a field of this type."""
    own = _own(*kind_of(hint))
    return [Falsehood(n, m) for n, m in {**own, "repeated from before": _last, "another device's": _other}.items()]


def value_at(message, path):
    """Return the value at a path of field names; of a list the first item. None if it is not there."""
    for name in path:
        if isinstance(message, tuple):
            message = message[0] if message else None
        if message is None:
            return None
        message = getattr(message, name)
    return message


def _encoded(value, hint):
    if isinstance(value, Raw):
        return value.data
    out = bytearray()
    codec._coder(hint).write(out, value)
    return bytes(out)


def _field(value, hint, path, false):
    """Return the encoding of a field, falsified at ``path`` in it."""
    if not path:
        if kind_of(hint)[0] == "optional" and isinstance(false, Raw) and false.data != b"\0":
            return b"\1" + false.data
        return _encoded(false, hint)
    kind, of = kind_of(hint)
    if kind == "record":
        return _record(value, path, false)
    if kind == "optional":
        return b"\1" + _field(value, of, path, false)
    return struct.pack("<I", len(value)) + b"".join(
        _field(item, of, path, false) if i == 0 else _encoded(item, of) for i, item in enumerate(value)
    )


def _record(value, path, false):
    parts = []
    for name, hint in field_hints(type(value)).items():
        given = getattr(value, name)
        if name == path[0]:
            parts.append(_field(given, hint, path[1:], false))
        else:
            parts.append(_encoded(given, hint))
    return b"".join(parts)


def with_false(message, path, false):
    """Return the encoding of a message whose field at ``path`` is false."""
    return MAGIC + bytes([codec._KIND_OF[type(message)]]) + _record(message, path, false)
