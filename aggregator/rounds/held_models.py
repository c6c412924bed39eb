"""The models of a run as the aggregator knows them: the states that devices hold, and nothing of their contents.

`HeldModels` is the part of the engine's state that the announcement of a round is made from: the states that models may
start from, the last steps with their masked means, signed statements about states, and checkpoints that devices have sealed.
The functions here are pure:

- `agree` separates a round's updates into those trained from the states that most devices hold, and those out of step;
- `after_round` takes a closed round into account: its step, its statements, its checkpoints.

`aggregator.rounds.missing_states` says which devices lack a state, and orders checkpoints for them.

Example: of five devices one has a damaged model. Four statements name one digest of state (0, 6) and one names another, so
the update of that device is left out, and the device takes a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np

from aggregator.numerics.parted import is_parted
from aggregator.rounds.relay import RelayedStep, States, is_state
from aggregator.rounds.summed import OpenedSum, summed_body
from aggregator.rounds.suspects import Suspects
from aggregator.strategies.base import ClientUpdate, RoundPlan
from aggregator.strategies.registry import plan_settings
from crypto.seal.envelope import read_head
from shoal.errors import IntegrityError, WireError
from shoal.membership.statements import peek_statement
from shoal.protocol.channels import EVERYONE
from shoal.protocol.codec import encode
from shoal.protocol.jobs import MeanPlace
from shoal.protocol.messages import FOR_ALL, SHARED_MODEL, STATISTICS_MODELS, Assignment, DeclineReason, Sealed
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.codec import encode as encode_vector
from shoal.protocol.precision.seeds import mean_seed
from shoal.protocol.shards import digest_over
from shoal.protocol.states import (
    MAX_OPEN_STATES,
    MAX_RETAINED_RECIPES,
    NO_TRANSCRIPT,
    RETAINED_STEPS,
    SPARE_CHECKPOINTS,
    Offer,
    StateId,
    Statement,
    StateRecipe,
    Step,
    Term,
    TranscriptEntry,
    attached_checkpoints,
    checkpoint_purpose,
)
from shoal.types import DIGEST_BYTES, Array, Float32Vector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.protocol.documents import RunPlan

    Bytes = NDArray[np.uint8]
else:
    Bytes = Annotated[Any, Array("uint8")]

FEW_HOLDERS: Final = 2
"""Up to this many times the devices that certify a state, holders keep their model's last certified state as well."""
MAX_LINKS: Final = 32
"""Most rounds in a row with too few signatures over which a device that was away can follow the transcript."""


@dataclass(frozen=True, slots=True)
class KeptMean:
    """A masked mean of a retained step.

    Attributes:
        model: the recipe of this model adds it.
        contributors: number of devices whose updates are averaged.
        key_id: names the mask.
        vector: (d,) or the length of the model's segment, float32, masked, as devices decode it.
        digest: SHA-256 of `wire`.
        body: the vector as encoded, uint8; None in float32. It is stored, not made again: another processor may round another
            scale, and devices compare the digest. Of a mean whose parts workers hold, the parts' digests, one after another;
            ``vector`` is empty then.
    """

    model: int
    contributors: int
    key_id: bytes
    vector: Float32Vector = field(repr=False)
    digest: bytes = bytes(32)
    body: Bytes | None = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[bytes, ...]:
        """SHA-256 of each part that a worker holds, in the order of the workers; none if the vector is here."""
        if self.body is None or len(self.vector):
            return ()
        joined = self.body.tobytes()
        return tuple(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))

    @property
    def wire(self) -> memoryview:
        """The vector's bytes in the plan's precision."""
        return np.ascontiguousarray(self.vector, "<f4").data.cast("B") if self.body is None else self.body.data


@dataclass(frozen=True, slots=True)
class KeptStep:
    """A step that devices can still take, and its means in ascending order of their models."""

    step: Step
    means: tuple[KeptMean, ...]


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A state that a device has sealed for others.

    Attributes:
        state: the state in it.
        round: the round under whose content key it is sealed; key_version: of that round.
        device: the sender.
        data: the envelope as received, uint8.
    """

    state: StateId
    round: int
    key_version: int
    device: str
    data: Bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The digest of a state that most devices name, and signed statements that name it, by device."""

    digest: bytes
    statements: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Named:
    """The states that a device held in step, and the last round in which its statement named them; 0 for the origins."""

    round: int
    states: tuple[StateId, ...]


@dataclass(frozen=True, slots=True)
class HeldModels:
    """The models of a run.

    Attributes:
        key_version: of the open round or the last one.
        states: the states that models start from, by number.
        closed: the last closed round, 0 before the first.
        steps: those that lead to the models as they stand, at most `RETAINED_STEPS` recipes of each model, oldest first.
        named: the states of each device whose last statement agreed with most others.
        trained: the model that each device trained from last.
        lacking: device -> the last round that it declined for lack of a state.
        evidence: of states that are still in use or in a checkpoint.
        certified: model -> its newest checkpoint whose state enough devices have signed.
        pending: model -> a newer one that waits for more statements.
        transcript: the run's transcript before the announcement of the next round.
        spares: model -> further checkpoints of the final round.
        signed: the statements of the last round in which enough devices signed for a certificate, by device.
        links: encoded TranscriptEntry of each round after that one, at most `MAX_LINKS`.
        shipped: whether all devices have the origins from the run package.
        suspects: who may spoil sums, in a run with a keeper.
    """

    key_version: int
    states: States
    closed: int = 0
    steps: tuple[KeptStep, ...] = ()
    named: Mapping[str, Named] = field(default_factory=dict)
    trained: Mapping[str, int] = field(default_factory=dict)
    lacking: Mapping[str, int] = field(default_factory=dict)
    evidence: Mapping[StateId, Evidence] = field(default_factory=dict)
    certified: Mapping[int, KeptCheckpoint] = field(default_factory=dict)
    pending: Mapping[int, KeptCheckpoint] = field(default_factory=dict)
    transcript: bytes = NO_TRANSCRIPT
    spares: Mapping[int, tuple[KeptCheckpoint, ...]] = field(default_factory=dict)
    signed: Mapping[str, bytes] = field(default_factory=dict)
    links: tuple[bytes, ...] = ()
    shipped: bool = True
    suspects: Suspects = field(default_factory=Suspects)

    @classmethod
    def begin(cls, run: RunPlan, devices: Iterable[str], key_version: int) -> HeldModels:
        """Return the models before round 1: the run's origins, which ``devices`` have from the run package.

        A later run of a standing order ships none but that of the statistics: each device says which it has (`with_origins`).
        """
        states = States.of_origins(run.origins)
        shipped = sorted(states.names.values())[run.without_statistics.origins if run.follows else 0 :]
        named = dict.fromkeys(sorted(devices), Named(0, tuple(shipped)))
        return cls(key_version, states, named=named, shipped=not run.follows)

    def with_origins(self, device: str, origins: Iterable[int]) -> HeldModels:
        """Return the models once a device has said which origins it has; after the first round its statements say more."""
        if self.shipped or self.closed:
            return self
        known = self.named.get(device, Named(0, ()))
        states = {*known.states, *(StateId(origin, 0) for origin in origins)}
        return dataclasses.replace(self, named={**self.named, device: Named(0, tuple(sorted(states)))})

    @classmethod
    def none(cls, key_version: int) -> HeldModels:
        """Return an empty `HeldModels` for a finished run."""
        return cls(key_version, States({}, 0))

    def reach(self, start: Iterable[StateId], since: int = 0) -> frozenset[StateId]:
        """Return the states that follow from ``start`` by the retained steps, those in ``start`` among them.

        Args:
            start: states.
            since: the first round whose step counts; a device has erased the keys of the rounds before its last one.
        """
        found = set(start)
        for kept in self.steps:
            if kept.step.round < since:
                continue
            found |= {r.state for r in kept.step.recipes if all(term.state in found for term in r.terms)}
        return frozenset(found)

    @property
    def known(self) -> frozenset[StateId]:
        """The states that a model starts from or that the retained steps name: a device may name any others as well."""
        recipes = [recipe for kept in self.steps for recipe in kept.step.recipes]
        terms = {term.state for recipe in recipes for term in recipe.terms}
        spare = set(self.steps[-1].step.open) if self.steps else set()
        return frozenset(terms | spare | {recipe.state for recipe in recipes} | set(self.states.names.values()))

    def held_by(self, device: str) -> frozenset[StateId]:
        """Return the states that a device has or can make from the retained means."""
        known = self.named.get(device)
        return frozenset() if known is None else self.reach(known.states, known.round)

    def in_reach(self, device: str, least: int) -> frozenset[StateId]:
        """Return the states that a device has, or can make from the retained means and from checkpoints that it can open.

        Args:
            device: its name.
            least: statements that certify a state.
        """
        since, known = opens_since(self, device), self.named.get(device)
        opened = {
            c.state for c in self.announced(least).values() if c.key_version == self.key_version and c.round >= since
        }
        return self.reach(opened.union(() if known is None else known.states), since)

    def is_current(self, device: str) -> bool:
        """Return whether the device was in step in one of the last rounds, or no round has closed yet."""
        known = self.named.get(device)
        return not self.closed or (known is not None and known.round > self.closed - RETAINED_STEPS)

    def only(self, devices: Container[str]) -> HeldModels:
        """Return the models without the statements and checkpoints of all but ``devices``: no device accepts others'."""
        evidence = {
            state: Evidence(e.digest, {d: s for d, s in e.statements.items() if d in devices})
            for state, e in self.evidence.items()
        }
        return dataclasses.replace(
            self,
            named={d: n for d, n in self.named.items() if d in devices},
            trained={d: m for d, m in self.trained.items() if d in devices},
            lacking={d: r for d, r in self.lacking.items() if d in devices},
            evidence=evidence,
            signed={d: s for d, s in self.signed.items() if d in devices},
            certified={m: c for m, c in self.certified.items() if c.device in devices},
            pending={m: c for m, c in self.pending.items() if c.device in devices},
        )

    def announced(self, least: int) -> dict[int, KeptCheckpoint]:
        """Return model -> the checkpoint to announce, whose state at least ``least`` devices have signed."""
        return {m: c for m, c in sorted(self.certified.items()) if self._signers(c) >= least}

    def _signers(self, checkpoint: KeptCheckpoint) -> int:
        known = self.evidence.get(checkpoint.state)
        return 0 if known is None else len(known.statements)

    def statements(self, states: Iterable[StateId]) -> tuple[bytes, ...]:
        """Return the signed statements that certify ``states``, each once, by device."""
        found = {(d, s) for state in states for d, s in self.evidence[state].statements.items()}
        return tuple(signed for _, signed in sorted(found))

    def history(self, devices: Iterable[str]) -> tuple[bytes, ...]:
        """Return what leads a device that missed a round to the announced transcript; nothing if none of ``devices`` did.

        That is the statements of the last round that enough devices signed, and the entries of the rounds since.
        """
        away = any(d not in self.named or self.named[d].round < self.closed for d in devices)
        return (*self.signed.values(), *self.links) if away else ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """A round's updates, compared by the states that their devices hold.

    Attributes:
        accepted: the updates trained from (and compared with) the states that most devices hold, in the order given.
        out_of_step: device -> model, for the others.
        digests: the digest of each state that most devices name.
        statements: of all devices that uploaded.
    """

    accepted: tuple[ClientUpdate, ...]
    out_of_step: Mapping[str, int]
    digests: Mapping[StateId, bytes]
    statements: Mapping[str, Statement]

    def agrees(self, device: str) -> bool:
        """Return whether all states that the device names have the digest that most devices name."""
        return all(self.digests.get(held.state) == held.digest for held in self.statements[device].states)


def offers_of(plan: RoundPlan, states: States) -> dict[int, StateId]:
    """Return the state of each model that ``plan`` offers, and of the segment that all share, in ascending order.

    Raises:
        IntegrityError: a model is not at a state that devices hold.
    """
    models = dict(plan.models)
    if plan.shared is not None:
        models[SHARED_MODEL] = plan.shared
    for model, value in models.items():
        if not is_state(value):
            raise IntegrityError(f"round {plan.round} offers model {model}, which is at no state that devices hold")
    return {model: states[value.origin] for model, value in sorted(models.items())}


def agree(
    held: HeldModels,
    offers: Mapping[int, StateId],
    given: Iterable[ClientUpdate],
    assignments: Mapping[str, Assignment] | None = None,
) -> Agreement:
    """Return which of a round's updates were trained from, and compared with, the states that most devices hold.

    Args:
        held: the models in that round.
        offers: state of each offered model.
        given: the round's updates, whose statements were checked when they arrived.
        assignments: of the devices; without one a device compared no models.
    """
    given = tuple(given)
    statements = {c.device: peek_statement(c.statement) for c in given}
    votes: dict[StateId, Counter[bytes]] = {}
    for statement in statements.values():
        for named in statement.states:
            votes.setdefault(named.state, Counter())[named.digest] += 1
    digests = {state: _winner(found, held.evidence.get(state)) for state, found in votes.items()}
    keys = Counter(c.key_id for c in given if c.vector is not None)
    key_id = min(keys, key=lambda k: (-keys[k], k), default=b"")
    accepted: list[ClientUpdate] = []
    out_of_step: dict[str, int] = {}
    for c in given:
        has = {named.state: named.digest for named in statements[c.device].states}
        assignment = (assignments or {}).get(c.device)
        compared = () if assignment is None else assignment.compare
        needed = [offers[model] for model in {c.model, *compared, *(offers.keys() & FOR_ALL)} & offers.keys()]
        fits = all(state in has and has[state] == digests[state] for state in needed)
        if fits and (c.vector is None or c.key_id == key_id):
            accepted.append(c)
        else:
            out_of_step[c.device] = c.model
    return Agreement(tuple(accepted), dict(sorted(out_of_step.items())), digests, statements)


def _winner(votes: Counter[bytes], before: Evidence | None) -> bytes:
    """Return the digest with the most votes; of several the one that the last certificate has, else the smallest."""
    known = b"" if before is None else before.digest
    return min(votes, key=lambda digest: (-votes[digest], digest != known, digest))


def after_round(
    held: HeldModels,
    round_: int,
    *,
    run: RunPlan,
    offers: Mapping[int, StateId],
    agreement: Agreement,
    given: Iterable[ClientUpdate],
    declined: Mapping[str, DeclineReason],
    settled: tuple[States, tuple[RelayedStep, ...], frozenset[int]] | None,
    models: Collection[int] = (),
    limit: float = 0.0,
    signers: int,
    sums: Sequence[OpenedSum] = (),
) -> HeldModels:
    """Return the models after a round has closed.

    Args:
        held: before.
        round_: the round.
        run: the owner's plan.
        offers: state of each model that the round offered.
        agreement: see `agree`.
        given: all updates of the round.
        declined: device -> reason, for those that did not upload.
        settled: the states after the round, the steps to new ones, and the numbers of those in use; None for the final round,
            which changes no model.
        models: ids of all models after the round, unless it is the final one.
        limit: largest norm that an update of the round may have had, see `aggregator.rounds.screening.Screened`.
        signers: statements that certify a state (`signers_needed`).
        sums: that were opened, in a run with a keeper.
    """
    given = tuple(given)
    known = held.known
    named, trained, lacking = dict(held.named), dict(held.trained), dict(held.lacking)
    for c in given:
        if c.device not in agreement.out_of_step and agreement.agrees(c.device):
            states_named = (h.state for h in agreement.statements[c.device].states)
            named[c.device] = Named(round_, tuple(state for state in states_named if state in known))
            lacking.pop(c.device, None)
            if c.vector is not None:
                trained[c.device] = c.model
        else:
            named.pop(c.device, None)
    for device, reason in sorted(declined.items()):
        if reason is DeclineReason.STATE:
            named.pop(device, None)
            lacking[device] = round_
    agreeing = [c for c in given if agreement.agrees(c.device) and c.attached]
    sealed = [pair for c in agreeing for pair in _attached(c, offers, run, held.key_version).items()]
    pending, spares = {**held.pending, **dict(sealed)}, dict(held.spares)
    for model, found in sealed if settled is None else ():
        if found is not pending[model]:
            spares[model] = (*spares.get(model, ()), found)[:SPARE_CHECKPOINTS]
    evidence = _evidence(held, run, agreement, {c.device: c.statement for c in given})
    # The final round is announced again, with its checkpoints, under the same transcript.
    signed, links, transcript = held.signed, held.links, held.transcript
    if settled is not None:
        entry = entry_of(held, run, round_, offers)
        links, transcript = (*links, encode(entry))[-MAX_LINKS:], entry.digest
    if len(given) >= signers:
        first = sorted(given, key=lambda c: c.device)[: run.recipe.min_contributors]
        signed, links = {c.device: c.statement for c in first}, ()
    moved = dataclasses.replace(
        held,
        closed=round_,
        signed=signed,
        links=links,
        named=named,
        trained=trained,
        lacking=lacking,
        evidence=evidence,
        pending=pending,
        spares=spares,
        transcript=transcript,
    )
    moved = _promoted(moved, signers)
    if settled is None:
        return _tidied(moved)
    states, relayed, used = settled
    spare = _spare(moved, offers, signers) if used else frozenset[StateId]()
    # Inter-group aggregation adds other groups' means, so a mean may be longer than every update.
    limit = run.recipe.norm_limit if run.capabilities.scale else min(limit, run.recipe.norm_limit)
    open_ = open_states(states, used, run, spare)
    step = _kept_step(round_, relayed, open_, agreement.accepted, limit, run, sums)
    moved = dataclasses.replace(moved, states=states, steps=_retained(held.steps, step))
    return _tidied(_without_checkpoints_of_the_past(moved, models))


def _spare(held: HeldModels, offers: Mapping[int, StateId], least: int) -> frozenset[StateId]:
    """Return the certified states that devices keep besides those of the next round, for models that few devices hold.

    If fewer than ``least`` hold the model later, they can't certify its state. Then it is rolled back to one of these, and any
    device that has kept it can seal it again, under whatever keys.
    """
    recent = [n.states for n in held.named.values() if n.round > held.closed - RETAINED_STEPS]
    few = {m for m, state in offers.items() if sum(state in states for states in recent) < FEW_HOLDERS * least}
    return frozenset(c.state for m, c in held.announced(least).items() if m in few)


def transcript_of(held: HeldModels, run: RunPlan, round_: int, offers: Mapping[int, StateId]) -> bytes:
    """Return the run's transcript with the announcement of a round; arguments as for `entry_of`."""
    return entry_of(held, run, round_, offers).digest


def entry_of(held: HeldModels, run: RunPlan, round_: int, offers: Mapping[int, StateId]) -> TranscriptEntry:
    """Return the announcement of a round in the run's transcript.

    Args:
        held: the models in that round.
        run: the owner's plan.
        round_: the round.
        offers: state of each offered model.
    """
    newest = held.steps[-1] if held.steps else None
    return TranscriptEntry(
        previous=held.transcript,
        fleet=run.fleet,
        run_id=run.run_id,
        round=round_,
        offers=tuple(Offer(model, state) for model, state in sorted(offers.items())),
        step=None if newest is None else newest.step,
        means=() if newest is None else tuple(mean.digest for mean in newest.means),
    )


def _kept_step(
    round_: int,
    relayed: tuple[RelayedStep, ...],
    open_: tuple[StateId, ...],
    accepted: tuple[ClientUpdate, ...],
    limit: float,
    run: RunPlan,
    sums: Sequence[OpenedSum] = (),
) -> KeptStep:
    """Return the step of a round for devices, with its means."""
    key_id = next((c.key_id for c in accepted if c.vector is not None), bytes(16))
    recipes = tuple(
        StateRecipe(
            step.state.model,
            round_,
            tuple(Term(state.model, state.round, weight) for weight, state in step.terms),
            None if step.mean is None else 1.0,
        )
        for step in sorted(relayed, key=lambda step: step.state)
    )
    moved = [(step, step.mean) for step in sorted(relayed, key=lambda step: step.state) if step.mean is not None]
    if is_parted([mean for _, mean in moved]):
        means = _parted_means(round_, moved, key_id, run)
    else:
        means = tuple(_kept_mean(step, mean, key_id, run, sums) for step, mean in moved)
    return KeptStep(Step(round_, recipes, open_, limit if means else 0.0), means)


def with_sums(
    held: HeldModels, states: States, relayed: tuple[RelayedStep, ...], used: Collection[int], run: RunPlan
) -> HeldModels:
    """Return the models of a stopped run with new states that are sums of others, as a step of the plan's last round.

    That round is never announced: nothing else can be a step of it.

    Args:
        held: between two rounds, before the last one of the plan.
        states: with the new ones.
        relayed: the steps to the new ones, without means.
        used: numbers of the states in use.
        run: the owner's plan.
    """
    spare = held.steps[-1].step.open if held.steps else ()
    new = _kept_step(run.recipe.rounds, relayed, open_states(states, used, run, spare), (), 0.0, run)
    return dataclasses.replace(held, states=states, steps=_retained(held.steps, new))


def _kept_mean(
    step: RelayedStep, mean: Float32Vector, key_id: bytes, run: RunPlan, sums: Sequence[OpenedSum]
) -> KeptMean:
    """Return a mean in the plan's precision, or the sum that it is of in a run with a keeper; encoded once."""
    model, precision = step.state.model, run.recipe.precision_down
    if run.keeper is not None:
        body, vector = summed_body(mean, sums, segment_name(model, sharing=len(mean) < run.length), run)
        data = np.frombuffer(body, np.uint8)
        return KeptMean(model, step.contributors, key_id, vector, hashlib.sha256(body).digest(), body=data)
    if precision == "float32":
        digest = hashlib.sha256(np.ascontiguousarray(mean, "<f4").data.cast("B")).digest()
        return KeptMean(model, step.contributors, key_id, mean, digest)
    body = encode_vector(mean, precision, mean_seed(run.run_id, step.state.round, model))
    vector = decode_vector(body, len(mean), precision)
    digest = hashlib.sha256(body).digest()
    return KeptMean(model, step.contributors, key_id, vector, digest, body=np.frombuffer(body, np.uint8))


def _parted_means(
    round_: int, moved: list[tuple[RelayedStep, Any]], key_id: bytes, run: RunPlan
) -> tuple[KeptMean, ...]:
    """Have the workers make and store their parts of the means."""
    models = [(step.state.model, len(mean) < run.length) for step, mean in moved]
    places = [MeanPlace(model, segment_name(model, sharing=sharing)) for model, sharing in models]
    digests = moved[0][1].space.means([mean for _, mean in moved], places, round_)
    return tuple(
        KeptMean(
            step.state.model,
            step.contributors,
            key_id,
            np.empty(0, np.float32),
            digest_over(parts),
            body=np.frombuffer(b"".join(parts), np.uint8),
        )
        for (step, _), parts in zip(moved, digests, strict=True)
    )


def segment_name(model: int, *, sharing: bool) -> str:
    """Return the segment that the means of a model have, with or without weight sharing; empty if they are whole vectors."""
    if model in STATISTICS_MODELS or not sharing:
        return ""
    return "shared" if model == SHARED_MODEL else "cluster"


def _retained(before: tuple[KeptStep, ...], new: KeptStep) -> tuple[KeptStep, ...]:
    """Return the steps that stay announced after a round.

    A round that moves no model retains the steps before it: devices that missed those need them as much as before. For the
    same reason the recipes that led to a stalled model are retained while others go on. Of each model at most
    RETAINED_STEPS recipes stay, and of all at most MAX_RETAINED_RECIPES.
    """
    if before and not new.step.recipes:
        last = before[-1]
        return (*before[:-1], KeptStep(dataclasses.replace(last.step, open=new.step.open), last.means))
    needed = {*new.step.open, *(term.state for recipe in new.step.recipes for term in recipe.terms)}
    # Two means of a model share a topic label if their rounds are a multiple of RETAINED_STEPS apart.
    taken = {(recipe.model, recipe.round % RETAINED_STEPS) for recipe in new.step.recipes}
    found = [new]
    for place, kept in enumerate(reversed(before), start=1):
        recipes = []
        for recipe in kept.step.recipes:
            label = (recipe.model, recipe.round % RETAINED_STEPS)
            if (place < RETAINED_STEPS or recipe.state in needed) and label not in taken:
                recipes.append(recipe)
                taken.add(label)
        needed |= {term.state for recipe in recipes for term in recipe.terms}
        if recipes and len(taken) <= MAX_RETAINED_RECIPES:
            models = {recipe.model for recipe in recipes}
            means = tuple(mean for mean in kept.means if mean.model in models)
            found.append(KeptStep(dataclasses.replace(kept.step, recipes=tuple(recipes), open=()), means))
    return tuple(reversed(found))


def open_states(
    states: States, used: Collection[int], run: RunPlan, spare: Collection[StateId] = ()
) -> tuple[StateId, ...]:
    """Return the states that a later recipe or assignment may name, ascending, with those in ``spare`` if there is room."""
    # A strategy that takes several origins may come to some of them in a later round.
    several = plan_settings(run).origins > 1
    found = {ref for n, ref in states.names.items() if n in used or (several and ref.round == 0)}
    return tuple(sorted(found.union(spare) if len(found.union(spare)) <= MAX_OPEN_STATES else found))


def _evidence(
    held: HeldModels, run: RunPlan, agreement: Agreement, signed: Mapping[str, bytes]
) -> dict[StateId, Evidence]:
    """Return the evidence of all states: at most ``min_contributors`` statements for each, the newest first."""
    found = dict(held.evidence)
    signers: dict[StateId, dict[str, bytes]] = {}
    for device in sorted(agreement.statements):
        for named in agreement.statements[device].states:
            if agreement.digests[named.state] == named.digest:
                signers.setdefault(named.state, {})[device] = signed[device]
    for state, given in signers.items():
        before = found.get(state)
        earlier = before.statements if before is not None and before.digest == agreement.digests[state] else {}
        chosen = {**given, **{d: s for d, s in earlier.items() if d not in given}}
        found[state] = Evidence(agreement.digests[state], dict(list(chosen.items())[: run.recipe.min_contributors]))
    return found


def _promoted(held: HeldModels, least: int) -> HeldModels:
    """Let checkpoints whose states enough devices have signed replace the earlier ones of their models."""
    done = {m: c for m, c in held.pending.items() if held._signers(c) >= least}
    pending = {m: c for m, c in held.pending.items() if m not in done}
    return dataclasses.replace(held, certified={**held.certified, **done}, pending=pending)


def _without_checkpoints_of_the_past(held: HeldModels, models: Collection[int]) -> HeldModels:
    """Forget checkpoints of models that are gone, such as the halves of a refused split, unless a recipe needs the state."""
    known = held.known

    def needed(checkpoints: Mapping[int, KeptCheckpoint]) -> dict[int, KeptCheckpoint]:
        return {m: c for m, c in checkpoints.items() if m in models or m in FOR_ALL or c.state in known}

    return dataclasses.replace(held, certified=needed(held.certified), pending=needed(held.pending))


def _tidied(held: HeldModels) -> HeldModels:
    """Forget the evidence of states that are in no checkpoint and that no model starts from."""
    needed = {c.state for c in (*held.certified.values(), *held.pending.values())} | set(held.states.names.values())
    return dataclasses.replace(held, evidence={s: e for s, e in held.evidence.items() if s in needed})


def _attached(
    update: ClientUpdate, offers: Mapping[int, StateId], run: RunPlan, key_version: int
) -> dict[int, KeptCheckpoint]:
    """Return the checkpoints attached to an update; none if they are malformed or not of offered states."""
    try:
        envelopes = attached_checkpoints(update.attached)
    except WireError:
        return {}
    found = {}
    for model, envelope in envelopes.items():
        state = offers.get(model)
        if state is None or not _is_checkpoint(envelope, update, run, state):
            return {}
        data = np.frombuffer(envelope, np.uint8)
        found[model] = KeptCheckpoint(state, update.round, key_version, update.device, data)
    return found


def _is_checkpoint(envelope: memoryview, update: ClientUpdate, run: RunPlan, state: StateId) -> bool:
    # Devices check the seal and the digest; the aggregator can't.
    try:
        head, _ = read_head(envelope)
    except WireError:
        return False
    purpose = checkpoint_purpose(run.run_id, update.round, state)
    return head == Sealed(run.fleet, purpose, update.device, EVERYONE)


def opens_since(held: HeldModels, device: str) -> int:
    """Return the first round whose content key the device can probably derive: keys are derived forwards only."""
    if device in held.lacking:
        return held.lacking[device]
    if device in held.named:
        return held.named[device].round
    return held.closed + 1 - RETAINED_STEPS if device in held.trained else 0
