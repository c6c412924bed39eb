"""The mask secret shows itself only on purpose."""

from __future__ import annotations

import copy
import pickle

import pytest

from crypto.mask.secret import MaskSecret
from shoal.errors import IntegrityError

RAW = b"correct horse battery staple 32b"


def test_generate_gives_new_secret_each_time() -> None:
    assert len({MaskSecret.generate().reveal() for _ in range(8)}) == 8


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_wrong_length_shows_no_bytes(length: int) -> None:
    """The error names the length and holds no byte of the value."""
    with pytest.raises(IntegrityError, match=f"not {length}") as caught:
        MaskSecret.from_bytes((RAW * 2)[:length])
    assert "horse" not in str(caught.value) + repr(caught.value) + caught.value.hint


def test_repr_str_and_format_are_redacted() -> None:
    secret = MaskSecret.from_bytes(RAW)
    for shown in (repr(secret), str(secret), f"{secret}", f"{[secret]}"):
        assert "horse" not in shown
        assert RAW.hex() not in shown
        assert "redacted" in shown


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_secret_can_not_be_pickled(protocol: int) -> None:
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(MaskSecret.from_bytes(RAW), protocol=protocol)


def test_secret_is_neither_copied_nor_hashed() -> None:
    """The value stays in one object that nothing alters."""
    secret = MaskSecret.from_bytes(RAW)
    with pytest.raises(TypeError, match="copied"):
        copy.deepcopy(secret)
    with pytest.raises(AttributeError, match="can't be changed"):
        secret._value = bytes(32)
    with pytest.raises(TypeError, match="unhashable"):
        hash(secret)
    assert secret.reveal() == RAW


def test_equality_is_by_value() -> None:
    assert MaskSecret.from_bytes(RAW) == MaskSecret.from_bytes(RAW)
    assert MaskSecret.from_bytes(RAW) != MaskSecret.from_bytes(bytes(32))
    assert MaskSecret.from_bytes(RAW) != RAW
