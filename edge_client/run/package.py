"""Opening of run packages and mask epochs: the owner's plan, the task and the origins."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from crypto.mask.derivation import MaskContext, MaskKey, derive, segment_keys
from crypto.mask.modes.registry import MODES
from crypto.seal.envelope import open_from_group, read_head, seal_to_group
from crypto.seal.signed import open_document
from edge_client.followed_run import Run
from edge_client.run.policy import check_plan
from shoal.errors import IntegrityError, UntrustedError
from shoal.membership.certificates import check_certificate
from shoal.membership.grants import OWNER_NAME
from shoal.protocol.codec import decode, decode_prefix, encode
from shoal.protocol.documents import Roster, RunPackage, RunPlan
from shoal.protocol.epochs import Epoch, Origins
from shoal.protocol.messages import Sealed
from shoal.task.bundle import TaskBundle

if TYPE_CHECKING:
    from crypto.mask.secret import MaskSecret
    from crypto.seal.envelope import GroupKey
    from crypto.seal.identity import Identity
    from edge_client.membership import DeviceMembership
    from shoal.protocol.epochs import Checkpoint
    from shoal.types import Float32Vector


def task_purpose(plan_digest: bytes) -> str:
    """Return the purpose under which the owner seals a task to its devices."""
    return f"task/{plan_digest.hex()}"


def origins_purpose(run_id: bytes) -> str:
    """Return the purpose under which the owner seals a run's origins to its devices."""
    return f"origins/{run_id.hex()}"


def owners_plan(package: bytes, membership: DeviceMembership) -> RunPlan:
    """Return the plan of a package after checking the owner's signature alone; see `check_followable` for the rest.

    Raises:
        UntrustedError: the plan is not signed by the owner.
        WireError: the bytes are not a run package.
    """
    return open_document(decode(package, RunPackage).plan, RunPlan, membership.owner_key)


def check_followable(plan: RunPlan, membership: DeviceMembership) -> None:
    """Check that this device can follow a plan.

    Raises:
        UntrustedError: as `check_plan`.
    """
    check_plan(plan, fleet=membership.fleet, modes=tuple(MODES))


def open_plan(package: bytes, membership: DeviceMembership) -> RunPlan:
    """Return the plan of a package that the owner signed and that this device can follow.

    Raises:
        UntrustedError: the plan is not signed by the owner, or this device can't follow it.
        WireError: the bytes are not a run package.
    """
    return _plan(decode(package, RunPackage), membership)


def starts_later(plan: RunPlan, membership: DeviceMembership) -> bool:
    """Whether this device can only join the run in a later mask epoch: its secrets are newer than those of the first one."""
    generation = membership.grant.keys_since
    return generation > plan.roster_sequence or membership.grant.mask_epoch > plan.epoch


def open_run(package: bytes, membership: DeviceMembership) -> Run:
    """Return the run in its first mask epoch, with its task, origins and mask key.

    Raises:
        UntrustedError: the package is not from the owner, or not sealed under the devices' content key.
        IntegrityError: task, origins or mask do not fit the plan, or the device is past the run's first mask epoch.
    """
    parts = decode(package, RunPackage)
    plan = _plan(parts, membership)
    raw = _open(parts.origins, origins_purpose(plan.run_id), membership)
    if len(raw) != 4 * plan.origins * plan.length:
        raise IntegrityError(f"{len(raw)} bytes of origins, not {plan.origins} of {plan.length} coordinates")
    origins = np.frombuffer(raw, "<f4").reshape(plan.origins, plan.length)
    generation = membership.grant.keys_since
    key = epoch_key(plan, membership.secret_at(generation, plan.epoch), plan.epoch)
    if key.key_id != plan.key_id:
        raise IntegrityError(
            "this device's mask secret is not the one that the run was made with",
            hint="have the owner issue a new grant, and join again",
        )
    task = task_of(_open(parts.task, task_purpose(plan.task_digest), membership), plan)
    return Run(
        plan=plan, bundle=task, origins=origins, key=key, segment_keys=segment_keys(key), since=0, generation=generation
    )


def open_epoch(package: bytes, epoch: Epoch, membership: DeviceMembership, least_roster: int = 0) -> Run:
    """Return the run in a later mask epoch, if more than half of the roster signed its checkpoint.

    An epoch under keys that the owner has replaced since is accepted as long as we hold those keys: from it the fleet rolls
    over to the newest keys, and only then trains again.

    Args:
        package: the run package.
        epoch: the epoch as received.
        membership: keys and fleet.
        least_roster: oldest roster that the certificate may have; it must also be as new as the plan's roster and the keys.

    Raises:
        UntrustedError: the plan is not signed by the owner; the certificate is invalid, of too old a roster, or of another
            run.
        RosterForkError: the certificate's roster has the sequence of ours and other bytes.
        NotEnrolledError: the keys of the epoch have not arrived yet.
        IntegrityError: the sealed origins differ from the signed digest, or do not fit the plan.
    """
    plan = _plan(decode(package, RunPackage), membership)
    claimed = epoch.certificate.checkpoint
    least = max(plan.roster_sequence, claimed.generation, least_roster)
    c, roster = check_certificate(
        epoch.certificate, owner_key=membership.owner_key, fleet=membership.fleet, least_sequence=least
    )
    membership.check_fork(roster.sequence, epoch.certificate.roster)
    if c.run_id != plan.run_id:
        raise UntrustedError("a mask epoch of another run")
    if hashlib.sha256(epoch.sealed).digest() != c.digest:
        raise IntegrityError("the sealed origins are not what the devices signed")
    bundle, origins = open_origins(epoch.sealed, c, plan, membership, roster)
    key = epoch_key(plan, membership.secret_at(c.generation, c.next_epoch), c.next_epoch)
    if key.key_id != c.key_id:
        raise IntegrityError("this device's mask secret is not that of the mask epoch", hint="join the fleet again")
    later = plan.in_epoch(c.next_epoch, c.key_id, c.origins)
    return Run(
        plan=later,
        bundle=bundle,
        origins=origins,
        key=key,
        segment_keys=segment_keys(key),
        since=c.round,
        generation=c.generation,
    )


def reopen(package: bytes, epoch: bytes | None, membership: DeviceMembership) -> Run:
    """Return the run that a device has stored.

    Args:
        package: the run package.
        epoch: the start of its mask epoch, an encoded `shoal.protocol.epochs.Epoch`; an epoch of another run is ignored.
        membership: the device's keys and fleet.

    Raises:
        as `open_run` and `open_epoch`
    """
    if epoch is not None:
        found = decode(epoch, Epoch)
        if found.certificate.checkpoint.run_id == open_plan(package, membership).run_id:
            return open_epoch(package, found, membership)
    return open_run(package, membership)


def open_origins(
    sealed: bytes | memoryview,
    checkpoint: Checkpoint,
    plan: RunPlan,
    membership: DeviceMembership,
    roster: Roster | None = None,
) -> tuple[TaskBundle, Float32Vector]:
    """Return the task, and the origins (origins, d) float32, that a device has sealed for the others.

    Args:
        sealed: the envelope as received.
        checkpoint: the checkpoint that describes it.
        plan: the run's plan.
        membership: keys and fleet.
        roster: the roster that must list its sender; the newest by default. Give the certificate's roster for an epoch in
            force, since its sender may have been revoked later.

    Raises:
        UntrustedError: the sender is not a device of the roster, or the envelope is of another checkpoint.
        IntegrityError: the contents do not fit the plan.
    """
    head, at = read_head(sealed)
    sender = (roster or membership.roster).device(head.sender)
    if sender is None or (head.fleet, head.purpose) != (membership.fleet, epoch_purpose(checkpoint)):
        raise UntrustedError(f"a sealed {head.purpose.split('/')[0]} of {head.sender!r} that is not this checkpoint's")
    group = membership.content_of(checkpoint.generation)
    plain = open_from_group(group, sealed, head, at, sender.sign_key)
    found, rest = decode_prefix(plain, Origins)
    if (found.fleet, found.run_id, found.next_epoch) != (plan.fleet, plan.run_id, checkpoint.next_epoch):
        raise UntrustedError("origins of another run or mask epoch")
    size = 4 * found.origins * found.length
    if (found.origins, found.length) != (checkpoint.origins, plan.length) or len(rest) != found.task + size:
        raise IntegrityError(f"{len(rest)} bytes where a task and {checkpoint.origins} origins belong")
    origins = np.frombuffer(rest[found.task :], "<f4").reshape(found.origins, found.length)
    if not np.isfinite(origins).all():
        raise IntegrityError("origins that are not finite")
    return task_of(rest[: found.task], plan), origins


def seal_origins(
    task: TaskBundle,
    origins: Float32Vector,
    checkpoint: Checkpoint,
    identity: Identity,
    group: GroupKey,
) -> bytes:
    """Seal task and origins for the other devices; `open_origins` is the inverse.

    Args:
        task: the run's task.
        origins: shape (origins, d), float32.
        checkpoint: gives fleet, run and next epoch; its other fields are not used.
        identity: keys of the device that seals.
        group: the content key of the next epoch.
    """
    raw = task.to_bytes()
    count, length = origins.shape
    head = Origins(
        fleet=checkpoint.fleet,
        run_id=checkpoint.run_id,
        next_epoch=checkpoint.next_epoch,
        task=len(raw),
        origins=count,
        length=length,
    )
    plain = encode(head) + raw + origins.astype("<f4", copy=False).tobytes()
    return seal_to_group(identity, group, Sealed(group.fleet, epoch_purpose(checkpoint), identity.name, "*"), plain)


def epoch_purpose(checkpoint: Checkpoint) -> str:
    """Return the purpose under which a device seals origins to the others."""
    return f"epoch/{checkpoint.run_id.hex()}/{checkpoint.next_epoch}"


def epoch_key(plan: RunPlan, secret: MaskSecret, epoch: int) -> MaskKey:
    """Return the mask key of a run's epoch, from the secret of that epoch."""
    return derive(secret, MaskContext.of_plan(plan, epoch))


def task_of(data: memoryview, plan: RunPlan) -> TaskBundle:
    """Return the task bundle in ``data``.

    Raises:
        IntegrityError: it is not the task that the plan names.
    """
    bundle = TaskBundle.from_bytes(bytes(data))
    if bundle.digest != plan.task_digest or bundle.segments != plan.mask_segments:
        raise IntegrityError("the task is not the one that the run plan names")
    return bundle


def _plan(parts: RunPackage, membership: DeviceMembership) -> RunPlan:
    plan = open_document(parts.plan, RunPlan, membership.owner_key)
    check_followable(plan, membership)
    return plan


def _open(sealed: bytes, purpose: str, membership: DeviceMembership) -> memoryview:
    head, at = read_head(sealed)
    if (head.fleet, head.purpose, head.sender) != (membership.fleet, purpose, OWNER_NAME):
        raise UntrustedError(f"a sealed {head.purpose.split('/')[0]} that is not this run's")
    return open_from_group(membership.content, sealed, head, at, membership.owner_key)
