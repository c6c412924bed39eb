"""Messages of a rollover, which turns the masked models of one mask epoch into the origins of the next.

One device folds every model into a new origin and seals the origins, with the task, under the devices' content key.
The others compare them with their own folds and sign a `Checkpoint`, which contains the digest of the sealed bytes. The
signatures of more than half of the roster make a `Certificate`. With it and the sealed bytes a device can enter the new
mask epoch.

Example: in a roster of three, the device that folded uploads a `Proposal`, the aggregator retains it for the other two,
each of which uploads an `Endorsement`, and two signatures make the certificate in the retained `Epoch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, ArrayU32, Fixed16, Fixed32, Fixed64, message
from shoal.protocol.documents import require_name

UNSIGNED: Final = bytes(64)
"""In place of the signature of a device whose own fold differs."""


@message(30)
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The statement that devices sign to begin a new mask epoch.

    Attributes:
        round: the round after which the new epoch begins.
        epoch: the mask epoch that ends; next_epoch: the one that begins.
        generation: key version of the next epoch: the roster sequence at which its secrets were drawn.
        key_id: names the next epoch's mask key.
        origins: number of folded models.
        digest: SHA-256 of the sealed origins.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    epoch: U32
    next_epoch: U32
    generation: U32
    key_id: Fixed16
    origins: U16
    digest: Fixed32

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        if self.next_epoch <= self.epoch:
            raise WireError(f"mask epoch {self.next_epoch} after {self.epoch}")
        if not 1 <= self.origins <= limits.MAX_MODELS:
            raise WireError(f"a checkpoint of {self.origins} models")


@message(31)
@dataclass(frozen=True, slots=True)
class Proposal:
    """Attachment of the upload of the device that folded.

    It is followed by ``carried`` vectors, (d,) float32 little-endian each under the next key, and ``sealed`` bytes of sealed
    origins.
    """

    checkpoint: Checkpoint
    carried: U16
    sealed: U32


@message(32)
@dataclass(frozen=True, slots=True)
class Endorsement:
    """Attachment of the upload of a device that compared: its signature and its own updates under the next key.

    Attributes:
        signature: by the device's Ed25519 key over the checkpoint; all zero if its own fold differs.
        renewed: rounds of the updates that follow, (d,) float32 little-endian each.
    """

    signature: Fixed64
    renewed: ArrayU32


@message(33)
@dataclass(frozen=True, slots=True)
class SignedBy:
    """One device's signature of a checkpoint."""

    device: str
    signature: Fixed64

    def __post_init__(self) -> None:
        require_name(self.device, "device name")


@message(34)
@dataclass(frozen=True, slots=True)
class Certificate:
    """A checkpoint with the signatures of more than half of ``roster``, the roster as the owner signed it."""

    checkpoint: Checkpoint
    roster: bytes
    signatures: tuple[SignedBy, ...]


@message(35)
@dataclass(frozen=True, slots=True)
class Epoch:
    """Retained during a mask epoch: its certificate and the sealed origins."""

    certificate: Certificate
    sealed: bytes


@message(36)
@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Header of the sealed origins: ``task`` bytes of the task and (origins, length) float32 little-endian follow."""

    fleet: str
    run_id: Fixed16
    next_epoch: U32
    task: U32
    origins: U16
    length: U32
