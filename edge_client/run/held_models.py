"""The models that a device holds in a run: brought up to each round, stored, and handed to its jobs.

Rules:

- `HeldModels.locate` compares the states held with those that an assignment needs, and returns the transfers to fetch: means
  of retained steps, and checkpoints of states that no step leads to.
- `HeldModels.thetas` applies the steps once everything has arrived. `HeldModels.store` makes the new states durable, erases
  the keys of the rounds applied and takes those of the open round. It runs while the job trains, and before the upload leaves.
- A device whose state has another digest than the certified one drops that state and takes a checkpoint in a later round.

Example: a device holds state (0, 6), and round 8 is announced with the steps of rounds 6 and 7. It fetches the mean of round
7, makes (0, 7), stores it, trains from it, and signs its digest in the upload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from crypto.mask.dense import behind_matrix
from crypto.mask.derivation import MaskKey, derive, key_id, segment_keys
from crypto.mask.masking import unmask
from edge_client.models.checkpoints import naming_sealer, open_checkpoint
from edge_client.models.recipes import BLOCK, CatchUp, catch_up
from edge_client.models.round_context import RoundContext, Run
from edge_client.models.states import ModelState, ModelStates
from edge_client.models.store import OWN_FORK, StateStore, Transcript
from edge_client.models.sum_codes import checked_mean
from edge_client.run.history import SignedElsewhereError, certifying, check_history
from edge_client.run.policy import check_mean, mean_limit
from shoal import limits
from shoal.digests import sha256
from shoal.errors import ForkedHistoryError, MissingStateError, ShoalError, UntrustedError, WireError
from shoal.membership.statements import (
    Claim,
    check_claims,
    sign_statement,
    signers_needed,
)
from shoal.protocol.codec import decode_prefix
from shoal.protocol.messages import (
    FOR_ALL,
    SHARED_MODEL,
    STATISTICS_MODEL,
    STATISTICS_MODELS,
    Announcement,
    Assignment,
    ModelsHeld,
    statistics_model,
)
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.shards import PART_LABEL, MeanPartHeader, borders, digest_over, mean_part_number, part_of
from shoal.protocol.sizes import COORDINATE_BYTES
from shoal.protocol.states import (
    FORKED_ROUND,
    RETAINED_STEPS,
    CheckpointRef,
    HeldState,
    MeanHeader,
    MeanRef,
    Offer,
    RoundModels,
    StateCertificate,
    StateId,
    Step,
    TranscriptHead,
    mean_number,
)
from shoal.types import Float32Vector, MaskedVector

MOST_AHEAD: Final = 1 << 21
"""Coordinates of the longest mask that is derived ahead of time: a longer one takes more memory than the time is worth."""

if TYPE_CHECKING:
    from crypto.mask.schedule import RoundKeys
    from edge_client.membership import DeviceMembership
    from shoal.protocol.documents import Roster, RunPlan


class _Located(NamedTuple):
    """A transfer at a topic label: a checkpoint, a mean of ``round``, or the part of it that ``worker`` holds."""

    ref: MeanRef | CheckpointRef
    round: int = 0
    worker: int | None = None


@dataclass(slots=True)
class _Fetch:
    """The transfers that one round needs.

    Attributes:
        located: by topic label.
        arrived: label -> announced transfer id, of the transfers that have arrived and were checked.
        means: unmasked, by the label of the whole.
        states: opened checkpoints by label.
        parts: parts of means by label, each with its header.
        used: whether the models of the round were made of them; their vectors are gone then.
    """

    located: dict[str, _Located] = field(default_factory=dict)
    arrived: dict[str, bytes] = field(default_factory=dict)
    means: dict[str, Float32Vector] = field(default_factory=dict)
    states: dict[str, ModelState] = field(default_factory=dict)
    parts: dict[str, tuple[MeanPartHeader, bytes]] = field(default_factory=dict)
    used: bool = False

    @property
    def wanted(self) -> dict[str, bytes]:
        """Topic label -> transfer id; the parts of a mean have the name of the whole."""
        return {label: found.ref.transfer for label, found in self.located.items()}

    def drop(self, label: str) -> None:
        """Drop the transfer received at a label, and the mean of which it is a part."""
        whole = self.located[label].ref.label if label in self.located else label
        for held in (self.arrived, self.parts, self.states):
            held.pop(label, None)
        self.means.pop(whole, None)


class HeldModels:
    """The models of one run.

    Args:
        run: the run that the device follows.
        membership: keys and fleet.
        store: the run's states and keys on disk.
        states: the states that it holds.

    Attributes:
        states: those held after the last round that the device took part in.
        contrary: devices that have signed another history than the last announced one, in name order; too few to believe.
    """

    def __init__(self, run: Run, membership: DeviceMembership, store: StateStore, states: ModelStates) -> None:
        self._run = run
        self._membership = membership
        self._store = store
        self.states = states
        self.contrary: tuple[str, ...] = ()
        self._task_bytes = len(run.bundle.to_bytes())
        self._masks: dict[tuple[int, int], dict[str, MaskKey]] = {}
        self._way = CatchUp((), (), (), frozenset(), frozenset())
        self._certified = CertifiedStates((), (), {}, run.plan, membership.roster)
        self._claims: tuple[Claim, ...] = ()
        self._held = RoundModels(0, ())
        self._fetch = _Fetch()
        self._early: dict[str, tuple[bytes, memoryview]] = {}

    @property
    def head(self) -> TranscriptHead | None:
        """The head of the run's transcript after the last round that the device took part in; None before the first."""
        known = self._store.transcript
        round_ = FORKED_ROUND if self.left else known.round
        return TranscriptHead(self._store.run_id, round_, known.head) if round_ else None

    @property
    def plan(self) -> RunPlan:
        """The plan of the run."""
        return self._run.plan

    def to_follow(self) -> tuple[ModelsHeld | None, dict[int, Float32Vector]]:
        """Return with which models the next run of a standing order could begin here, and those vectors (d,) float32 by origin.

        None if the device has left the run, or if it has too many models.
        """
        plan, known = self.plan, self._store.transcript
        offers = known.offers or tuple(Offer(m, StateId(m, 0)) for m in range(plan.without_statistics.origins))
        held, here = RoundModels(0, offers), {id_: state.theta for id_, state in self.states.held.items()}
        models = [offer.model for offer in offers if offer.model not in FOR_ALL]
        if self.left or len(models) > limits.MAX_FOLLOWED_MODELS:
            return None, {}
        lacks = {offer.model for offer in offers if offer.at not in here}
        own = {} if SHARED_MODEL in lacks else {i: m for i, m in enumerate(models) if m not in lacks}
        told = ModelsHeld(run=plan.run, run_id=plan.run_id, transcript=known.head, models=len(models), own=tuple(own))
        return told, {i: assembled(plan, held, model, here) for i, model in own.items()}

    @property
    def left(self) -> bool:
        """Whether the device has left the run because of its history."""
        return self._store.transcript.round >= OWN_FORK

    def locate(self, announcement: Announcement, assignment: Assignment) -> dict[str, bytes]:
        """Return the transfers that the assignment needs, as topic label -> transfer id.

        Args:
            announcement: one that `edge_client.run.policy` has checked.
            assignment: this device's.

        Raises:
            MissingStateError: a state is needed that neither the retained steps nor the announced checkpoints give.
            NotEnrolledError: the keys of the announced version have not arrived.
            UntrustedError: an older key version, or a model that mixes the segments of the plan.
            ForkedHistoryError: as `edge_client.run.history.check_history`.
        """
        held = announcement.held
        check_segments(held)
        self._check_history(announcement.round, held)
        self._follow_version(held, announcement.round)
        steps = [retained.step for retained in held.steps]
        wanted = needed_states(held, assignment, self._run.plan) | self._parting(held)
        digests, roster = self.states.digests(), self._membership.roster
        claims = certifying(self._run.plan, roster, announcement.round, held, self._store.transcript)
        self._certified = CertifiedStates(held.checkpoints, claims, digests, self._run.plan, roster)
        way = self._compare(self.states.digests(), steps, wanted)
        useful = {id_ for id_ in way.missing if id_ in self._certified}
        refs = {
            ref.state: ref
            for ref in held.checkpoints
            if ref.state in useful and self._store.has_keys(ref.round, ref.key_version)
        }
        if way.missing and refs.keys() >= set(way.missing):
            in_step = {id_: d for id_, d in self.states.digests().items() if id_ not in way.out_of_step}
            then = self._compare(in_step | {id_: self._certified[id_] for id_ in refs}, steps, wanted)
            way = replace(then, out_of_step=way.out_of_step)
            lacking = set(way.missing)
        else:
            lacking = set(way.missing) - refs.keys()
        if lacking:
            raise MissingStateError(f"states {_names(lacking)} can't be made from those held")
        self._held, self._way = held, way
        self._claims = claims
        located = {ref.label: _Located(ref) for ref in refs.values()}
        for step in way.steps:
            means = next(r.means for r in held.steps if r.step.round == step.round)
            added = {recipe.model for recipe in step.recipes if recipe.mean is not None}
            for mean in (mean for mean in means if mean.model in added):
                parts = self._part_labels(mean.model, step.round)
                located |= {label: _Located(mean, step.round, worker) for worker, label in enumerate(parts)}
                located |= {} if parts else {mean.label: _Located(mean, step.round)}
        # Received transfers stay if the round is announced again.
        self._fetch = _Fetch(located) if self._fetch.used else replace(self._fetch, located=located)
        return self._fetch.wanted

    def _part_labels(self, model: int, round_: int) -> list[str]:
        """Return the topic labels of a mean's parts, in the order of the workers; none if it travels in one piece."""
        plan, group = self._run.plan, self._membership.group
        numbers = (mean_part_number(mean_number(model, round_), worker) for worker in range(len(plan.workers)))
        return [f"{PART_LABEL}{group.topic_label(plan.run_id, number)}" for number in numbers]

    def name_of(self, label: str, transfer: bytes) -> bytes:
        """Return the name under which `locate` has announced a transfer at ``label``."""
        return self._fetch.wanted.get(label, transfer)

    def _parting(self, held: RoundModels) -> frozenset[StateId]:
        """Return the states that this device can make now and perhaps not later: open ones that this round does not offer.

        IFCA returns to the models of an earlier start, for example. The means that lead there are retained for a short time.
        """
        if held.newest is None:
            return frozenset()
        offered = {offer.at for offer in held.offers}
        reach, made = set(self.states.held), set[StateId]()
        for retained in held.steps:
            for recipe in retained.step.recipes if self._store.has_keys(retained.step.round) else ():
                if all(term.state in reach for term in recipe.terms):
                    made.add(recipe.state)
            reach |= made
        return frozenset(made & set(held.newest.open)) - offered

    def _compare(self, digests: Mapping[StateId, bytes], steps: Sequence[Step], wanted: frozenset[StateId]) -> CatchUp:
        certified = self._certified
        return catch_up(digests, steps, wanted=wanted, has_keys=self._store.has_keys, certified=certified)

    def _check_history(self, round_: int, held: RoundModels) -> None:
        """Check that the announcement continues the history that this device and others have seen, and leave the run if not."""
        known, left = self._store.transcript, self.left
        began = any(state.round == 0 for state in self.states.held)
        try:
            self.contrary = check_history(
                self._run.plan, self._membership.roster, round_, held, known=known, began=began
            )
        except ForkedHistoryError as error:
            if not left:
                self._store.refuse_run(own=not isinstance(error, SignedElsewhereError))
            raise

    def _follow_version(self, held: RoundModels, round_: int) -> None:
        """Continue under the key version that the announcement names, if it is newer than that of the chain.

        A device that was away does not know since which round it is in use, so it also derives the keys of the rounds before
        whose means and checkpoints are announced.
        """
        key_version = held.key_version
        if key_version < self._store.key_version:
            raise UntrustedError(f"a round under keys of roster {key_version}, after {self._store.key_version}")
        if key_version > self._store.key_version:
            version = self._membership.version_key(key_version)
            chain = version.begin_run_of(self._run.plan)
            sealed = [ref.round for ref in held.checkpoints if ref.key_version == key_version]
            retained = [kept.step.round for kept in held.steps]
            chain.skip_to(max(0, min([round_ - RETAINED_STEPS, *sealed, *retained])))
            self._store.renew(chain, round_, retained)
            # Last: after a crash in between, the version's secret gives the same chain again.
            self._membership.keep_version(version)

    def labels_ahead(self, announcement: Announcement, assignment: Assignment) -> tuple[str, ...]:
        """Return the labels at which the means of this round will be published, before the next announcement.

        A device that does not take part in every round would receive an earlier mean there for nothing, so it gets none.
        """
        plan, group = self._run.plan, self._membership.group
        if plan.recipe.participation < 1:
            return ()
        models = {*assignment.models, *([SHARED_MODEL] if announcement.held.state_of(SHARED_MODEL) else [])}
        whole = {m: group.topic_label(plan.run_id, mean_number(m, announcement.round)) for m in sorted(models)}
        return tuple(label for m in whole for label in self._part_labels(m, announcement.round) or [whole[m]])

    def arrived(self) -> dict[str, bytes]:
        """Open what arrived before it was announced; return label -> transfer id of the located transfers that are here.

        Raises:
            UntrustedError, IntegrityError: as `take`.
        """
        early, self._early = self._early, {}
        for label, (transfer, plain) in early.items():
            found = self._fetch.located.get(label)
            if found is not None and (found.worker is not None or found.ref.transfer == transfer):
                self.take(label, transfer, plain)
        wanted = self._fetch.wanted
        return {label: name for label, name in self._fetch.arrived.items() if wanted.get(label) == name}

    def take(self, label: str, transfer: bytes, plain: memoryview) -> bool:
        """Check and open a mean or a checkpoint; return False if it is not announced yet, and store it for `arrived`.

        A transfer that `thetas` has used already, which a broker sends again after a reconnection, is ignored.

        Raises:
            BadCheckpointError: the announced checkpoint can't be used, so the aggregator orders another.
            UntrustedError, IntegrityError: the announced mean can't be used. In both cases the device can't take part in the
                round: the same bytes would arrive again.
        """
        fetch, found = self._fetch, self._fetch.located.get(label)
        if fetch.used and fetch.wanted.get(label) == transfer:
            return False
        if found is None or fetch.used or not self._take(label, transfer, found, plain):
            self._early[label] = transfer, plain
            return False
        fetch.arrived[label] = found.ref.transfer
        return True

    def _take(self, label: str, transfer: bytes, found: _Located, plain: memoryview) -> bool:
        """Take the located transfer; return False if it is another one. A part's own name is not announced."""
        fetch, ref = self._fetch, found.ref
        if found.worker is None and ref.transfer != transfer:
            return False
        if isinstance(ref, CheckpointRef):
            fetch.states[label] = self._open(ref, plain)
        elif found.worker is None:
            fetch.means[label] = self._unmask(found.round, ref.model, ref.digest, plain)
        else:
            header, body = decode_prefix(plain, MeanPartHeader)
            if header.worker != found.worker:
                raise UntrustedError(f"the part of worker {header.worker} where that of worker {found.worker} belongs")
            if (header.round, header.model) != (found.round, ref.model):
                return False
            fetch.parts[label] = header, bytes(body)
            labels = self._part_labels(ref.model, found.round)
            if fetch.parts.keys() >= set(labels):
                fetch.means[ref.label] = self._joined(found.round, ref, [fetch.parts[part] for part in labels])
        return True

    def _joined(self, round_: int, mean: MeanRef, parts: list[tuple[MeanPartHeader, bytes]]) -> Float32Vector:
        """Return the mean, unmasked, whose parts these are.

        Raises:
            UntrustedError: the parts are not those of the announced mean.
        """
        plan, first = self._run.plan, parts[0][0]
        if digest_over([sha256(body) for _, body in parts]) != mean.digest:
            raise UntrustedError(
                f"the parts of the mean of model {mean.model} in round {round_} are not the announced ones"
            )
        header = MeanHeader(
            fleet=first.fleet,
            run_id=first.run_id,
            round=round_,
            key_id=first.key_id,
            model=mean.model,
            length=first.length,
            segment=first.segment,
        )
        if any(replace(part, worker=first.worker) != first for part, _ in parts):
            raise UntrustedError(f"the parts of the mean of model {mean.model} do not belong together")
        span = self._span_of(mean.model)
        masked = np.empty(span.stop - span.start, np.float32)
        for part, (_, body) in zip(borders(plan.length, len(plan.workers)), parts, strict=True):
            start, stop = part_of(span, part)
            if len(body) != encoded_bytes(stop - start, plan.recipe.precision_down):
                raise UntrustedError(f"a part of {len(body)} bytes in the mean of model {mean.model}")
            if stop > start:
                masked[start:stop] = self._part(body, stop - start)
        return self._checked(header, masked, encoded_bytes(len(masked), plan.recipe.precision_down))

    def _part(self, body: bytes, length: int) -> Float32Vector:
        try:
            return decode_vector(body, length, self._run.plan.recipe.precision_down)
        except WireError as error:
            raise UntrustedError(f"a part of a mean: {error}") from error

    def _open(self, ref: CheckpointRef, sealed: memoryview) -> ModelState:
        keys, roster = self._store.keys_under(ref.round, ref.key_version), self._membership.roster
        with opened(ref, sealed, self._claims, keys, self._run.plan, self._held, roster, self._task_bytes) as found:
            return found[0]

    def _unmask(self, round_: int, model: int, digest: bytes, plain: memoryview) -> Float32Vector:
        header, body = decode_prefix(plain, MeanHeader)
        if (header.round, header.model) != (round_, model) or sha256(body) != digest:
            raise UntrustedError(f"the mean of model {header.model} in round {header.round} is not the announced one")
        plan, span = self._run.plan, self._span_of(model)
        if plan.keeper is None:
            return self._checked(header, self._decoded(round_, model, body), len(body))
        keys = self._keys_named(round_, header.key_id)
        masked = checked_mean(body, keys, plan, segment_of(self._held, model), model)
        return self._checked(header, masked, COORDINATE_BYTES * (span.stop - span.start))

    def _checked(self, header: MeanHeader, masked: Float32Vector, body_bytes: int) -> Float32Vector:
        """Check a mean against the plan and the limits, and return it unmasked."""
        round_ = header.round
        # A hostile vector may overflow: `check_mean` refuses the norm that results, inf or NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            # By blocks, since a product of a vector that is not aligned copies it.
            blocks = np.array_split(masked, 1 + len(masked) // BLOCK)
            norm = float(np.sqrt(sum(float(np.dot(block, block)) for block in blocks)))
        model_norm = max((state.norm for state in self.states.held.values()), default=0.0)
        plan = self._run.plan
        announced = next(kept.step.limit for kept in self._held.steps if kept.step.round == round_)
        limit = mean_limit(announced, self._store.longest, model_norm, plan)
        check_mean(header, plan, segment_of(self._held, header.model), body_bytes, norm, limit)
        keys = self._keys_named(round_, header.key_id)
        return unmask(MaskedVector(masked, header.key_id), self._mask_of(keys, header.model, header.segment))

    def _decoded(self, round_: int, model: int, body: memoryview) -> Float32Vector:
        """Return a mean as all devices decode it; an empty vector if it has another number of bytes, which is refused later.

        Raises:
            UntrustedError: a coordinate or a scale is out of range.
        """
        plan, span = self._run.plan, self._span_of(model)
        length, precision = span.stop - span.start, plan.recipe.precision_down
        if len(body) != encoded_bytes(length, precision):
            return np.empty(0, np.float32)
        try:
            return decode_vector(body, length, precision, copy=False)
        except WireError as error:
            raise UntrustedError(f"the mean of model {model} in round {round_}: {error}") from error

    def _keys_named(self, round_: int, name: bytes) -> RoundKeys:
        """Return the keys of a round whose mask has the id ``name``, as far as this device can tell.

        A round that it missed while the key version changed may have been under either version.
        """
        keys = self._store.peek(round_)
        newest = self._store.key_version
        if self._mask_id(keys) != name and self._store.has_keys(round_, newest):
            newer = self._store.keys_under(round_, newest)
            if self._mask_id(newer) == name:
                self._store.prefer(newer)
                return newer
        if self._mask_id(keys) != name and keys.key_version != newest:
            # Perhaps those of a version that was in use between these two, while this device was away.
            raise MissingStateError(f"this device never had the keys under which the mean of round {round_} is masked")
        return keys

    def _mask_id(self, keys: RoundKeys) -> bytes:
        derived = self._masks.get((keys.key_version, keys.round))
        if derived is not None:
            return derived[""].key_id
        return key_id(keys.mask, keys.context_of(self._run.plan))

    def drop(self, label: str) -> None:
        """Drop what was received under ``label``."""
        self._fetch.drop(label)
        self._early.pop(label, None)

    def thetas(self, announcement: Announcement, assignment: Assignment) -> dict[int, Float32Vector]:
        """Bring the states up to the round, and return the assignment's models, theta (d,) float32 by id.

        The caller must call `store` before anything leaves the device; a job may start before.

        Raises:
            MissingStateError: a state that was made has another digest than the certified one.
            IntegrityError: a step gives a model that is not finite.
            StorageError: as `store`.
        """
        held, way = announcement.held, self._way
        in_step = self.states.keep(self.states.held.keys() - set(way.out_of_step))
        states = in_step.with_states(self._fetch.states.values())
        for step in way.steps:
            needed = [f.ref for f in self._fetch.located.values() if f.round == step.round]
            of_round = {ref.model: self._fetch.means[ref.label] for ref in needed if isinstance(ref, MeanRef)}
            states = states.apply(step, of_round, self._store.peek(step.round), span_of=self._span_of)
        wrong = self._certified.contradicted(states.digests())
        self.states = states.keep(way.keep - wrong)
        self._fetch = _Fetch(self._fetch.located, used=True)
        # Of a list: another thread may add a mask that it derived ahead of time.
        self._masks = {at: masks for at, masks in list(self._masks.items()) if at[1] >= announcement.round}
        if wrong:
            self.store(announcement)
            raise MissingStateError(f"states {_names(wrong)} differ from those of the other devices")
        here = {id_: state.theta for id_, state in self.states.held.items()}
        return {model: assembled(self._run.plan, held, model, here) for model in assignment.models}

    def statistics(self, announcement: Announcement, model: int) -> ModelState | None:
        """Return the mean of statistics by which samples are standardised for a model; call it after `thetas`.

        It is that of the model's own devices if the round offers one, or else the fleet's; None if it offers neither.
        """
        at = statistics_of(announcement.held, model)
        return None if at is None else self.states.held[at]

    def store(self, announcement: Announcement) -> None:
        """Make the states of the round durable, erase the keys of earlier rounds, and take those of this one and the next.

        In every second round nothing is written, see `edge_client.models.store`.

        Raises:
            StorageError: the disk is full or fails; the states and keys of the round before are still there.
        """
        round_ = announcement.round
        transcript = Transcript(round_, announcement.held.transcript, announcement.held.offers)
        self._certify()
        if not announcement.finished and self._store.saw(transcript):
            return
        self._store.commit(
            self.states,
            applied=round_ - 1,
            waiting=self._way.waiting,
            taking=range(round_, round_ + (1 if announcement.finished else RETAINED_STEPS)),
            transcript=transcript,
        )
        offers = () if announcement.finished else announcement.held.offers
        self.states = self._store.at_rest(self.states, {offer.at for offer in offers})

    def _certify(self) -> None:
        """Keep the stored states that the announced statements certify, for a run that begins with them.

        Signatures are not verified here: the aggregator has done that, and the owner does before such a run.
        """
        recipe = self._run.plan.recipe
        roster = self._membership.roster.only(recipe.only)
        needed = signers_needed(recipe.min_contributors, roster.active_count)
        kept, digests = set[bytes](), []
        for held in self._store.held:
            signed = {c.statement.device: c.signed for c in self._claims if held in c.statement.states}
            active = [signed[device] for device in signed if roster.device(device) is not None]
            if len(active) >= needed:
                kept.update(active[:needed])
                digests.append(held.digest)
        if digests:
            self._store.certify(sorted(kept), digests)

    def context(self, announcement: Announcement, assignment: Assignment) -> RoundContext:
        """Return the context of the job; call it after `thetas`."""
        held, round_, member = announcement.held, announcement.round, self._membership
        asked = {model: held.state_of(model) for model in assignment.seal}
        statement = sign_statement(member.identity, self.states.statement(member.name, round_, held.transcript))
        keys = self._store.peek(round_)
        return RoundContext(
            keys=keys,
            # From these keys, not the store: a job runs in another thread, while `store` replaces the stored ones.
            derive_mask=lambda: self._mask_of(keys, assignment.candidates[0]),
            key_id=self._mask_id(keys),
            statement=statement,
            to_seal={m: self.states.held[at] for m, at in asked.items() if at is not None and at in self.states.held},
            task=self._run.bundle.to_bytes() if assignment.seal else b"",
        )

    def _span_of(self, model: int) -> slice:
        return self._run.plan.span(segment_of(self._held, model))

    def trained(self, norm: float) -> None:
        """Note the norm of this device's update: the means of later steps are compared with the longest."""
        # A longer one is refused, so it is in no mean.
        self._store.longest = max(self._store.longest, min(norm, self._run.plan.recipe.norm_limit))

    def next_mask(self, announcement: Announcement) -> Callable[..., object] | None:
        """Return a function that derives the next round's mask ahead of time; None if the device may not need it, or it is long.

        Any thread may call the function. If a newer key version takes effect in the next round, its mask is another one.
        """
        plan = self._run.plan
        if plan.recipe.participation < 1 or announcement.round >= plan.recipe.rounds or plan.length > MOST_AHEAD:
            return None
        keys = self._store.peek(announcement.round + 1)
        return lambda *_cancelled: self._mask(keys)

    def _mask_of(self, keys: RoundKeys, model: int, segment: str = "") -> MaskKey:
        """Return the mask of a model's vectors in a round; that of the statistics has a dense matrix before it."""
        key, run = self._mask(keys)[segment], self._run
        if model not in STATISTICS_MODELS or not run.plan.statistics:
            return key
        return behind_matrix(key, keys.mask, run.bundle.manifest.statistics_size)

    def _mask(self, keys: RoundKeys) -> dict[str, MaskKey]:
        at = (keys.key_version, keys.round)
        found = self._masks.get(at)
        if found is None:
            found = self._masks[at] = segment_keys(derive(keys.mask, keys.context_of(self._run.plan)))
        return found


def statistics_of(held: RoundModels, model: int) -> StateId | None:
    """Return the state of the statistics that an offered model's devices standardise by: their own or the fleet's, if any."""
    own = held.state_of(statistics_model(model))
    return held.state_of(STATISTICS_MODEL) if own is None else own


def segment_of(held: RoundModels, model: int) -> str:
    """Return the segment that the means and later states of a model have; empty if they are whole vectors.

    Models share weights if the announcement offers the segment that they share.
    """
    if held.state_of(SHARED_MODEL) is None:
        return ""
    return "shared" if model == SHARED_MODEL else "cluster"


def assembled(plan: RunPlan, held: RoundModels, model: int, thetas: Mapping[StateId, Float32Vector]) -> Float32Vector:
    """Return an offered model as one vector (d,) float32: with weight sharing, its own segment and the one that all share.

    Args:
        plan: the run's plan.
        held: models of an announcement that the policy has checked.
        model: id of an offered model.
        thetas: float32, at least the states of the model and of the shared segment. An origin is a whole vector; with weight
            sharing, later states are segments.
    """

    def vector(of: int) -> Float32Vector:
        at = held.state_of(of)
        assert at is not None, "the policy has checked that an assignment's models are offered"
        return thetas[at][plan.span(segment_of(held, of))] if at.round == 0 else thetas[at]

    if held.state_of(SHARED_MODEL) is None:
        return vector(model)
    theta = np.empty(plan.length, np.float32)
    theta[plan.span("shared")] = vector(SHARED_MODEL)
    theta[plan.span("cluster")] = vector(model)
    return theta


@contextmanager
def opened(
    ref: CheckpointRef,
    sealed: memoryview,
    claims: Iterable[Claim],
    keys: RoundKeys,
    plan: RunPlan,
    held: RoundModels,
    roster: Roster,
    most_task_bytes: int,
) -> Iterator[tuple[ModelState, bytes]]:
    """Open an announced checkpoint for the block, as state and task; see `open_checkpoint` and `naming_sealer`.

    Args:
        ref: the announced checkpoint.
        sealed: as received.
        claims: the announced statements, as checked.
        keys: those of the round in which it was sealed.
        plan: the run's.
        held: what the announcement says of the models.
        roster: the newest.
        most_task_bytes: the largest task to accept.

    Raises:
        BadCheckpointError: the checkpoint is not certified or damaged, or the block finds it or its task of no use.
    """
    with naming_sealer(sealed, ref.state, keys, roster):
        yield open_checkpoint(
            sealed,
            StateCertificate(tuple(claim.signed for claim in claims)),
            wanted=ref.state,
            keys=keys,
            roster=roster,
            length=length_of(plan, held, ref.state),
            signers=signers_needed(plan.recipe.min_contributors, roster.only(plan.recipe.only).active_count),
            most_task_bytes=most_task_bytes,
        )


def length_of(plan: RunPlan, held: RoundModels, state: StateId) -> int:
    """Return the number of coordinates of a state; origins are whole vectors."""
    span = plan.span("" if state.round == 0 else segment_of(held, state.model))
    return int(span.stop - span.start)


def check_segments(held: RoundModels) -> None:
    """Check that no announced model or recipe mixes the shared segment with the others, whose lengths differ.

    Raises:
        UntrustedError: one does.
    """
    used = [(offer.model, offer.at) for offer in held.offers]
    used += [(r.model, term.state) for kept in held.steps for r in kept.step.recipes for term in r.terms]
    for model, state in used:
        if state.round and segment_of(held, state.model) != segment_of(held, model):
            raise UntrustedError(f"model {model} is announced with state {state.round} of model {state.model}")


def needed_states(held: RoundModels, assignment: Assignment, plan: RunPlan) -> frozenset[StateId]:
    """Return the states of an assignment's models, and those that all devices need: the shared segment's, the statistics'.

    Where models are added up (the capability ``scale``), a device needs all of them for the next recipe. Offers of earlier states
    under another number are for newcomers, which compare with them.
    """
    summed = {offer.at for offer in held.offers if offer.at.model == offer.model and plan.capabilities.scale}
    asked = FOR_ALL.union(assignment.models)
    return frozenset(summed.union(offer.at for offer in held.offers if offer.model in asked))


class CertifiedStates(Mapping[StateId, bytes]):
    """The digest of each state of an announced checkpoint that enough devices have signed, by state.

    Signatures are verified when a digest is asked for, unless the device holds the state with that very digest. A device that
    follows the run makes the certified states itself and verifies none.

    Args:
        checkpoints: as announced.
        claims: the announced statements.
        own: digests of the states that this device holds.
        plan: the run's plan.
        roster: the newest roster.
    """

    def __init__(
        self,
        checkpoints: Iterable[CheckpointRef],
        claims: Sequence[Claim],
        own: Mapping[StateId, bytes],
        plan: RunPlan,
        roster: Roster,
    ) -> None:
        self._claims, self._own, self._plan, self._roster = claims, own, plan, roster
        named: dict[StateId, Counter[bytes]] = {ref.state: Counter() for ref in checkpoints}
        for claim in claims:
            for state in claim.statement.states:
                if state.state in named:
                    named[state.state][state.digest] += 1
        self._claimed = {id_: digests.most_common(1)[0][0] for id_, digests in named.items() if digests}
        self._signed: dict[StateId, bool] = {}

    def __getitem__(self, state: StateId) -> bytes:
        digest = self._claimed[state]
        if self._own.get(state) != digest and not self._is_signed(state, digest):
            raise KeyError(state)  # too few signatures: the device believes its own state
        return digest

    def __iter__(self) -> Iterator[StateId]:
        return (state for state in self._claimed if state in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def contradicted(self, digests: Mapping[StateId, bytes]) -> set[StateId]:
        """Return the states among ``digests`` that have another digest than the certified one."""
        differing = {id_ for id_, digest in self._claimed.items() if digests.get(id_, digest) != digest}
        return {id_ for id_ in differing if id_ in self}

    def _is_signed(self, state: StateId, digest: bytes) -> bool:
        known = self._signed.get(state)
        if known is None:
            plan = self._plan
            try:
                check_claims(
                    self._claims,
                    HeldState(state.model, state.round, digest),
                    fleet=plan.fleet,
                    run_id=plan.run_id,
                    roster=self._roster,
                    needed=plan.recipe.min_contributors,
                )
                known = True
            except ShoalError:
                known = False
            self._signed[state] = known
        return known


def _names(states: set[StateId]) -> str:
    return ", ".join(f"{s.round} of model {s.model}" for s in sorted(states))
