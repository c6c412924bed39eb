"""The bounds hold for the largest messages that can be made, and for all that a run sends."""

import dataclasses

import pytest

from crypto.seal.identity import Identity, sign_document
from crypto.seal.receiving import ReceivingSecrets
from shoal import limits
from shoal.protocol import channels, sizes
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.codec import MAX_LATER_BYTES, encode
from shoal.protocol.documents import Member, ReceivingNotice, Roster
from shoal.protocol.messages import Sealed
from shoal.protocol.states import HeldState, Statement
from tests.helpers.fleets import Wiretap, make_fleet
from tests.helpers.plans import run_plan

LONGEST = "n" * limits.MAX_NAME_CHARS
ENVELOPE_BYTES = 8 + 32 + 16 + 4 + 64


def longest(number):
    return f"{number:0{limits.MAX_NAME_CHARS}d}"


def sealed_bytes(message, purpose):
    """Return the size of a sealed message with as many later fields as it may have."""
    message = dataclasses.replace(message, later=((1, bytes(MAX_LATER_BYTES - 4)),))
    return ENVELOPE_BYTES + len(encode(Sealed(LONGEST, purpose, LONGEST, LONGEST))) + len(encode(message))


def test_longest_notice_fits():
    """The longest notice of receiving keys fits."""
    notice = ReceivingNotice(LONGEST, LONGEST, ReceivingSecrets.generate().public)
    notice = dataclasses.replace(notice, later=((1, bytes(MAX_LATER_BYTES - 4)),))
    signed = sign_document(Identity.generate(LONGEST), notice)
    assert len(signed) <= channels.RECEIVING.largest == limits.MAX_NOTE_BYTES


def test_full_roster_of_longest_names_fits():
    """All revoked, and the whole as large as a roster can get."""
    member = Member(LONGEST, bytes(32), bytes(32))
    names = [longest(n) for n in range(1000)]
    devices = tuple(Member(name, bytes(32), bytes(32)) for name in names)
    size = (
        sealed_bytes(
            Roster(
                fleet=LONGEST,
                sequence=1,
                issued_at_s=1,
                expires_at_s=1,
                aggregator=member,
                devices=devices,
                revoked=tuple(names),
            ),
            "roster",
        )
        + 64
    )
    assert size <= sizes.roster_bytes(1000)
    whole = limits.SEALED_HEAD_BYTES + limits.MAX_DEVICES * (sizes.MEMBER_BYTES + sizes.NAME_BYTES)
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


def test_upload_has_room_for_its_statement():
    """An upload has room for a statement about two states of each model."""
    identity = Identity.generate(LONGEST)
    plan = run_plan(max_models=3)
    states = tuple(HeldState(model, round_, bytes(32)) for model in range(4) for round_ in (1, 2))
    signed = sign_document(identity, Statement(LONGEST, bytes(16), 1, LONGEST, states))
    room = sizes.upload_bytes(plan) - limits.SEALED_HEAD_BYTES - 4 * plan.length - 8 * plan.max_models
    assert len(signed) <= room <= len(signed) + 1024
