"""The key derivation: HKDF-SHA256, and an encoding in which no two lists of fields are alike."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.mask.kdf import SALT, encode, expand

SECRET = bytes(range(32))


def test_expand_is_hkdf_of_rfc_5869() -> None:
    """Written out with hmac: extract with the salt, then expand over the encoded fields."""
    info = encode(b"purpose", b"", b"x")
    pseudo_random_key = hmac.new(SALT, SECRET, hashlib.sha256).digest()
    first = hmac.new(pseudo_random_key, info + b"\x01", hashlib.sha256).digest()
    second = hmac.new(pseudo_random_key, first + info + b"\x02", hashlib.sha256).digest()
    assert expand(SECRET, 40, b"purpose", b"", b"x") == (first + second)[:40]


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_different_fields_encode_differently(one: list[bytes], other: list[bytes]) -> None:
    assert (encode(*one) == encode(*other)) == (one == other)


@pytest.mark.parametrize("fields", [(), (b"mask",), (b"mask", b"reef")])
def test_longer_output_starts_the_same(fields: tuple[bytes, ...]) -> None:
    """A longer output starts with the shorter one."""
    assert expand(SECRET, 64, *fields)[:32] == expand(SECRET, 32, *fields)


def test_secret_and_fields_change_the_output() -> None:
    outputs = {expand(s, 32, *f) for s in (SECRET, SECRET[::-1]) for f in ((b"a",), (b"b",), (b"a", b""), ())}
    assert len(outputs) == 8
