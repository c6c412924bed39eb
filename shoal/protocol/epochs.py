"""What travels at a rollover: from the masked models of one mask epoch to the origins of the next.

One device folds every model into a new origin and seals the origins, with the task, under the devices' content key.
The others compare them with their own and sign a `Checkpoint`, which names what was sealed. More than half of the
roster's signatures make a `Certificate`; with the sealed bytes it is all that anybody needs to go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, ArrayU32, Fixed16, Fixed32, Fixed64, message
from shoal.protocol.documents import require_name

UNSIGNED: Final = bytes(64)
"""Stands for the signature of a device whose own fold differs."""


@message(30)
@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What devices sign of a new mask epoch.

    Attributes:
        round: the round after which it begins.
        epoch: the mask epoch that ends; next_epoch: the one that begins.
        generation: roster sequence at which the secrets of the next epoch were drawn.
        key_id: names the next epoch's mask key.
        origins: models that were folded.
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
    """Attached to the upload of the device that folded.

    ``carried`` vectors, (d,) float32 little-endian under the next key, and the sealed origins follow.
    """

    checkpoint: Checkpoint
    carried: U16
    sealed: U32


@message(32)
@dataclass(frozen=True, slots=True)
class Endorsement:
    """Attached to the upload of a device whose own fold is the same; its updates of these rounds follow, masked anew.

    Attributes:
        signature: by the device's Ed25519 key over the checkpoint; all zero where the fold differs from its own.
        renewed: rounds of its own updates, (d,) float32 little-endian each, that follow under the next key.
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
    """A checkpoint that more than half of the roster signed; ``roster`` is that roster as the owner signed it."""

    checkpoint: Checkpoint
    roster: bytes
    signatures: tuple[SignedBy, ...]


@message(35)
@dataclass(frozen=True, slots=True)
class Epoch:
    """What is retained for the fleet as long as a mask epoch lasts: its certificate and the sealed origins."""

    certificate: Certificate
    sealed: bytes


@message(36)
@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """In front of what a checkpoint seals: the task's bytes and (origins, length) float32 little-endian follow."""

    fleet: str
    run_id: Fixed16
    next_epoch: U32
    task: U32
    origins: U16
    length: U32
