"""docs/wire-format.md agrees with the code: every message, its kind and its fields, the frame, the envelopes' magics."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import re
import struct
import types
import typing

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from aggregator import looks
from aggregator.keeper import memory as keeper_memory
from crypto.seal import envelope
from crypto.seal.identity import Identity
from docs import channel_tables
from edge_client import membership as edge_membership
from edge_client.models import fresh_start, private_values, store
from edge_client.storage import finished_models as finished
from edge_client.storage import pending_upload, scales, state
from shoal import limits
from shoal.membership import enrol_requests as seal_tokens
from shoal.owner.enrolment import tokens
from shoal.owner.keys import receiving as owner_receiving
from shoal.owner.keys import vault
from shoal.protocol import cells, codec, documents, enrolment, jobs, messages, recipe, requests, shards, states, sums
from shoal.protocol import chunking as frame
from shoal.protocol.channels import CHANNELS
from tests.helpers.receiving import RECEIVING
from tests.helpers.trees import ROOT

PAGE = (ROOT / "docs" / "wire-format.md").read_text()
ROW = re.compile(r"^\| (\d+) \| ([A-Z]\w+) \| `([^`]*)` \|", re.MULTILINE)
PLAIN = {str: "string", bytes: "blob", float: "f64", bool: "bool"}
INTEGERS = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64"}


def type_name(hint):
    """Return the page's name of a field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        mark = arguments[1]
        if isinstance(mark, codec._Fixed):
            return f"bytes{mark.length}"
        if isinstance(mark, codec._Later):
            return "later fields"
        return INTEGERS[mark.code] + ("[]" if isinstance(mark, codec._Array) else "")
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin in (typing.Union, types.UnionType):
        return f"optional {type_name(next(a for a in arguments if a is not type(None)))}"
    return PLAIN.get(hint) or hint.__name__


def registered(*modules):
    """Return {kind: (name, fields)} of the message types that the modules define."""
    found = {}
    for kind, cls in codec._BY_KIND.items():
        if cls.__module__ in {m.__name__ for m in modules}:
            hints = typing.get_type_hints(cls, include_extras=True)
            fields = ", ".join(f"{f.name}: {type_name(hints[f.name])}" for f in dataclasses.fields(cls))
            found[kind] = (cls.__name__, fields)
    return found


def test_page_lists_every_message_in_order():
    """A field added, renamed or moved changes the format and must change the page."""
    described = {int(kind): (name, fields) for kind, name, fields in ROW.findall(PAGE)}
    assert described == registered(
        documents,
        recipe,
        messages,
        enrolment,
        requests,
        states,
        shards,
        jobs,
        cells,
        sums,
        keeper_memory,
        looks,
        pending_upload,
        state,
        finished,
        fresh_start,
        scales,
        private_values,
        store,
        tokens,
        vault,
        owner_receiving,
        edge_membership,
    )


def test_page_gives_the_frame_header_in_full():
    """Each field's name, offset and length, as struct lays them out."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)
    names = ["magic", "version", "kind", "flags", "round", "index", "total", "offset", "size", "id"]
    lengths = [4, 1, 1, 2, 4, 4, 4, 8, 8, 16]
    offsets = [sum(lengths[:i]) for i in range(len(lengths))]
    assert [(int(o), int(n), name) for o, n, name in rows] == list(zip(offsets, lengths, names, strict=True))
    assert sum(lengths) == frame.HEADER_BYTES
    assert f"{frame.HEADER_BYTES} bytes" in PAGE


def test_the_page_lists_every_chunk_kind():
    """Kind numbers of the frame."""
    listed = dict(
        re.findall(
            r"(?<!\d)(\d+) (upload|plan|roster|round|control|state|enrol|grant|decline|reminder|receiving|mean|checkpoint"
            r"|request|answer|notice|part|mean_part|job|report|order|done|cells|sums|refusal|round_again)\b",
            PAGE,
        )
    )
    assert listed == {str(int(k)): k.name.lower() for k in frame.ChunkKind}


def test_the_page_names_every_magic():
    """The four bytes that each form begins with."""
    for magic in (codec.MAGIC, frame.MAGIC, envelope.MEMBER_MAGIC, envelope.GROUP_MAGIC):
        assert f'"{magic.decode()}"' in PAGE


def test_message_is_encoded_as_the_page_says():
    """The page's worked example, byte by byte."""
    example = re.search(r"```hex\n(.*?)```", PAGE, re.DOTALL).group(1)
    pieces = [line.split("|")[0] for line in example.splitlines()]
    assert bytes.fromhex("".join(pieces)) == codec.encode(
        messages.Presence("reef", "dev-1", 7, True, "0.2.0", 1_790_000_000)
    )


DEVICE, SERVER = Identity.generate("dev-1"), Identity.generate("aggregator")


def taken_apart(payload, sender, purpose):
    """Return (head, ciphertext) of an envelope, read by the page, after checking its signature by the page."""
    (length,) = struct.unpack("<I", payload[4:8])
    head, ciphertext, signature = payload[: 8 + length], payload[8 + length : -64], payload[-64:]
    signed = b"shoal/v1/signature\0" + purpose.encode() + b"\0" + hashlib.sha256(head + ciphertext).digest()
    sender.sign_private.public_key().verify(signature, signed)
    return head, ciphertext


def test_envelope_to_a_member_is_as_written():
    """Opened with HPKE alone, without our code."""
    sealed = messages.Sealed("reef", "upload", "dev-1", "aggregator")
    payload = envelope.seal_to_member(DEVICE, SERVER.member.seal_key, sealed, b"message", b"vector")
    head, ciphertext = taken_apart(payload, DEVICE, "upload")
    assert head[:4] == b"SHE1"
    assert head[8:] == codec.encode(sealed)
    plain = envelope.SUITE.decrypt(ciphertext, SERVER.seal_private, info=head)
    assert plain == b"vector" + b"message" + struct.pack("<I", 7)
    assert len(ciphertext) == len(plain) + 48


def test_envelope_to_group_is_what_page_says():
    """Opened with AES-GCM alone, without our code."""
    sealed = messages.Sealed("reef", "mean", "aggregator", "*")
    key = envelope.GroupKey("reef", "broadcast", bytes(range(32)))
    head, ciphertext = taken_apart(envelope.seal_to_group(SERVER, key, sealed, b"plain"), SERVER, "mean")
    info = b"shoal/v1/group-key" + struct.pack("<I", 4) + b"reef" + struct.pack("<I", 9) + b"broadcast"
    secret = HKDF(SHA256(), 32, None, info).derive(bytes(range(32)))
    assert AESGCM(secret).decrypt(ciphertext[:12], ciphertext[12:], head) == b"plain"


def expanded(secret, purpose, length):
    return HKDF(SHA256(), length, None, b"shoal/v1/token/" + purpose).derive(secret)


def test_an_enrolment_is_what_the_page_says():
    """Line and request, opened with base64, HKDF, AES-GCM and HMAC alone."""
    secret = bytes(range(16))
    token = enrolment.Token(
        fleet="reef", broker="mqtt://broker", owner="o", aggregator="a", expires_at_s=1_800_000_000, secret=secret
    )
    line = token.to_line()
    assert line.startswith("shoal1-")
    data = base64.urlsafe_b64decode(line[7:] + "=" * (-len(line[7:]) % 4))
    assert data == codec.encode(token) + hashlib.sha256(codec.encode(token)).digest()[:4]

    request = seal_tokens.make_request(DEVICE, token, 1_799_999_000, RECEIVING.public)
    opened = codec.decode(request, enrolment.EnrolRequest)
    assert opened.member == DEVICE.member
    head, ciphertext = taken_apart(opened.sealed, DEVICE, "enrolment")
    assert head[8:] == codec.encode(messages.Sealed("reef", "enrolment", "dev-1", "owner"))
    info = b"shoal/v1/group-key" + struct.pack("<I", 4) + b"reef" + struct.pack("<I", 9) + b"enrolment"
    key = HKDF(SHA256(), 32, None, info).derive(expanded(secret, b"seal", 32))
    plain = AESGCM(key).decrypt(ciphertext[:12], ciphertext[12:], head)
    assert plain[:32] == hmac.digest(expanded(secret, b"proof", 32), plain[32:], "sha256")
    statement = codec.decode(plain[32:], enrolment.EnrolStatement)
    name = expanded(secret, b"id", 8).hex()
    assert (statement.token, statement.owner, statement.aggregator) == (name, "o", "a")
    assert (statement.expires_at_s, statement.asked_at_s) == (1_800_000_000, 1_799_999_000)
    assert statement.card[64:] == codec.encode(documents.Card("device", DEVICE.member, RECEIVING.public))
    assert f"at most {limits.MAX_ENROLMENT_BYTES:,} bytes" in PAGE


def test_the_page_has_the_table_of_channels():
    """`python -m docs.channel_tables --write` makes it again."""
    assert f"{channel_tables.BEGIN}\n{channel_tables.block()}\n{channel_tables.END}" in PAGE
    assert f"fetches at most {limits.FIRST_PACKAGE_BYTES:,} bytes" in PAGE


def test_the_tables_name_messages_that_exist():
    """Each word with a capital letter in the column of messages is a message type, but for HMAC."""
    known = {
        name
        for name, _ in registered(cells, documents, messages, enrolment, jobs, requests, shards, states, sums).values()
    }
    assert {word for c in CHANNELS for word in re.findall(r"[A-Z]\w+", c.message)} - {"HMAC"} <= known
