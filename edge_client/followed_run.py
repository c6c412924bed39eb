"""The decrypted run that a device follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_client.models.fresh_start import TensorFigures
    from shoal.protocol.documents import RunPlan
    from shoal.task.bundle import TaskBundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that this device may follow; `edge_client.run.held_models` has its models.

    Attributes:
        plan: the owner's plan.
        bundle: the task.
        start: figures of the model that the device began the run with; None if it began with a segment of a model only.
    """

    plan: RunPlan
    bundle: TaskBundle
    start: TensorFigures | None = None
