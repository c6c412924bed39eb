"""The run that a device follows, opened: plan, task, origins and mask key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from crypto.mask.keys import MaskKey
    from shoal.protocol.documents import RunPlan
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that this device may follow.

    Attributes:
        plan: the owner's, as it stands in this mask epoch.
        origins: shape (origins, d), float32, read-only: what models are offsets from; the aggregator never has them.
        key: the mask; segment_keys: the same mask, segment by segment, for what travels in parts.
        since: the round after which the mask epoch began, 0 for the first.
        generation: roster sequence of the secrets that it is made with.
    """

    plan: RunPlan
    bundle: TaskBundle
    origins: Float32Vector
    key: MaskKey
    segment_keys: Mapping[str, MaskKey]
    since: int = 0
    generation: int = 0
