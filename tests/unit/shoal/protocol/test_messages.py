"""What messages refuse by themselves, and what they answer."""

import dataclasses
import struct

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import AggregatorGrant, DeviceGrant, Member, Roster, SegmentSpec
from shoal.protocol.messages import (
    NO_ASSIGNMENT,
    Action,
    Announcement,
    Assignment,
    Control,
    Decline,
    DeclineReason,
    ModelRef,
    Phase,
    Reminder,
    Share,
    Upload,
)
from tests.helpers.plans import run_plan

KEYS = (bytes(32), bytes(32))
ORDER = Assignment(int(Phase.TRAIN), (0,), int(Share.TRAIN), train=True, evaluate=False, margins=False)


def members(*names):
    return tuple(Member(n, *KEYS) for n in names)


def roster(devices=("a", "b", "c"), revoked=()):
    return Roster(
        fleet="demo",
        sequence=4,
        issued_at_s=1,
        expires_at_s=2,
        aggregator=None,
        devices=members(*devices),
        revoked=revoked,
    )


def announcement(**changes):
    fields = {
        "fleet": "demo",
        "run": 1,
        "run_id": bytes(16),
        "epoch": 1,
        "key_id": bytes(16),
        "roster_sequence": 3,
        "round": 1,
        "nonce": bytes(16),
        "deadline_s": 60.0,
        "finished": False,
        "models": (ModelRef(model=0, origin=0, label="aa", transfer=bytes(16), contributors=0, norm=0.0),),
        "assignments": (ORDER,),
        "assignment_of": (0, NO_ASSIGNMENT, 5),
        "mode": "permutation",
    }
    return Announcement(**{**fields, **changes})


def test_a_roster_finds_who_is_not_revoked():
    r = roster(revoked=("b",))
    assert r.device("a").name == "a"
    assert r.device("b") is None
    assert r.device("x") is None
    assert r.active() == ("a", "c")


@pytest.mark.parametrize(
    "make",
    [
        lambda: roster(devices=("a", "a")),
        lambda: dataclasses.replace(roster(), fleet="Demo"),
        lambda: Member("UPPER", *KEYS),
        lambda: Member("", *KEYS),
        lambda: Member("a/b", *KEYS),
        lambda: Member("a" * (limits.MAX_NAME_CHARS + 1), *KEYS),
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
def test_what_makes_no_sense_is_refused(make):
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
        (Decline("demo", "a", bytes(16), bytes(16), DeclineReason.DATA), -1),
    ],
)
def test_an_unknown_number_of_an_enumeration_is_refused(message, at):
    """The byte ``at`` holds the member's number."""
    data = bytearray(encode(message))
    for number in (0, 8, 255):
        data[at] = number
        with pytest.raises(WireError, match=f"{number} is not a"):
            decode(bytes(data), type(message))


def test_a_number_that_is_no_member_is_not_encoded():
    with pytest.raises(WireError, match="9 is not a valid Phase"):
        encode(dataclasses.replace(ORDER, phase=9))


def test_a_member_comes_back_as_one():
    found = decode(encode(ORDER), Assignment)
    assert (type(found.phase), type(found.share)) == (Phase, Share)


@pytest.mark.parametrize(
    "changes",
    [
        {"fleet": "no name"},
        {"segments": ()},
        {"segments": (run_plan().segments[0],) * 3},
        {"origins": 0},
        {"origins": 3, "max_models": 2},
        {"max_models": limits.MAX_MODELS + 1},
        {"quorum": 0.0},
        {"quorum": 1.1},
        {"participation": 0.0},
        {"participation": 2.0},
        {"deadline_s": 0.0},
        {"norm_limit": 0.0},
        {"norm_limit": -1.0},
        {"rounds": 0},
        {"min_contributors": 0},
        {"epoch_rounds": 0},
        {"weighting": "median"},
        {"norm_noise": -0.001},
        {"norm_noise": limits.MAX_NORM_NOISE * 1.001},
        {"max_samples": 0},
        {"max_samples": 2**32},
        {"weight_cap": 0.5},
        {"weight_cap": -1.0},
        {"weight_cap": float("nan")},
        {"weight_cap": float("inf")},
    ],
)
def test_a_run_plan_checks_itself(changes):
    with pytest.raises(WireError):
        run_plan(**changes)


def test_a_plan_that_breaks_its_rules_does_not_arrive_either():
    """The same checks run on decoding: the bytes of a plan whose quorum was set to zero are refused."""
    plan = run_plan(quorum=0.123456789)
    data = encode(plan).replace(struct.pack("<d", 0.123456789), struct.pack("<d", 0.0))
    with pytest.raises(WireError, match="quorum"):
        decode(data, type(plan))


def test_each_device_finds_its_order_by_its_place():
    a = announcement()
    assert a.order_for(0) == ORDER
    assert a.order_for(1) is None
    assert a.order_for(99) is None
    with pytest.raises(WireError, match="does not hold"):
        a.order_for(2)


def test_the_aggregators_grant_has_no_room_for_what_opens_a_mask():
    """Not by discipline but by type: there is no field."""
    only_devices = {f.name for f in dataclasses.fields(DeviceGrant)} - {
        f.name for f in dataclasses.fields(AggregatorGrant)
    }
    assert only_devices == {"mask_secret", "mask_epoch", "content_key"}


def test_grants_do_not_show_their_secrets():
    grant = DeviceGrant(
        fleet="demo",
        owner_key=bytes(32),
        broker="mqtt://x",
        roster=b"",
        keys_since=0,
        broadcast_key=b"B" * 32,
        mask_secret=b"M" * 32,
        content_key=b"C" * 32,
    )
    for secret in ("BBBB", "MMMM", "CCCC", "secret=", "content_key=", "broadcast_key="):
        assert secret not in repr(grant)


def test_an_upload_names_everything_that_binds_it():
    """Fleet, run, round, nonce, recipient, mask key and mode are in what the device signs."""
    fields = {f.name for f in dataclasses.fields(Upload)}
    assert {"fleet", "run_id", "round", "nonce", "device", "recipient", "key_id", "mode", "task_digest"} <= fields


def test_a_plan_knows_where_its_segments_lie():
    plan = run_plan(segments=(SegmentSpec("shared", 4), SegmentSpec("cluster", 2)))
    assert [plan.span(name) for name in ("", "shared", "cluster")] == [slice(0, 6), slice(0, 4), slice(4, 6)]
    with pytest.raises(WireError, match="no segment 'shared'"):
        run_plan().span("shared")
