"""The start of a run on a device: with its run package, from the disk, or late with a checkpoint.

- `open_run` opens the run package under round 0 of the run's chain; `keep_run` makes the run durable.
- `resume_run` continues after a restart. The keys of round 0 are erased by then, so the task is stored in clear.
- `LateStart` begins a run whose package this device can't open, since it was admitted under a newer key version: task and
  first state come from a checkpoint.

Order of the writes: the run's chain and states, the run package, and last the version's secret, stepped past this run. After a
crash in between, the secret that is still there gives the same chain again.

`RunFollower` chooses the run that the device follows, stores it and puts it in force. An earlier run or secret is erased only
after its successor is durable, so that a power cut leaves one of the two.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from crypto.seal.envelope import GroupKey, open_from_group, read_head
from edge_client.models.checkpoints import CONTENT_LABEL
from edge_client.models.fresh_start import TensorFigures, figures_of
from edge_client.models.private_values import initial_values, joined
from edge_client.models.round_context import Run
from edge_client.models.states import ModelStates
from edge_client.models.store import StateStore, Transcript
from edge_client.run.held_models import HeldModels, opened
from edge_client.run.history import certifying
from edge_client.run.policy import (
    check_announcement,
    check_followable,
    open_plan,
    origins_purpose,
    owners_plan,
    task_of,
    task_purpose,
)
from shoal.digests import sha256
from shoal.errors import IntegrityError, NotEnrolledError, UntrustedError, WireError
from shoal.membership.grants import OWNER_NAME
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.messages import STATISTICS_MODELS, Announcement
from shoal.protocol.states import NO_TRANSCRIPT, CheckpointRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from crypto.mask.schedule import RoundKeys, RunChain, VersionKey
    from crypto.seal.replay import ReplayWatermark
    from edge_client.membership import DeviceMembership
    from edge_client.storage.state import DeviceState
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that a device has opened and not stored yet.

    Attributes:
        run: plan and task.
        version: the version's secret, stepped past this run.
        chain: the run's chain, at the first round whose keys the device may need.
        states: the states that it begins with.
    """

    run: Run
    version: VersionKey
    chain: RunChain
    states: ModelStates


def open_run(package: bytes | memoryview, membership: DeviceMembership, before: HeldModels | None = None) -> OpenedRun:
    """Return the run of a package, with its task, and its origins as states.

    ``before`` has the models of the device's last run. A later run of a standing order begins with them; a device that lacks one
    takes a checkpoint.

    Raises:
        NotEnrolledError: the device lacks the key version under which the package is sealed.
        UntrustedError: the package is not from the owner, or not sealed under the run's keys.
        IntegrityError: task or origins do not fit the plan, or the keys of the run are erased.
    """
    plan = open_plan(package, membership)
    version, chain = _chain_of(plan, plan.key_version, membership)
    keys = chain.take()
    parts = decode(package, RunPackage)
    task_keys = keys if plan.schedule is None else version.peek_run(*plan.task_run)
    bundle = task_of(_open(parts.task, task_purpose(plan.task_digest), task_keys, membership), plan)
    if plan.follows:
        carried = _carried(plan, parts, before)
        states = ModelStates.of_origins(carried, keys)
        whole = carried.get(0)
        start = None if whole is None else _figures(whole, bundle)
        return OpenedRun(run=Run(plan=plan, bundle=bundle, start=start), version=version, chain=chain, states=states)
    raw = _open(parts.origins, origins_purpose(plan.run_id), keys, membership)
    if len(raw) != 4 * plan.origins * plan.length:
        raise IntegrityError(f"{len(raw)} bytes of origins, not {plan.origins} of {plan.length} coordinates")
    del parts  # the origins are the largest that a device receives: they are in memory no more often than needed
    origins = np.frombuffer(raw, "<f4").astype(np.float32, copy=False).reshape(plan.origins, plan.length)
    if not np.isfinite(origins).all():
        raise IntegrityError("origins that are not finite")
    states = ModelStates.of_origins({i: origin.copy() for i, origin in enumerate(origins)}, keys)
    run = Run(plan=plan, bundle=bundle, start=_figures(origins[0], bundle))
    return OpenedRun(run=run, version=version, chain=chain, states=states)


def _carried(plan: RunPlan, parts: RunPackage, before: HeldModels | None) -> dict[int, Float32Vector]:
    """Return the origins of a later run of a standing order that this device holds, (d,) float32 by number.

    Raises:
        UntrustedError: the device has models of a later run of the order than those, or another number of them.
    """
    found: dict[int, Float32Vector] = {}
    if before is not None:
        told, models = before.to_follow()
        begun = told is None or told.transcript != NO_TRANSCRIPT
        if begun and parts.before < before.plan.run and before.plan.run >= plan.run - plan.turn:
            raise UntrustedError(
                f"run {plan.run} begins with the models of run {parts.before}, and this device has those of run {before.plan.run}"
            )
        if told is not None and (told.run, told.transcript) == (parts.before, parts.transcript):
            if told.models != parts.models:
                raise UntrustedError(f"run {plan.run} begins with {parts.models} models, and {told.models} are there")
            found = models
    if plan.statistics:
        found[parts.models] = np.zeros(plan.length, np.float32)
    return found


def keep_run(
    begun: OpenedRun, package: bytes | memoryview, membership: DeviceMembership, files: DeviceState
) -> HeldModels:
    """Make a run durable that begins, erase keys and states of the one before, and return the models held."""
    store = StateStore.begin(membership.directory, begun.chain)
    store.commit(begun.states, applied=begun.chain.next_round - 1)
    start = begun.run.start
    # Not the origins: with the next state they would show the clear mean of the first round, see `fresh_start`.
    origins = b"" if start is None else encode(start)
    files.save_run(encode(replace(decode(package, RunPackage), task=begun.run.bundle.to_bytes(), origins=origins)))
    membership.keep_version(begun.version)
    return HeldModels(begun.run, membership, store, begun.states)


def resume_run(
    package: bytes | memoryview, membership: DeviceMembership, mark: ReplayWatermark
) -> tuple[Run, HeldModels]:
    """Return the run that `keep_run` stored, and the models held; ``mark`` is the stored one.

    Raises:
        IntegrityError: the stored states are damaged or of another run.
    """
    run = stored_run(package, membership)
    plan = run.plan
    store = StateStore.open(membership.directory)
    if store is None or store.run_id != plan.run_id:
        raise IntegrityError("the stored model states are of another run")
    if mark.run == plan.run and mark.round > store.transcript.round:
        store.transcript = replace(store.transcript, round=mark.round, head=mark.transcript)
    states, errors = store.load()
    for error in errors:
        LOG.warning("a model state is lost", extra={"kv": {"reason": error, "hint": error.hint}})
    _finish_keeping(plan, store.key_version, membership)
    return run, HeldModels(run, membership, store, states)


def stored_run(package: bytes | memoryview, membership: DeviceMembership) -> Run:
    """Return plan and task of the run that a device has stored, without its models.

    Raises:
        IntegrityError: the package is not the owner's, or damaged, or an earlier version of Shoal wrote it.
    """
    try:
        plan = open_plan(package, membership)
    except (UntrustedError, WireError) as error:
        raise IntegrityError(
            f"the stored run is damaged, or of an earlier version of Shoal: {error}",
            hint="the device takes part again when the owner's next run begins",
        ) from error
    parts = decode(package, RunPackage)
    return Run(plan=plan, bundle=task_of(memoryview(parts.task), plan), start=start_figures(parts))


def _figures(theta: Float32Vector, bundle: TaskBundle) -> TensorFigures:
    """Return the figures of a model (d,) with the task's initial private values."""
    return figures_of(joined(theta, initial_values(bundle)), bundle.manifest.lengths)


def start_figures(stored: RunPackage) -> TensorFigures | None:
    """Return the figures of the model that a stored run began with; None if it has none.

    Raises:
        WireError: they are damaged.
    """
    return decode(stored.origins, TensorFigures) if stored.origins else None


def _finish_keeping(plan: RunPlan, key_version: int, membership: DeviceMembership) -> None:
    """Step the version's secret past the run if a crash came before that write of `keep_run`."""
    try:
        version = membership.version_key(key_version)
    except NotEnrolledError:
        return  # a newer version is in force
    if version.next_run <= plan.run:
        version, _ = _chain_of(plan, key_version, membership)
        membership.keep_version(version)


class NotMeantError(UntrustedError):
    """The owner has signed a run for other devices than this one."""

    def __init__(self, plan: RunPlan) -> None:
        super().__init__(f"run {plan.run} is for devices with the label {plan.recipe.only}, which this one lacks")


class LateStart:
    """Begins a run from a checkpoint, on a device that was admitted after its run package was sealed.

    Attributes:
        plan: the run's plan, signed by the owner.
        package: the run package as received.
    """

    def __init__(self, plan: RunPlan, package: bytes | memoryview) -> None:
        self.plan = plan
        self.package = package
        self._announcement: Announcement | None = None
        self._ref: CheckpointRef | None = None

    def locate(self, announcement: Announcement) -> dict[str, bytes]:
        """Return the transfer to fetch, as topic label -> transfer id; empty if no checkpoint is sealed under our keys yet.

        Raises:
            UntrustedError: the plan does not allow the announcement.
        """
        check_announcement(announcement, self.plan)
        held = announcement.held
        found = [ref for ref in held.checkpoints if ref.key_version == held.key_version]
        # The statistics say nothing of how the models began: only if nothing else can be opened.
        found.sort(key=lambda ref: ref.state.model in STATISTICS_MODELS)
        self._announcement, self._ref = announcement, found[0] if found else None
        return {ref.label: ref.transfer for ref in found[:1]}

    def take(
        self, label: str, transfer: bytes, sealed: memoryview, membership: DeviceMembership, most_task_bytes: int
    ) -> OpenedRun | None:
        """Return the run that a received checkpoint begins; None if it is not the one that was located.

        Raises:
            NotEnrolledError: the keys of the announced version have not arrived.
            BadCheckpointError: the checkpoint is not certified, or damaged, or its task is not the plan's.
        """
        ref, announcement, plan = self._ref, self._announcement, self.plan
        if ref is None or announcement is None or (label, transfer) != (ref.label, ref.transfer):
            return None
        version, chain = _chain_of(plan, ref.key_version, membership)
        chain.skip_to(ref.round)
        roster = membership.roster
        claims = certifying(plan, roster, announcement.round, announcement.held, Transcript())
        # The chain that is stored must still give the keys of this round, whose mean may be needed.
        keys = chain.peek(ref.round)
        with opened(ref, sealed, claims, keys, plan, announcement.held, roster, most_task_bytes) as (state, task):
            bundle = task_of(memoryview(task), plan)
        states = ModelStates(plan.fleet, plan.run_id, {state.id: state})
        whole = len(state.theta) == plan.length and ref.state.model not in STATISTICS_MODELS
        run = Run(plan=plan, bundle=bundle, start=_figures(state.theta, bundle) if whole else None)
        return OpenedRun(run=run, version=version, chain=chain, states=states)


def _chain_of(plan: RunPlan, key_version: int, membership: DeviceMembership) -> tuple[VersionKey, RunChain]:
    """Return a version's secret, stepped past the plan's run, and the run's chain at round 0."""
    version = membership.version_key(key_version)
    return version, version.begin_run_of(plan)


def _open(sealed: bytes, purpose: str, keys: RoundKeys, membership: DeviceMembership) -> memoryview:
    head, at = read_head(sealed)
    if (head.fleet, head.purpose, head.sender) != (membership.fleet, purpose, OWNER_NAME):
        raise UntrustedError(f"a sealed {head.purpose.split('/')[0]} that is not this run's")
    group = GroupKey(keys.fleet, CONTENT_LABEL, keys.content)
    return open_from_group(group, sealed, head, at, membership.owner_key)


class RunFollower:
    """Opens the owner's run packages for one device.

    Attributes:
        held: the models of the run in force; None before the first run.
        late: a run that this device can only begin with a checkpoint; None if absent.
        newest: id of the last run that the device tried to begin, even if it failed; empty if that package was not signed by
            the owner, or its run was older than an earlier one.
    """

    def __init__(self, membership: DeviceMembership, files: DeviceState) -> None:
        self._membership = membership
        self._files = files
        self._known = b""
        self.newest = b""
        self.late: LateStart | None = None
        self.held: HeldModels | None = None
        self._begun: OpenedRun | None = None

    def resumed(self, mark: ReplayWatermark) -> Run | None:
        """Return the run that was followed before a restart, if it can be opened; ``mark`` is the stored one."""
        package = self._files.load_run()
        if package is None:
            return None
        try:
            run, self.held = resume_run(package, self._membership, mark)
        except (UntrustedError, IntegrityError, NotEnrolledError) as error:
            LOG.warning("the stored run can't be resumed", extra={"kv": {"reason": error, "hint": error.hint}})
            return None
        return run

    def begun(
        self, package: bytes | memoryview, current: Run | None, least_run: int, check: Callable[[RunPlan], None]
    ) -> Run | None:
        """Return the run of a package; None if it is known already, or this device must begin it with a checkpoint.

        Args:
            package: the run package from the aggregator.
            current: the run that the device follows now.
            least_run: number of the newest run that the device has ever followed.
            check: checks that the run may begin now.

        Raises:
            NotEnrolledError: the keys of the plan's version have not arrived.
            UntrustedError: the plan is not signed by the owner, or the run is not newer than an earlier one.
            IntegrityError: task or origins do not fit the plan.
            NotMeantError: the run is for devices with a label that this one lacks.
        """
        if sha256(package) == self._known:
            return None
        self.newest = b""
        plan = owners_plan(package, self._membership)
        if current is not None and plan.run_id == current.plan.run_id:
            # After a restart: the stored package has the task in clear, so its digest says nothing.
            self._known = sha256(package)
            return None
        if plan.run < least_run or (current is not None and plan.run <= current.plan.run):
            raise UntrustedError(f"run {plan.run} after run {max(least_run, plan.run)}")
        self.newest = plan.run_id
        check_followable(plan, self._membership)
        member = self._membership
        if member.roster.only(plan.recipe.only).device(member.name) is None:
            raise NotMeantError(plan)
        check(plan)
        self.late = None
        try:
            if plan.follows and plan.key_version < self._membership.roster.keys_since:
                # A device that was revoked since has these keys. Who takes part by now has a certified model.
                raise NotEnrolledError("the owner has replaced the keys of this standing order")
            self._begun = open_run(package, self._membership, self.held)
        except NotEnrolledError:
            if plan.key_version > self._membership.newest_generation:
                raise
            self.late = LateStart(plan, package)
            return None
        return self._begun.run

    def taken(self, label: str, transfer: bytes, sealed: memoryview, most_task_bytes: int) -> Run | None:
        """Return the run that a checkpoint begins late; None if it does not.

        Raises:
            as `LateStart.take`
        """
        assert self.late is not None
        self._begun = self.late.take(label, transfer, sealed, self._membership, most_task_bytes)
        return None if self._begun is None else self._begun.run

    def refuse(self, package: bytes | memoryview, run: Run) -> None:
        """Store a run that this device can't do, with its task in clear and without origins, for `shoal-edge doctor`."""
        self._begun = None
        parts = decode(package, RunPackage)
        self._files.save_refused(encode(replace(parts, task=run.bundle.to_bytes(), origins=b"")))

    def keep(self, package: bytes | memoryview) -> None:
        """Store the run that `begun` or `taken` returned last, and erase the secrets before its own."""
        assert self._begun is not None
        self.held = keep_run(self._begun, package, self._membership, self._files)
        self._known, self.late, self._begun = sha256(package), None, None
