"""The decrypted run that a device follows: plan, task, origins and mask key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from crypto.mask.derivation import MaskKey
    from shoal.protocol.documents import RunPlan
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that this device may follow.

    Attributes:
        plan: the owner's plan, for this mask epoch.
        bundle: the task.
        origins: shape (origins, d), float32, read-only: the vectors that models start from; the aggregator never has them.
            Under round keys the device holds them as states, and this is empty.
        key: the mask key; segment_keys: the mask of each segment, for models that are sent in parts. Under round keys, which
            `edge_client.run.held_models` derives for each round, there is neither.
        since: the round after which the mask epoch began, 0 for the first.
        generation: key version of the epoch.
    """

    plan: RunPlan
    bundle: TaskBundle
    origins: Float32Vector
    key: MaskKey | None = None
    segment_keys: Mapping[str, MaskKey] = field(default_factory=dict)
    since: int = 0
    generation: int = 0
