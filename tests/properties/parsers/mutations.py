"""Damage done to good bytes, and a search for damage that a parser does not stand; all from one random source."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from shoal.errors import ShoalError
from tests.properties.parsers.every import Parser

EDITS = 4
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 30, 1 << 62, (1 << 64) - 1)
WORDS = (
    b"\0",
    b"\n",
    b"..",
    b"/",
    b"%00",
    b"{",
    b"[",
    b'"',
    b"nan",
    b"-1",
    b"1e999",
    b"inf",
    b"\xff\xfe",
    b"9" * 30,
    b"[" * 40,
)


@dataclass
class Finding:
    """An input that a parser answered with something other than a ShoalError."""

    parser: str
    data: bytes = field(repr=False)
    error: Exception


def mutate(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Return ``data`` after one to EDITS edits: flipped, cut, repeated, overwritten, or spliced with one of ``others``."""
    out = bytearray(data)
    for _ in range(random.randint(1, EDITS)):
        at = random.randint(0, len(out))
        size = random.choice((1, 2, 4, 8, 16, random.randint(0, max(len(out), 1))))
        match random.randint(0, 8):
            case 0 if out:
                out[min(at, len(out) - 1)] ^= 1 << random.randint(0, 7)
            case 1:
                del out[at : at + size]
            case 2:
                del out[at:]
            case 3:
                out[at:at] = out[at : at + size]
            case 4:
                out[at : at + size] = random.randbytes(min(size, 64))
            case 5:
                length = random.choice((1, 2, 4, 8))
                number = random.choice(NUMBERS) & ((1 << 8 * length) - 1)
                out[at : at + length] = number.to_bytes(length, random.choice(("little", "big")))
            case 6:
                out[at:at] = random.choice(WORDS)
            case 7 if others:
                other = random.choice(others)
                out[at:] = other[random.randint(0, len(other)) :]
            case _:
                out[at:at] = bytes(size if size < 64 else 64)
    return bytes(out)


def attempt(parser: Parser, data: bytes) -> Finding | None:
    """Call the parser with ``data``; return a finding for any exception but a ShoalError, else None."""
    try:
        parser.read(data)
    except ShoalError:
        return None
    except Exception as error:  # noqa: BLE001 - any other exception is a finding
        return Finding(parser.name, data, error)
    return None


def hunt(parser: Parser, random: Random, *, seconds: float = 1e9, runs: int = 1 << 62) -> tuple[int, list[Finding]]:
    """Give the parser damaged seeds for ``seconds``, or ``runs`` times; return how many, and one finding a kind of error."""
    end, done = time.monotonic() + seconds, 0
    found: dict[tuple[object, ...], Finding] = {}
    while done < runs and time.monotonic() < end:
        seed = random.choice(parser.seeds)
        data = random.randbytes(random.randint(0, 80)) if random.random() < 0.05 else mutate(random, seed, parser.seeds)
        finding = attempt(parser, data)
        done += 1
        if finding is not None:
            found.setdefault(place(finding.error), finding)
    return done, list(found.values())


def place(error: Exception) -> tuple[object, ...]:
    """Return type and line of an error, which identify a finding."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (type(error), *((trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else ()))
