"""A stored task is read back, and refused if one of its files was replaced."""

import pytest

from crypto.seal.identity import Identity
from shoal.errors import TaskError, UntrustedError
from shoal.owner.task_compiler.signed import SIGNATURE_FILE, SOURCE_FILE, Source, read_signed, write_signed

OWNER = Identity.generate("owner")
SOURCE = Source("logistic", {"inputs": 4, "classes": 3})


@pytest.fixture
def folder(tmp_path, logistic):
    write_signed(logistic(4, 3), SOURCE, OWNER, tmp_path)
    return tmp_path


def test_a_task_comes_back(folder, logistic):
    """To its owner."""
    assert read_signed(folder, OWNER) == (logistic(4, 3), SOURCE)
    with pytest.raises(UntrustedError, match="not the one that this owner signed"):
        read_signed(folder, Identity.generate("owner"))


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"{half",
        b"2",
        b"[]",
        b"{}",
        b'{"source": "x"}',
        b'{"source": "x", "options": 5}',
        b'{"source": "x", "options": {"n": null}}',
        b"\xff",
        b"[" * 10**5,
    ],
)
def test_a_source_that_is_none_is_refused(folder, junk):
    (folder / SOURCE_FILE).write_bytes(junk)
    with pytest.raises(TaskError, match="lacks a signature or a source"):
        read_signed(folder, OWNER)


@pytest.mark.parametrize("junk", ["", "zz", "00", "é"])
def test_a_signature_that_is_none_is_refused(folder, junk):
    (folder / SIGNATURE_FILE).write_text(junk, encoding="utf-8")
    with pytest.raises((TaskError, UntrustedError)):
        read_signed(folder, OWNER)
