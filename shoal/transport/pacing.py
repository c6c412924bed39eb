"""A limit on the rate of sending: a token bucket that holds one message, without a clock or a wait of its own.

A message may leave once the bucket has made up for the one before. The network thread goes on meanwhile: it reads, acknowledges
and answers keep-alives, none of which counts.

Example: at 1,000 bytes a second the message after one of 500 bytes leaves half a second later.

    >>> pace = Pace(1000)
    >>> pace.wait_s(10.0), pace.sent(500, 10.0), pace.wait_s(10.0), pace.wait_s(10.5)
    (0.0, None, 0.5, 0.0)

`uniform` draws for jitter without the ``random`` module, which takes half a megabyte of a device's memory.
"""

from __future__ import annotations

import os
from typing import Final

from shoal import limits

CHUNK_S: Final = 1.0
"""Time that one chunk takes at most: a slow link is not blocked by a chunk for longer."""


class Pace:
    """The rate of one connection.

    Args:
        bytes_per_s: payload bytes a second; 0 is no limit.
    """

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._rate = bytes_per_s
        self._ready_s = 0.0

    @classmethod
    def of_kbps(cls, kbps: float) -> Pace:
        """Return the pace of so many kilobits (1,000 bits) a second; 0 is no limit."""
        return cls(kbps * 1000 / 8)

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next message may leave."""
        return max(0.0, self._ready_s - now_s)

    def sent(self, size: int, now_s: float) -> None:
        """Note that a message of ``size`` payload bytes leaves at ``now_s``."""
        if self._rate:
            self._ready_s = max(now_s, self._ready_s) + size / self._rate

    @property
    def most_chunk_bytes(self) -> int:
        """The largest payload of a chunk that takes `CHUNK_S`."""
        return int(self._rate * CHUNK_S) if self._rate else limits.MAX_PACKET_BYTES


_DRAWN: Final[list[int]] = []
"""Numbers that the next calls return: one system call draws 64."""


def uniform(low: float = 0.0, high: float = 1.0) -> float:
    """Return a random number from [low, high), drawn with 32 random bits."""
    try:
        number = _DRAWN.pop()
    except IndexError:
        number, *rest = memoryview(os.urandom(256)).cast("I")
        _DRAWN.extend(rest)
    return low + (high - low) * number / 2**32
