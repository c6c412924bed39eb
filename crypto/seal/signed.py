"""Documents that are signed but not encrypted: roster, run plan, card."""

from __future__ import annotations

from typing import TypeVar

from crypto.seal.identity import SIGNATURE_BYTES, Identity, verify
from shoal.errors import WireError
from shoal.protocol.codec import decode, encode

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
