"""Signed documents that are not secret by themselves: roster, run plan, card."""

from __future__ import annotations

from typing import TypeVar

from crypto.seal.identity import SIGNATURE_BYTES, Identity, verify
from shoal.errors import WireError
from shoal.protocol.codec import decode, encode

M = TypeVar("M")


def sign_document(identity: Identity, document: object) -> bytes:
    """Return ``signature (64) | encoded message``; the message's type is part of what is signed."""
    content = encode(document)
    return identity.sign(_purpose(type(document)), content) + content


def open_document(data: bytes | memoryview, expected: type[M], key: bytes) -> M:
    """Return the document if ``key`` (32 bytes, Ed25519) signed it.

    Raises:
        UntrustedError: the signature is not that key's.
        WireError: the bytes are not such a document; with a valid signature, one of another version.
    """
    view = memoryview(data)
    if len(view) <= SIGNATURE_BYTES:
        raise WireError(f"{len(view)} bytes are too short for a signed {expected.__name__}")
    verify(key, _purpose(expected), view[SIGNATURE_BYTES:], view[:SIGNATURE_BYTES])
    try:
        return decode(view[SIGNATURE_BYTES:], expected)
    except WireError as error:
        raise WireError(
            f"this {expected.__name__} was signed by another version of Shoal ({error})",
            hint="all parties of a fleet run one version; have it signed again",
        ) from error


def peek_document(data: bytes | memoryview, expected: type[M]) -> M:
    """Return the document WITHOUT checking who signed it: only to read the key of a self-signed card before checking."""
    return decode(memoryview(data)[SIGNATURE_BYTES:], expected)


def _purpose(kind: type[object]) -> str:
    return f"document/{kind.__name__}"
