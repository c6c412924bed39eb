"""The digests are those of Python's own library, in pieces and at once."""

import hashlib
import hmac

import pytest

from shoal.digests import Sha256, before_digest, hmac_sha256, sha256, shake_256

DATA = bytes(range(256)) * 5


@pytest.mark.parametrize("cut", [0, 1, 700, len(DATA)])
def test_sha256_of_pieces_is_that_of_whole(cut):
    assert sha256(DATA[:cut], memoryview(DATA)[cut:]) == hashlib.sha256(DATA).digest()


def test_sha256_of_nothing():
    assert sha256() == sha256(b"") == hashlib.sha256().digest()


def test_growing_digest_at_each_step():
    """A growing sha256 tells its digest at each step."""
    growing = Sha256(DATA[:10])
    assert growing.digest() == hashlib.sha256(DATA[:10]).digest()
    growing.update(memoryview(DATA)[10:20], DATA[20:])
    assert growing.digest() == growing.digest() == hashlib.sha256(DATA).digest()


def test_what_stands_before_its_digest():
    assert before_digest(DATA + sha256(DATA)) == DATA
    assert before_digest(sha256()) == b""
    for other in (b"", DATA, DATA[1:] + sha256(DATA), DATA + sha256(DATA)[:-1]):
        assert before_digest(other) is None


def test_hmac_of_pieces_is_that_of_the_whole():
    key = b"k" * 32
    assert hmac_sha256(key, DATA[:3], memoryview(DATA)[3:]) == hmac.digest(key, DATA, "sha256")


@pytest.mark.parametrize("count", [0, 1, 32, 5000])
def test_shake_256(count):
    assert shake_256(b"name", count) == hashlib.shake_256(b"name").digest(count)
