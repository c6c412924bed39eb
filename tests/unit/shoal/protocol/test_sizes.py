"""The bounds hold for the largest messages that can be made, and for all that a run sends."""

import dataclasses

import pytest

from crypto.seal.identity import Identity, sign_document
from crypto.seal.receiving import ReceivingSecrets
from shoal import limits
from shoal.protocol import channels, sizes
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.codec import MAX_LATER_BYTES, encode
from shoal.protocol.documents import Member, ReceivingNotice, Roster, SegmentSpec
from shoal.protocol.messages import Control, Decline, DeclineReason, Presence, Reminder, Sealed, Upload, Vitals
from shoal.protocol.states import HeldState, Statement, TranscriptHead
from tests.helpers.fleets import Wiretap, make_fleet
from tests.helpers.plans import run_plan

LONGEST = "n" * limits.MAX_NAME_CHARS
ENVELOPE_BYTES = 8 + 32 + 16 + 4 + 64


VITALS = Vitals(
    uptime_s=1,
    disk_free_bytes=1,
    memory_bytes=1,
    memory_free_bytes=1,
    load=1.0,
    cores=1,
    temperature_c=1.0,
    battery_percent=1,
    charging=True,
)


def longest(number):
    return f"{number:0{limits.MAX_NAME_CHARS}d}"


def sealed_bytes(message, purpose):
    """Return the size of a sealed message with as many later fields as it may have."""
    message = dataclasses.replace(message, later=((1, bytes(MAX_LATER_BYTES - 4)),))
    return ENVELOPE_BYTES + len(encode(Sealed(LONGEST, purpose, LONGEST, LONGEST))) + len(encode(message))


CONTROL = Control(
    fleet=LONGEST,
    device=LONGEST,
    action=2,
    run=1,
    round=1,
    transfer=bytes(16),
    missing=tuple(range(1024)),
    reason="r" * 4096,
)
REMINDER = Reminder(
    fleet=LONGEST,
    device=LONGEST,
    run_id=bytes(16),
    round=1,
    transfer=bytes(16),
    digest=bytes(32),
    size=1,
    chunk_bytes=1024,
    turn=1,
)
HEADER = Upload(
    fleet=LONGEST,
    run=1,
    run_id=bytes(16),
    round=1,
    phase=1,
    nonce=bytes(16),
    device=LONGEST,
    recipient=bytes(32),
    task_digest=bytes(32),
    mode=LONGEST,
    key_id=bytes(16),
    model=1,
    samples=1,
    loss=1.0,
    margins=(),
    correct=1,
    tested=1,
    length=1,
)
"""All but the vector, the margins and the statement, which the bound counts for themselves."""


@pytest.mark.parametrize(
    ("purpose", "message", "most"),
    [
        ("decline", Decline(LONGEST, LONGEST, bytes(16), bytes(16), int(DeclineReason.DATA)), limits.MAX_NOTE_BYTES),
        ("reminder", REMINDER, limits.MAX_NOTE_BYTES),
        (
            "presence",
            Presence(LONGEST, LONGEST, 1, True, "v" * 64, 1, TranscriptHead(bytes(16), 1, bytes(32)), 1, VITALS),
            limits.MAX_NOTE_BYTES,
        ),
        ("control", CONTROL, limits.MAX_CONTROL_BYTES),
        ("upload", HEADER, limits.SEALED_HEAD_BYTES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_longest_message_fits(purpose, message, most):
    assert sealed_bytes(message, purpose) <= most


def test_longest_notice_fits():
    """The longest notice of receiving keys fits."""
    notice = ReceivingNotice(LONGEST, LONGEST, ReceivingSecrets.generate().public)
    notice = dataclasses.replace(notice, later=((1, bytes(MAX_LATER_BYTES - 4)),))
    signed = sign_document(Identity.generate(LONGEST), notice)
    assert len(signed) <= channels.RECEIVING.largest == limits.MAX_NOTE_BYTES


def test_full_roster_of_longest_names_fits():
    """All revoked, and the whole as large as a roster can get."""
    names = tuple(longest(n) for n in range(1000))
    roster = Roster(
        fleet=LONGEST,
        sequence=1,
        issued_at_s=1,
        expires_at_s=1,
        aggregator=Member(LONGEST, bytes(32), bytes(32)),
        devices=tuple(Member(name, bytes(32), bytes(32)) for name in names),
        revoked=names,
        labels=("a=" + "b" * (limits.MAX_LABELS_CHARS - 2),) * 1000,
    )
    assert sealed_bytes(roster, "roster") + 64 <= sizes.roster_bytes(1000)
    whole = limits.SEALED_HEAD_BYTES + limits.MAX_DEVICES * sizes.LISTED_BYTES
    assert sizes.roster_bytes(limits.MAX_DEVICES) == whole < limits.MAX_GRANT_BYTES


ALGORITHMS = [("fedavg", {}), ("ifca", {"settings": {"k": "2"}}), ("cfl", {})]


def largest_sent(path, algorithm, **options):
    """Run a fleet; return its plan, the size of its task, and the largest transfer of each kind."""
    tap = Wiretap()
    with make_fleet(path, faults=tap, algorithm=algorithm, rounds=4, **options) as fleet:
        fleet.run(60)
        plan, task_bytes = fleet.plan, len(fleet.bundle.to_bytes())
    largest = {}
    for passage in tap.heard:
        if passage.payload:
            header = parse(passage.payload)[0]
            largest[header.kind] = max(header.size, largest.get(header.kind, 0))
    return plan, task_bytes, largest


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_what_run_sends_is_within_the_bounds(tmp_path, algorithm, options):
    """With half of the devices in each round, so that checkpoints travel too."""
    options = {"participation": 0.7, **options}
    plan, task_bytes, largest = largest_sent(tmp_path / "fleet", algorithm, **options)
    checkpoint = sizes.checkpoint_bytes(plan, task_bytes)
    assert largest[ChunkKind.MEAN] <= sizes.mean_bytes(plan)
    assert largest[ChunkKind.CHECKPOINT] <= checkpoint
    assert largest[ChunkKind.STATE] <= limits.MAX_NOTE_BYTES
    assert largest[ChunkKind.CONTROL] <= limits.MAX_CONTROL_BYTES
    assert largest[ChunkKind.ROUND] <= sizes.announcement_bytes(3, plan.max_models)
    assert largest[ChunkKind.ROSTER] <= sizes.roster_bytes(3)
    assert largest[ChunkKind.UPLOAD] <= sizes.upload_bytes(plan, attached=plan.max_models * checkpoint)


def test_upload_grows_with_the_model():
    """An upload grows with the model and what is attached."""
    plan = run_plan()
    assert sizes.upload_bytes(plan, attached=7) - sizes.upload_bytes(plan) == 7
    longer = run_plan(segments=(SegmentSpec("cluster", plan.length + 10),))
    assert sizes.upload_bytes(longer) - sizes.upload_bytes(plan) == 40


def test_upload_has_room_for_its_statement():
    """An upload has room for a statement about two states of each model."""
    identity = Identity.generate(LONGEST)
    plan = run_plan(max_models=3)
    states = tuple(HeldState(model, round_, bytes(32)) for model in range(4) for round_ in (1, 2))
    signed = sign_document(identity, Statement(LONGEST, bytes(16), 1, LONGEST, states))
    room = sizes.upload_bytes(plan) - limits.SEALED_HEAD_BYTES - 4 * plan.length - 8 * plan.max_models
    assert len(signed) <= room <= len(signed) + 1024
