"""Seals on everything that travels: HPKE to one member, AES-256-GCM under a key that a group shares; both signed.

Layout of both, byte exact in docs/wire-format.md: ``magic (4) | u32 head length | head | ...`` where head is an
encoded `Sealed` message in clear. To the remote side every failure is the same `SealError`; the cause stays in
``__cause__`` for the local log.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Final, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from crypto.seal.identity import SIGNATURE_BYTES, Identity, verify
from wire.codec import decode, encode
from wire.errors import ShoalError, UntrustedError, WireError
from wire.messages import Sealed

SUITE: Final = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
MEMBER_MAGIC: Final = b"SHE1"
GROUP_MAGIC: Final = b"SHG1"
NONCE_BYTES: Final = 12
MAX_HEAD_BYTES: Final = 1024
KEY_BYTES: Final = 32


class SealError(UntrustedError):
    """A sealed message could not be opened; says nothing about why."""

    def __init__(self) -> None:
        super().__init__("a sealed message was refused")


@dataclass(frozen=True, slots=True, repr=False)
class GroupKey:
    """A key that a group shares: ``broadcast`` (devices and aggregator) or ``content`` (devices and owner).

    Attributes:
        secret: 32 bytes; the AEAD key is derived from it for one fleet and label.
    """

    fleet: str
    label: str
    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise WireError(f"a {self.label} key of {len(self.secret)} bytes")

    def aead(self) -> AESGCM:
        """Return the cipher: HKDF-SHA256(secret; length-prefixed fleet and label)."""
        info = b"shoal/v1/group-key" + b"".join(struct.pack("<I", len(p)) + p for p in _parts(self.fleet, self.label))
        return AESGCM(HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(self.secret))

    def topic_label(self, run_id: bytes, model: int) -> str:
        """Return the opaque topic name of a model: 16 hex digits that only the group can tell apart."""
        info = b"shoal/v1/label" + run_id + struct.pack("<H", model)
        return HKDF(hashes.SHA256(), 8, None, info).derive(self.secret).hex()

    def __repr__(self) -> str:
        return f"GroupKey({self.fleet!r}, {self.label!r}, <secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys can't be pickled")


def _parts(*texts: str) -> list[bytes]:
    return [t.encode() for t in texts]


def _framed(magic: bytes, head: Sealed) -> bytes:
    raw = encode(head)
    return magic + struct.pack("<I", len(raw)) + raw


def read_head(data: bytes | memoryview) -> tuple[Sealed, int]:
    """Return the clear head of a sealed message and where the sealed part begins. It is not authenticated yet.

    Raises:
        WireError: the bytes are not a sealed message.
    """
    view = memoryview(data)
    if len(view) < 8 or bytes(view[:4]) not in (MEMBER_MAGIC, GROUP_MAGIC):
        raise WireError("not a sealed message")
    (length,) = struct.unpack("<I", view[4:8])
    if length > MAX_HEAD_BYTES or 8 + length > len(view):
        raise WireError(f"a sealed message with a head of {length} bytes")
    return decode(view[8 : 8 + length], Sealed), 8 + length


def seal_to_member(
    identity: Identity, recipient_seal_key: bytes, head: Sealed, signed: bytes, body: bytes = b""
) -> bytes:
    """Return ``signed | body`` sealed to one member, with ``signed`` and the head signed by ``identity``.

    A large ``body`` is bound by a digest that the caller puts into ``signed``: signing 30 microseconds of digest
    beats signing megabytes.
    """
    framed = _framed(MEMBER_MAGIC, head)
    signature = identity.sign(head.purpose, framed + signed)
    plain = b"".join((signature, struct.pack("<I", len(signed)), signed, body))
    return framed + SUITE.encrypt(plain, X25519PublicKey.from_public_bytes(recipient_seal_key), info=framed)


def open_from_member(
    identity: Identity, data: bytes | memoryview, head: Sealed, at: int, sender_sign_key: bytes
) -> tuple[memoryview, memoryview]:
    """Return (signed, body) of what `seal_to_member` made; ``head`` and ``at`` come from `read_head`.

    Raises:
        SealError: not sealed to us, altered, or not signed by the sender.
    """
    view = memoryview(data)
    framed = bytes(view[:at])
    try:
        if framed[:4] != MEMBER_MAGIC:
            raise WireError("sealed to a group")
        plain = memoryview(SUITE.decrypt(view[at:], identity.seal_private, info=framed))
        (length,) = struct.unpack("<I", plain[SIGNATURE_BYTES : SIGNATURE_BYTES + 4])
        start = SIGNATURE_BYTES + 4
        if length > len(plain) - start:
            raise WireError("the signed part is longer than the message")
        signed = plain[start : start + length]
        verify(sender_sign_key, head.purpose, framed + bytes(signed), plain[:SIGNATURE_BYTES])
    except (InvalidTag, ValueError, struct.error, ShoalError) as error:
        raise SealError from error
    return signed, plain[start + length :]


def seal_to_group(identity: Identity, key: GroupKey, head: Sealed, plain: bytes) -> bytes:
    """Return ``plain`` sealed under the group's key and signed, head and ciphertext, by ``identity``."""
    framed = _framed(GROUP_MAGIC, head)
    nonce = os.urandom(NONCE_BYTES)
    sealed = key.aead().encrypt(nonce, plain, framed)
    signature = identity.sign(head.purpose, b"".join((framed, nonce, sealed)))
    return b"".join((framed, signature, nonce, sealed))


def open_from_group(
    key: GroupKey, data: bytes | memoryview, head: Sealed, at: int, sender_sign_key: bytes
) -> memoryview:
    """Return the plaintext of what `seal_to_group` made, after its signature and its seal hold.

    Raises:
        SealError: altered, under another key, or not signed by the sender.
    """
    view = memoryview(data)
    body = at + SIGNATURE_BYTES
    try:
        if bytes(view[:4]) != GROUP_MAGIC:
            raise WireError("sealed to a member")
        signed = b"".join((view[:at], view[body:]))
        verify(sender_sign_key, head.purpose, signed, view[at:body])
        return memoryview(
            key.aead().decrypt(bytes(view[body : body + NONCE_BYTES]), view[body + NONCE_BYTES :], view[:at])
        )
    except (InvalidTag, ValueError, ShoalError) as error:
        raise SealError from error
