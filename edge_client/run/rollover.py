"""A device's part in the end of a mask epoch: fold all models into origins, or compare another's fold and sign it.

The models are those that every device can unmask. Folded they are the origins of the next epoch, sealed under the
devices' content key; the aggregator passes them on and can't read them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from edge_client.learning.update import Finished, TrainingContext, masked_bytes, sealed_upload
from edge_client.run import package
from shoal.errors import ShoalError, UntrustedError
from shoal.membership.certificates import sign_checkpoint
from shoal.protocol.codec import decode_prefix, encode
from shoal.protocol.epochs import UNSIGNED, Checkpoint, Endorsement, Proposal
from shoal.protocol.messages import Phase

if TYPE_CHECKING:
    from crypto.mask.derivation import MaskKey
    from edge_client.learning.worker import Job
    from edge_client.membership import DeviceMembership
    from shoal.protocol.messages import Announcement, Assignment
    from shoal.types import Float32Vector

ROTATION_TOLERANCE: Final = 1e-5
"""Relative l2 distance of two devices' folds under a mode whose floating point differs between machines."""


@dataclass(frozen=True, slots=True)
class NextEpoch:
    """The mask epoch that an announcement asks for, as this device derives it."""

    number: int
    generation: int
    key: MaskKey


def job(
    shop: TrainingContext,
    announcement: Announcement,
    assignment: Assignment,
    models: Mapping[int, Float32Vector],
    carried: Mapping[int, Float32Vector],
    proposal: tuple[bytes, bytes],
    membership: DeviceMembership,
) -> Job:
    """Return the job of an assignment in a rollover; arguments as in `fold` and `endorse`.

    Raises:
        UntrustedError: ``proposal`` (transfer id, payload) is not the one that was announced.
    """
    if assignment.phase == Phase.CHECKPOINT:
        return lambda _: fold(shop, announcement, assignment, models, carried, membership)
    transfer, payload = proposal
    if announcement.proposal is None or transfer != announcement.proposal.transfer:
        raise UntrustedError("the checkpoint is not the one that was announced")
    return lambda _: endorse(shop, announcement, assignment, models, payload, membership)


def next_epoch(shop: TrainingContext, announcement: Announcement, membership: DeviceMembership) -> NextEpoch:
    """Return the epoch that follows: the next of the same secrets, or the first of newer ones.

    Raises:
        NotEnrolledError: the secrets have not come yet.
        UntrustedError: older secrets than those in force are asked for.
    """
    plan, generation = shop.plan, announcement.generation
    if generation < shop.run.generation:
        raise UntrustedError(f"a rollover to keys of roster {generation} after {shop.run.generation}")
    number = plan.epoch + 1
    if generation > shop.run.generation:
        number = max(number, membership.grant_of(generation).mask_epoch)
    return NextEpoch(number, generation, package.epoch_key(plan, membership.secret_at(generation, number), number))


def fold(
    shop: TrainingContext,
    announcement: Announcement,
    assignment: Assignment,
    models: Mapping[int, Float32Vector],
    carried: Mapping[int, Float32Vector],
    membership: DeviceMembership,
) -> Finished:
    """Return the upload of the device that folds.

    Args:
        shop: keys and task.
        announcement: the first step of a rollover.
        assignment: this device's.
        models: theta (d,), float32, of every model.
        carried: the vectors (d,), float32, that are no models, in clear.
        membership: holds the secrets of the next epoch.

    Raises:
        NotEnrolledError, UntrustedError: as `next_epoch`.
    """
    coming = next_epoch(shop, announcement, membership)
    origins = folded(models)
    draft = Checkpoint(
        fleet=shop.plan.fleet,
        run_id=shop.plan.run_id,
        round=announcement.round,
        epoch=shop.plan.epoch,
        next_epoch=coming.number,
        generation=coming.generation,
        key_id=coming.key.key_id,
        origins=len(origins),
        digest=bytes(32),
    )
    content = membership.content_of(coming.generation)
    sealed = package.seal_origins(shop.run.bundle, origins, draft, shop.identity, content)
    checkpoint = dataclasses.replace(draft, digest=hashlib.sha256(sealed).digest())
    anew = [masked_bytes(carried[i], coming.key) for i in sorted(carried)]
    head = encode(Proposal(checkpoint, len(anew), len(sealed)))
    parcel = sealed_upload(
        shop, announcement, assignment, assignment.candidates[0], attached=b"".join((head, *anew, sealed))
    )
    return Finished(parcel, assignment.candidates[0], 0.0, 0, 0)


def endorse(
    shop: TrainingContext,
    announcement: Announcement,
    assignment: Assignment,
    models: Mapping[int, Float32Vector],
    proposal: bytes,
    membership: DeviceMembership,
) -> Finished:
    """Return the upload of a device that compares: its signature, and its own updates under the new mask.

    A fold that differs from its own, or can't be opened, is answered without a signature.

    Args:
        shop: keys, task and cached updates.
        announcement: the second step of a rollover.
        assignment: this device's.
        models: theta (d,), float32, of every model.
        proposal: an encoded `Checkpoint` and the sealed origins.
        membership: holds the secrets of the next epoch.
    """
    signature, renewed, anew = UNSIGNED, [], []
    reason = ""
    try:
        coming = next_epoch(shop, announcement, membership)
        checkpoint, sealed = decode_prefix(memoryview(proposal), Checkpoint)
        reason = _objection(shop, announcement, checkpoint, sealed, coming, models, membership)
        if not reason:
            signature = sign_checkpoint(shop.identity, checkpoint)
            for round_ in assignment.renew:
                update = shop.own.find(round_)
                if update is not None:
                    renewed.append(round_)
                    anew.append(masked_bytes(update, coming.key))
    except ShoalError as error:
        reason = str(error)
    head = encode(Endorsement(signature, tuple(renewed)))
    parcel = sealed_upload(shop, announcement, assignment, assignment.candidates[0], attached=b"".join((head, *anew)))
    return Finished(parcel, assignment.candidates[0], 0.0, 0, 0, objection=reason)


def folded(models: Mapping[int, Float32Vector]) -> Float32Vector:
    """Return the origins of the next mask epoch, (models, d) float32: the models in order of their ids."""
    return np.stack([models[m] for m in sorted(models)])


def _objection(
    shop: TrainingContext,
    announcement: Announcement,
    checkpoint: Checkpoint,
    sealed: memoryview,
    coming: NextEpoch,
    models: Mapping[int, Float32Vector],
    membership: DeviceMembership,
) -> str:
    """Return the reason why this device refuses to sign; empty if it signs."""
    plan, c = shop.plan, checkpoint
    if coming.generation != membership.keys_since:
        return f"the owner has replaced the keys of roster {coming.generation}"
    if (c.fleet, c.run_id, c.round, c.epoch) != (plan.fleet, plan.run_id, announcement.round, plan.epoch):
        return "it is of another run, round or mask epoch"
    if (c.next_epoch, c.generation, c.key_id) != (coming.number, coming.generation, coming.key.key_id):
        return "it is made with another key than ours"
    if c.origins != len(models) or hashlib.sha256(sealed).digest() != c.digest:
        return "it is not what is sealed"
    _, theirs = package.open_origins(sealed, c, plan, membership)
    ours = folded(models)
    if shop.key.exact:
        return "" if np.array_equal(theirs, ours) else "our fold of the models differs"
    apart = np.linalg.norm(theirs - ours, axis=1)
    return (
        "" if (apart <= ROTATION_TOLERANCE * np.linalg.norm(ours, axis=1)).all() else "our fold of the models differs"
    )
