"""Every parser of bytes that somebody else may have written: by name, with bytes that it takes, as properties and fuzzers use it.

A parser takes what it is given or raises a ShoalError; anything else that escapes is a finding. Whoever adds a parser to the
project adds it here, and both `tests/properties/test_parsers.py` and `tests/fuzz/fuzz_parsers.py` go over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import ShoalError, WireError
from shoal.protocol import codec


@dataclass(frozen=True)
class Parser:
    """One parser.

    Attributes:
        seeds: inputs that it takes.
        read: parses, and returns or raises a ShoalError.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]

    def takes(self, data: bytes) -> bool:
        """Return whether the parser accepts ``data``; anything but a ShoalError goes through."""
        try:
            self.read(data)
        except ShoalError:
            return False
        return True


def parcelled(*parts: bytes) -> bytes:
    """Return several inputs in one: each behind its length in 4 bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def parts_of(data: bytes) -> list[bytes]:
    """Return the inputs that `parcelled` put together; of any bytes, whatever can be read so."""
    found = []
    while len(data) >= 4:
        size = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def text(data: bytes) -> str:
    """Return the bytes as text, whatever they are."""
    return data.decode("utf-8", "surrogateescape")


def messages(samples: dict[type, list[bytes]]) -> list[Parser]:
    """Return a parser for each registered message; ``samples`` holds encoded ones by their type."""
    kinds = {t for t in codec._BY_KIND.values() if not t.__module__.startswith("tests.")}
    return [_message(kind, samples.get(kind, [])) for kind in sorted(kinds, key=lambda t: t.__name__)]


def _message(kind: type, seeds: list[bytes]) -> Parser:
    head = codec.MAGIC + bytes([codec._KIND_OF[kind]])

    def read(data: bytes) -> object:
        value, rest = codec.decode_prefix(data, kind)
        if codec.encode(value) + bytes(rest) != data:
            raise AssertionError(f"{kind.__name__} has two encodings")
        if len(rest):
            raise WireError("bytes too many")
        return value

    return Parser(f"message {kind.__name__}", tuple(seeds) or (head + bytes(200),), read)


def all_parsers(root) -> list[Parser]:
    """Return every parser there is, over a fleet and its files below the empty directory ``root``."""
    from tests.helpers import parsers_disk, parsers_scene, parsers_wire

    for name in ("talk", "disk", "copies"):
        (root / name).mkdir()
    scene = parsers_scene.Scene(root / "talk")
    disk = parsers_disk.Disk(parsers_scene.Scene(root / "disk"), root / "copies")
    return [*messages(scene.samples()), *parsers_wire.parsers(scene), *parsers_disk.parsers(disk)]
