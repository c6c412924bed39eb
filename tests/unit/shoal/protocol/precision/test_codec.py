"""Encodings of vectors: known answers, properties, figures of error, and bytes of a hostile peer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shoal import limits
from shoal.errors import IntegrityError, UsageError, WireError
from shoal.protocol.precision.codec import decode, encode
from shoal.protocol.precision.lengths import encoded_bytes, norm_room
from tests.helpers.trees import ROOT

KNOWN = json.loads((ROOT / "tests" / "vectors" / "precision.json").read_text())
SEED = bytes.fromhex(KNOWN["seed"])
VECTOR = np.frombuffer(bytes.fromhex(KNOWN["vector"]), "<f4").astype(np.float32)
LOSSY = limits.PRECISIONS[1:]
LENGTHS = [1, 2, 3, 5, 255, 256, 257, 4096, 4097, 65_536, 65_537, 70_001]


def normal(length, seed=0, scale=1e-3):
    return (scale * np.random.default_rng(seed).standard_normal(length)).astype(np.float32)


def relative(found, vector):
    return np.linalg.norm(found - vector) / np.linalg.norm(vector)


@pytest.mark.parametrize("precision", limits.PRECISIONS)
def test_known_answers(precision):
    """Another number of bytes is refused; a vector of zeros stays one, and so does an empty one."""
    data = encode(VECTOR, precision, SEED)
    assert data.hex() == KNOWN[precision]
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(WireError, match="bytes where 300 coordinates"):
            decode(wrong, 300, precision)
    for zero in (np.zeros(300, np.float32), np.empty(0, np.float32)):
        assert decode(encode(zero, precision, b"x"), len(zero), precision).tolist() == zero.tolist()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("precision", limits.PRECISIONS)
def test_vector_takes_the_documented_bytes(precision, length):
    """A vector takes the documented bytes and comes back."""
    vector = normal(length)
    data = encode(vector, precision, b"one")
    found = decode(data, length, precision)
    assert (len(data), found.dtype, found.shape) == (encoded_bytes(length, precision), np.float32, (length,))
    assert encode(vector, precision, b"one") == data
    assert np.linalg.norm(found) <= norm_room(precision) * np.linalg.norm(vector) or length < 256
    assert found.flags.writeable


@pytest.mark.parametrize(("precision", "error", "cosine"), [("float16", 0.001, 0.999999), ("int8", 0.02, 0.9997)])
def test_figures_of_error(precision, error, cosine):
    """Those of the table in docs/adr/0040-precision.md, on a vector whose coordinates differ in size."""
    rng = np.random.default_rng(3)
    vector = (rng.standard_normal(60_000) * rng.exponential(size=60_000) * 1e-3).astype(np.float32)
    if precision == "float16":
        vector *= np.float32(100)
    found = decode(encode(vector, precision, b"x"), len(vector), precision)
    assert relative(found, vector) < error
    assert vector @ found / np.linalg.norm(vector) / np.linalg.norm(found) > cosine


def test_tiny_vectors_become_zeros():
    """Tiny vectors become zeros and no denormal numbers."""
    tiny = np.full(300, 1e-40, np.float32)
    assert not decode(encode(tiny, "int8", b"x"), 300, "int8").any()
    small = normal(3000, scale=2.0**-80)
    found = np.abs(decode(encode(small, "int8", b"x"), 3000, "int8"))
    assert found[found > 0].min() >= np.finfo(np.float32).tiny


def test_float16_clips_to_its_largest_number():
    vector = np.array([1e6, -1e6, 2.0], np.float32)
    assert decode(encode(vector, "float16", b""), 3, "float16").tolist() == [65504, -65504, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", limits.PRECISIONS)
def test_infinite_vectors_are_refused(precision, bad):
    """Vectors that are not finite are refused."""
    vector = np.ones(300, np.float32)
    vector[299] = bad
    with pytest.raises(IntegrityError, match="NaN"):
        encode(vector, precision, b"x")


@pytest.mark.parametrize(
    ("vector", "error", "message"),
    [
        (np.full(300, 3e38, np.float32), IntegrityError, "too long"),
        (np.ones(3), UsageError, None),
        (np.ones((1, 3), np.float32), UsageError, None),
    ],
    ids=["too long", "another type", "another shape"],
)
def test_other_vectors_are_refused(vector, error, message):
    with pytest.raises(error, match=message):
        encode(vector, "int8", b"x")


def test_unknown_forms_take_no_memory():
    """Unknown precisions and lengths are refused before memory is taken."""
    with pytest.raises(WireError, match="no precision"):
        decode(b"", 0, "int7")
    with pytest.raises(WireError, match="no precision"):
        encode(VECTOR, "int7", b"")
    for length in (-1, limits.MAX_COORDINATES + 1):
        with pytest.raises(WireError, match="coordinates"):
            decode(b"", length, "int8")


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        *(
            (0, np.array([scale], "<f4").tobytes(), "scale out of range")
            for scale in (np.nan, np.inf, -1.0, -0.0, 2.0**101, 2.0**-91, 1e-45)
        ),
        (-1, b"\x80", "-128"),
    ],
)
def test_hostile_scales_are_refused(at, data, message):
    """And an integer of -128."""
    hostile = bytearray(encode(VECTOR, "int8", SEED))
    hostile[at : at + len(data) or None] = data
    with pytest.raises(WireError, match=message):
        decode(bytes(hostile), 300, "int8")


def test_largest_scale_stays_finite():
    """The largest scale gives finite coordinates."""
    data = bytearray(b"\x7f" * encoded_bytes(300, "int8"))
    data[:8] = np.full(2, 2.0**100, "<f4").tobytes()
    assert np.isfinite(decode(bytes(data), 300, "int8")).all()


@pytest.mark.parametrize(("precision", "pattern"), [("float32", b"\0\0\x80\x7f"), ("float16", b"\0\x7c")])
def test_infinite_floats_are_refused(precision, pattern):
    """Floats that are not finite are refused."""
    with pytest.raises(WireError, match="NaN or infinite"):
        decode(pattern, 1, precision)


@pytest.mark.parametrize("precision", LOSSY)
def test_random_bytes_decode_or_are_refused(precision):
    rng = np.random.default_rng(5)
    for length in (1, 7, 300):
        for _ in range(50):
            data = rng.bytes(encoded_bytes(length, precision))
            try:
                assert np.isfinite(decode(data, length, precision)).all()
            except WireError:
                continue
