"""The keys and states of one round, as a job needs them to mask an update, sign a statement and seal checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_client.models.checkpoints import seal_checkpoint
from shoal.protocol.codec import encode
from shoal.protocol.states import SealedCheckpoints

if TYPE_CHECKING:
    from crypto.mask.derivation import MaskKey
    from crypto.mask.schedule import RoundKeys
    from crypto.seal.identity import Identity
    from edge_client.models.fresh_start import TensorFigures
    from edge_client.models.states import ModelState
    from shoal.protocol.documents import RunPlan
    from shoal.task.bundle import TaskBundle


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundContext:
    """What a job needs besides the models.

    Attributes:
        keys: the round's keys.
        derive_mask: derives the round's mask at its first call; a job calls it, since that takes milliseconds.
        key_id: names the mask.
        statement: the device's signed statement about the states that it holds.
        to_seal: states of which the upload carries checkpoints, by offered model.
        task: the encoded task bundle, which each checkpoint contains; empty if there is nothing to seal.
    """

    keys: RoundKeys
    derive_mask: Callable[[], MaskKey]
    key_id: bytes
    statement: bytes
    to_seal: Mapping[int, ModelState]
    task: bytes

    def attachment(self, identity: Identity) -> list[bytes | memoryview]:
        """Return the checkpoints to attach to the upload, sealed by ``identity``, in pieces; none if none are asked for."""
        if not self.to_seal:
            return []
        sealed = [
            seal_checkpoint(identity, self.keys, state, self.task).payload for _, state in sorted(self.to_seal.items())
        ]
        head = SealedCheckpoints(tuple(sorted(self.to_seal)), tuple(map(len, sealed)))
        return [encode(head), *sealed]


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
