"""Verification of uploads, declines and reminders: authentic, whole, finite and within the plan's limits."""

import dataclasses

import numpy as np
import pytest

from aggregator.membership import FalseMessageError
from aggregator.rounds.state import Declined
from aggregator.uploads.validation import RefusedUploadError, UploadVerifier
from crypto.seal.envelope import seal_to_member
from crypto.seal.identity import Identity, sign_document
from shoal import limits
from shoal.errors import ShoalError, UntrustedError
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.codec import encode
from shoal.protocol.documents import Roster
from shoal.protocol.messages import Decline, DeclineReason, Reminder
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.codec import encode as encode_vector
from shoal.protocol.precision.lengths import encoded_bytes, norm_room
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.states import StateId, Statement
from shoal.protocol.sums import share_head
from tests.helpers.plans import D, altered, engine_of, resumed, run_plan, upload_of
from tests.helpers.statements import sealed_checkpoints

DEVICE, OTHER, SERVER = (Identity.generate(n) for n in ("dev-1", "dev-2", "aggregator"))
ROSTER = Roster(
    fleet="demo",
    sequence=3,
    issued_at_s=0,
    expires_at_s=1,
    aggregator=SERVER.member,
    devices=(DEVICE.member, OTHER.member),
    revoked=(),
)
RUN = run_plan(norm_limit=10.0)
HEAD = channels.UPLOAD.head("demo", "dev-1", "aggregator")


def upload(values=None, **changes):
    engine = engine_of(RUN)
    state = resumed(engine, ("dev-1",))
    fields = {"recipient": SERVER.member.seal_key, "signer": DEVICE, **changes}
    return upload_of(engine, state, "dev-1", values=values, **fields)


def transfer(header, body, *, signer=DEVICE, head=HEAD):
    sealed = seal_to_member(signer, SERVER.member.seal_key, head, encode(header), body)
    (chunk,) = split(sealed, kind=ChunkKind.UPLOAD, round=1)
    return Reassembler().add("dev-1", chunk, 0.0)


def verify(*args, device="dev-1", roster=ROSTER, run=RUN, **options):
    return UploadVerifier(SERVER, run).upload(device, transfer(*args, **options), roster)


def test_an_honest_upload_is_verified():
    values = np.arange(D, dtype=np.float32)
    header, body = upload(values)
    verified = verify(header, body)
    assert (verified.header, bytes(verified.body)) == (header, body)
    assert verified.norm == pytest.approx(float(np.linalg.norm(values)))
    assert len(verified.digest) == 32


def test_digest_tells_uploads_apart():
    """It covers the sealed bytes: a resend has the same one, a second sealing of the same vector another."""
    sent = transfer(*upload())
    verifier = UploadVerifier(SERVER, RUN)
    digest = verifier.upload("dev-1", sent, ROSTER).digest
    assert verifier.upload("dev-1", sent, ROSTER).digest == digest
    assert verifier.upload("dev-1", transfer(*upload()), ROSTER).digest != digest


@pytest.mark.parametrize("device", ["dev-9", "dev-1"])
def test_unknown_and_revoked_stay_unopened(device):
    """Unknown and revoked devices are refused before anything is opened."""
    with pytest.raises(UntrustedError, match=f"{device} is not in the roster"):
        verify(*upload(), device=device, roster=dataclasses.replace(ROSTER, revoked=("dev-1",)))


@pytest.mark.parametrize(("length", "taken"), [(9.999, True), (10.001, False)])
def test_the_norm_limit_is_the_plans(length, taken):
    values = np.full(D, length / np.sqrt(D), np.float32)
    if taken:
        assert verify(*upload(values)).norm == pytest.approx(length)
        return
    header, body = upload(values)
    with pytest.raises(RefusedUploadError, match="norm 10 is above the plan's limit 10") as caught:
        verify(header, body)
    assert caught.value.header == header


def test_a_forged_upload_is_no_refusal():
    """A forged signature must not make the aggregator answer the device, whatever the vector contains."""
    with pytest.raises(UntrustedError) as caught:
        verify(*upload(np.full(D, np.nan)), signer=OTHER)
    assert not isinstance(caught.value, RefusedUploadError)


DECLINE = Decline("demo", "dev-1", RUN.run_id, b"n" * 16, int(DeclineReason.TASK))
REMINDER = Reminder(
    fleet="demo",
    device="dev-1",
    run_id=RUN.run_id,
    round=1,
    transfer=b"t" * 16,
    digest=b"d" * 32,
    size=6000,
    chunk_bytes=1024,
    turn=1,
)
MESSAGES = {
    "decline": (UploadVerifier.decline, DECLINE, Declined("dev-1", b"n" * 16, DeclineReason.TASK)),
    "reminder": (UploadVerifier.reminder, REMINDER, REMINDER),
}


def head_of(kind):
    return dataclasses.replace(HEAD, purpose=kind)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_device_may_send_its_own(kind):
    read, message, found = MESSAGES[kind]
    assert read(UploadVerifier(SERVER, RUN), "dev-1", transfer(message, b"", head=head_of(kind)), ROSTER) == found


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"device": "dev-2"}, {}),
        ({"fleet": "reef"}, {}),
        ({}, {"head": HEAD}),
        ({}, {"signer": OTHER}),
        ({}, {"head": dataclasses.replace(HEAD, sender="dev-2"), "signer": OTHER}),
    ],
)
@pytest.mark.parametrize("kind", MESSAGES)
def test_other_senders_are_refused(kind, changes, options):
    read, message, _ = MESSAGES[kind]
    sent = transfer(dataclasses.replace(message, **changes), b"", **{"head": head_of(kind), **options})
    with pytest.raises(ShoalError):
        read(UploadVerifier(SERVER, RUN), "dev-1", sent, ROSTER)


def test_a_decline_of_another_run_is_refused():
    """A reminder of another run is accepted: its device waits for the answer (test_retransmission.py)."""
    for kind, (read, message, _) in MESSAGES.items():
        sent = transfer(dataclasses.replace(message, run_id=b"x" * 16), b"", head=head_of(kind))
        if kind == "reminder":
            assert read(UploadVerifier(SERVER, RUN), "dev-1", sent, ROSTER).run_id == b"x" * 16
            continue
        with pytest.raises(UntrustedError, match="another run"):
            read(UploadVerifier(SERVER, RUN), "dev-1", sent, ROSTER)


@pytest.mark.parametrize("kind", MESSAGES)
def test_kinds_of_messages_are_told_apart(kind):
    """One kind of message is not taken for another."""
    header, body = upload()
    (other,) = MESSAGES.keys() - {kind}
    for message, rest in ((header, body), (MESSAGES[other][1], b"")):
        for head in (head_of(kind), head_of(other)):
            with pytest.raises(ShoalError):
                MESSAGES[kind][0](UploadVerifier(SERVER, RUN), "dev-1", transfer(message, rest, head=head), ROSTER)


@pytest.mark.parametrize("kind", MESSAGES)
def test_extra_bytes_are_refused(kind):
    read, message, _ = MESSAGES[kind]
    with pytest.raises(FalseMessageError, match=f"4 extra bytes after a {kind}") as caught:
        read(UploadVerifier(SERVER, RUN), "dev-1", transfer(message, bytes(4), head=head_of(kind)), ROSTER)
    assert caught.value.device == "dev-1"


@pytest.mark.parametrize(("samples", "taken"), [(100_000, True), (100_001, False), (2**32 - 1, False)])
def test_sample_count_above_limit_is_refused(samples, taken):
    """A sample count above the plans limit is refused."""
    header, body = upload(samples=samples)
    if taken:
        assert verify(header, body).header.samples == samples
        return
    with pytest.raises(RefusedUploadError, match=f"{samples} samples reported, above the plan's max_samples 100000"):
        verify(header, body)


def statement(signer=DEVICE, **changes):
    fields = {"fleet": "demo", "run_id": RUN.run_id, "round": 1, "device": signer.name, "states": ()}
    return sign_document(signer, Statement(**{**fields, **changes}))


def test_upload_has_statement_of_its_device():
    signed = statement()
    assert verify(*upload(statement=signed)).header.statement == signed


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"x" * 300,
        statement()[:-1],
        bytes(64) + statement()[64:],
        statement(OTHER),
        statement(device="dev-2"),
        statement(Identity.generate("dev-9")),
        statement(round=2),
        statement(run_id=bytes(16)),
        statement(fleet="other"),
    ],
    ids=["none", "noise", "cut", "forged", "of another", "in another name", "unknown", "round", "run", "fleet"],
)
def test_other_statements_upload_is_refused(wrong):
    """An upload with another statement is refused and its device is told."""
    with pytest.raises(RefusedUploadError, match="statement"):
        verify(*upload(statement=wrong))


def in_precision(precision, values=None, *, norm_limit=10.0, **changes):
    """Return (plan, header, body) of an honest upload in a precision."""
    run = altered(RUN, precision_up=precision, norm_limit=norm_limit)
    values = np.arange(D, dtype=np.float32) if values is None else values
    header, _ = upload(values, precision=precision, **changes)
    return run, header, encode_vector(values, precision, b"seed")


@pytest.mark.parametrize("precision", limits.PRECISIONS)
def test_vectorless_report_has_no_norm(precision):
    """A report without a vector has no norm."""
    run, header, _ = in_precision(precision)
    assert verify(dataclasses.replace(header, length=0), b"", run=run).norm == 0.0


@pytest.mark.parametrize("precision", limits.PRECISIONS)
def test_plans_precision_is_decoded(precision):
    """An upload in the plans precision is decoded on arrival."""
    run, header, body = in_precision(precision)
    extra = sealed_checkpoints("dev-1", run, 1, [(0, StateId(0, 0))], DEVICE)
    header = dataclasses.replace(header, attached=len(extra))
    found = verify(header, body + extra, run=run)
    vector = decode_vector(body, D, precision)
    assert bytes(found.body) == vector.tobytes() + extra
    assert found.norm == pytest.approx(float(np.linalg.norm(vector)))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_another_precision_is_refused(precision):
    """Another precision than the plans is refused."""
    _, header, body = in_precision(precision)
    with pytest.raises(RefusedUploadError, match=f"a vector in '{precision}', not float16"):
        verify(header, body, run=altered(RUN, precision_up="float16"))


def test_longer_vector_is_refused_undecoded(monkeypatch):
    """A longer vector is refused before it is decoded."""
    run, header, _ = in_precision("int8")
    header = dataclasses.replace(header, length=4 * D)
    monkeypatch.setattr("aggregator.uploads.validation.decode_vector", None)
    with pytest.raises(RefusedUploadError, match="a vector of length 24"):
        verify(header, bytes(encoded_bytes(4 * D, "int8")), run=run)


def test_hostile_bytes_hold_no_round_up():
    """Hostile bytes are refused so that the round does not wait."""
    run, header, body = in_precision("int8")
    with pytest.raises(RefusedUploadError, match="a scale out of range"):
        verify(header, b"\xff" * 4 + body[4:], run=run)


def test_norm_limit_has_room_for_rounding():
    """An update at the limit is not refused because rounding made it longer."""
    run, header, body = in_precision("int8", np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.5], np.float32))
    norm = float(np.linalg.norm(decode_vector(body, D, "int8")))
    limit = norm / norm_room("int8")
    assert verify(header, body, run=altered(run, norm_limit=limit * 1.001)).norm == pytest.approx(norm)
    with pytest.raises(RefusedUploadError, match="above the plan's limit"):
        verify(header, body, run=altered(run, norm_limit=limit * 0.999))


KEEPER = Identity.generate("keeper")
WITH_KEEPER = altered(
    RUN, mode="rotation", weighting="uniform", min_contributors=3, keeper=KEEPER.member, most_summed=64
)


@pytest.mark.parametrize(
    ("signer", "device", "taken"), [("dev-1", "dev-1", True), ("dev-2", "dev-1", False), ("dev-2", "dev-2", False)]
)
def test_share_is_signed_by_its_device(signer, device, taken):
    signed = {"dev-1": DEVICE, "dev-2": OTHER}[signer]
    share = seal_to_member(signed, KEEPER.member.seal_key, share_head("demo", device, "keeper"), b"share")
    header, body = upload(share=share)
    if taken:
        found = verify(header, body, run=WITH_KEEPER)
        assert (found.header.share, found.norm) == (share, 0.0)
    else:
        with pytest.raises(RefusedUploadError, match="the share for the keeper"):
            verify(header, body, run=WITH_KEEPER)


def test_padded_words_are_no_numbers():
    """Words under a pad may look like NaN or infinities, and have no norm."""
    assert verify(*upload(np.full(D, np.nan, np.float32)), run=WITH_KEEPER).norm == 0.0
