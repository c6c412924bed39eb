"""Model states in memory: immutable vectors with their digests, and the set of those that a device holds.

A state (model, round) is never changed; a step adds states, and `ModelStates.keep` forgets those that are no longer named.
Both return a new set that shares the vectors, so a crash or an error between two steps leaves a whole set.

Example: model 0 is at (0, 6). The step of round 7 makes (0, 7) from it. While a trial is open, (0, 6) stays as well, since a
refused trial's recipe names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from crypto.mask.schedule import RoundKeys, state_digest
from edge_client.models.recipes import evaluate
from shoal.errors import UsageError
from shoal.protocol.states import NO_TRANSCRIPT, HeldState, StateId, Statement, Step

if TYPE_CHECKING:
    from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """One state of a model, in clear.

    Attributes:
        id: model and round.
        theta: (d,), float32, read-only.
        digest: 32 bytes, the keyed digest of the state.
        digest_key: 32 bytes, the digest's key; a checkpoint of the state needs it.
        norm: theta's.
    """

    id: StateId
    theta: Float32Vector = field(repr=False)
    digest: bytes
    digest_key: bytes = field(repr=False)
    norm: float = field(default=0.0, repr=False)

    @classmethod
    def of(cls, id_: StateId, theta: Float32Vector, *, run_id: bytes, digest_key: bytes) -> ModelState:
        """Return the state with its digest; ``theta``, (d,) float32 C-contiguous, is made read-only."""
        theta.flags.writeable = False
        with np.errstate(over="ignore"):
            norm = float(np.linalg.norm(theta))
        return cls(id_, theta, state_digest(digest_key, run_id, id_.model, id_.round, theta), digest_key, norm)

    @property
    def held(self) -> HeldState:
        """The state's name and digest, as a statement names it."""
        return HeldState(self.id.model, self.id.round, self.digest)


@dataclass(frozen=True, slots=True, eq=False)
class ModelStates:
    """The states of one run that a device holds.

    Attributes:
        fleet, run_id: the run.
        held: the states by name.
    """

    fleet: str
    run_id: bytes
    held: Mapping[StateId, ModelState]

    @classmethod
    def of_origins(cls, origins: Mapping[int, Float32Vector], keys: RoundKeys) -> ModelStates:
        """Return the states with which a run begins.

        Args:
            origins: (d,), float32, C-contiguous, by model.
            keys: those of the run's first round, which key the digests of the origins.
        """
        empty = cls(keys.fleet, keys.run_id, {})
        return empty.with_states(
            ModelState.of(StateId(model, 0), theta, run_id=keys.run_id, digest_key=keys.digest_key)
            for model, theta in origins.items()
        )

    def apply(
        self,
        step: Step,
        means: Mapping[int, Float32Vector],
        keys: RoundKeys,
        *,
        span_of: Callable[[int], slice] = lambda _: slice(None),
    ) -> ModelStates:
        """Return these states and the new ones that the recipes of ``step`` make.

        Args:
            step: with the recipes that this device evaluates, see `edge_client.models.recipes`.
            means: (d,), float32, unmasked, by the model of the recipe that adds it.
            keys: the keys of the step's round.
            span_of: the coordinates that a model's states have of an origin; all, unless models share weights: then the later
                states of a model hold one segment, and origins are whole.

        Raises:
            UsageError: the keys are those of another round or run, or a mean is missing.
            IntegrityError: a recipe names a state that is not held, or a result is not finite.
        """
        if (keys.run_id, keys.round) != (self.run_id, step.round):
            raise UsageError(f"the keys of round {keys.round} for the step of round {step.round}")
        made = []
        for recipe in step.recipes:
            span = span_of(recipe.model)
            vectors = {id_: s.theta[span] if id_.round == 0 else s.theta for id_, s in self.held.items()}
            mean = None if recipe.mean is None else means.get(recipe.model)
            theta = evaluate(recipe, vectors, mean)
            made.append(ModelState.of(recipe.state, theta, run_id=self.run_id, digest_key=keys.digest_key))
        return self.with_states(made)

    def with_states(self, states: Iterable[ModelState]) -> ModelStates:
        """Return these states and ``states``, which replace those of the same name."""
        return ModelStates(self.fleet, self.run_id, {**self.held, **{state.id: state for state in states}})

    def keep(self, ids: Collection[StateId]) -> ModelStates:
        """Return only the states named in ``ids``."""
        return ModelStates(self.fleet, self.run_id, {id_: s for id_, s in self.held.items() if id_ in ids})

    def digests(self) -> dict[StateId, bytes]:
        """Return the digest of each state held."""
        return {id_: state.digest for id_, state in self.held.items()}

    def newest(self, model: int) -> ModelState | None:
        """Return the newest state of a model, or None if none is held."""
        return max((s for id_, s in self.held.items() if id_.model == model), key=lambda s: s.id, default=None)

    def statement(self, device: str, round_: int, transcript: bytes = NO_TRANSCRIPT) -> Statement:
        """Return the statement of all states held, for the device to sign in round ``round_`` with the run's transcript."""
        held = tuple(self.held[id_].held for id_ in sorted(self.held))
        return Statement(
            fleet=self.fleet,
            run_id=self.run_id,
            round=round_,
            device=device,
            states=held,
            transcript=transcript,
        )
