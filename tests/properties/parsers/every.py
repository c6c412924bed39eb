"""Table of all parsers of untrusted bytes, by name, with valid inputs as seeds, for property tests and fuzzers.

A parser accepts its input or raises a ShoalError; any other exception is a finding. New parsers of the project must be added
here; `tests/properties/test_parsers.py` and `tests/fuzz/fuzz_parsers.py` use the table.
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
        """Return whether the parser accepts ``data``; exceptions other than ShoalError are raised."""
        try:
            self.read(data)
        except ShoalError:
            return False
        return True


def parcelled(*parts: bytes) -> bytes:
    """Return several inputs joined, each after its length in 4 bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def parts_of(data: bytes) -> list[bytes]:
    """Return the inputs that `parcelled` put together; of other bytes, any pieces."""
    found = []
    while len(data) >= 4:
        size = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


def text(data: bytes) -> str:
    """Return any bytes as text."""
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
    from tests.properties.parsers import disk, rounds, scene, shards, wire

    for name in ("talk", "disk", "copies", "rounds"):
        (root / name).mkdir()
    talk = scene.Scene(root / "talk")
    files = disk.Disk(scene.Scene(root / "disk"), root / "copies")
    samples = shards.samples() | talk.samples()
    return [*messages(samples), *wire.parsers(talk), *rounds.parsers(root / "rounds"), *disk.parsers(files)]
