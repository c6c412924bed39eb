"""Error feedback: the residual is taken in the clear, added once, and dropped when it is of no use."""

import dataclasses

import numpy as np
import pytest

from crypto.mask.masking import unmask
from crypto.mask.modes.registry import MODES
from edge_client.learning.feedback import RESIDUAL_ROUNDS, encode_update, residual_for, with_residual
from edge_client.storage.pending_upload import Residual
from shoal import limits
from shoal.protocol.messages import Phase
from shoal.protocol.precision.codec import decode
from shoal.protocol.precision.lengths import FEEDBACK
from shoal.types import MaskedVector
from tests.helpers.masks import key_of

D = 700
UPDATE = np.random.default_rng(1).standard_normal(D).astype(np.float32)
RUN, TRANSFER = b"r" * 16, b"t" * 16


def residual(**changes):
    return Residual.of(UPDATE, **({"run_id": RUN, "round_": 4, "model": 2, "transfer": TRANSFER} | changes))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", limits.PRECISIONS)
def test_residual_is_what_was_lost(mode, precision):
    """The residual is what the receivers vector lacks."""
    key = key_of(mode, D)
    found = encode_update(UPDATE, key, precision, b"s")
    assert (decode(found.body, D, precision) == found.masked).all()
    assert (found.residual is None) == (precision not in FEEDBACK)
    if found.residual is not None:
        arrived = unmask(MaskedVector(found.masked, key.key_id), key)
        assert np.allclose(arrived + found.residual, UPDATE, atol=1e-5)


def test_clear_vectors_need_no_mask():
    """Clear vectors are encoded without a mask."""
    found = encode_update(UPDATE, None, "int8", b"s")
    assert np.allclose(found.masked + found.residual, UPDATE, atol=1e-6)


def test_many_rounds_lose_one_residual():
    """Every round has a mask and a seed of its own."""
    left, arrived = np.zeros(D, np.float32), np.zeros(D)
    for round_ in range(20):
        key = key_of(("rotation", "permutation", "signed-permutation")[round_ % 3], D)
        found = encode_update(UPDATE + left, key, "int8", str(round_).encode())
        arrived += unmask(MaskedVector(found.masked, key.key_id), key)
        left = found.residual
    assert np.allclose(arrived + left, 20 * UPDATE, atol=1e-3)
    assert np.linalg.norm(left) < np.linalg.norm(UPDATE), "the residual does not grow"


def test_residual_is_used_until_stale():
    """A residual is used in a later round of its run until it is stale."""
    stored = residual()
    assert residual_for(stored, RUN, 5, b"") is stored
    assert residual_for(stored, RUN, 4 + RESIDUAL_ROUNDS, b"other") is stored
    assert residual_for(stored, RUN, 5 + RESIDUAL_ROUNDS, b"") is None
    assert residual_for(stored, RUN, 4, b"") is None, "its own round"
    assert residual_for(stored, b"x" * 16, 5, b"") is None, "another run"
    assert residual_for(stored, RUN, 5, TRANSFER) is None, "its upload was refused"
    assert residual_for(None, RUN, 5, b"") is None


@pytest.mark.parametrize(("model", "phase"), [(3, Phase.TRAIN), (2, Phase.PRETRAIN)])
def test_foreign_residual_is_not_added(model, phase):
    """A residual of another model or for a cold start is not added."""
    assert with_residual(UPDATE, residual(), model, phase) is UPDATE


def test_a_residual_is_added_as_stored():
    stored = residual()
    assert (with_residual(UPDATE, stored, 2, Phase.TRAIN) == UPDATE + stored.vector()).all()
    assert with_residual(UPDATE, None, 2, Phase.TRAIN) is UPDATE
    head = dataclasses.replace(stored.head, length=3)
    assert with_residual(UPDATE, dataclasses.replace(stored, head=head), 2, Phase.TRAIN) is UPDATE
