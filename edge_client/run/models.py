"""The models that a device has received: decrypted and checked on arrival, assembled when the job starts.

With weight sharing (Ghosh et al., extended version, section 4.3) a model is sent in two transfers: the shared segment, once
for all clusters, and a cluster segment for each. Without it a model is one transfer.
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
    """A model, or a segment of one, from one transfer.

    Attributes:
        transfer: id of the transfer.
        model, origin, segment, scale: the fields of its header.
        theta: shape (length of the segment,), float32: scaled origin plus offset, in clear.
    """

    transfer: bytes
    model: int
    origin: int
    segment: str
    scale: float
    theta: Float32Vector


class ModelStore:
    """The parts of one run's models that were received, by topic label."""

    def __init__(self, run: Run, group: GroupKey) -> None:
        self._run = run
        self._group = group
        self._parts: dict[str, Part] = {}

    def take(self, label: str, transfer: bytes, plain: memoryview) -> bool:
        """Check, unmask and store the model received under ``label``; return False if it is of another run.

        Raises:
            UntrustedError: the run's plan does not allow the model.
            IntegrityError: its coordinates are not finite.
        """
        header, body = decode_prefix(plain, ModelHeader)
        run = self._run
        if header.run_id != run.plan.run_id:
            return False
        if label != self._group.topic_label(run.plan.run_id, header.model):
            raise UntrustedError(f"model {header.model} under another model's label")
        masked = np.frombuffer(body, "<f4").astype(np.float32) if len(body) % 4 == 0 else np.empty(0, np.float32)
        # A hostile vector may overflow: `check_model` refuses the norm that results, inf or NaN.
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
        """Expect models under the topic labels of another broadcast key from now on."""
        self._group = group

    def drop(self, label: str) -> None:
        """Drop the part received under ``label``."""
        self._parts.pop(label, None)

    def thetas(self, announcement: Announcement, assignment: Assignment) -> dict[int, Float32Vector]:
        """Return the assignment's candidates, theta (d,) float32 by model id.

        Raises:
            UntrustedError: a part received is not the one that was announced.
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
        """Return the carried vectors, which are no models, as (d,) float32 in clear, by id.

        Raises:
            UntrustedError: a vector received is not the one that was announced.
        """
        return {ref.model: self._theta(ref, "") for ref in announcement.carried}

    def _theta(self, ref: ModelRef, segment: str) -> Float32Vector:
        if ref.transfer == NO_TRANSFER:  # the model is still at its origin, so its offset is zero and not sent
            return _scaled(self._run.origins[ref.origin, self._run.plan.span(segment)], ref.scale)
        part = self._parts[ref.label]
        found = (part.transfer, part.model, part.origin, part.segment, part.scale)
        if found != (ref.transfer, ref.model, ref.origin, segment, ref.scale):
            raise UntrustedError(f"model {ref.model} is not the one that was announced")
        return part.theta


def _scaled(origin: Float32Vector, scale: float) -> Float32Vector:
    return origin if scale == 1 else origin * np.float32(scale)
