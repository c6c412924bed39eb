"""A disk of a few megabytes that a test can fill."""

import os
import subprocess
from contextlib import contextmanager, suppress

import pytest

MIB = 1 << 20


@contextmanager
def small_disk(path, mib=8):
    """Mount an empty file system of so many MiB at ``path``; the test is skipped where that is not allowed."""
    path.mkdir(parents=True, mode=0o700, exist_ok=True)
    options = f"size={mib}m,mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path):
    """Leave not one free block on the disk that ``path`` is on; return the file that takes them."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        # A program that writes there too may free blocks meanwhile.
        while os.statvfs(path).f_bavail:
            with suppress(OSError):
                file.write(bytes(4096))
    return filler
