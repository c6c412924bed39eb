"""Messages refuse invalid values when they are made and when they are decoded."""

import dataclasses

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import (
    NO_ASSIGNMENT,
    Action,
    Announcement,
    Assignment,
    Control,
    Decline,
    DeclineReason,
    Phase,
    Reminder,
    Share,
    Upload,
)
from shoal.protocol.states import Offer, RoundModels, StateId

ORDER = Assignment(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)


def announcement(**changes):
    fields = {
        "fleet": "demo",
        "run": 1,
        "run_id": bytes(16),
        "roster_sequence": 3,
        "round": 1,
        "nonce": bytes(16),
        "deadline_s": 60.0,
        "finished": False,
        "assignments": (ORDER,),
        "assignment_of": (0, NO_ASSIGNMENT, 5),
        "held": RoundModels(3, (Offer(0, StateId(0, 0)),)),
    }
    return Announcement(**{**fields, **changes})


@pytest.mark.parametrize(
    "make",
    [
        lambda: dataclasses.replace(ORDER, candidates=()),
        lambda: Decline("demo", "a", bytes(16), bytes(16), int(DeclineReason.UPLOAD)),
        lambda: Reminder(
            fleet="demo",
            device="a",
            run_id=bytes(16),
            round=1,
            transfer=bytes(16),
            digest=bytes(32),
            size=0,
            chunk_bytes=1024,
            turn=1,
        ),
        lambda: Reminder(
            fleet="demo",
            device="a",
            run_id=bytes(16),
            round=1,
            transfer=bytes(16),
            digest=bytes(32),
            size=limits.MAX_TRANSFER_BYTES + 1,
            chunk_bytes=1024,
            turn=1,
        ),
        lambda: Reminder(
            fleet="demo",
            device="a",
            run_id=bytes(16),
            round=1,
            transfer=bytes(16),
            digest=bytes(32),
            size=1,
            chunk_bytes=0,
            turn=1,
        ),
        lambda: Reminder(
            fleet="demo",
            device="a",
            run_id=bytes(16),
            round=1,
            transfer=bytes(16),
            digest=bytes(32),
            size=1,
            chunk_bytes=limits.MAX_PACKET_BYTES + 1,
            turn=1,
        ),
    ],
)
def test_invalid_values_are_refused(make):
    with pytest.raises(WireError):
        make()


@pytest.mark.parametrize(
    ("message", "at"),
    [
        (ORDER, 5),
        (ORDER, 5 + 1 + 4 + 2),
        (
            Control(
                fleet="demo", device="a", action=Action.ACK, run=1, round=1, transfer=bytes(16), missing=(), reason=""
            ),
            5 + 6 + 3,
        ),
        (Decline("demo", "a", bytes(16), bytes(16), DeclineReason.DATA), -5),
    ],
)
def test_unknown_enumeration_is_refused(message, at):
    """The byte ``at`` holds the member's number."""
    data = bytearray(encode(message))
    for number in (0, 99, 255):
        data[at] = number
        with pytest.raises(WireError, match=f"{number} is not a"):
            decode(bytes(data), type(message))


@pytest.mark.parametrize("number", [4, 7])
def test_deleted_phases_number_stays_unused(number):
    """An assignment encoded by an earlier version must not get another meaning; no such number is encoded."""
    data = bytearray(encode(ORDER))
    found = decode(bytes(data), Assignment)
    assert (type(found.phase), type(found.share)) == (Phase, Share)
    data[5] = number
    with pytest.raises(WireError, match=f"{number} is not a"):
        decode(bytes(data), Assignment)
    with pytest.raises(WireError, match=f"{number} is not a valid Phase"):
        encode(dataclasses.replace(ORDER, phase=number))


def test_device_chooses_the_first_alone():
    """A device chooses among the first candidate alone where the others serve another end. It needs all models to compare."""
    order = dataclasses.replace(ORDER, candidates=(2, 1))
    chosen = {phase: dataclasses.replace(order, phase=phase).scored for phase in Phase}
    alone = {Phase.TRIAL, Phase.ADAPT, Phase.KEEP, Phase.STATISTICS}
    assert chosen == {phase: (2,) if phase in alone else (2, 1) for phase in Phase}
    assert (ORDER.models, dataclasses.replace(order, compare=(0, 1, 3)).models) == ((0,), (2, 1, 0, 3))


def test_each_device_finds_order_by_place():
    """Each device finds its order by its place."""
    a = announcement()
    assert [a.order_for(place) for place in (0, 1, 99)] == [ORDER, None, None]
    with pytest.raises(WireError, match="does not hold"):
        a.order_for(2)


def test_upload_names_all_that_binds_it():
    """Fleet, run, round, nonce, recipient, mask key and mode are in what the device signs."""
    fields = {f.name for f in dataclasses.fields(Upload)}
    assert {"fleet", "run_id", "round", "nonce", "device", "recipient", "key_id", "mode", "task_digest"} <= fields
