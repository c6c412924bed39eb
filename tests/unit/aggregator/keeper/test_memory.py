"""A keeper's memory: replaced as a whole, and never missing."""

from __future__ import annotations

import pytest

from aggregator.keeper.memory import MEMORY_FILE, KeeperMemory
from shoal.errors import IntegrityError
from tests.helpers.plans import run_plan


def test_written_and_read(tmp_path):
    made = KeeperMemory().opening(run_plan(), 4, b"d" * 32, [frozenset({b"a" * 16, b"b" * 16})])
    made.save(tmp_path)
    assert KeeperMemory.load(tmp_path) == made
    assert KeeperMemory.load(tmp_path).recent == [[frozenset({b"a" * 16, b"b" * 16})]]
    assert (tmp_path / MEMORY_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [None, b"", b"SHM1rubbish"])
def test_without_it_no_keeper_serves(tmp_path, content):
    if content is not None:
        (tmp_path / MEMORY_FILE).write_bytes(content)
        (tmp_path / MEMORY_FILE).chmod(0o600)
    with pytest.raises(IntegrityError, match="does not know what it has opened"):
        KeeperMemory.load(tmp_path)
