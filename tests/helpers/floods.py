"""Chunks that announce far more than they hold, and the memory that real programs take while they receive them."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.protocol.chunking import HEADER, MAGIC, MIN_CHUNK_BYTES, VERSION, ChunkKind
from tests.helpers.processes import memory_bytes

MIB = 1 << 20
JUST_ON_THE_HEAP_BYTES = 4 * MIB - 1
IDLE_S = 1.0


def claim(kind, size, number, *, round_=1, index=0, chunk_bytes=MIN_CHUNK_BYTES):
    """Return one chunk of a transfer of ``size`` bytes that does not exist; ``number`` makes its id."""
    total = -(-size // chunk_bytes)
    name = number.to_bytes(16, "little")
    head = HEADER.pack(MAGIC, VERSION, int(kind), 0, round_, index, total, index * chunk_bytes, size, name)
    return head + bytes(chunk_bytes)


def claims(kinds=tuple(ChunkKind), sizes=(JUST_ON_THE_HEAP_BYTES, 900 * MIB), numbers=4):
    """Return such chunks of every kind, of both sizes, with several ids."""
    return [claim(kind, size, n) for kind in kinds for size in sizes for n in range(numbers)]


def rss_mb(pid):
    """Return the resident memory of a process in MiB."""
    return memory_bytes(pid=pid) / MIB


def cpu_ticks(pid):
    """Return the processor time of a process, in the kernel's ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def until_idle(pid, wait_s=60.0):
    """Return when a process has used next to no processor time for IDLE_S."""
    end_s = time.monotonic() + wait_s
    before = -10
    while cpu_ticks(pid) - before > 2:
        assert time.monotonic() < end_s, "the process does not come to rest"
        before = cpu_ticks(pid)
        time.sleep(IDLE_S)
