"""The owner's requests as messages, sealed by any identity."""

from __future__ import annotations

import time

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crypto.seal.envelope import open_from_member, read_head, seal_message_to_member
from crypto.seal.identity import Identity
from shoal.membership.grants import OWNER_NAME
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode, encode
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.requests import OwnerAnswer, OwnerRequest
from shoal.protocol.topics import Topics
from shoal.transport.base import Message

ANSWER_KEY = X25519PrivateKey.from_private_bytes(b"a" * 32)
FLEET = "demo"
AGGREGATOR = Identity.generate("aggregator")
"""The aggregator of owners without a real one, for `tell`."""


def request_of(action, *, sequence=1, fleet=FLEET, expires_at_s=None, **parts):
    """Return a request that expires in a minute."""
    return OwnerRequest(
        fleet=fleet,
        sequence=sequence,
        expires_at_s=int(time.time()) + 60 if expires_at_s is None else expires_at_s,
        answer_key=ANSWER_KEY.public_key().public_bytes_raw(),
        action=action,
        **parts,
    )


def seal_request(owner, aggregator, request, package=b"", *, signer=None, head=None):
    """Return a request as the owner's program seals it, or as ``signer`` does, under another head."""
    head = head or channels.REQUEST.head(request.fleet, OWNER_NAME, aggregator.name)
    return seal_message_to_member(signer or owner.owner, aggregator.seal_key, head, encode(request), package)


def chunks_of(sealed, **options):
    return split(sealed.payload, kind=channels.REQUEST.kind, round=0, **options)


def opened(chunks, fleet, key=ANSWER_KEY):
    """Return the answer in chunks that the aggregator has published, and its document."""
    reassembler = Reassembler()
    (whole,) = [t for c in chunks if (t := reassembler.add("a", c, 0.0)) is not None]
    head, at = read_head(whole.payload)
    message, body = open_from_member(
        fleet.owner, whole.payload, head, at, fleet.roster.aggregator.sign_key, whole.signed, private=key
    )
    return decode(message, OwnerAnswer), bytes(body)


def tell(question, message, body=b"{}", *, signer=AGGREGATOR, key=None, head=None):
    """Deliver an answer of AGGREGATOR in fleet "reef" to a question; every part of it may be another."""
    head = head or channels.ANSWER.head("reef", "aggregator", "owner")
    key = key or question._key.public_key().public_bytes_raw()
    sealed = seal_message_to_member(signer, key, head, encode(message), body)
    for chunk in split(sealed.payload, kind=channels.ANSWER.kind, round=0):
        question.on_event(Message(Topics("reef").owner_answer, chunk), 0.0)
