"""Publish the means and checkpoints of a run, and list them for the announcement.

Each is published once and stays on the broker until the announcement of a later round no longer names it. After a restart, or
under another broadcast key, all are sealed and published again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from aggregator.rounds.held_models import transcript_of
from shoal.protocol import channels
from shoal.protocol.chunking import TRANSFER_ID_BYTES
from shoal.protocol.codec import encode
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import (
    CheckpointRef,
    MeanHeader,
    MeanRef,
    Offer,
    RetainedStep,
    RoundModels,
    checkpoint_number,
    mean_number,
    spare_number,
)

if TYPE_CHECKING:
    from aggregator.rounds.held_models import HeldModels, KeptCheckpoint, KeptMean, KeptStep
    from shoal.protocol.channels import Channel
    from shoal.protocol.documents import RunPlan
    from shoal.protocol.states import StateId

Publish = Callable[["Channel", bytes, int, str], bytes]
"""Seals and retains a message of a channel, for a round, at a label; returns its transfer id."""
_Key = tuple[str, bytes, int, int]
"""Mean or checkpoint, run id, model, round."""
_MEAN: Final = "mean"
_CHECKPOINT: Final = "checkpoint"


class RelayedModels:
    """The means and checkpoints of one run on the broker.

    Args:
        publish: see `Publish`.
        label: returns the topic label of a number.
    """

    def __init__(self, publish: Publish, label: Callable[[bytes, int], str]) -> None:
        self._publish = publish
        self._label = label
        self._sent: dict[_Key, bytes] = {}
        self.spare_labels: list[str] = []

    def clear(self) -> None:
        """Forget what was published: devices with another broadcast key can't open it."""
        self._sent.clear()

    def announce(
        self,
        run: RunPlan,
        held: HeldModels,
        offers: Mapping[int, StateId],
        round_: int,
        *,
        signers: int,
        devices: Iterable[str] = (),
    ) -> RoundModels:
        """Publish the means and checkpoints that are not on the broker yet; return the models of the announcement.

        ``signers`` is the number of statements that certify a state (`signers_needed`), ``devices`` the fleet.
        """
        current: set[_Key] = set()
        steps = tuple(self._step(run, kept, current) for kept in held.steps)
        found = held.announced(signers)
        # Two models may be at one state, such as the halves of a split: it is announced once.
        of_state = {c.state: (model, c) for model, c in found.items()}
        refs = tuple(self._checkpoint(run, model, c, current) for _, (model, c) in sorted(of_state.items()))
        self.spare_labels = [label for model in found for label in self._spares(run, model, held, current)]
        self._sent = {key: transfer for key, transfer in self._sent.items() if key in current}
        return RoundModels(
            key_version=held.key_version,
            offers=tuple(Offer(model, state) for model, state in sorted(offers.items())),
            steps=steps,
            checkpoints=refs,
            statements=tuple(dict.fromkeys((*held.statements(of_state), *held.history(devices)))),
            transcript=transcript_of(held, run, round_, offers),
        )

    def _spares(self, run: RunPlan, model: int, held: HeldModels, current: set[_Key]) -> Iterable[str]:
        """Publish the spare checkpoints of a model, and yield their labels; no announcement names them."""
        for turn, spare in enumerate(held.spares.get(model, ())):
            label = self._label(run.run_id, spare_number(model, turn))
            key = (f"spare {turn}", run.run_id, model, spare.round)
            current.add(key)
            if key not in self._sent:
                self._sent[key] = self._publish(channels.CHECKPOINT, spare.data.tobytes(), spare.round, label)
            yield label

    def _step(self, run: RunPlan, kept: KeptStep, current: set[_Key]) -> RetainedStep:
        return RetainedStep(kept.step, tuple(self._mean(run, kept.step.round, mean, current) for mean in kept.means))

    def _mean(self, run: RunPlan, round_: int, mean: KeptMean, current: set[_Key]) -> MeanRef:
        label = self._label(run.run_id, mean_number(mean.model, round_))
        if mean.parts:
            # The workers publish it in parts, at labels of their own; devices know it by its digest.
            return MeanRef(mean.model, label, mean.digest[:TRANSFER_ID_BYTES], mean.contributors, mean.digest)
        key = (_MEAN, run.run_id, mean.model, round_)
        current.add(key)
        if key not in self._sent:
            segment = "shared" if mean.model == SHARED_MODEL else "cluster"
            header = MeanHeader(
                fleet=run.fleet,
                run_id=run.run_id,
                round=round_,
                key_id=mean.key_id,
                model=mean.model,
                length=len(mean.vector),
                segment="" if len(mean.vector) == run.length else segment,
            )
            self._sent[key] = self._publish(channels.MEAN, encode(header) + mean.wire, round_, label)
        return MeanRef(mean.model, label, self._sent[key], mean.contributors, mean.digest)

    def _checkpoint(self, run: RunPlan, model: int, checkpoint: KeptCheckpoint, current: set[_Key]) -> CheckpointRef:
        label = self._label(run.run_id, checkpoint_number(model))
        key = (_CHECKPOINT, run.run_id, model, checkpoint.round)
        current.add(key)
        if key not in self._sent:
            self._sent[key] = self._publish(channels.CHECKPOINT, checkpoint.data.tobytes(), checkpoint.round, label)
        return CheckpointRef(checkpoint.state, checkpoint.round, checkpoint.key_version, label, self._sent[key])
