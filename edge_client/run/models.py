"""The models that a device has at hand: opened and checked on arrival, put together when work begins.

With weight sharing (Ghosh et al., extended version, section 4.3) a model comes in two transfers, the shared segment once
for all clusters and a cluster segment each; without it a model is one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from crypto.mask.masking import unmask
from edge_client.run.policy import check_model
from shoal.errors import UntrustedError
from shoal.protocol.codec import decode_prefix
from shoal.protocol.messages import NO_TRANSFER, Announcement, Assignment, ModelHeader, ModelRef
from shoal.types import MaskedVector

if TYPE_CHECKING:
    from crypto.seal.envelope import GroupKey
    from edge_client.followed_run import Run
    from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one transfer brought.

    Attributes:
        model, origin, segment, scale: of its header.
        theta: shape (length of the segment,), float32: scaled origin and offset added up, in clear.
    """

    transfer: bytes
    model: int
    origin: int
    segment: str
    scale: float
    theta: Float32Vector


class ModelStore:
    """The parts at hand of one run's models, by topic label."""

    def __init__(self, run: Run, group: GroupKey) -> None:
        self._run = run
        self._group = group
        self._parts: dict[str, Part] = {}

    def take(self, label: str, transfer: bytes, plain: memoryview) -> bool:
        """Keep what came under ``label``; return whether it is of this run.

        Raises:
            UntrustedError: it is not what the run's plan allows.
            IntegrityError: its coordinates are not finite.
        """
        header, body = decode_prefix(plain, ModelHeader)
        run = self._run
        if header.run_id != run.plan.run_id:
            return False
        if label != self._group.topic_label(run.plan.run_id, header.model):
            raise UntrustedError(f"model {header.model} under another model's label")
        masked = np.frombuffer(body, "<f4").astype(np.float32) if len(body) % 4 == 0 else np.empty(0, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            norm = float(np.sqrt(np.dot(masked, masked)))
        check_model(header, run.plan, len(body), norm)
        theta = unmask(MaskedVector(masked, header.key_id), run.segment_keys[header.segment])
        theta += _scaled(run.origins[header.origin, run.plan.span(header.segment)], header.scale)
        self._parts[label] = Part(
            transfer=transfer,
            model=header.model,
            origin=header.origin,
            segment=header.segment,
            scale=header.scale,
            theta=theta,
        )
        return True

    def regroup(self, group: GroupKey) -> None:
        """Find models under the labels of another broadcast key from now on."""
        self._group = group

    def drop(self, label: str) -> None:
        """Forget what came under ``label``."""
        self._parts.pop(label, None)

    def thetas(self, announcement: Announcement, assignment: Assignment) -> dict[int, Float32Vector]:
        """Return the order's candidates, theta (d,) float32 by model id.

        Raises:
            UntrustedError: what is at hand is not what was announced.
        """
        refs = [ref for ref in announcement.models if ref.model in assignment.candidates]
        if announcement.shared is None:
            return {ref.model: self._theta(ref, "") for ref in refs}
        plan, shared = self._run.plan, self._theta(announcement.shared, "shared")
        thetas = {}
        for ref in refs:
            theta = thetas[ref.model] = np.empty(plan.length, np.float32)
            theta[plan.span("shared")] = shared
            theta[plan.span("cluster")] = self._theta(ref, "cluster")
        return thetas

    def carried(self, announcement: Announcement) -> dict[int, Float32Vector]:
        """Return the vectors (d,), float32, that are no models, in clear, by id.

        Raises:
            UntrustedError: what is at hand is not what was announced.
        """
        return {ref.model: self._theta(ref, "") for ref in announcement.carried}

    def _theta(self, ref: ModelRef, segment: str) -> Float32Vector:
        if ref.transfer == NO_TRANSFER:
            return _scaled(self._run.origins[ref.origin, self._run.plan.span(segment)], ref.scale)
        part = self._parts[ref.label]
        found = (part.transfer, part.model, part.origin, part.segment, part.scale)
        if found != (ref.transfer, ref.model, ref.origin, segment, ref.scale):
            raise UntrustedError(f"model {ref.model} is not the one that was announced")
        return part.theta


def _scaled(origin: Float32Vector, scale: float) -> Float32Vector:
    return origin if scale == 1 else origin * np.float32(scale)
