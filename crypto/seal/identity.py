"""Long-term keys of one party: Ed25519 to sign, X25519 to receive sealed messages.

`sign_document` and `open_document` are for documents that are signed but not encrypted: roster, run plan, card.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from shoal.digests import sha256
from shoal.errors import IntegrityError, UntrustedError, WireError
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Member
from shoal.types import check_name
from shoal.util.files import read_private, write_private

KEY_FILE_MAGIC: Final = b"shoal-identity-1\n"
SIGNATURE_BYTES: Final = 64
_DOMAIN: Final = b"shoal/v1/signature\x00"


@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """A party's private keys. Never printed or pickled; stored only in a file of mode 0600."""

    name: str
    sign_private: Ed25519PrivateKey
    seal_private: X25519PrivateKey

    @classmethod
    def generate(cls, name: str) -> Identity:
        """Return fresh keys for the party ``name``."""
        return cls(check_name(name, "name"), Ed25519PrivateKey.generate(), X25519PrivateKey.generate())

    @property
    def member(self) -> Member:
        """The party's public keys."""
        return Member(
            self.name,
            self.sign_private.public_key().public_bytes_raw(),
            self.seal_private.public_key().public_bytes_raw(),
        )

    def sign(self, purpose: str, content: bytes | memoryview) -> bytes:
        """Return a 64-byte signature over ``purpose`` and ``content``."""
        return self.sign_digest(purpose, sha256(content))

    def sign_digest(self, purpose: str, digest: bytes) -> bytes:
        """Do as `sign` for the content whose SHA-256 is ``digest``."""
        return self.sign_private.sign(_to_sign(purpose, digest))

    def reveal(self) -> bytes:
        """Return both private keys in the format of a key file."""
        body = self.sign_private.private_bytes_raw() + self.seal_private.private_bytes_raw()
        return KEY_FILE_MAGIC + self.name.encode() + b"\n" + body

    def save(self, path: Path) -> None:
        """Write both private keys to ``path``, mode 0600, durable before it returns."""
        write_private(path, self.reveal())

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file that `save` wrote.

        Raises:
            IntegrityError: the file is not a whole identity.
        """
        return cls.from_bytes(read_private(path), path)

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Identity:
        """Read the bytes of a key file; ``path`` is for the error message.

        Raises:
            IntegrityError: the bytes are not a whole identity.
        """
        head, _, rest = data[len(KEY_FILE_MAGIC) :].partition(b"\n")
        if not data.startswith(KEY_FILE_MAGIC) or len(rest) != 64:
            raise IntegrityError(f"{path} is not a key file", hint="restore it from a backup, or join the fleet again")
        return cls(
            check_name(head.decode("ascii", "replace"), "name"),
            Ed25519PrivateKey.from_private_bytes(rest[:32]),
            X25519PrivateKey.from_private_bytes(rest[32:]),
        )

    def __repr__(self) -> str:
        return f"Identity({self.name!r}, {fingerprint(self.member)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("private keys can't be pickled")


def _to_sign(purpose: str, digest: bytes) -> bytes:
    return _DOMAIN + purpose.encode() + b"\x00" + digest


def verify(key: bytes, purpose: str, content: bytes | memoryview, signature: bytes | memoryview) -> None:
    """Verify a signature over ``purpose`` and ``content`` with ``key`` (32 bytes, Ed25519).

    Raises:
        UntrustedError: the signature is not by this key.
    """
    verify_digest(key, purpose, sha256(content), signature)


def verify_digest(key: bytes, purpose: str, digest: bytes, signature: bytes | memoryview) -> None:
    """Do as `verify` for the content whose SHA-256 is ``digest``."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(bytes(signature), _to_sign(purpose, digest))
    except (InvalidSignature, ValueError) as error:
        raise UntrustedError(f"the signature on this {purpose} is not its sender's") from error


def check_seal_key(key: bytes) -> None:
    """Check that messages can be sealed to ``key`` (32 bytes, X25519).

    X25519 refuses a point of small order, which gives the same shared secret with every party (RFC 7748, section 6.1). An
    owner who had signed a member with such a key could never again seal new keys to the fleet.

    Raises:
        WireError: nothing can be sealed to it.
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as error:
        raise WireError("a member whose seal key is no key: nothing can be sealed to it") from error


def fingerprint(member: Member) -> str:
    """Return 24 characters in groups of four, for people to compare: a truncated SHA-256 of both public keys."""
    digest = sha256(member.sign_key + member.seal_key)
    # 120 bits: 24 characters of base32 without padding, and out of reach for a second key with the same fingerprint.
    text = base64.b32encode(digest[:15]).decode().lower()
    return "-".join(text[i : i + 4] for i in range(0, 24, 4))


M = TypeVar("M")


def sign_document(identity: Identity, document: object) -> bytes:
    """Return ``signature (64) | encoded message``; the signature also covers the message's type."""
    content = encode(document)
    return identity.sign(_purpose(type(document)), content) + content


def open_document(data: bytes | memoryview, expected: type[M], key: bytes) -> M:
    """Check that ``key`` (32 bytes, Ed25519) signed a document, and return the document.

    Raises:
        UntrustedError: the signature is not by this key.
        WireError: the bytes are not a document of type ``expected``, or, with a valid signature, one of another version.
    """
    check_document(data, expected, key)
    try:
        return decode(memoryview(data)[SIGNATURE_BYTES:], expected)
    except WireError as error:
        raise WireError(
            f"this {expected.__name__} was signed by another version of Shoal ({error})",
            hint="upgrade the older software, or have it signed again by the newer",
        ) from error


def check_document(data: bytes | memoryview, expected: type[M], key: bytes) -> None:
    """Check that ``key`` (32 bytes, Ed25519) signed these bytes as a document of type ``expected``.

    Raises:
        UntrustedError: the signature is not by this key.
        WireError: the bytes are too short.
    """
    view = memoryview(data)
    if len(view) <= SIGNATURE_BYTES:
        raise WireError(f"{len(view)} bytes are too short for a signed {expected.__name__}")
    verify(key, _purpose(expected), view[SIGNATURE_BYTES:], view[:SIGNATURE_BYTES])


def peek_document(data: bytes | memoryview, expected: type[M]) -> M:
    """Return the document WITHOUT checking its signature: only to read who should have signed it, before the check."""
    return decode(memoryview(data)[SIGNATURE_BYTES:], expected)


def _purpose(kind: type[object]) -> str:
    return f"document/{kind.__name__}"
