"""The private coordinates of a run's models: the device's own values, which are trained with every model and never sent.

A task may have private parameters (FedPer: Arivazhagan et al., 2019). Devices upload, mask and average the first d coordinates of
a model alone; the last p are one vector on each device, whichever of the fleet's models it trains.

``models/private.bin`` holds the values before and after the last round in which the device trained. A round that is worked on
again, after a crash or for a new announcement of the same round, begins with the values before it, so that each round trains
them once. The values are durable before the round's upload is.

Example: a device is killed in round 7 after its values are stored and before its upload is. It starts, trains round 7 again from
the values after round 6, and stores the same bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from edge_client.models.store import FOLDER, checked_content
from shoal.digests import sha256
from shoal.errors import IntegrityError, TaskError
from shoal.protocol.codec import U32, Fixed16, encode, message
from shoal.util.files import private_directory, read_if_there, sync_directory, write_atomic, write_failed

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")
PRIVATE_FILE: Final = "private.bin"


@message(81)
@dataclass(frozen=True, slots=True)
class PrivateFile:
    """The head of private.bin; the values before and after ``round``, (length,) float32 each, and the SHA-256 of all follow."""

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
        directory: the device's.
        run_id: the run.
        initial: the task's initial values, (p,) float32; p may be 0, and then nothing is read or written.
    """

    def __init__(self, directory: Path, run_id: bytes, initial: Float32Vector) -> None:
        self._directory = directory
        self._run_id = run_id
        self._round = 0
        self._before = self._after = initial
        if len(initial):
            self._load()

    @property
    def newest(self) -> Float32Vector:
        """The values after the last round in which the device trained; the initial ones before the first. Shape (p,)."""
        return self._after

    def at(self, round_: int) -> Float32Vector:
        """Return the values with which the work of a round begins, (p,) float32."""
        return self._before if self._round == round_ else self._after

    def keep(self, round_: int, trained: Float32Vector) -> None:
        """Make the values (p,) float32 durable that a round's training has ended with.

        Raises:
            ConfigError: the file can't be written; the values from before the round stay.
        """
        if not len(trained):
            return
        before = self.at(round_)
        head = encode(PrivateFile(self._run_id, round_, len(trained)))
        pieces = (head, before.astype("<f4").tobytes(), trained.astype("<f4").tobytes())
        folder = private_directory(self._directory / FOLDER)
        write_atomic(folder / PRIVATE_FILE, *pieces, sha256(*pieces))
        self._round, self._before, self._after = round_, before, trained

    def _load(self) -> None:
        path = self._directory / FOLDER / PRIVATE_FILE
        try:
            found = stored_values(path, self._run_id, len(self._after))
        except IntegrityError as error:
            LOG.warning("private values are lost", extra={"kv": {"reason": error, "hint": error.hint}})
            return
        if found is not None:
            self._round, self._before, self._after = found


def erase(directory: Path) -> None:
    """Remove the private values of an earlier run from a device's directory.

    Raises:
        ConfigError: the file can't be removed.
    """
    path = directory / FOLDER / PRIVATE_FILE
    try:
        if path.exists():
            path.unlink()
            sync_directory(path.parent)
    except OSError as error:
        raise write_failed(path, error) from error


def stored_values(path: Path, run_id: bytes, length: int) -> tuple[int, Float32Vector, Float32Vector] | None:
    """Return round and values before and after it; None if the file is missing or of another run.

    Raises:
        IntegrityError: the file is damaged.
    """
    data = read_if_there(path)
    if data is None:
        return None
    hint = "they begin with the task's initial values again"
    head, body = checked_content(path, data, PrivateFile, hint)
    if head.run_id != run_id:
        return None
    if head.length != length or len(body) != 8 * length:
        raise IntegrityError(f"{path} holds {len(body)} bytes where twice {length} coordinates belong", hint=hint)
    values = np.frombuffer(body, "<f4").astype(np.float32).reshape(2, length)
    values.flags.writeable = False
    return head.round, values[0], values[1]
