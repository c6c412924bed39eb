"""Checkpoints: a state that a device in step seals for devices that lack it.

The sealing device chooses the bytes, so a receiver trusts them only as far as the digest goes: it recomputes the digest from
the vector and uses the state only if a certificate names this digest. The checkpoint is sealed under the content key of the
round in which it is needed, which devices and owner hold and the aggregator does not. It contains the key of the digest,
because a newcomer lacks the keys of the state's own round. It also contains the task, for a device that was admitted after
the run began and can't open the run package.

Example: a device that was away for rounds 3 to 8 gets state (0, 8) in round 9. Two devices have signed its digest, and
``min_contributors`` is 2, so it holds (0, 8) from then on.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from crypto.mask.schedule import RoundKeys
from crypto.seal.envelope import GroupKey, SealedMessage, is_from, open_from_group, read_head, seal_message_to_group
from crypto.seal.identity import Identity
from edge_client.models.states import ModelState
from shoal import limits
from shoal.errors import IntegrityError, MissingStateError, ShoalError, TaskError, UntrustedError, WireError
from shoal.membership.statements import check_certificate
from shoal.protocol.codec import decode_prefix, encode
from shoal.protocol.messages import Sealed
from shoal.protocol.states import SealedState, StateCertificate, StateId, checkpoint_purpose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.protocol.documents import Roster

CONTENT_LABEL: Final = "content"


class BadCheckpointError(MissingStateError):
    """A checkpoint whose digest is not certified, or that is of no use otherwise: its state is still missing.

    Attributes:
        sealed_by: the device that signed it as what it should be; empty if none did.
    """

    def __init__(self, sealed_by: str, error: ShoalError) -> None:
        super().__init__(f"a checkpoint by {sealed_by or 'the aggregator'} is of no use: {error}", hint=error.hint)
        self.sealed_by = sealed_by


def checkpoint_head(keys: RoundKeys, state: StateId, sender: str) -> Sealed:
    """Return the head of a checkpoint's envelope: sealed in the round of ``keys``, to the fleet, by ``sender``."""
    return Sealed(keys.fleet, checkpoint_purpose(keys.run_id, keys.round, state), sender, "*")


def seal_checkpoint(identity: Identity, keys: RoundKeys, state: ModelState, task: bytes = b"") -> SealedMessage:
    """Return ``state`` and ``task`` sealed under the content key of the round of ``keys``, and signed by ``identity``.

    Args:
        identity: keys of the device that seals.
        keys: those of the open round.
        state: a state that the device holds.
        task: the encoded task bundle.
    """
    header = SealedState(
        fleet=keys.fleet,
        run_id=keys.run_id,
        model=state.id.model,
        round=state.id.round,
        length=len(state.theta),
        digest_key=state.digest_key,
        task=len(task),
    )
    body = state.theta.astype("<f4", copy=False).data.cast("B")
    head = checkpoint_head(keys, state.id, identity.name)
    return seal_message_to_group(identity, _group(keys), head, encode(header), task, body)


def open_checkpoint(
    data: bytes | memoryview,
    certificate: StateCertificate,
    *,
    wanted: StateId,
    keys: RoundKeys,
    roster: Roster,
    length: int,
    signers: int,
    most_task_bytes: int = 0,
) -> tuple[ModelState, bytes]:
    """Return the state and the task in a checkpoint after checking seal, sender, digest and certificate.

    The caller checks the task, whose digest is in the run plan.

    Args:
        data: the sealed checkpoint, as received.
        certificate: statements about the state.
        wanted: the state that the device lacks.
        keys: the keys of the round in which the checkpoint was sealed.
        roster: the newest roster.
        length: number of coordinates, from the run plan.
        signers: number of devices that must have signed the digest.
        most_task_bytes: largest task to accept.

    Raises:
        UntrustedError: the sender is not in the roster, the seal does not open, or too few devices certify the digest.
        IntegrityError: the contents are malformed or not finite, or it is another state.
    """
    if len(data) > limits.SEALED_HEAD_BYTES + most_task_bytes + 4 * length:
        raise IntegrityError(f"a checkpoint of {len(data)} bytes for a model of {length} coordinates")
    head, at = read_head(data)
    sender = roster.device(head.sender)
    if sender is None or head != checkpoint_head(keys, wanted, head.sender):
        raise UntrustedError("a checkpoint of another state, round or fleet, or of a device that is not in the roster")
    header, body = decode_prefix(open_from_group(_group(keys), data, head, at, sender.sign_key), SealedState)
    if (header.fleet, header.run_id, header.model, header.round) != (
        keys.fleet,
        keys.run_id,
        wanted.model,
        wanted.round,
    ):
        raise IntegrityError("a checkpoint holds another state than its envelope says")
    if header.length != length or len(body) != header.task + 4 * length:
        raise IntegrityError(f"a checkpoint of {len(body)} bytes for a model of {length} coordinates")
    theta = np.frombuffer(body[header.task :], "<f4").astype(np.float32)
    if not np.isfinite(theta).all():
        raise IntegrityError("a checkpoint with NaN or infinite coordinates")
    state = ModelState.of(wanted, theta, run_id=keys.run_id, digest_key=header.digest_key)
    check_certificate(
        certificate,
        state.held,
        fleet=keys.fleet,
        run_id=keys.run_id,
        roster=roster,
        needed=signers,
    )
    return state, bytes(body[: header.task])


@contextmanager
def naming_sealer(data: bytes | memoryview, wanted: StateId, keys: RoundKeys, roster: Roster) -> Iterator[None]:
    """Name the device that has sealed a checkpoint if the block finds it of no use; arguments as for `open_checkpoint`.

    Raises:
        BadCheckpointError: the block raised an error about the checkpoint or its task.
    """
    try:
        yield
    except (UntrustedError, IntegrityError, TaskError) as error:
        raise BadCheckpointError(_sealer(data, wanted, keys, roster), error) from error


def _sealer(data: bytes | memoryview, wanted: StateId, keys: RoundKeys, roster: Roster) -> str:
    """Return the device that signed a checkpoint as that of ``wanted``; empty if none did, or if it is another one's."""
    try:
        head, _ = read_head(data)
    except WireError:
        return ""
    member = roster.device(head.sender)
    if member is None or head != checkpoint_head(keys, wanted, head.sender):
        return ""
    return head.sender if is_from(data, head, member.sign_key) else ""


def _group(keys: RoundKeys) -> GroupKey:
    return GroupKey(keys.fleet, CONTENT_LABEL, keys.content)
