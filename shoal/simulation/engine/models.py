"""The clear models of a simulated run, held in the place of all devices.

A strategy holds no vector between rounds (`aggregator.rounds.relay`): `Models.relay` evaluates the recipes of a round here, as
every device would.

`Links` encodes and decodes updates and means in the plan's precision with a fleet's functions, so a simulated device adds the
residuals that a real one would. Residuals are not stored in a checkpoint of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aggregator.rounds.relay import RelayedStep, States, settle
from aggregator.strategies.base import starts_of
from crypto.mask.derivation import MaskKey, derive, segment_keys
from crypto.mask.masking import mask as masked_under
from crypto.mask.masking import unmask
from crypto.mask.schedule import VersionKey
from edge_client.learning.feedback import encode_update, residual_for, with_residual
from edge_client.models.recipes import weighted_sum
from edge_client.storage.pending_upload import Residual
from shoal.errors import IntegrityError
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.precision.codec import decode, encode
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.precision.seeds import mean_seed, upload_seed
from shoal.protocol.states import StateId
from shoal.types import KEY_ID_BYTES, Float32Vector, MaskedVector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aggregator.strategies.base import ClusterModel, RoundPlan, Strategy
    from shoal.protocol.documents import RunPlan
    from shoal.types import Segment

KEY_VERSION: Final = 1


class RoundMasks:
    """Derives the masks of a run's rounds from its seed.

    They hide nothing: in a simulation masks only show that strategies work on masked vectors.
    """

    def __init__(
        self, *, fleet: str, run_id: bytes, seed: int, task_digest: bytes, mode: str, segments: tuple[Segment, ...]
    ) -> None:
        """Begin at round 1; the arguments are those of `crypto.mask.derivation.MaskContext`, and the run's seed."""
        self._chain = VersionKey(fleet, KEY_VERSION, seed.to_bytes(32, "little")).begin_run(run_id, 1)
        self._task_digest, self._mode, self._segments = task_digest, mode, segments

    def take(self, round_: int) -> MaskKey:
        """Return the mask of a round, which is later than the one before.

        Raises:
            IntegrityError: it is not.
        """
        self._chain.skip_to(round_)
        keys = self._chain.take()
        return derive(keys.mask, keys.context(self._task_digest, self._mode, self._segments))


class Links:
    """The links of all devices of a run.

    Attributes:
        exact: if not None, device -> the masked update of the last round before it was rounded, (d,) float32.
        up: bytes of all encoded updates so far, and their number; down: the same of the means that devices fetched.
        ring: in a run on sums the encoding of updates, which are rounded when they are added up; empty in any other.
    """

    def __init__(self, run: RunPlan) -> None:
        """Begin at round 1 of ``run``."""
        self._run = run
        self._residuals: dict[str, Residual] = {}
        self._moved: dict[int, int] = {}
        self.exact: dict[str, Float32Vector] | None = None
        self.ring = ""
        self.up = (0, 0)
        self.down = (0, 0)

    def open_round(self, plan: RoundPlan) -> None:
        """Count the means that devices fetch for a round: of the models in their assignments that moved in the last one."""
        if self.exact is not None:
            self.exact.clear()
        for assignment in plan.assignments.values():
            fetched = [self._moved[model] for model in assignment.models if model in self._moved]
            self.down = self.down[0] + sum(fetched), self.down[1] + len(fetched)
        self._moved = {}

    def update(
        self, clear: Float32Vector, mask: MaskKey | None, *, device: str, model: int, phase: int, round_: int
    ) -> Float32Vector:
        """Return the masked update (d,) float32 as the aggregator decodes it, and hold the residual that it leaves.

        Args:
            clear: the device's update.
            mask: of the round; None if vectors are clear.
            device: its name.
            model: that it trained from.
            phase: of its assignment.
            round_: the round.
        """
        run = self._run
        if self.ring or run.recipe.precision_up == "float32":
            self.up = self.up[0] + encoded_bytes(len(clear), self.ring or "float32"), self.up[1] + 1
            return clear if mask is None else masked_under(clear, mask).values
        stored = residual_for(self._residuals.pop(device, None), run.run_id, round_, b"")
        seed = upload_seed(run.run_id, round_, phase, device)
        sent = with_residual(clear, stored, model, phase)
        encoded = encode_update(sent, mask, run.recipe.precision_up, seed)
        self.up = self.up[0] + len(encoded.body), self.up[1] + 1
        if self.exact is not None:
            self.exact[device] = sent if mask is None else masked_under(sent, mask).values
        if encoded.residual is not None:
            transfer = bytes(KEY_ID_BYTES)
            self._residuals[device] = Residual.of(
                encoded.residual, run_id=run.run_id, round_=round_, model=model, transfer=transfer
            )
        return encoded.masked

    def mean(self, vector: Float32Vector, *, model: int, round_: int) -> Float32Vector:
        """Return a masked mean, float32, as devices decode it."""
        precision = self._run.recipe.precision_down
        self._moved[model] = encoded_bytes(len(vector), precision)
        if precision == "float32":
            return vector
        seed = mean_seed(self._run.run_id, round_, model)
        return decode(encode(vector, precision, seed), len(vector), precision)


@dataclass(frozen=True, slots=True)
class HeldStates:
    """The states that devices hold between two rounds, besides the origins: names, numbers and vectors, for a checkpoint."""

    names: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    next: int = 0
    vectors: Mapping[int, Float32Vector] = field(default_factory=dict)


class Models:
    """The models of a run in the clear, and the mask of the current round.

    Attributes:
        mask: the mask of the vectors that the strategy receives in this round; None if they are clear.
        links: encodes the vectors between devices and aggregator.
    """

    def __init__(self, run: RunPlan, origins: NDArray[np.float32]) -> None:
        """Hold the origins (run.origins, d), float32."""
        self._run = run
        self.links = Links(run)
        self.mask: MaskKey | None = None
        self._states = States.of_origins(run.origins)
        self._vectors: dict[StateId, Float32Vector] = {StateId(i, 0): row for i, row in enumerate(origins)}
        self._masks: RoundMasks | None = None
        if run.recipe.mode != "none":
            self._masks = RoundMasks(
                fleet=run.fleet,
                run_id=run.run_id,
                seed=run.seed,
                task_digest=run.task_digest,
                mode=run.recipe.mode,
                segments=run.mask_segments,
            )

    def open_round(self, round_: int) -> None:
        """Derive the mask of round ``round_``, which is later than the last one, unless vectors are clear."""
        if self._masks is not None:
            self.mask = self._masks.take(round_)

    @property
    def key_id(self) -> bytes:
        """The 16 bytes that name the mask of this round; zeros if vectors are clear."""
        return bytes(KEY_ID_BYTES) if self.mask is None else self.mask.key_id

    def theta(self, plan: RoundPlan, model: int) -> Float32Vector:
        """Return a clear model of the plan, (d,) float32."""
        if plan.shared is None:
            return self._sum(plan.models[model], "")
        theta = np.empty(self._run.length, np.float32)
        theta[self._run.span("shared")] = self._sum(plan.shared, "shared")
        theta[self._run.span("cluster")] = self._sum(plan.models[model], "cluster")
        return theta

    def _sum(self, value: ClusterModel, segment: str) -> Float32Vector:
        """Return the weighted sum of states that a model of a plan is, in new memory."""
        if value.offset is not None:
            raise IntegrityError("a strategy has planned a model that devices do not hold")
        (first, weight), *others = starts_of([(1.0, value)]).items()
        total: Float32Vector = self._state(self._states[first], segment) * np.float32(weight)
        for number, weight in others:
            total += self._state(self._states[number], segment) * np.float32(weight)
        return total

    def _state(self, ref: StateId, segment: str) -> Float32Vector:
        vector = self._vectors[ref]
        # Origins are whole vectors; later states of models that share weights have one segment each.
        return vector[self._run.span(segment)] if ref.round == 0 else vector

    def relay(self, strategy: Strategy, state: Any, round_: int) -> Any:
        """Return the strategy's state after round ``round_`` without vectors; the states that follow from it are held here."""
        models = strategy.models_of(state)
        state, self._states, steps = settle(state, models, self._states, round_)
        segments = {} if self.mask is None else segment_keys(self.mask)
        for step in steps:
            segment = ""
            if SHARED_MODEL in models:
                segment = "shared" if step.state.model == SHARED_MODEL else "cluster"
            self._vectors[step.state] = self._evaluate(step, segment, segments.get(segment))
        named = set(self._states.names.values())
        self._vectors = {ref: vector for ref, vector in self._vectors.items() if ref in named}
        return state

    def _evaluate(self, step: RelayedStep, segment: str, mask: MaskKey | None) -> Float32Vector:
        parts = [(weight, self._state(ref, segment)) for weight, ref in step.terms]
        if step.mean is not None:
            mean = self.links.mean(step.mean, model=step.state.model, round_=step.state.round)
            parts.append((1.0, mean if mask is None else unmask(MaskedVector(mean, mask.key_id), mask)))
        return weighted_sum(parts)

    @property
    def held(self) -> HeldStates:
        """The states besides the origins."""
        later = {number: ref for number, ref in self._states.names.items() if ref.round}
        vectors = {number: self._vectors[ref] for number, ref in later.items()}
        return HeldStates({number: (ref.model, ref.round) for number, ref in later.items()}, self._states.next, vectors)

    def restore(self, held: HeldStates) -> None:
        """Continue from states that `held` returned."""
        if not held.next:
            return
        origins = States.of_origins(self._run.origins)
        later = {number: StateId(*name) for number, name in held.names.items()}
        self._states = States({**origins.names, **later}, held.next)
        self._vectors |= {later[number]: vector for number, vector in held.vectors.items()}
