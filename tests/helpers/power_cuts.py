"""Power cuts: a program that ends at any change of the disk, as far as the changes before it have got."""

import os
from pathlib import Path

import pytest


class PowerCut(BaseException):
    """Raised to end a program at any point."""


def cut(*_):
    raise PowerCut


class CutAt:
    """Ends the program at the n-th change of the disk below a folder; a cut write leaves half of its bytes."""

    def __init__(self, monkeypatch, left):
        self.left = left
        self.log = []
        for name in ("write", "pwrite"):
            monkeypatch.setattr(os, name, self.halving(name, getattr(os, name)))
        for owner, name in (
            (os, "fsync"),
            (os, "fdatasync"),
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
            (Path, "rmdir"),
            (Path, "symlink_to"),
        ):
            monkeypatch.setattr(owner, name, self.cutting(name, getattr(owner, name)))

    def count(self, name, *details):
        self.log.append((name, *details))
        self.left -= 1
        return self.left < 0

    def halving(self, name, real):
        def write(handle, data, *at):
            if self.count(name):
                real(handle, bytes(data)[: len(data) // 2], *at)
                raise PowerCut
            return real(handle, data, *at)

        return write

    def cutting(self, name, real):
        def call(*arguments, **options):
            if self.count(name, *map(str, arguments)):
                raise PowerCut
            return real(*arguments, **options)

        return call


def cut_at(left, work, *arguments, **options):
    """Interrupt ``work`` after so many changes of the disk; return whether it finished."""
    with pytest.MonkeyPatch.context() as patch:
        CutAt(patch, left)
        try:
            work(*arguments, **options)
        except PowerCut:
            return False
    return True
