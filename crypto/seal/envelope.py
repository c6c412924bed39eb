"""Signed envelopes for messages: HPKE to one member, or AES-256-GCM under a key that a group shares.

Both begin with ``magic (4) | u32 head length | head``, where head is an encoded `Sealed` message in clear;
docs/wire-format.md has the exact bytes.

A receiver opens an envelope in three steps, of which the second is the caller's:

1. `read_head` parses the head. Nothing is authentic yet.
2. The caller compares fleet, purpose and sender with those that belong on the topic, and looks up the sender's key. If it knows
   the whole head, `read_expected` does the first two steps.
3. `open_from_member` or `open_from_group` verifies the signature, which covers the head, and only then decrypts.

Step 3 proves who sealed the envelope, not that it belongs here: without step 2, a valid message for another purpose would be
accepted. Every failure of step 3 is the same `SealError`, so that a sender learns nothing; the reason is in ``__cause__`` for
the local log.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from crypto.seal.identity import SIGNATURE_BYTES, Identity, verify_digest
from shoal.digests import Sha256
from shoal.errors import ShoalError, UntrustedError, WireError
from shoal.protocol.chunking import TRANSFER_ID_BYTES, Fingerprint
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import Sealed

SUITE: Final = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
MEMBER_MAGIC: Final = b"SHE1"
"""First bytes of an envelope to one member."""

GROUP_MAGIC: Final = b"SHG1"
"""First bytes of an envelope to a group."""

PREFIX_BYTES: Final = 8
"""Magic and length of the head, which precede it."""

MAX_HEAD_BYTES: Final = 1024
NONCE_BYTES: Final = 12
KEY_BYTES: Final = 32
BLOCK_BYTES: Final = 1 << 20
"""Bytes that are sealed at a time under a group's key."""
NOT_AUTHENTIC: Final = "it was sealed under another key, or altered"


class SealError(UntrustedError):
    """A sealed message could not be opened; the message does not say why."""

    def __init__(self) -> None:
        super().__init__("a sealed message was refused")


@dataclass(frozen=True, slots=True, repr=False)
class GroupKey:
    """A key that a group shares, such as the broadcast key (devices and aggregator) or a round's content key (devices and owner).

    Attributes:
        fleet: name of the fleet.
        label: the use of the key: ``broadcast``, ``content`` or ``enrolment``.
        secret: 32 bytes; the AEAD key is derived from it for one fleet and label.
    """

    fleet: str
    label: str
    secret: bytes
    _derived: list[bytes] = field(default_factory=list, init=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise WireError(f"a {self.label} key of {len(self.secret)} bytes")

    def cipher_key(self) -> bytes:
        """Return the cipher's key: HKDF-SHA256(secret; length-prefixed fleet and label). It is derived once."""
        if not self._derived:
            info = b"shoal/v1/group-key" + _length_prefixed(self.fleet, self.label)
            self._derived.append(HKDF(hashes.SHA256(), KEY_BYTES, None, info).derive(self.secret))
        return self._derived[0]

    def aead(self) -> AESGCM:
        """Return the cipher under `cipher_key`."""
        return AESGCM(self.cipher_key())

    def topic_label(self, run_id: bytes, model: int) -> str:
        """Return the opaque topic name of a model: 16 hex digits that only the group can map to the model."""
        info = b"shoal/v1/label" + run_id + struct.pack("<H", model)
        return HKDF(hashes.SHA256(), 8, None, info).derive(self.secret).hex()

    def __repr__(self) -> str:
        return f"GroupKey({self.fleet!r}, {self.label!r}, <secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys can't be pickled")


def _length_prefixed(*texts: str) -> bytes:
    """Join texts unambiguously: without the lengths, ("ab", "c") and ("a", "bc") would give the same bytes."""
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(part)) + part for part in encoded)


def _framed(magic: bytes, head: Sealed) -> bytes:
    raw = encode(head)
    return magic + struct.pack("<I", len(raw)) + raw


def read_head(data: bytes | memoryview) -> tuple[Sealed, int]:
    """Return the clear head of a sealed message, NOT authenticated yet, and the offset of the sealed part.

    Raises:
        WireError: the bytes are not a sealed message.
    """
    view = memoryview(data)
    if len(view) < PREFIX_BYTES or bytes(view[:4]) not in (MEMBER_MAGIC, GROUP_MAGIC):
        raise WireError("not a sealed message")
    (length,) = struct.unpack("<I", view[4:PREFIX_BYTES])
    head_end = PREFIX_BYTES + length
    if length > MAX_HEAD_BYTES or head_end > len(view):
        raise WireError(
            f"a head of {length} bytes in a sealed message of {len(view)}: at most {MAX_HEAD_BYTES} are allowed"
        )
    return decode(view[PREFIX_BYTES:head_end], Sealed), head_end


def read_expected(data: bytes | memoryview, wanted: Sealed, what: str) -> tuple[Sealed, int]:
    """Return what `read_head` does, if the head is ``wanted``; ``what`` names in an error the message that belongs here.

    Raises:
        UntrustedError: it is the head of another message.
        WireError: the bytes are not a sealed message.
    """
    head, at = read_head(data)
    if head != wanted:
        raise UntrustedError(f"a {head.purpose} of {head.sender!r} where {what} belongs")
    return head, at


@dataclass(frozen=True, slots=True)
class SealedMessage:
    """A sealed payload, with its transfer id and the digest that its signature covers, which sealing computes in one pass."""

    payload: bytes
    transfer_id: bytes
    signed: bytes


def seal_message_to_member(
    identity: Identity,
    recipient_seal_key: bytes,
    head: Sealed,
    message: bytes,
    body: bytes | memoryview | list[bytes | memoryview] = b"",
) -> SealedMessage:
    """Seal ``message`` and ``body`` to one member and sign them as ``identity``.

    The signature covers the digest of head and ciphertext and ends the payload: it can be checked before anything is
    decrypted, and shares a pass of SHA-256 with the transfer id. The head, which names the sender, is bound into the seal, so
    that another party can't sign the ciphertext as its own.

    A body may come in pieces, a list that is emptied: large ones are freed before the ciphertext is made.
    """
    framed, pieces = _framed(MEMBER_MAGIC, head), body if isinstance(body, list) else [body]
    recipient = X25519PublicKey.from_public_bytes(recipient_seal_key)
    # The body first: a vector at offset 0 is aligned, so that the receiver can use it without a copy.
    plain = b"".join((*pieces, message, struct.pack("<I", len(message))))
    pieces.clear()
    sealed = SUITE.encrypt(plain, recipient, info=framed)
    del plain
    return _signed(identity, head.purpose, (framed, sealed))


def seal_to_member(
    identity: Identity, recipient_seal_key: bytes, head: Sealed, message: bytes, body: bytes = b""
) -> bytes:
    """Return the payload of `seal_message_to_member`."""
    return seal_message_to_member(identity, recipient_seal_key, head, message, body).payload


def open_from_member(
    identity: Identity,
    data: bytes | memoryview,
    head: Sealed,
    at: int,
    sender_sign_key: bytes,
    digest: bytes | None = None,
    *,
    private: X25519PrivateKey | None = None,
) -> tuple[memoryview, memoryview]:
    """Check and open a payload of `seal_message_to_member`; return (message, body).

    Args:
        identity: the recipient.
        data: the payload.
        head: its head, from `read_head`.
        at: offset of the sealed part, from `read_head`.
        sender_sign_key: 32 bytes, Ed25519, of the member that head names.
        digest: `Fingerprint.signed` of the payload, if it is known already.
        private: the receiving key that the payload is sealed to; None if it is sealed to the identity's seal key.

    Raises:
        SealError: the payload is not sealed to ``identity``, was altered, or is not signed by the sender.
    """
    view = memoryview(data)
    try:
        if bytes(view[:4]) != MEMBER_MAGIC:
            raise WireError("it is sealed to a group, not to a member")
        # The signature comes first, so that only bytes of a known sender are ever decrypted.
        _check_signature(view, head.purpose, sender_sign_key, digest)
        plain = memoryview(SUITE.decrypt(view[at:-SIGNATURE_BYTES], private or identity.seal_private, info=view[:at]))
        (length,) = struct.unpack("<I", plain[-4:])
        message_end = len(plain) - 4
        if length > message_end:
            raise WireError(f"a message of {length} bytes in a plaintext of {len(plain)}")
    except InvalidTag:
        # InvalidTag has no text, and the log shows the text of the cause.
        raise SealError from WireError(NOT_AUTHENTIC)
    except (ValueError, struct.error, ShoalError) as error:
        raise SealError from error
    message_begin = message_end - length
    return plain[message_begin:message_end], plain[:message_begin]


def seal_message_to_group(
    identity: Identity,
    key: GroupKey,
    head: Sealed,
    *plain: bytes | memoryview,
    write: Callable[[bytes], object] | None = None,
) -> SealedMessage:
    """Seal the joined pieces of ``plain`` under the group's key, and sign head and ciphertext as ``identity``.

    They are sealed by blocks. With ``write`` each block goes there, and the returned payload is empty.
    """
    return _signed(identity, head.purpose, _sealed_blocks(key, head, plain), write)


def _sealed_blocks(key: GroupKey, head: Sealed, plain: Iterable[bytes | memoryview]) -> Iterable[bytes]:
    """Yield an envelope to a group, without its signature, in pieces."""
    # Random nonces are safe for 2^32 messages under one key (NIST SP 800-38D), far more than a fleet sends.
    framed, nonce = _framed(GROUP_MAGIC, head), os.urandom(NONCE_BYTES)
    cipher = Cipher(algorithms.AES(key.cipher_key()), modes.GCM(nonce)).encryptor()
    cipher.authenticate_additional_data(framed)
    yield from (framed, nonce)
    for piece in plain:
        view = memoryview(piece).cast("B")
        yield from (cipher.update(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))
    yield cipher.finalize()
    yield cipher.tag


def seal_to_group(identity: Identity, key: GroupKey, head: Sealed, plain: bytes) -> bytes:
    """Return the payload of `seal_message_to_group`."""
    return seal_message_to_group(identity, key, head, plain).payload


def open_from_group(
    key: GroupKey, data: bytes | memoryview, head: Sealed, at: int, sender_sign_key: bytes, digest: bytes | None = None
) -> memoryview:
    """Check and open a payload of `seal_message_to_group`; return the plaintext.

    Arguments after ``key`` are those of `open_from_member`.

    Raises:
        SealError: the payload was altered, is under another key, or is not signed by the sender.
    """
    try:
        _check_signature(memoryview(data), head.purpose, sender_sign_key, digest)
    except ShoalError as error:
        raise SealError from error
    return peek_from_group(key, data, at)


def peek_from_group(key: GroupKey, data: bytes | memoryview, at: int) -> memoryview:
    """Return the plaintext WITHOUT checking who of the group has sealed it: check `is_from` before it is used.

    Raises:
        SealError: the payload was altered, or is under another key.
    """
    view = memoryview(data)
    try:
        if bytes(view[:4]) != GROUP_MAGIC:
            raise WireError("it is sealed to a member, not to a group")
        nonce, sealed = view[at : at + NONCE_BYTES], view[at + NONCE_BYTES : -SIGNATURE_BYTES]
        return memoryview(key.aead().decrypt(bytes(nonce), sealed, view[:at]))
    except InvalidTag:
        raise SealError from WireError(NOT_AUTHENTIC)
    except (ValueError, ShoalError) as error:
        raise SealError from error


def is_from(data: bytes | memoryview, head: Sealed, sender_sign_key: bytes, digest: bytes | None = None) -> bool:
    """Return whether the sender signed a sealed message, without opening it; arguments are those of `open_from_member`."""
    try:
        _check_signature(memoryview(data), head.purpose, sender_sign_key, digest)
    except ShoalError:
        return False
    return True


def _signed(
    identity: Identity, purpose: str, parts: Iterable[bytes], write: Callable[[bytes], object] | None = None
) -> SealedMessage:
    """Return ``parts`` and their signature as one payload, which is empty if ``write`` takes them one by one."""
    payload, digest = io.BytesIO(), Sha256()
    write = write or payload.write
    for part in parts:
        digest.update(part)
        write(part)
    signed = digest.digest()
    signature = identity.sign_digest(purpose, signed)
    # The transfer id is the digest of the whole payload; going on from the signed digest spares a second pass.
    digest.update(signature)
    write(signature)
    return SealedMessage(payload.getvalue(), digest.digest()[:TRANSFER_ID_BYTES], signed)


def _check_signature(view: memoryview, purpose: str, sender_sign_key: bytes, digest: bytes | None) -> None:
    if len(view) <= SIGNATURE_BYTES:
        raise WireError(f"{len(view)} bytes are too short for a signature")
    known = Fingerprint.of(view).signed if digest is None else digest
    verify_digest(sender_sign_key, purpose, known, view[-SIGNATURE_BYTES:])
