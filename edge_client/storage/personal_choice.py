"""The file of a device's personal choice for one finished run: its figures, and the chosen model if the device trained it.

One file has all of it, so that a power cut, or a second program that chooses again at the same time, leaves one choice whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shoal.digests import sha256
from shoal.errors import IntegrityError
from shoal.protocol.codec import U8, U16, U32, U64, Fixed16, decode_prefix, encode, message
from shoal.types import DIGEST_BYTES
from shoal.util.times import second

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.types import Float32Vector

CHOICE_VERSION: Final = 1
_CLUSTER: Final = "cluster"


@message(79)
@dataclass(frozen=True, slots=True)
class CandidateFit:
    """A candidate's mean loss on the samples that were compared; None if it is not a finite number."""

    name: str
    loss: float | None


@message(80)
@dataclass(frozen=True, slots=True, kw_only=True)
class PersonalChoice:
    """The model that a device chose after a run.

    Attributes:
        version: `CHOICE_VERSION`.
        run_id: the run.
        choice: name of the chosen candidate; see `edge_client.learning.personal`.
        by_hand: whether a person went back to the cluster's model, whatever the figures say.
        fits: the candidates that were compared, in order.
        samples, folds: see `edge_client.learning.finish.Chosen`.
        took_s: seconds that the finish took.
        made_at_s: unix seconds by the device's clock.
        length: coordinates of the model that follows, float32 little-endian; 0 if the choice is one of the run's own models.
    """

    version: U16
    run_id: Fixed16
    choice: str
    by_hand: bool
    fits: tuple[CandidateFit, ...]
    samples: U32
    folds: U8
    took_s: float
    made_at_s: U64
    length: U32

    def of_cluster(self) -> PersonalChoice:
        """Return the choice after a person has selected the cluster's model; the figures stay."""
        return replace(self, choice=_CLUSTER, by_hand=True, length=0)

    def document(self) -> dict[str, Any]:
        """Return the figures for JSON output."""
        return {
            "choice": self.choice,
            "by_hand": self.by_hand,
            "losses": {fit.name: fit.loss for fit in self.fits},
            "samples": self.samples,
            "folds": self.folds,
            "took_s": round(self.took_s, 3),
            "made_at": second(self.made_at_s),
        }


def pack(choice: PersonalChoice, theta: Float32Vector | None) -> bytes:
    """Return the bytes of a choice's file; ``theta`` (d,) float32 is None if ``choice.length`` is 0."""
    body = b""
    if theta is not None:
        import numpy as np

        body = np.ascontiguousarray(theta, "<f4").tobytes()
    data = encode(choice) + body
    return data + sha256(data)


def unpack(data: bytes, path: Path) -> tuple[PersonalChoice, memoryview]:
    """Return a choice and the bytes of its model; ``path`` is for error messages.

    Raises:
        IntegrityError: the data are damaged, or of another version.
    """
    hint = "choose again with: shoal-edge personalise, or remove the file"
    head = memoryview(data)[:-DIGEST_BYTES]
    if sha256(head) != data[-DIGEST_BYTES:]:
        raise IntegrityError(f"{path} is damaged", hint=hint)
    choice, body = decode_prefix(head, PersonalChoice)
    if choice.version != CHOICE_VERSION:
        raise IntegrityError(f"{path} has version {choice.version}, not {CHOICE_VERSION}", hint=hint)
    if len(body) != 4 * choice.length:
        raise IntegrityError(f"{path} holds {len(body)} bytes where {choice.length} coordinates belong", hint=hint)
    return choice, body
