"""The residual of an upload on disk: private to its upload, and None after any damage."""

import numpy as np
import pytest

from edge_client.storage.pending_upload import Residual, parse_residual

RUN, TRANSFER = b"r" * 16, b"t" * 16
VECTOR = np.random.default_rng(0).standard_normal(600).astype(np.float32)


def stored(transfer=TRANSFER, **changes):
    return Residual.of(VECTOR, **({"run_id": RUN, "round_": 4, "model": 2, "transfer": transfer} | changes))


def test_residual_comes_back_rounded():
    """With one percent of rounding; a job that is repeated seals its upload anew, under another transfer id."""
    found = parse_residual(stored().to_bytes() + b"bytes of an older, longer slot", TRANSFER)
    assert found == stored()
    assert (found.head.run_id, found.head.round, found.head.model, found.head.length) == (RUN, 4, 2, 600)
    assert np.linalg.norm(found.vector() - VECTOR) < 0.02 * np.linalg.norm(VECTOR)
    assert len(found.to_bytes()) < 600 * 1.2
    assert (stored(b"x" * 16).vector() == found.vector()).all()
    assert parse_residual(stored().to_bytes(), b"x" * 16) is None, "of another upload"


@pytest.mark.parametrize("at", [0, 4, 5, 30, 60, 300, -1])
def test_damage_is_found(at):
    data = bytearray(stored().to_bytes())
    data[at] ^= 1
    assert parse_residual(bytes(data), TRANSFER) is None


def test_every_cut_is_found():
    data = stored().to_bytes()
    assert all(parse_residual(data[:end], TRANSFER) is None for end in range(len(data)))


def test_the_vector_is_in_no_repr():
    assert repr(stored()) == "Residual(round=4, model=2, length=600)"
