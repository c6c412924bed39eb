"""The rollover to the next mask epoch on the aggregator, without I/O (docs/adr/0014-mask-epochs.md).

It takes two steps after a closed round. First one device folds every model into a new origin and uploads the origins, sealed
for the other devices; then all compare them with their own and sign. With the signatures of more than half of the roster the
next epoch begins, and every vector under the old key is erased. Until then the old epoch stays in force: if a device is
missing, a fold differs or a program crashes, another device folds.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from aggregator.rounds.resume import ResumeMetadata
from aggregator.strategies.base import ClientUpdate, ClusterModel, RoundPlan, UploadKey, norm_of
from aggregator.strategies.renewal import Inherited
from shoal.errors import UntrustedError
from shoal.protocol.codec import decode_prefix
from shoal.protocol.documents import RunPlan
from shoal.protocol.epochs import Checkpoint, Endorsement, Proposal
from shoal.protocol.messages import CARRIED_FIRST, Assignment, Phase, Share
from shoal.types import Float32Vector

NORM_TOLERANCE: Final = 1e-4
"""Relative: masks keep lengths, so a vector that is masked anew has the length it had."""
HASTY_TRIES: Final = 3
"""After so many failures in a row, each further try waits for the plan's deadline first."""


@dataclass(frozen=True, slots=True)
class Rollover:
    """A rollover under way.

    Attributes:
        generation: roster sequence of the secrets that the next epoch is made with.
        tries: folds that failed.
        folder: the device that folds in this try; empty between tries.
        proposal: its upload, once the second step is open.
    """

    generation: int
    tries: int = 0
    folder: str = ""
    proposal: ClientUpdate | None = None


@dataclass(frozen=True, slots=True)
class Folded:
    """A proposal taken apart: what is to be signed, the sealed origins, the carried vectors under the next key by name."""

    checkpoint: Checkpoint
    sealed: bytes
    carried: Mapping[str, Float32Vector]


def fold_plan(inherited: Inherited, run: RunPlan, round_: int, step: int, folder: str, *, keep: bool) -> RoundPlan:
    """Return the first step: ``folder`` folds all models.

    Args:
        inherited: what must live on.
        run: gives ``min_contributors``.
        round_: the round that was closed.
        step: number of the announcement after it.
        folder: the device.
        keep: whether vectors that are no models go along; not where secrets are drawn afresh, since somebody who knows
            the old ones would know these vectors and, from their masked form, the new mask.
    """
    assignment = _order(Phase.CHECKPOINT, inherited)
    carried = _carried(inherited, run) if keep else {}
    slots = {CARRIED_FIRST + i: s for i, s in enumerate(carried.values())}
    return RoundPlan(round_, inherited.models, {folder: assignment}, shared=inherited.shared, step=step, carried=slots)


def sign_plan(inherited: Inherited, round_: int, step: int, devices: Iterable[str], *, keep: bool) -> RoundPlan:
    """Return the second step: ``devices`` compare, sign, and mask anew what is their own."""
    assignment = _order(Phase.ENDORSE, inherited)
    own: dict[str, list[int]] = {}
    if keep:
        for key in inherited.own:
            own.setdefault(key[2], []).append(key[0])
    assignments = {d: _renewing(assignment, own.get(d, ())) for d in devices}
    return RoundPlan(round_, inherited.models, assignments, shared=inherited.shared, step=step)


def _order(phase: Phase, inherited: Inherited) -> Assignment:
    models = tuple(sorted(inherited.models))
    return Assignment(phase, models, Share.TRAIN, train=False, evaluate=False, margins=False)


def _renewing(assignment: Assignment, rounds: Iterable[int]) -> Assignment:
    return dataclasses.replace(assignment, renew=tuple(sorted(rounds)))


def _carried(inherited: Inherited, run: RunPlan) -> dict[str, ClusterModel]:
    """Return the carried vectors that may be sent to a device, as slots of scale 0, in order of their names."""
    least = max(1, run.min_contributors)
    return {
        name: ClusterModel(0, c.vector, c.contributors, scale=0.0)
        for name, c in sorted(inherited.carried.items())
        if c.contributors >= least
    }


def stored_proposal(metadata: ResumeMetadata, stored: Iterable[ClientUpdate]) -> ClientUpdate | None:
    """Return the upload of the device that folded, where a rollover was interrupted after it.

    Args:
        metadata: of the snapshot.
        stored: what was uploaded for its round.
    """
    if metadata.rollover is None:
        return None
    folder = metadata.rollover.folder
    return next((c for c in stored if c.phase is Phase.CHECKPOINT and c.device == folder), None)


def read_proposal(upload: ClientUpdate, inherited: Inherited, run: RunPlan, generation: int, current: int) -> Folded:
    """Return what the device that folded has uploaded.

    Args:
        upload: its contribution to the first step.
        inherited: what it was sent.
        run: the plan in the epoch that ends.
        generation: of the secrets that the next epoch is to be made with.
        current: of the secrets in force.

    Raises:
        UntrustedError: it is not what was asked for.
        WireError: malformed.
    """
    proposal, rest = decode_prefix(memoryview(upload.attached), Proposal)
    c = proposal.checkpoint
    if (c.fleet, c.run_id, c.round, c.epoch) != (run.fleet, run.run_id, upload.round, run.epoch):
        raise UntrustedError("a checkpoint of another run, round or mask epoch")
    if c.generation != generation or (generation == current and c.next_epoch != run.epoch + 1):
        raise UntrustedError(f"a checkpoint for mask epoch {c.next_epoch} of keys {c.generation}")
    if c.origins != len(inherited.models) or c.key_id == run.key_id:
        raise UntrustedError(f"a checkpoint of {c.origins} models where there are {len(inherited.models)}")
    wanted = _carried(inherited, run) if generation == current else {}
    size = 4 * run.length
    if proposal.carried != len(wanted) or len(rest) != proposal.carried * size + proposal.sealed:
        raise UntrustedError(f"{proposal.carried} carried vectors in {len(rest)} bytes")
    sealed = bytes(rest[proposal.carried * size :])
    if hashlib.sha256(sealed).digest() != c.digest:
        raise UntrustedError("a checkpoint that does not name what is sealed")
    carried = {}
    for i, (name, slot) in enumerate(wanted.items()):
        carried[name] = _masked_anew(rest[i * size : (i + 1) * size], slot.norm, f"carried vector {name}")
    return Folded(c, sealed, carried)


def read_endorsement(
    upload: ClientUpdate, assignment: Assignment, inherited: Inherited, run: RunPlan, key_id: bytes
) -> tuple[bytes, dict[UploadKey, ClientUpdate]]:
    """Return a device's signature, and its own updates under the next key.

    Args:
        upload: its contribution to the second step.
        assignment: what it was asked for.
        inherited: holds the updates under the old key.
        run: the plan in the epoch that ends.
        key_id: 16 bytes, of the next key.

    Raises:
        UntrustedError: it is not what was asked for.
        WireError: malformed.
    """
    endorsement, rest = decode_prefix(memoryview(upload.attached), Endorsement)
    size = 4 * run.length
    if not set(endorsement.renewed) <= set(assignment.renew) or len(rest) != size * len(endorsement.renewed):
        raise UntrustedError(f"{upload.device} has masked other updates anew than it was asked for")
    before = {c.round: c for c in inherited.own.values() if c.device == upload.device}
    own = {}
    for i, round_ in enumerate(endorsement.renewed):
        old = before[round_]
        vector = _masked_anew(rest[i * size : (i + 1) * size], old.norm, f"{upload.device}'s update of round {round_}")
        own[old.key] = dataclasses.replace(old, key_id=key_id, vector=vector, norm=norm_of(vector))
    return endorsement.signature, own


def _masked_anew(data: memoryview, norm: float, what: str) -> Float32Vector:
    vector = np.frombuffer(data, "<f4").astype(np.float32)
    if not abs(norm_of(vector) - norm) <= NORM_TOLERANCE * norm:
        raise UntrustedError(f"{what} has changed its length under the new mask")
    return vector
