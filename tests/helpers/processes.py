"""Inspection of other processes: limits, readable files of /proc, and searches of their memory and files for bytes."""

from __future__ import annotations

import ctypes
import multiprocessing
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

PR_CAPBSET_DROP = 24
MOST_CAPABILITIES = 64
PEEK = """
import ctypes, struct, sys
if ctypes.CDLL(None).capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)):
    sys.exit("capset failed")
try:
    with open(f"/proc/{sys.argv[1]}/environ", "rb") as file:
        print("open" if file.read() else "empty")
except PermissionError:
    print("refused")
"""


def run_at_once(target, *arguments):
    """Run a function in several programs, each with arguments of its own and, last, the barrier at which all begin."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(arguments))
    programs = [context.Process(target=target, args=(*each, start)) for each in arguments]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
        assert program.exitcode == 0


def memory_bytes(field="VmRSS", pid="self"):
    """Return a figure of a process's memory as /proc/PID/status has it, such as VmRSS or RssFile."""
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def give_up_capabilities():
    """Have the program that follows run as any user does, also where root started it."""
    for capability in range(MOST_CAPABILITIES):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def inspectable(pid):
    """Whether another process of the same user, without capabilities, has ptrace's read access to the process.

    Root itself needs none for a process that `give_up_capabilities` was called for: only its dumpable flag decides.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEEK, str(pid)], capture_output=True, text=True, timeout=30, check=True
    )
    return {"open": True, "refused": False}[done.stdout.strip()]


def core_limits(pid):
    """Return (soft, hard) of RLIMIT_CORE as the kernel has them."""
    (line,) = [x for x in Path(f"/proc/{pid}/limits").read_text().splitlines() if x.startswith("Max core file size")]
    return tuple(line.split()[4:6])


def command_line(pid):
    """Return the process's arguments, as any user can read them."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def found_in_memory(pid, needles, *, files=False):
    """Return the names of those ``needles`` (name -> bytes) that a process's readable memory contains; see `regions`."""
    found = set()
    longest, search = max(map(len, needles.values())), Search(needles)
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for low, high in regions(pid, files=files):
            memory.seek(low)
            tail = b""
            while low < high:
                try:
                    piece = memory.read(min(high - low, 1 << 24))
                except OSError:  # a device's pages, or gone meanwhile
                    break
                if not piece:
                    break
                low += len(piece)
                block = tail + piece
                found |= search.names_in(block)
                tail = block[1 - longest :]
    return found


PROBE = 8
"""Bytes of a needle that are looked for first."""


class Search:
    """Finds any of many ``needles`` (name -> at least PROBE bytes) in one pass over a block of memory.

    Of each needle the PROBE bytes with the most distinct values are looked for first: memory is full of zeros.
    """

    def __init__(self, needles):
        self._by_probe = defaultdict(list)
        self._starts = np.zeros(1 << 16, bool)
        for name, needle in needles.items():
            at = max(range(min(64, len(needle) - PROBE + 1)), key=lambda i, n=needle: len(set(n[i : i + PROBE])))
            probe = needle[at : at + PROBE]
            self._by_probe[probe].append((name, needle, at))
            self._starts[int.from_bytes(probe[:2], "little")] = True
        self._probes = np.sort(np.array([int.from_bytes(p, "little") for p in self._by_probe], np.uint64))

    def names_in(self, block):
        """Return the names of the needles that a block of memory contains."""
        if len(block) < PROBE:
            return set()
        data = np.frombuffer(block, np.uint8)
        pairs = (np.frombuffer(block, "<u2", (len(block) - offset) // 2, offset) for offset in (0, 1))
        at = np.concatenate([2 * np.flatnonzero(self._starts[pair]) + i for i, pair in enumerate(pairs)])
        at = at[at <= len(data) - PROBE]
        words = np.lib.stride_tricks.sliding_window_view(data, PROBE)[at].copy().view(np.uint64)[:, 0]
        place = np.minimum(np.searchsorted(self._probes, words), len(self._probes) - 1)
        found = set()
        for i in at[self._probes[place] == words].tolist():
            for name, needle, offset in self._by_probe[block[i : i + PROBE]]:
                if i >= offset and block.startswith(needle, i - offset):
                    found.add(name)
        return found


def regions(pid, *, files=False):
    """Yield (start, end) of every readable mapping of a process; of files that it can't write to only with ``files``.

    Code is never among those.
    """
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, access, _, _, inode, *_ = line.split()
        own = access[1] == "w" or inode == "0" or (files and access[2] != "x")
        if access[0] == "r" and own and not line.endswith(("[vvar]", "[vsyscall]")):
            low, high = span.split("-")
            yield int(low, 16), int(high, 16)


def contents(path):
    """Return the bytes of a file; none if it is not a file, or was deleted meanwhile."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return b""


def found_in_files(paths, needles):
    """Return (file, name) for every needle (name -> bytes) that one of the files contains."""
    return {
        (str(path), name)
        for path in paths
        for data in [contents(path)]
        for name, needle in needles.items()
        if needle in data
    }
