"""The clear models of a simulated run, held in the place of all devices.

A strategy holds no vector between rounds (`aggregator.rounds.relay`): `Models.relay` evaluates the recipes of a round here, as
every device would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aggregator.rounds.relay import RelayedStep, States, settle
from aggregator.strategies.base import starts_of
from crypto.mask.derivation import segment_keys
from crypto.mask.masking import unmask
from edge_client.models.recipes import weighted_sum
from shoal.errors import IntegrityError
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import StateId
from shoal.simulation.engine.links import Links
from shoal.simulation.engine.masks import RoundMasks
from shoal.types import KEY_ID_BYTES, Float32Vector, MaskedVector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aggregator.strategies.base import ClusterModel, RoundPlan, Strategy
    from crypto.mask.derivation import MaskKey
    from shoal.protocol.documents import RunPlan


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
