"""What a device keeps across restarts and power cuts, in its private directory.

- ``pending.bin``: the high-water mark and the sealed upload of that round, written durably before the first byte is
sent, so that a restart sends the same bytes. - ``run.package``: the run that it follows; ``model.bin``: the newest
model of its own cluster; ``status.json``: figures for people.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from crypto.seal.replay import HighWater
from support.files import read_private, write_atomic
from wire.codec import U16, U32, Fixed16, decode_prefix, encode, message
from wire.errors import IntegrityError, ShoalError
from wire.frame import Fingerprint

if TYPE_CHECKING:
    from wire.types import Float32Vector

PENDING_FILE: Final = "pending.bin"
RUN_FILE: Final = "run.package"
MODEL_FILE: Final = "model.bin"
STATUS_FILE: Final = "status.json"
_PENDING_HINT: Final = "remove it only if the fleet is trusted: it guards against replayed announcements"


@message(64)
@dataclass(frozen=True, slots=True)
class Mark:
    """The head of pending.bin; the sealed upload follows. ``transfer`` is all zero where there is none."""

    roster: U32
    run: U32
    round: U32
    nonce: Fixed16
    transfer: Fixed16


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
class Pending:
    """What pending.bin holds."""

    mark: HighWater
    transfer: bytes
    sealed: bytes


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The model of the device's own cluster; theta has shape (d,), float32."""

    run: int
    run_id: bytes
    round: int
    cluster: int
    theta: Float32Vector


class DeviceState:
    """The files of one device."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save_pending(self, mark: HighWater, transfer: bytes, sealed: bytes, *, durable: bool = True) -> None:
        """Keep the mark and the upload of its round."""
        head = encode(Mark(mark.roster, mark.run, mark.round, mark.nonce.ljust(16, b"\0"), transfer.ljust(16, b"\0")))
        write_atomic(self.directory / PENDING_FILE, head, sealed, durable=durable)

    def load_pending(self) -> Pending:
        """Return what was kept; a device that never took part gets an empty mark.

        Raises:
            IntegrityError: the file is damaged.
        """
        path = self.directory / PENDING_FILE
        if not path.exists():
            return Pending(HighWater(), b"", b"")
        try:
            mark, rest = decode_prefix(read_private(path), Mark)
        except ShoalError as error:
            raise IntegrityError(
                f"{path} is damaged: {error}",
                hint=_PENDING_HINT,
            ) from error
        if len(rest) and Fingerprint.of(rest).transfer_id != mark.transfer:
            raise IntegrityError(f"{path} is damaged: the upload is not the one that it names", hint=_PENDING_HINT)
        return Pending(HighWater(mark.roster, mark.run, mark.round, mark.nonce), mark.transfer, bytes(rest))

    def save_run(self, package: bytes) -> None:
        """Keep the run package."""
        write_atomic(self.directory / RUN_FILE, package)

    def load_run(self) -> bytes | None:
        """Return the run package, or None where no run was ever followed."""
        path = self.directory / RUN_FILE
        return path.read_bytes() if path.exists() else None

    def save_model(self, model: OwnModel, *, durable: bool) -> None:
        """Keep the model of the device's own cluster."""
        head = encode(ModelFile(model.run, model.run_id, model.round, model.cluster, len(model.theta)))
        body = model.theta.astype("<f4", copy=False).tobytes()
        write_atomic(self.directory / MODEL_FILE, head + body, durable=durable)

    def load_model(self) -> OwnModel:
        """Return the newest model.

        Raises:
            IntegrityError: there is none yet, or the file is damaged.
        """
        import numpy as np

        path = self.directory / MODEL_FILE
        if not path.exists():
            raise IntegrityError(
                f"{path} does not exist: this device has no model yet", hint="let it take part in a run"
            )
        head, body = decode_prefix(read_private(path), ModelFile)
        if len(body) != 4 * head.length:
            raise IntegrityError(f"{path} holds {len(body)} bytes where {head.length} coordinates belong")
        theta = np.frombuffer(body, "<f4").astype(np.float32)
        return OwnModel(head.run, head.run_id, head.round, head.cluster, theta)

    def save_status(self, status: dict[str, Any]) -> None:
        """Publish figures for people and programs; nothing depends on them."""
        write_atomic(self.directory / STATUS_FILE, json.dumps(status).encode(), durable=False)

    def load_status(self) -> dict[str, Any] | None:
        """Return the last figures, or None."""
        path = self.directory / STATUS_FILE
        try:
            value: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        return value
