"""Error feedback: the rounding error of one update of a device is added to its next one.

Rules:

- The error is taken in the clear. An update is masked under its round's key, encoded and decoded again; the decoded vector is
  unmasked, and the difference from the clear update is the *residual*. The next round has another mask, so a difference of
  masked vectors would be of no use.
- A residual is stored with the upload that left it, in one write (`edge_client.storage.pending_upload`), and replaced with
  it. A job that is repeated after a crash adds the same residual and no other; an upload that is stored is never made again.
- It is added once, to an update of the same model, at most `RESIDUAL_ROUNDS` rounds later, and not if the aggregator refused
  its upload. Otherwise it is dropped: a residual is a correction of what others received.

Seide et al., "1-Bit Stochastic Gradient Descent" (2014); it converges since every encoding here leaves an error shorter than the
vector: Karimireddy et al., "Error Feedback Fixes SignSGD" (2019).

Example: two devices of one mask add residuals of their own; the mean of many rounds loses nothing to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from crypto.mask.masking import mask, unmask
from edge_client.storage.pending_upload import Residual
from shoal.protocol.messages import Phase
from shoal.protocol.precision.codec import decode, encode
from shoal.protocol.precision.lengths import FEEDBACK, encoded_bytes
from shoal.protocol.shards import part_seed
from shoal.types import Float32Vector, MaskedVector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crypto.mask.derivation import MaskKey

RESIDUAL_ROUNDS: Final = 10
"""Rounds after which a residual is stale: the model has moved on while the device was not drawn."""
PHASES: Final = (Phase.TRAIN, Phase.TRIAL, Phase.ADAPT)
"""Phases whose updates train a model; a cold start only compares directions."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """An update on the wire.

    Attributes:
        body: the masked update, encoded; in float32 the bytes of ``masked``.
        masked: (d,) float32, the vector that the receiver decodes.
        residual: (d,) float32, clear: the update less that vector without its mask; None without error feedback.
    """

    body: bytes | memoryview
    masked: Float32Vector
    residual: Float32Vector | None


def encode_update(
    clear: Float32Vector,
    key: MaskKey | None,
    precision: str,
    seed: bytes,
    cuts: Sequence[tuple[int, int]] = (),
) -> Encoded:
    """Mask and encode an update.

    Args:
        clear: (d,) float32, with the residual of the update before.
        key: the round's mask; None if vectors are clear, in simulations.
        precision: the plan's ``precision_up``.
        seed: see `shoal.protocol.precision.seeds.upload_seed`.
        cuts: first and last coordinate of each part, in a run whose uploads travel in parts: each is encoded by itself.

    Raises:
        IntegrityError: a coordinate is not finite, or too large to encode.
    """
    masked = clear if key is None else mask(clear, key).values
    if precision == "float32" and key is not None:
        # `mask` has checked it, and nothing else holds the vector.
        return Encoded(masked.astype("<f4", copy=False).data.cast("B"), masked, None)
    body = _encoded(masked, precision, seed, cuts)
    if precision == "float32":
        return Encoded(body, masked, None)
    decoded = _decoded(body, len(clear), precision, cuts)
    if precision not in FEEDBACK:
        return Encoded(body, decoded, None)
    arrived = decoded if key is None else unmask(MaskedVector(decoded, key.key_id), key)
    return Encoded(body, decoded, clear - arrived)


def _encoded(masked: Float32Vector, precision: str, seed: bytes, cuts: Sequence[tuple[int, int]]) -> bytes | memoryview:
    if not cuts:
        return encode(masked, precision, seed)
    parts = (encode(masked[a:b], precision, part_seed(seed, worker)) for worker, (a, b) in enumerate(cuts))
    return b"".join(parts)


def _decoded(body: bytes | memoryview, length: int, precision: str, cuts: Sequence[tuple[int, int]]) -> Float32Vector:
    if not cuts:
        return decode(body, length, precision)
    view, found, at = memoryview(body), np.empty(length, np.float32), 0
    for start, stop in cuts:
        size = encoded_bytes(stop - start, precision)
        found[start:stop] = decode(view[at : at + size], stop - start, precision)
        at += size
    return found


def residual_for(stored: Residual | None, run_id: bytes, round_: int, wasted: bytes) -> Residual | None:
    """Return the residual that a job of a round may add; None if absent, or it is of another run, stale or wasted.

    Args:
        stored: the residual of the newest upload.
        run_id: of the job's run.
        round_: of the job.
        wasted: transfer id of the newest upload that was refused.
    """
    if stored is None or stored.head.run_id != run_id or stored.head.transfer == wasted:
        return None
    return stored if 0 < round_ - stored.head.round <= RESIDUAL_ROUNDS else None


def with_residual(delta: Float32Vector, stored: Residual | None, model: int, phase: int) -> Float32Vector:
    """Return an update (d,) float32 of a model with the residual, if that is of the same model."""
    if stored is None or stored.head.model != model or phase not in PHASES or stored.head.length != len(delta):
        return delta
    return delta + stored.vector()
