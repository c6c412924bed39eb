"""Messages about model states: recipes that make them, statements that devices sign about them, means and checkpoints.

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
from itertools import accumulate, pairwise
from typing import Final

from shoal import limits
from shoal.digests import sha256
from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, ArrayU16, ArrayU32, Fixed16, Fixed32, decode, decode_prefix, encode, message
from shoal.protocol.documents import require_name

MAX_TERMS: Final = limits.MAX_MODELS
"""Most states in one recipe, and most recipes in one step."""
NO_TRANSCRIPT: Final = bytes(32)
"""The transcript of a run before its first announcement."""
FORKED_ROUND: Final = (1 << 32) - 1
"""In place of a transcript's round: the aggregator has shown the device another history than others, or than before."""
RETAINED_STEPS: Final = 2
"""Recipes of each model that the aggregator retains, with their means; a device that missed more takes a checkpoint."""
MAX_RETAINED_RECIPES: Final = RETAINED_STEPS * (limits.MAX_MODELS + 1)
"""Most recipes in all retained steps: RETAINED_STEPS of each model and of the segment that all models share."""
MAX_OPEN_STATES: Final = 2 * limits.MAX_MODELS
"""Most states that a step leaves open, or that a device holds: two of each model."""
SPARE_CHECKPOINTS: Final = 2
"""Most further checkpoints of each model in the final round, by other devices: the owner tries them all."""
_SHARED_PLACE: Final = limits.MAX_MODELS + limits.MAX_SCALED
"""Place of the segment that all models share, after those of the models and of their statistics."""


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
class StateRecipe:
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
        limit: largest norm that a mean of the step may have; 0 if it has no mean.
    """

    round: U32
    recipes: tuple[StateRecipe, ...]
    open: tuple[StateId, ...]
    limit: float = 0.0

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
        transcript: the run's transcript after the announcement of that round, see `TranscriptEntry`.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    device: str
    states: tuple[HeldState, ...]
    transcript: Fixed32 = NO_TRANSCRIPT

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
    """Header of a checkpoint: one state, sealed by a device. The task and (length,) float32 little-endian follow.

    Attributes:
        digest_key: the key of the state's digest; a receiver may lack the keys of the state's round.
        task: bytes of the task bundle, which a device needs that was admitted after the run began.
    """

    fleet: str
    run_id: Fixed16
    model: U16
    round: U32
    length: U32
    digest_key: Fixed32 = field(repr=False)
    task: U32 = 0


@message(48)
@dataclass(frozen=True, slots=True)
class Offer:
    """A model that assignments may name, and its state: devices of the model train from it.

    Attributes:
        model: id within the run, or `shoal.protocol.messages.SHARED_MODEL` for the segment that all models share.
        at: the state; it may have the id of another model, from which this one was split.
    """

    model: U16
    at: StateId


@message(49)
@dataclass(frozen=True, slots=True)
class MeanRef:
    """A mean of a retained step: the recipe of ``model`` adds it.

    Attributes:
        label: topic label; transfer: transfer id.
        contributors: number of devices whose updates are averaged.
        digest: SHA-256 of the masked vector's bytes.
    """

    model: U16
    label: str
    transfer: Fixed16
    contributors: U32
    digest: Fixed32 = bytes(32)


@message(50)
@dataclass(frozen=True, slots=True)
class RetainedStep:
    """A step that devices can still take, with its means in ascending order of their models.

    All but the newest may have only those recipes that a device could still need, and name no open states.
    """

    step: Step
    means: tuple[MeanRef, ...]

    def __post_init__(self) -> None:
        needed = [recipe.model for recipe in self.step.recipes if recipe.mean is not None]
        if needed != [mean.model for mean in self.means]:
            raise WireError(f"the means of step {self.step.round} are not those that its recipes add")


@message(51)
@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint that devices can take.

    Attributes:
        state: the state that it holds.
        round: the round under whose content key it is sealed.
        key_version: of that round.
        label: topic label; transfer: transfer id.
    """

    state: StateId
    round: U32
    key_version: U32
    label: str
    transfer: Fixed16


@message(52)
@dataclass(frozen=True, slots=True)
class RoundModels:
    """The models of an announced round.

    Attributes:
        key_version: under which the round's keys are derived.
        offers: ascending by model.
        steps: the retained ones, oldest first.
        checkpoints: ascending by state.
        statements: statements of devices (`Statement`) that certify the states of ``checkpoints``.
        transcript: the run's transcript with this announcement.
    """

    key_version: U32
    offers: tuple[Offer, ...]
    steps: tuple[RetainedStep, ...] = ()
    checkpoints: tuple[CheckpointRef, ...] = ()
    statements: tuple[bytes, ...] = ()
    transcript: Fixed32 = NO_TRANSCRIPT

    def __post_init__(self) -> None:
        models = [offer.model for offer in self.offers]
        if len(models) > MAX_TERMS + 1 or any(a >= b for a, b in pairwise(models)):
            raise WireError("the offered models are too many or not in ascending order")
        if any(a.step.round >= b.step.round for a, b in pairwise(self.steps)):
            raise WireError("the retained steps are not in ascending order")
        if any(not kept.step.recipes for kept in self.steps[:-1]):
            raise WireError("a retained step that changes no model")
        if sum(len(kept.step.recipes) for kept in self.steps) > MAX_RETAINED_RECIPES:
            raise WireError(f"the retained steps have more than {MAX_RETAINED_RECIPES} recipes")
        _check_ascending([ref.state for ref in self.checkpoints], "checkpoints")

    def state_of(self, model: int) -> StateId | None:
        """Return the state at which a model is offered; None if it is not."""
        return next((offer.at for offer in self.offers if offer.model == model), None)

    @property
    def newest(self) -> Step | None:
        """The step of the last closed round; None before the first has closed."""
        return self.steps[-1].step if self.steps else None


@message(55)
@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptEntry:
    """One announcement in the transcript of a run: the hash chain of all that devices base their models on.

    An aggregator that shows two groups of devices two histories gives them two transcripts. Devices sign theirs.

    Attributes:
        previous: the transcript before this announcement; NO_TRANSCRIPT before the first.
        step: the newest retained step; None before the first round has closed.
        means: digests of its means, in its order.

    The key version is left out: an aggregator that restarts may announce the same round again under newer keys.
    """

    previous: Fixed32
    fleet: str
    run_id: Fixed16
    round: U32
    offers: tuple[Offer, ...]
    step: Step | None
    means: tuple[Fixed32, ...]

    @property
    def digest(self) -> bytes:
        """The transcript with this announcement: SHA-256 of the encoded entry."""
        return sha256(encode(self))


@message(56)
@dataclass(frozen=True, slots=True)
class TranscriptHead:
    """The transcript of a run after the announcement of ``round``, as one device knows it.

    In place of the round, FORKED_ROUND says that the device has left the run, since it was shown another history.
    """

    run_id: Fixed16
    round: U32
    transcript: Fixed32


@message(53)
@dataclass(frozen=True, slots=True, kw_only=True)
class MeanHeader:
    """Header of a mean that devices add to a model; (length,) float32 little-endian follows, masked under the round's key.

    Attributes:
        key_id: names the mask.
        segment: name of the segment that follows; empty for the whole vector.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    key_id: Fixed16
    model: U16
    length: U32
    segment: str = ""


@message(54)
@dataclass(frozen=True, slots=True)
class SealedCheckpoints:
    """Head of the bytes attached to an upload: one checkpoint's envelope of each size follows, for the models in order."""

    models: ArrayU16
    sizes: ArrayU32

    def __post_init__(self) -> None:
        if len(self.models) != len(self.sizes) or any(a >= b for a, b in pairwise(self.models)):
            raise WireError("the attached checkpoints are not one for each model in ascending order")


def attached_checkpoints(data: bytes | memoryview) -> dict[int, memoryview]:
    """Return model -> the envelope of its checkpoint, of the bytes attached to an upload.

    Raises:
        WireError: they are no list of checkpoints, or its sizes are not theirs.
    """
    head, body = decode_prefix(data, SealedCheckpoints)
    if len(body) != sum(head.sizes):
        raise WireError(f"{len(body)} bytes of checkpoints where {sum(head.sizes)} were announced")
    ends = accumulate(head.sizes)
    return {m: body[end - size : end] for m, size, end in zip(head.models, head.sizes, ends, strict=True)}


def mean_number(model: int, round_: int) -> int:
    """Return the number of a mean's topic label: two for each model, used in turn, since two means are retained."""
    return 2 * _place(model) + round_ % RETAINED_STEPS


def checkpoint_number(model: int) -> int:
    """Return the number of the topic label of a model's checkpoint."""
    return 2 * (_SHARED_PLACE + 1) + _place(model)


def spare_number(model: int, turn: int) -> int:
    """Return the number of the topic label of a model's spare checkpoint; ``turn`` counts from 0."""
    # At the end of the blocks of numbers in whose beginning the parts of means are (`shoal.protocol.shards.mean_part_number`).
    block = checkpoint_number(_SHARED_PLACE) + 1
    return (turn + 2) * block - (_SHARED_PLACE + 1) + _place(model)


def checkpoint_purpose(run_id: bytes, round_: int, state: StateId) -> str:
    """Return the purpose in the head of a checkpoint's envelope that a device seals in round ``round_``."""
    return f"checkpoint/{run_id.hex()}/{round_}/{state.model}/{state.round}"


def _place(model: int) -> int:
    return min(model, _SHARED_PLACE)


def read_certificate(data: bytes | memoryview) -> StateCertificate:
    """Return the certificate that ``data`` encodes; its signatures are not checked yet.

    Raises:
        WireError: the bytes are malformed, or more than MAX_CERTIFICATE_BYTES.
    """
    # Before decoding: a decoded list takes many times the memory of its bytes.
    if len(data) > limits.MAX_CERTIFICATE_BYTES:
        raise WireError(f"a certificate of {len(data)} bytes is over {limits.MAX_CERTIFICATE_BYTES}")
    return decode(data, StateCertificate)


def _check_ascending(states: Iterable[StateId], name: str) -> None:
    found = tuple(states)
    if len(found) > MAX_OPEN_STATES:
        raise WireError(f"{len(found)} {name} are over {MAX_OPEN_STATES}")
    if any(a >= b for a, b in pairwise(found)):
        raise WireError(f"the {name} are not in ascending order")


def _check_weight(weight: float) -> None:
    if weight != 0 and not limits.MIN_WEIGHT <= abs(weight) <= limits.MAX_WEIGHT:
        raise WireError(f"a weight of {weight:g} in a recipe")
