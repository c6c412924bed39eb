"""Messages of a run whose aggregator has workers: each of them takes one part of every vector.

The plan lists S workers, S at least 2. `borders` cuts the d coordinates of every masked vector into S parts, at fixed places. A
device seals each part of its update to its worker; the upload to the coordinator has the parts' digests in place of the update.
Workers report the parts that they have made durable, and the coordinator acknowledges an upload once all S are reported. A
mean is made and published in parts too, and its digest is that of the parts' digests.

Example: 100 coordinates and three workers give the parts 0 to 32, 32 to 64 and 64 to 100.

    >>> borders(100, 3)
    ((0, 32), (32, 64), (64, 100))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal import limits
from shoal.digests import sha256
from shoal.protocol.codec import U16, U32, Fixed16, Fixed32, message
from shoal.protocol.documents import RunPlan, require_name
from shoal.protocol.messages import Phase
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.states import checkpoint_number

_PART_LABELS: Final = checkpoint_number(limits.MAX_MODELS + limits.MAX_SCALED) + 1
"""Number of the first topic label of a part of a mean, after those of whole means and of checkpoints."""

PART_LABEL: Final = "p-"
"""Begins the topic label of a part of a mean, as a device names it among those of models."""


def borders(length: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Return the first coordinate of each worker's part, and the one after its last; nothing without workers.

    Args:
        length: coordinates d.
        workers: S; each part has at least one block of `limits.PART_BLOCK` coordinates if d is at least S blocks.
    """
    if not workers:
        return ()
    blocks = -(-length // limits.PART_BLOCK)
    cuts = [limits.PART_BLOCK * (worker * blocks // workers) for worker in range(workers)]
    return tuple(zip(cuts, (*cuts[1:], length), strict=True))


def part_of(span: slice, part: tuple[int, int]) -> tuple[int, int]:
    """Return the coordinates of a worker's part that lie in ``span``, counted within the span; an empty range if none do."""
    start, stop = max(span.start, part[0]), min(span.stop, part[1])
    return (start - span.start, stop - span.start) if start < stop else (0, 0)


def part_bytes(plan: RunPlan, worker: int) -> int:
    """Return the bytes of one worker's part of an update, in the plan's precision."""
    start, stop = borders(plan.length, len(plan.workers))[worker]
    return encoded_bytes(stop - start, plan.recipe.precision_up)


def sealed_part_bytes(plan: RunPlan, worker: int) -> int:
    """Return the largest sealed part of an update for one worker."""
    return limits.SEALED_HEAD_BYTES + part_bytes(plan, worker)


def sealed_mean_part_bytes(plan: RunPlan) -> int:
    """Return the largest sealed part of a mean."""
    longest = max(stop - start for start, stop in borders(plan.length, len(plan.workers)))
    return limits.SEALED_HEAD_BYTES + encoded_bytes(longest, plan.recipe.precision_down)


def digest_over(parts: Sequence[bytes]) -> bytes:
    """Return the digest of a vector that travels in parts: SHA-256 of the parts' digests, in the order of the workers."""
    return sha256(*parts)


def mean_part_number(mean: int, worker: int) -> int:
    """Return the number of the topic label of a worker's part; ``mean`` is that of the whole mean (`mean_number`)."""
    return _PART_LABELS + worker * _PART_LABELS + mean


def part_seed(seed: bytes, worker: int) -> bytes:
    """Return the seed, 32 bytes, of one part of a vector whose seed is ``seed``."""
    return sha256(b"shoal/v1/part\0" + worker.to_bytes(2, "little") + seed)


@message(140)
@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPart:
    """Header of one part of a device's masked update; the part follows, in the plan's precision.

    Attributes:
        nonce: the announcement's.
        recipient: the worker's seal key.
        worker: the worker's number in the plan.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    phase: Phase
    nonce: Fixed16
    device: str
    recipient: Fixed32
    worker: U16

    def __post_init__(self) -> None:
        require_name(self.device, "device name")


@message(143)
@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPartHeader:
    """Header of a worker's part of a mean, which follows in the plan's precision, masked under the round's key.

    Attributes:
        key_id, length, segment: of the whole mean, see `shoal.protocol.states.MeanHeader`.
        worker: the worker's number in the plan.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    key_id: Fixed16
    model: U16
    length: U32
    segment: str
    worker: U16
