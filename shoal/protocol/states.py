"""Messages about model states: recipes that make them, statements that devices sign about them, and checkpoints.

A *state* is (model, round): the model after the close of that round. State 0 of a model is an origin of the run plan. A
*recipe* says how a new state follows from earlier ones, and a *step* holds the recipes of one round. In a *statement* a
device signs the digests of the states that it holds; statements of enough devices make the *certificate* of a state.

Example: round 7 trains model 0. The step has the recipe (0, 7) = 1 x (0, 6) + 1 x mean, and (0, 7) is its only open state.
A trial of a split at round 7 instead has (1, 7) = 1 x (0, 6) + 1 x mean of one half, (2, 7) likewise, and leaves (0, 6) open,
because a refused trial returns to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, Fixed16, Fixed32, decode, message
from shoal.protocol.documents import require_name

MAX_TERMS: Final = limits.MAX_MODELS
"""Most states in one recipe, and most recipes in one step."""
RETAINED_STEPS: Final = 2
"""Rounds whose steps and means the aggregator retains; a device that missed more takes a checkpoint."""
MAX_OPEN_STATES: Final = 2 * limits.MAX_MODELS
"""Most states that a step leaves open, or that a device holds: two of each model."""


@message(40)
@dataclass(frozen=True, slots=True, order=True)
class StateId:
    """The name of a state: a model's id within the run, and the round after whose close the model is meant."""

    model: U16
    round: U32


@message(41)
@dataclass(frozen=True, slots=True)
class Term:
    """A state and its weight in a recipe."""

    model: U16
    round: U32
    weight: float

    def __post_init__(self) -> None:
        _check_weight(self.weight)

    @property
    def state(self) -> StateId:
        """The name of the state."""
        return StateId(self.model, self.round)


@message(42)
@dataclass(frozen=True, slots=True)
class Recipe:
    """How the state (model, round) is made: the sum of weight x state, in this order, and at most one mean of the round.

    Attributes:
        terms: earlier states with their weights.
        mean: weight of the model's mean in this round, which is added last; None if there is no mean.
    """

    model: U16
    round: U32
    terms: tuple[Term, ...]
    mean: float | None

    def __post_init__(self) -> None:
        if not 1 <= len(self.terms) <= MAX_TERMS:
            raise WireError(f"a recipe of {len(self.terms)} states")
        if any(term.round >= self.round for term in self.terms):
            raise WireError(f"a recipe of round {self.round} that names a state of that round or later")
        if self.mean is not None:
            _check_weight(self.mean)

    @property
    def state(self) -> StateId:
        """The name of the state that the recipe makes."""
        return StateId(self.model, self.round)


@message(43)
@dataclass(frozen=True, slots=True)
class Step:
    """The close of one round: its recipes, and the open states.

    Attributes:
        recipes: in ascending order of their models; a model without a recipe did not change.
        open: ascending: every state that a later recipe or assignment may name, those of the recipes among them. A device
            forgets all others.
    """

    round: U32
    recipes: tuple[Recipe, ...]
    open: tuple[StateId, ...]

    def __post_init__(self) -> None:
        if len(self.recipes) > MAX_TERMS:
            raise WireError(f"a step of {len(self.recipes)} recipes")
        if any(recipe.round != self.round for recipe in self.recipes):
            raise WireError(f"the step of round {self.round} has a recipe of another round")
        _check_ascending([recipe.state for recipe in self.recipes], "recipes of a step")
        _check_ascending(self.open, "open states")
        if any(state.round > self.round for state in self.open):
            raise WireError(f"the step of round {self.round} leaves a later state open")


@message(44)
@dataclass(frozen=True, slots=True)
class HeldState:
    """A state that a device holds, and its digest (`crypto.mask.schedule.state_digest`)."""

    model: U16
    round: U32
    digest: Fixed32

    @property
    def state(self) -> StateId:
        """The name of the state."""
        return StateId(self.model, self.round)


@message(45)
@dataclass(frozen=True, slots=True)
class Statement:
    """The document in which a device signs all states that it holds.

    It names also states that the device does not train from: a model that no device chose needs a certificate too.

    Attributes:
        round: the round in which the device signs.
        states: ascending by model and round.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    device: str
    states: tuple[HeldState, ...]

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        require_name(self.device, "device name")
        # Strictly ascending, so that a device can't sign two digests of one state in one statement.
        _check_ascending([held.state for held in self.states], "states of a statement")


@message(46)
@dataclass(frozen=True, slots=True)
class StateCertificate:
    """Signed statements (`Statement`) of several devices; those that name a state's digest certify the state."""

    statements: tuple[bytes, ...]


@message(47)
@dataclass(frozen=True, slots=True)
class SealedState:
    """Header of a checkpoint: one state, sealed by a device; (length,) float32 little-endian follows.

    Attributes:
        digest_key: the key of the state's digest; a receiver may lack the keys of the state's round.
    """

    fleet: str
    run_id: Fixed16
    model: U16
    round: U32
    length: U32
    digest_key: Fixed32 = field(repr=False)


def read_step(data: bytes | memoryview) -> Step:
    """Return the step that ``data`` encodes.

    Raises:
        WireError: the bytes are malformed, or more than MAX_STEP_BYTES.
    """
    _check_size(data, limits.MAX_STEP_BYTES, "step")
    return decode(data, Step)


def read_certificate(data: bytes | memoryview) -> StateCertificate:
    """Return the certificate that ``data`` encodes; its signatures are not checked yet.

    Raises:
        WireError: the bytes are malformed, or more than MAX_CERTIFICATE_BYTES.
    """
    _check_size(data, limits.MAX_CERTIFICATE_BYTES, "certificate")
    return decode(data, StateCertificate)


def _check_size(data: bytes | memoryview, most: int, name: str) -> None:
    # Before decoding: a decoded list takes many times the memory of its bytes.
    if len(data) > most:
        raise WireError(f"a {name} of {len(data)} bytes is over {most}")


def _check_ascending(states: Iterable[StateId], name: str) -> None:
    found = tuple(states)
    if len(found) > MAX_OPEN_STATES:
        raise WireError(f"{len(found)} {name} are over {MAX_OPEN_STATES}")
    if any(a >= b for a, b in pairwise(found)):
        raise WireError(f"the {name} are not in ascending order")


def _check_weight(weight: float) -> None:
    if weight != 0 and not limits.MIN_WEIGHT <= abs(weight) <= limits.MAX_WEIGHT:
        raise WireError(f"a weight of {weight:g} in a recipe")
