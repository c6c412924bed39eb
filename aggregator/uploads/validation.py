"""Verification of complete messages: authentic, well-formed, and within the limits of the run plan.

The checks that need the open round are `aggregator.rounds.engine.Engine.validate`.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from aggregator.membership import UNKNOWN_HINT, FalseMessageError, signed_by
from aggregator.rounds.screening import norm_error
from aggregator.rounds.state import Declined
from aggregator.storage.store import OpenedUpload, UploadRef
from aggregator.strategies.base import norm_of
from crypto.seal.envelope import is_from, open_from_member, read_head
from crypto.seal.identity import Identity
from shoal.errors import ShoalError, UntrustedError, WireError
from shoal.membership.statements import open_statement
from shoal.protocol import channels
from shoal.protocol.channels import Channel
from shoal.protocol.codec import decode
from shoal.protocol.documents import Roster, RunPlan
from shoal.protocol.messages import Decline, Reminder, Upload
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.lengths import encoded_bytes, norm_room
from shoal.protocol.reassembly import Transfer
from shoal.protocol.states import attached_checkpoints
from shoal.protocol.sums import precision_in, share_head

N = TypeVar("N", Decline, Reminder)


class RefusedUploadError(UntrustedError):
    """An authentic upload that is malformed, false or breaks a limit of the plan; its device is told.

    Attributes:
        header: the upload's header; None if it can't be read.
    """

    def __init__(self, reason: str, header: Upload | None) -> None:
        super().__init__(reason)
        self.header = header


class UploadVerifier:
    """Opens and verifies the messages that devices send to the aggregator about uploads.

    Args:
        identity: the aggregator's own keys.
        run: the owner's plan.
    """

    def __init__(self, identity: Identity, run: RunPlan) -> None:
        self._identity = identity
        self._seal_key = identity.member.seal_key
        self._run = run

    def upload(self, device: str, transfer: Transfer, roster: Roster) -> OpenedUpload:
        """Return the upload in a transfer.

        Args:
            device: the sender as named by the topic.
            transfer: the complete transfer.
            roster: the newest roster.

        Raises:
            RefusedUploadError: authentic, but malformed, of another fleet, device, run or aggregator than its envelope, not
                finite, above the plan's norm limit or sample limit, of another length or precision than the plan's, without
                a valid statement about the device's states, or with checkpoints that its device has not signed.
            ShoalError: unknown device, not sealed to this aggregator, forged, or for a later run.
        """
        message, body = self._open(device, transfer, roster, channels.UPLOAD)
        try:
            header = decode(message, Upload)
        except ShoalError as error:
            raise RefusedUploadError(f"the header: {error}", None) from error
        self._check_header(header, body, device)
        self._check_samples(header)
        self._check_statement(header, roster)
        self._check_share(header, roster)
        self._check_attached(header, body[len(body) - header.attached :], roster)
        body = self._decoded(header, body)
        ref, norm = UploadRef(device, transfer.transfer_id), self._checked_norm(header, body)
        return OpenedUpload(header, bytes(message), ref, transfer.signed, norm, body=body)

    def decline(self, device: str, transfer: Transfer, roster: Roster) -> Declined:
        """Return the decline in a transfer; arguments as for `upload`.

        Raises:
            ShoalError: unknown device, not sealed to this aggregator, forged, malformed, or of another run.
        """
        decline = self._control_message(device, transfer, roster, channels.DECLINE, Decline)
        if decline.run_id != self._run.run_id:
            raise UntrustedError("a decline for another run")
        return Declined(device, decline.nonce, decline.reason, model=decline.model)

    def reminder(self, device: str, transfer: Transfer, roster: Roster) -> Reminder:
        """Return the reminder in a transfer, possibly of another run; arguments as for `upload`.

        Raises:
            ShoalError: unknown device, not sealed to this aggregator, forged or malformed.
        """
        return self._control_message(device, transfer, roster, channels.REMINDER, Reminder)

    def _control_message(self, device: str, transfer: Transfer, roster: Roster, channel: Channel, kind: type[N]) -> N:
        message, body = self._open(device, transfer, roster, channel)
        with signed_by(device):
            if body:
                raise WireError(f"{len(body)} extra bytes after a {channel.name}")
            decoded = decode(message, kind)
            if (decoded.fleet, decoded.device) != (self._run.fleet, device):
                raise UntrustedError(f"a {channel.name} by {decoded.device[:64]!r} of {decoded.fleet[:64]!r}")
        return decoded

    def _open(self, device: str, transfer: Transfer, roster: Roster, channel: Channel) -> tuple[memoryview, memoryview]:
        member = roster.device(device)
        if member is None:
            raise UntrustedError(f"{device} is not in the roster", hint=UNKNOWN_HINT)
        head, at = read_head(transfer.payload)
        expected = channel.head(roster.fleet, device, self._identity.name)
        if head != expected:
            # Anyone can move a device's message to another topic or kind, but only the device signs a false name in it.
            false = head.purpose == expected.purpose and is_from(
                transfer.payload, head, member.sign_key, transfer.signed
            )
            told = f"{head.purpose[:64]!r} of {head.sender[:64]!r} to {head.recipient[:64]!r} of {head.fleet[:64]!r}"
            reason = f"a sealed {told} on {device}'s topic"
            raise FalseMessageError(device, reason) if false else UntrustedError(reason)
        return open_from_member(self._identity, transfer.payload, head, at, member.sign_key, transfer.signed)

    def _check_header(self, header: Upload, body: memoryview, device: str) -> None:
        if (header.fleet, header.device) != (self._run.fleet, device):
            raise RefusedUploadError(f"an upload for {header.fleet[:64]!r} by {header.device[:64]!r}", header)
        if header.run > self._run.run and header.run_id != self._run.run_id:
            # Not a refusal: that run's file may be put back, and the device would not offer the upload again.
            raise UntrustedError(f"an upload for run {header.run}, which is not served")
        if header.recipient != self._seal_key:
            raise RefusedUploadError("an upload for another aggregator", header)
        if header.precision not in (self._run.recipe.precision_up, precision_in(self._run, 0.0)):
            raise RefusedUploadError(
                f"a vector in {header.precision[:16]!r}, not {self._run.recipe.precision_up}", header
            )
        if len(body) != encoded_bytes(header.coordinates, header.precision) + header.attached:
            counted = f"{header.length} coordinates and {header.attached} bytes"
            raise RefusedUploadError(f"{len(body)} bytes where {counted} were announced", header)

    def _check_samples(self, header: Upload) -> None:
        most = self._run.recipe.max_samples
        if header.samples > most:
            raise RefusedUploadError(f"{header.samples} samples reported, above the plan's max_samples {most}", header)

    def _check_statement(self, header: Upload, roster: Roster) -> None:
        try:
            statement = open_statement(header.statement, roster)
        except (ShoalError, ValueError) as error:
            raise RefusedUploadError(f"the statement about its states: {error}", header) from error
        about = (statement.fleet, statement.run_id, statement.round, statement.device)
        if about != (header.fleet, header.run_id, header.round, header.device):
            raise RefusedUploadError("a statement of another device, round or run", header)

    def _check_share(self, header: Upload, roster: Roster) -> None:
        """Check that the device has signed its share for the keeper, who alone can open it."""
        member, keeper = roster.device(header.device), self._run.keeper
        if not header.share or keeper is None or member is None:
            return
        try:
            head, _ = read_head(header.share)
            if head != share_head(header.fleet, header.device, keeper.name) or not is_from(
                header.share, head, member.sign_key
            ):
                raise UntrustedError("a share that the device has not signed for the keeper")
        except ShoalError as error:
            raise RefusedUploadError(f"the share for the keeper: {error}", header) from error

    def _check_attached(self, header: Upload, attached: memoryview, roster: Roster) -> None:
        """Check what can be seen of checkpoints from outside; their vectors are checked by those who can open them."""
        member = roster.device(header.device)
        try:
            for envelope in attached_checkpoints(attached).values() if attached else ():
                head, _ = read_head(envelope)
                if member is None or not is_from(envelope, head, member.sign_key):
                    raise UntrustedError("a checkpoint that the device has not signed")
                if (head.fleet, head.sender, head.recipient) != (header.fleet, header.device, channels.EVERYONE):
                    raise UntrustedError(f"a checkpoint of {head.sender[:64]!r} to {head.recipient[:64]!r}")
        except ShoalError as error:
            raise RefusedUploadError(f"what is attached: {error}", header) from error

    def _decoded(self, header: Upload, body: memoryview) -> memoryview:
        """Return the body with its vector in 4 bytes a coordinate, in which everything after this works."""
        run = self._run
        if header.precision == "float32" or not header.coordinates:
            return body
        if header.length != run.length:  # before a vector of that length is made from fewer bytes
            raise RefusedUploadError(f"a vector of length {header.length}", header)
        cut = encoded_bytes(run.length, header.precision)
        if run.keeper is not None:
            return memoryview(np.frombuffer(body[:cut], "<u2").astype("<u4").tobytes() + body[cut:])
        try:
            vector = decode_vector(body[:cut], run.length, run.recipe.precision_up)
        except WireError as error:
            raise RefusedUploadError(f"the update: {error}", header) from error
        return memoryview(vector.astype("<f4", copy=False).tobytes() + body[cut:])

    def _checked_norm(self, header: Upload, body: memoryview) -> float:
        if not header.coordinates or self._run.keeper is not None:  # workers report the norms of parts; a pad hides it
            return 0.0
        norm = norm_of(np.frombuffer(body, "<f4", header.length))
        error = norm_error(norm, self._run.recipe.norm_limit * norm_room(self._run.recipe.precision_up))
        if error:
            raise RefusedUploadError(error, header)
        return norm
