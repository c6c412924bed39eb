"""A device's state on disk, in its private directory, across restarts and power cuts.

- ``pending.0.bin`` and ``pending.1.bin``: the replay watermark and the sealed upload of its round, see `pending_upload`.
- ``run.package``: the run that the device follows, with figures of its start in place of the origins.
- ``refused.package``: a newer run that it can't do, without origins; `shoal-edge doctor` compares the samples with its task.
- ``model.bin``: the newest model of its cluster.
- ``status.json``: figures for people. ``trouble.json``: the error that stopped the device because its disk failed.
- ``run.told``: the id of the last run that was reported as finished.
- ``on-model.json``: the last end of the operator's program for new models, see `edge_client.answers.model_in_use`.
- ``model.onnx``, ``model.json`` and ``in-use/``: the model in use, for other programs, see there.
- ``finished/``: the models of the last finished runs, see `finished_models`.
- ``rest``: the seconds since the end of the last run, see `Rest`.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edge_client.storage.pending_upload import PendingUploadFiles
from shoal.errors import IntegrityError, ShoalError, reason_of
from shoal.protocol.codec import U16, U32, Fixed16, decode_prefix, encode, message
from shoal.util.files import read_if_there, read_private, write_atomic

if TYPE_CHECKING:
    from shoal.types import Float32Vector

RUN_FILE: Final = "run.package"
REFUSED_FILE: Final = "refused.package"
MODEL_FILE: Final = "model.bin"
STATUS_FILE: Final = "status.json"
TOLD_FILE: Final = "run.told"
TROUBLE_FILE: Final = "trouble.json"
ON_MODEL_FILE: Final = "on-model.json"
TROUBLE_BYTES: Final = 8192
"""Length of the file in which a device records the error that stopped it. The file has this length from the first start on,
because on a full disk only existing bytes can be overwritten."""
TROUBLE_TEXT_CHARS: Final = 400
"""Most characters of each text in that file. JSON takes at most 6 bytes for one, so that two texts fit."""


@message(65)
@dataclass(frozen=True, slots=True)
class ModelFile:
    """The head of model.bin; theta, (length,) float32 little-endian, follows."""

    run: U32
    run_id: Fixed16
    round: U32
    cluster: U16
    length: U32


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The model of the device's own cluster; theta has shape (d,), float32."""

    run: int
    run_id: bytes
    round: int
    cluster: int
    theta: Float32Vector


def model_bytes(model: OwnModel) -> tuple[bytes, memoryview]:
    """Return the head and body of a model file, without a copy of theta on little-endian machines."""
    import numpy as np

    head = encode(ModelFile(model.run, model.run_id, model.round, model.cluster, len(model.theta)))
    return head, np.ascontiguousarray(model.theta, "<f4").view(np.uint8).data


def parse_model(data: bytes, path: Path) -> OwnModel:
    """Decode the bytes of a model file; ``path`` is for error messages.

    Raises:
        IntegrityError: the data are damaged.
    """
    import numpy as np

    head, body = decode_prefix(data, ModelFile)
    if len(body) != 4 * head.length:
        raise IntegrityError(f"{path} holds {len(body)} bytes where {head.length} coordinates belong")
    theta = np.frombuffer(body, "<f4").astype(np.float32)
    return OwnModel(head.run, head.run_id, head.round, head.cluster, theta)


def _read_if_there(path: Path) -> bytes | None:
    """Return the bytes of a file, or None if it is missing: a running program may remove it at any moment."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def load_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file for people; None if the file is missing, damaged or holds anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class DeviceState:
    """The files of one device; ``pending`` are those of its upload."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pending = PendingUploadFiles(directory)

    def save_run(self, package: bytes) -> None:
        """Store the run package, and remove that of a run that the device could not do."""
        write_atomic(self.directory / RUN_FILE, package)
        (self.directory / REFUSED_FILE).unlink(missing_ok=True)

    def save_refused(self, package: bytes) -> None:
        """Store the package of a run that this device can't do."""
        if package != self.load_refused():
            write_atomic(self.directory / REFUSED_FILE, package)

    def load_refused(self) -> bytes | None:
        """Return the package of the run that this device can't do, or None if it can do the newest."""
        return _read_if_there(self.directory / REFUSED_FILE)

    def load_run(self) -> bytes | None:
        """Return the run package, or None if the device has never followed a run."""
        return _read_if_there(self.directory / RUN_FILE)

    def save_told(self, run_id: bytes) -> None:
        """Record, durably, that the end of this run has been reported."""
        write_atomic(self.directory / TOLD_FILE, run_id.hex().encode())

    def was_told(self, run_id: bytes) -> bool:
        """Whether the end of this run was reported before. Only the last such run is recorded: a device follows no older one."""
        return _read_if_there(self.directory / TOLD_FILE) == run_id.hex().encode()

    def save_model(self, model: OwnModel, *, durable: bool) -> None:
        """Store the model of the device's own cluster."""
        write_atomic(self.directory / MODEL_FILE, *model_bytes(model), durable=durable)

    def load_model(self) -> OwnModel:
        """Return the newest model.

        Raises:
            IntegrityError: there is none yet, or the file is damaged.
        """
        path = self.directory / MODEL_FILE
        if not path.exists():
            raise IntegrityError(
                f"{path} does not exist: this device has no model yet", hint="let it take part in a run"
            )
        return parse_model(read_private(path), path)

    def save_status(self, status: dict[str, Any]) -> None:
        """Write figures for people and other programs; the device itself does not depend on them."""
        write_atomic(self.directory / STATUS_FILE, json.dumps(status).encode(), durable=False)

    def touch_status(self) -> None:
        """Set the time of the status file: the device is alive. A failure is suppressed, as the time is for people only."""
        with suppress(OSError):
            os.utime(self.directory / STATUS_FILE)

    def alive_at_s(self) -> int | None:
        """Return the unix time at which the status file was written or touched last; None without one."""
        try:
            return int((self.directory / STATUS_FILE).stat().st_mtime)
        except OSError:
            return None

    def clear_trouble(self) -> None:
        """Clear the recorded error, and reserve the space to record the next one.

        Raises:
            StorageError: the disk is full or fails.
        """
        path = self.directory / TROUBLE_FILE
        if not path.exists() or path.stat().st_size != TROUBLE_BYTES:
            write_atomic(path, b" " * TROUBLE_BYTES)
        elif self.load_trouble() is not None:
            self._overwrite(path, b"")

    def save_trouble(self, error: ShoalError, at: str) -> None:
        """Record the error that stops the device, in place. Suppress a failure to write: the caller raises ``error`` anyway."""
        cut = TROUBLE_TEXT_CHARS
        note = {"error": reason_of(error)[:cut], "hint": error.hint[:cut], "at": at}
        with suppress(OSError):
            self._overwrite(self.directory / TROUBLE_FILE, json.dumps(note, ensure_ascii=False).encode())

    @staticmethod
    def _overwrite(path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(handle, data.ljust(TROUBLE_BYTES), 0)
            os.fdatasync(handle)
        finally:
            os.close(handle)

    def load_trouble(self) -> dict[str, str] | None:
        """Return the error that stopped the device if its disk was full or failed; None if not, or if it has started since."""
        value = load_json(self.directory / TROUBLE_FILE)
        return None if value is None else {n: str(value.get(n, "")) for n in ("error", "hint", "at")}

    def load_status(self) -> dict[str, Any] | None:
        """Return the last figures, or None."""
        return load_json(self.directory / STATUS_FILE)


REST_FILE: Final = "rest"
"""Seconds as a decimal number."""
SAVED_EVERY_S: Final = 600.0
"""Interval between two saves; a crash loses the time since the last one."""


class Rest:
    """Counts the seconds since the end of the last run, by which the device refuses one of a standing order that comes too early.

    There are infinitely many before the end of the first run. Only time while the program runs is counted, by the monotonic
    clock: a wrong clock can delay a run, and never hastens one.

    Args:
        directory: the device's.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / REST_FILE
        data = read_if_there(self._path)
        # A damaged file says nothing: the device has just ended a run, as far as it knows.
        self._before_s = math.inf if data is None else float(data) if data.isdigit() else 0.0
        self._saved_s = self._before_s
        self._since_s = math.nan

    def seconds(self, now_s: float) -> float:
        """Return the seconds counted; ``now_s`` is monotonic."""
        return self._before_s + (0.0 if math.isnan(self._since_s) else now_s - self._since_s)

    def begin(self, now_s: float) -> None:
        """Start anew, durably: a run has ended."""
        self._before_s, self._since_s = 0.0, now_s
        self._save(0.0, durable=True)

    def keep_up(self, now_s: float, *, closing: bool = False) -> None:
        """Count on from the first call, and save now and then, or at once when the program is ``closing``."""
        if math.isnan(self._since_s):
            self._since_s = now_s
        seconds = self.seconds(now_s)
        if seconds < math.inf and (closing or seconds - self._saved_s >= SAVED_EVERY_S):
            self._save(seconds, durable=False)

    def _save(self, seconds: float, *, durable: bool) -> None:
        write_atomic(self._path, str(int(seconds)).encode(), durable=durable)
        self._saved_s = seconds
