"""The private coordinates of a run's models: the device's own values, which are trained with every model and never sent.

A task may have private parameters (FedPer: Arivazhagan et al., 2019). Devices upload, mask and average the first d coordinates of
a model alone; the last p are one vector on each device, whichever of the fleet's models it trains.

The values before and after the last round in which the device trained are stored with that round's upload, by the same write
(`edge_client.storage.pending_upload`). A round that is worked on again, after a crash or for a new announcement, begins with the
values before it, so that each round trains them once.

Example: a device is killed in round 7 before its upload is stored. It starts, and trains round 7 again from the values after
round 6. If it is killed after that, it has both, and sends the same upload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.digests import before_digest, sha256
from shoal.errors import IntegrityError, TaskError
from shoal.protocol.codec import U32, Fixed16, decode_prefix, encode, message

if TYPE_CHECKING:
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector


@message(81)
@dataclass(frozen=True, slots=True)
class PrivateFile:
    """The head of stored values; those before and after ``round``, (length,) float32 each, and the SHA-256 of all follow."""

    run_id: Fixed16
    round: U32
    length: U32


def joined(theta: Float32Vector, private: Float32Vector) -> Float32Vector:
    """Return a whole model (d + p,) from its federated coordinates (d,) and private ones (p,), float32.

    Without private coordinates it is ``theta`` itself, not a copy.
    """
    return np.concatenate((theta, private)) if len(private) else theta


def initial_values(bundle: TaskBundle) -> Float32Vector:
    """Return the initial values of a task's private coordinates, (p,) float32, read-only.

    Raises:
        TaskError: they are not finite.
    """
    values = np.frombuffer(bundle.private, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise TaskError("the task's initial values of private parameters are not finite", hint="compile the task again")
    values.flags.writeable = False
    return values


class PrivateValues:
    """The private coordinates of one run on one device.

    Args:
        run_id: the run.
        initial: the task's initial values, (p,) float32; p may be 0.
        stored: what `to_bytes` returned before a restart; that of another run does not count.
    """

    def __init__(self, run_id: bytes, initial: Float32Vector, stored: bytes = b"") -> None:
        self._run_id = run_id
        self._round = 0
        self._before = self._after = initial
        found = parse_values(stored, run_id, len(initial)) if len(initial) and stored else None
        if found is not None:
            self._round, self._before, self._after = found

    @property
    def newest(self) -> Float32Vector:
        """The values after the last round in which the device trained; the initial ones before the first. Shape (p,)."""
        return self._after

    def at(self, round_: int) -> Float32Vector:
        """Return the values with which the work of a round begins, (p,) float32."""
        return self._before if self._round == round_ else self._after

    def keep(self, round_: int, trained: Float32Vector) -> None:
        """Take the values (p,) float32 that a round's training has ended with."""
        self._round, self._before, self._after = round_, self.at(round_), trained

    def to_bytes(self) -> bytes:
        """Return the values as they are stored; empty if there are none, or none that are trained."""
        if not self._round or not len(self._after):
            return b""
        head = encode(PrivateFile(self._run_id, self._round, len(self._after)))
        pieces = (head, self._before.astype("<f4").tobytes(), self._after.astype("<f4").tobytes())
        return b"".join((*pieces, sha256(*pieces)))


def parse_values(data: bytes, run_id: bytes, length: int) -> tuple[int, Float32Vector, Float32Vector] | None:
    """Return round and values before and after it; None if they are of another run.

    Raises:
        IntegrityError: they are damaged.
    """
    content = before_digest(data)
    if content is None:
        raise IntegrityError("the private values stored with the last upload are damaged")
    head, body = decode_prefix(content, PrivateFile)
    if head.run_id != run_id:
        return None
    if head.length != length or len(body) != 8 * length:
        raise IntegrityError(f"{len(body)} bytes of private values where twice {length} coordinates belong")
    values = np.frombuffer(body, "<f4").astype(np.float32).reshape(2, length)
    values.flags.writeable = False
    return head.round, values[0], values[1]
