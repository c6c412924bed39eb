"""From a reassembled transfer to an upload that can be judged: opened, signed by the device, finite, within the norm limit."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from aggregator.membership import UNKNOWN_HINT
from aggregator.rounds.events import Declined
from aggregator.strategies.base import norm_of
from crypto.seal.envelope import open_from_member, read_head
from crypto.seal.identity import Identity
from shoal.errors import ShoalError, UntrustedError, WireError
from shoal.protocol.codec import decode
from shoal.protocol.documents import Roster, RunPlan
from shoal.protocol.messages import Decline, Obstacle, Reminder, Upload
from shoal.protocol.reassembly import Transfer

UPLOAD_PURPOSE: Final = "upload"
DECLINE_PURPOSE: Final = "decline"
REMINDER_PURPOSE: Final = "reminder"
N = TypeVar("N", Decline, Reminder)


@dataclass(frozen=True, slots=True)
class Opened:
    """An authentic upload: its header, its vector's bytes and norm, and the digest that its sender signed."""

    upload: Upload
    body: memoryview
    norm: float
    transfer: bytes
    digest: bytes


class RefusedUploadError(UntrustedError):
    """An upload is its device's and is refused all the same: the device is told."""

    def __init__(self, reason: str, upload: Upload) -> None:
        super().__init__(reason)
        self.upload = upload


class Intake:
    """Opens uploads under one roster; counts what it refuses, by reason."""

    def __init__(self, identity: Identity, run: RunPlan) -> None:
        self._identity = identity
        self._run = run
        self.refused: Counter[str] = Counter()

    def open(self, device: str, transfer: Transfer, roster: Roster) -> Opened:
        """Return the upload that ``device`` sent.

        Args:
            device: the device in the topic, as the broker vouches for it.
            transfer: the reassembled bytes.
            roster: who belongs to the fleet now.

        Raises:
            ShoalError: unknown device, not sealed to us, forged, malformed, not finite, or above the plan's norm limit or
                sample count.
        """
        message, body = self._open(device, transfer, roster, UPLOAD_PURPOSE)
        upload = decode(message, Upload)
        self._check(upload, body, device)
        self._check_samples(upload)
        return Opened(upload, body, self._norm(upload, body), transfer.transfer_id, transfer.signed)

    def declined(self, device: str, transfer: Transfer, roster: Roster) -> Declined:
        """Return what ``device`` says instead of an upload; arguments are those of `open`.

        Raises:
            ShoalError: unknown device, not sealed to us, forged, malformed, or of another run.
        """
        decline = self._note(device, transfer, roster, DECLINE_PURPOSE, Decline)
        if decline.run_id != self._run.run_id:
            raise UntrustedError("a decline for another run")
        return Declined(device, decline.nonce, Obstacle(decline.obstacle))

    def reminder(self, device: str, transfer: Transfer, roster: Roster) -> Reminder:
        """Return the reminder that ``device`` sent, maybe of another run; arguments are those of `open`.

        Raises:
            ShoalError: unknown device, not sealed to us, forged or malformed.
        """
        return self._note(device, transfer, roster, REMINDER_PURPOSE, Reminder)

    def _note(self, device: str, transfer: Transfer, roster: Roster, purpose: str, kind: type[N]) -> N:
        message, body = self._open(device, transfer, roster, purpose)
        if body:
            raise WireError(f"{len(body)} bytes behind a {purpose}")
        note = decode(message, kind)
        if (note.fleet, note.device) != (self._run.fleet, device):
            raise UntrustedError(f"a {purpose} by {note.device!r} of {note.fleet!r} on {device}'s topic")
        return note

    def _open(self, device: str, transfer: Transfer, roster: Roster, purpose: str) -> tuple[memoryview, memoryview]:
        member = roster.device(device)
        if member is None:
            raise UntrustedError(f"{device} is not in the roster", hint=UNKNOWN_HINT)
        head, at = read_head(transfer.payload)
        if (head.fleet, head.purpose, head.sender) != (roster.fleet, purpose, device):
            raise UntrustedError(f"a sealed {head.purpose} of {head.sender!r} to {head.fleet!r} on {device}'s topic")
        return open_from_member(self._identity, transfer.payload, head, at, member.sign_key, transfer.signed)

    def _check(self, upload: Upload, body: memoryview, device: str) -> None:
        if (upload.fleet, upload.device) != (self._run.fleet, device):
            raise UntrustedError(f"an upload for {upload.fleet!r} by {upload.device!r}")
        if upload.run > self._run.run:
            # Not refused: that run's file may come back, and its device would not offer the upload again.
            raise UntrustedError(f"an upload for run {upload.run}, which is not served")
        if upload.recipient != self._identity.member.seal_key:
            raise UntrustedError("an upload for another aggregator")
        if len(body) != 4 * upload.length + upload.attached:
            raise WireError(f"{len(body)} bytes where {upload.length} coordinates and {upload.attached} were announced")

    def _check_samples(self, upload: Upload) -> None:
        most = self._run.max_samples
        if upload.samples > most:
            raise RefusedUploadError(f"{upload.samples} samples reported, above the plan's max_samples {most}", upload)

    def _norm(self, upload: Upload, body: memoryview) -> float:
        if not upload.length:
            return 0.0
        norm = norm_of(np.frombuffer(body, "<f4", upload.length))
        if not math.isfinite(norm):
            raise RefusedUploadError("the update holds NaN or infinities, or overflows", upload)
        if norm > self._run.norm_limit:
            limit = self._run.norm_limit
            raise RefusedUploadError(f"the update's norm {norm:.3g} is above the plan's limit {limit:.3g}", upload)
        return norm

    def count(self, error: ShoalError) -> None:
        """Count a refusal under its class name."""
        self.refused[type(error).__name__] += 1
