"""The announcement and the checkpoints of a run's final round, opened with the owner's keys and checked.

Under each key version a run's chain begins at round 0. The owner skips it to the round in which a checkpoint was sealed, takes
that round's content key, opens the checkpoint, and compares its digest with the statements of ``min_contributors`` devices.

Example: the final round of run 3 is 21. It offers model 0 at state (0, 20), which dev-2 has sealed in round 21.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from crypto.mask.schedule import RoundKeys, VersionKey
from crypto.seal.envelope import GroupKey, SealError, is_from, open_from_group, read_expected, read_head
from edge_client.models.checkpoints import naming_sealer, open_checkpoint
from edge_client.models.private_values import initial_values, joined
from edge_client.models.store import Transcript
from edge_client.run.held_models import assembled, check_segments, length_of, statistics_of
from edge_client.run.history import certifying
from edge_client.run.policy import check_announcement, task_of
from shoal import limits
from shoal.errors import ConfigError, IntegrityError, NotReadyError, ShoalError, TaskError, UntrustedError
from shoal.membership.roster import aggregator_of
from shoal.membership.statements import check_certificate
from shoal.protocol import channels
from shoal.protocol.codec import decode
from shoal.protocol.messages import FOR_ALL, SHARED_MODEL, STATISTICS_MODELS, Announcement, Phase
from shoal.protocol.states import SPARE_CHECKPOINTS, CheckpointRef, StateCertificate, StateId, spare_number

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from edge_client.models.states import ModelState
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.owner.keys.vault import VersionSecrets
    from shoal.protocol.documents import Roster, RunPlan
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector

KEYS_HINT = (
    "the owner stores the keys of the last versions only, and removes old ones when it fetches models: take the directory from "
    "a backup, or use a device's model (shoal-edge export)"
)
CERTIFICATE_HINT = (
    "revoked devices do not count: shoal-edge export on a device writes its model, and with --certified one that "
    "`run start --from` takes"
)


@dataclass(frozen=True, slots=True)
class OpenedState:
    """A certified state from a checkpoint.

    Attributes:
        state: the state in clear, with its digest.
        task: the encoded task that came with it, not checked.
        sealed_by: the device that sealed it; sealed_in: the round.
        certified_by: devices that signed the digest, as many as the plan demands.
    """

    state: ModelState
    task: bytes = field(repr=False)
    sealed_by: str
    sealed_in: int
    certified_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FinalModel:
    """One model of a finished run.

    Attributes:
        model: its id within the run.
        theta: (d + p,), float32; private coordinates have the task's initial values, since devices never send theirs.
        own: its state as opened; with weight sharing, the model's own segment.
        contributors: updates in the model's last mean; None if the announcement does not say.
        devices: the devices of the cluster; None if devices choose their model themselves, as in IFCA.
        parents: models that it comes from, as far as the announcement says: those of a split or a merge in the last rounds,
            and the models above it where CFL stores the path.
    """

    model: int
    theta: Float32Vector = field(repr=False)
    own: OpenedState
    contributors: int | None
    devices: tuple[str, ...] | None
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """The models of a run's final round.

    Attributes:
        plan: the owner's plan.
        round: the final round; key_version: under which it was announced.
        bundle: the task.
        models: ascending by id.
        shared: with weight sharing, the state of the segment that all models share.
        missing: model -> reason, for the offered models that can't be had.
        statistics: model -> the mean of statistics that its devices standardise by, if the task does so and it can be had.
    """

    plan: RunPlan
    round: int
    key_version: int
    bundle: TaskBundle
    models: tuple[FinalModel, ...]
    shared: OpenedState | None
    missing: Mapping[int, str]
    statistics: Mapping[int, ModelState] = field(default_factory=dict, repr=False)


def open_broadcast(
    sealed: bytes | memoryview, channel: channels.Channel, roster: Roster, version: VersionSecrets
) -> memoryview:
    """Return the plaintext of a message of the aggregator to the whole fleet.

    Raises:
        SealError: it is under another key, or altered.
        UntrustedError: it is another kind of message.
    """
    sender = aggregator_of(roster)
    head, at = read_expected(sealed, channel.head(roster.fleet, sender.name), f"a {channel.name} of this fleet")
    group = GroupKey(roster.fleet, "broadcast", version.broadcast_key)
    return open_from_group(group, sealed, head, at, sender.sign_key)


class FinalRound:
    """An authentic announcement, and what the owner can open of its round.

    Attributes:
        plan: of the announced run, from the owner's directory.
        announcement: as opened; held: the models that it announces; version: the secrets under which it was sealed.
    """

    def __init__(
        self,
        plan: RunPlan,
        announcement: Announcement,
        version: VersionSecrets,
        versions: Mapping[int, VersionSecrets],
    ) -> None:
        self.plan = plan
        self.announcement = announcement
        self.held = announcement.held
        self.version = version
        self._versions = versions

    @classmethod
    def open(cls, sealed: bytes | memoryview, fleet: FleetDirectory, plans: Mapping[bytes, RunPlan]) -> FinalRound:
        """Open an announcement of any round.

        Args:
            sealed: as received.
            fleet: the owner's directory.
            plans: the signed plans, by run id.

        Raises:
            ConfigError: the directory has no such run, or not the keys of the announcement's version.
            UntrustedError: it is not the aggregator's, or not as the plan allows.
            WireError: it is malformed.
        """
        versions = fleet.versions
        for version in versions:
            try:
                plain = open_broadcast(sealed, channels.ANNOUNCEMENT, fleet.roster, version)
            except SealError:
                continue
            announcement = decode(plain, Announcement)
            break
        else:
            head, _ = read_head(sealed)
            if not is_from(sealed, head, aggregator_of(fleet.roster).sign_key):
                raise UntrustedError("an announcement that the fleet's aggregator did not sign")
            raise ConfigError(
                f"{fleet.path} does not hold the keys of the key version under which the last round was announced",
                hint=KEYS_HINT,
            )
        plan = plans.get(announcement.run_id)
        if plan is None:
            raise ConfigError(
                f"{fleet.path} holds no signed run of the id that is announced as run {announcement.run}",
                hint="take the directory's folder runs from a backup",
            )
        check_announcement(announcement, plan)
        check_segments(announcement.held)
        if announcement.held.key_version != version.number:
            raise UntrustedError("an announcement that names another key version than it is sealed under")
        return cls(plan, announcement, version, {v.number: v for v in versions})

    @property
    def models(self) -> tuple[int, ...]:
        """The models that the round offers."""
        return tuple(offer.model for offer in self.held.offers if offer.model not in FOR_ALL)

    def wanted(self) -> dict[StateId, CheckpointRef]:
        """Return the checkpoints of the offered states; of a finished run, as far as there are any.

        Raises:
            NotReadyError: the run is under way, or devices have not sealed and certified its models yet.
        """
        plan, at, held = self.plan, self.announcement.round, self.held
        if not self.announcement.finished:
            raise NotReadyError(
                f"run {plan.run} is in round {at} of {plan.recipe.rounds}",
                hint="try again when it has finished: its models stay on the broker until the next run begins",
            )
        offered = {offer.at for offer in held.offers}
        refs = {ref.state: ref for ref in held.checkpoints if ref.state in offered}
        # The announcement is published again when the round has closed, with what devices sealed in it.
        if not refs or (refs.keys() != offered and all(ref.round < at for ref in refs.values())):
            raise NotReadyError(
                f"the final round of run {plan.run} is open, or fewer than {plan.recipe.min_contributors} devices have certified "
                "its models",
                hint="`shoal-aggregator status` says whether the run has finished: if so, use a device's model "
                "(shoal-edge export)",
            )
        return refs

    def open_checkpoint(self, ref: CheckpointRef, sealed: bytes | memoryview, roster: Roster) -> OpenedState:
        """Return the certified state in a checkpoint.

        Args:
            ref: the announced checkpoint.
            sealed: as received, in the aggregator's envelope.
            roster: the newest roster; statements of revoked devices don't count.

        Raises:
            ConfigError: the owner does not have the keys of its version.
            BadCheckpointError: its digest is not certified, or what its device has sealed is of no use otherwise.
            UntrustedError: the aggregator has not published it.
        """
        plan, held = self.plan, self.held
        inner = open_broadcast(sealed, channels.CHECKPOINT, roster, self.version)
        claims = certifying(plan, roster, self.announcement.round, held, Transcript())
        certificate = StateCertificate(tuple(claim.signed for claim in claims))
        keys, (head, _) = self._keys(ref), read_head(inner)
        with naming_sealer(inner, ref.state, keys, roster):
            state, task = open_checkpoint(
                inner,
                certificate,
                wanted=ref.state,
                keys=keys,
                roster=roster,
                length=length_of(plan, held, ref.state),
                signers=plan.recipe.min_contributors,
                most_task_bytes=self.most_task_bytes,
            )
        signers = check_certificate(
            certificate,
            state.held,
            fleet=plan.fleet,
            run_id=plan.run_id,
            roster=roster,
            needed=plan.recipe.min_contributors,
        )
        return OpenedState(state, task, head.sender, ref.round, signers)

    def spares(self) -> list[CheckpointRef]:
        """Return where spare checkpoints of the offered states may be; the announcement doesn't say which there are."""
        held, group = self.held, GroupKey(self.plan.fleet, "broadcast", self.version.broadcast_key)
        found = []
        for offer in held.offers:
            for turn in range(min(SPARE_CHECKPOINTS, len(self._asked(offer.model)) - 1)):
                label = group.topic_label(self.plan.run_id, spare_number(offer.model, turn))
                found.append(CheckpointRef(offer.at, self.announcement.round, held.key_version, label, bytes(16)))
        return found

    def _asked(self, model: int) -> list[int]:
        """Return the roster's indexes of the devices that were asked to seal a model."""
        a = self.announcement
        orders = [(i, a.order_for(i)) for i in range(len(a.assignment_of))]
        return [i for i, order in orders if order is not None and model in order.seal]

    def unsealed(self, sealers: Collection[tuple[str, StateId]], roster: Roster) -> list[str]:
        """Return a sentence for each device that was asked to seal a model, and of which no checkpoint is there."""
        found = []
        for offer in self.held.offers:
            names = [roster.devices[i].name for i in self._asked(offer.model) if i < len(roster.devices)]
            lacking = [name for name in names if (name, offer.at) not in sealers]
            found += [f"{name} was asked to seal model {offer.model}, and has sealed nothing" for name in lacking]
        return found

    @property
    def most_task_bytes(self) -> int:
        """The largest task that a checkpoint may contain; the run package, whose size is announced, contains it too."""
        return max(limits.FIRST_PACKAGE_BYTES, self.announcement.package_bytes)

    def _keys(self, ref: CheckpointRef) -> RoundKeys:
        found = self._versions.get(ref.key_version)
        if found is None:
            raise ConfigError(f"the owner does not hold the keys of version {ref.key_version}", hint=KEYS_HINT)
        chain = VersionKey(self.plan.fleet, found.number, found.version_secret).begin_run_of(self.plan)
        chain.skip_to(ref.round)
        return chain.take()

    def finished_run(
        self, opened: Mapping[StateId, OpenedState], reasons: Mapping[StateId, str], roster: Roster
    ) -> FinishedRun:
        """Return the models of the run.

        Args:
            opened: the states from checkpoints.
            reasons: state -> why its checkpoint can't be used.
            roster: the newest roster.

        Raises:
            NotReadyError: as `wanted`.
            UntrustedError: no model can be had.
            IntegrityError: no checkpoint contains the task of the plan.
        """
        wanted, held = self.wanted(), self.held
        missing: dict[int, str] = {}
        for offer in held.offers:
            if offer.at not in opened and offer.model not in STATISTICS_MODELS:
                lacking = "no device has sealed it, or too few have certified it"
                if offer.at in wanted:
                    lacking = reasons.get(offer.at, "its checkpoint has not arrived")
                missing[offer.model] = lacking
        if SHARED_MODEL in missing:
            reason = f"the segment that all models share: {missing.pop(SHARED_MODEL)}"
            missing = dict.fromkeys(self.models, reason)
        ids = [model for model in self.models if model not in missing]
        if not ids:
            model, reason = next(iter(missing.items()))
            raise UntrustedError(
                f"no model of run {self.plan.run} can be had; model {model}: {reason}", hint=CERTIFICATE_HINT
            )
        shared = held.state_of(SHARED_MODEL)
        bundle = self._task(opened)
        return FinishedRun(
            plan=self.plan,
            round=self.announcement.round,
            key_version=held.key_version,
            bundle=bundle,
            models=tuple(self._model(model, opened, roster, initial_values(bundle)) for model in ids),
            shared=None if shared is None else opened[shared],
            missing=missing,
            statistics={
                model: opened[at].state
                for model in ids
                if (at := statistics_of(held, model)) is not None and at in opened
            },
        )

    def _task(self, opened: Mapping[StateId, OpenedState]) -> TaskBundle:
        error: ShoalError = IntegrityError("no checkpoint contains a task")
        for state in opened.values():
            try:
                return task_of(memoryview(state.task), self.plan)
            except (IntegrityError, TaskError) as found:  # another device's checkpoint may have the right one
                error = found
        raise error

    def _model(
        self, model: int, opened: Mapping[StateId, OpenedState], roster: Roster, private: Float32Vector
    ) -> FinalModel:
        held = self.held
        at = held.state_of(model)
        assert at is not None, "only offered models are asked for"
        means = [mean for step in held.steps for mean in step.means if mean.model == model]
        federated = assembled(self.plan, held, model, {id_: found.state.theta for id_, found in opened.items()})
        return FinalModel(
            model=model,
            theta=joined(federated, private),
            own=opened[at],
            contributors=means[-1].contributors if means else None,
            devices=self._devices(model, roster),
            parents=self._parents(model, at),
        )

    def _devices(self, model: int, roster: Roster) -> tuple[str, ...] | None:
        found = []
        for index, device in enumerate(roster.devices):
            assignment = self.announcement.order_for(index)
            if assignment is None:
                continue
            if len(assignment.candidates) > 1 and assignment.phase is not Phase.KEEP:
                return None
            if assignment.candidates[0] == model:
                found.append(device.name)
        return tuple(found)

    def _parents(self, model: int, at: StateId) -> tuple[int, ...]:
        held = self.held
        found = {at.model}
        for step in held.steps:
            for recipe in step.step.recipes:
                if recipe.model in (model, at.model):
                    found |= {term.model for term in recipe.terms}
        for assignment in self.announcement.assignments:
            if assignment.phase is Phase.KEEP:
                line = assignment.candidates
                found |= {above for below, above in pairwise(line) if below == model}
        return tuple(sorted(found - {model}))
