"""Rosters, grants and run plans: they refuse invalid values, also when decoded, and answer questions about themselves."""

import dataclasses
import struct

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.limits import MAX_LABELS_CHARS
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import (
    AggregatorGrant,
    DeviceGrant,
    Member,
    Roster,
    RosterChange,
    SegmentSpec,
    read_labels,
    require_name,
    write_labels,
)
from shoal.types import Segment
from tests.helpers.plans import run_plan

KEYS = (bytes(32), bytes(32))


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


def change(**changes):
    fields = {
        "after": 3,
        "signature": bytes(64),
        "fleet": "demo",
        "sequence": 4,
        "issued_at_s": 1,
        "expires_at_s": 2,
        "aggregator": None,
        "devices": 3,
        "places": (2,),
        "members": members("c"),
        "labels": ("",),
        "revoked_stay": 0,
        "revoked": (),
        "keys_since": 0,
    }
    return RosterChange(**{**fields, **changes})


@pytest.mark.parametrize("name", ["UPPER", "", "a/b", "-a", "ä", "a\n", "a" * (limits.MAX_NAME_CHARS + 1)])
def test_invalid_received_name_is_wire_error(name):
    """A decoder raises it on bytes from the network, so it must not be the ConfigError of a local file."""
    with pytest.raises(WireError, match=r"member name .* is not a valid name"):
        Member(name, *KEYS)
    with pytest.raises(WireError, match=r"fleet name .* is not a valid name"):
        require_name(name, "fleet name")
    assert len(Member("a" * limits.MAX_NAME_CHARS, *KEYS).name) == limits.MAX_NAME_CHARS


def test_roster_finds_unrevoked_devices():
    """A roster may have its newest keys and a change may only name it."""
    r = roster(revoked=("b",))
    assert r.device("a").name == "a"
    assert (r.device("b"), r.device("x")) == (None, None)
    assert (r.active(), r.active_count) == (("a", "c"), 2)
    assert dataclasses.replace(roster(), keys_since=4).keys_since == 4
    assert change(after=4, places=(), members=()).sequence == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: roster(devices=("a", "a")), "lists a device twice"),
        (lambda: dataclasses.replace(roster(), fleet="Demo"), "fleet name 'Demo' is not a valid name"),
        (lambda: dataclasses.replace(roster(), keys_since=5), "sequence 4 with keys of 5"),
        (lambda: change(fleet="Demo"), "fleet name 'Demo' is not a valid name"),
        (lambda: change(after=5), "a change from roster 5 to 4"),
        (lambda: change(devices=limits.MAX_DEVICES + 1), f"{limits.MAX_DEVICES + 1} devices is over"),
    ],
)
def test_impossible_roster_is_refused(make, message):
    """An impossible roster or change is refused."""
    with pytest.raises(WireError, match=message):
        make()


def test_roster_has_a_place_for_each_device(monkeypatch):
    """A roster lists at most the devices that places can number."""
    monkeypatch.setattr(limits, "MAX_DEVICES", 2)
    assert roster(devices=("a", "b")).active_count == 2
    with pytest.raises(WireError, match="a roster of 3 devices is over 2"):
        roster(devices=("a", "b", "c"))


@pytest.mark.parametrize(
    "changes",
    [
        {"fleet": "no name"},
        {"segments": ()},
        {"segments": (run_plan().segments[0],) * 3},
        {"origins": 0},
        {"origins": 3, "max_models": 2},
        {"max_models": limits.MAX_MODELS + 1},
        {"seed": None},
        {"local": None},
        {"segments": (SegmentSpec("cluster", 0),)},
        {"segments": (SegmentSpec("layer", 6),)},
        {"segments": (SegmentSpec("shared", 1), SegmentSpec("cluster", limits.MAX_COORDINATES))},
    ],
)
def test_plan_with_value_out_of_range(changes):
    """A run plan with a value out of range is refused."""
    with pytest.raises(WireError):
        run_plan(**changes)


def test_rule_breaking_plan_is_refused():
    """As the bytes of a plan whose quorum was set to zero."""
    plan = run_plan(quorum=0.123456789)
    data = encode(plan).replace(struct.pack("<d", 0.123456789), struct.pack("<d", 0.0))
    with pytest.raises(WireError, match="quorum"):
        decode(data, type(plan))


def test_grant_has_no_version_secret():
    """The aggregator's grant has no field for a key version's secret; a device's does not show its secrets."""
    fields = [{f.name for f in dataclasses.fields(kind)} for kind in (DeviceGrant, AggregatorGrant)]
    assert fields[0] - fields[1] == {"version_secret", "next_run", "receiving"}
    grant = DeviceGrant(
        fleet="demo",
        owner_key=bytes(32),
        broker="mqtt://x",
        roster=b"",
        keys_since=0,
        receiving=1,
        broadcast_key=b"B" * 32,
        version_secret=b"V" * 32,
    )
    shown = repr(grant)
    assert [secret for secret in ("BBBB", "VVVV", "secret=", "broadcast_key=") if secret in shown] == []


def test_plan_finds_its_segments():
    """A plan finds the coordinates of its segments."""
    plan = run_plan(segments=(SegmentSpec("shared", 4), SegmentSpec("cluster", 2)))
    assert [plan.span(name) for name in ("", "shared", "cluster")] == [slice(0, 6), slice(0, 4), slice(4, 6)]
    assert (plan.length, plan.mask_segments) == (6, (Segment("shared", 4), Segment("cluster", 2)))
    with pytest.raises(WireError, match="no segment 'shared'"):
        run_plan().span("shared")


# -- Labels in a roster: what they may be, whom a run for a label counts, and what a damaged text gives --


def labelled(labels, revoked=()):
    return dataclasses.replace(roster(revoked=revoked), labels=labels)


def test_labels_are_read_as_they_are_written():
    found = {"site": "berlin", "line": "3", "name": "Gate 7"}
    assert write_labels(found) == "line=3,name=Gate 7,site=berlin"
    assert read_labels(write_labels(found)) == found
    assert read_labels("") == {}


@pytest.mark.parametrize(
    "text",
    [
        "site",
        "site=",
        "=x",
        "Site=x",
        "site=a,line=3",
        "line=3,line=4",
        "line=3,",
        "site=münchen",
        "name=a\x1b[31m",
        "name=a\n",
        "name=a  b",
        "name= a",
        "name=\u202eb",
        "a=" + "x" * (MAX_LABELS_CHARS - 1),
    ],
)
def test_no_confusing_text_is_a_label(text):
    """Control characters, look-alikes, spaces at the ends, a key twice, another order, and too long a text."""
    with pytest.raises(WireError, match="labels"):
        read_labels(text)
    with pytest.raises(WireError):
        labelled((text,))


@pytest.mark.parametrize("labels", [("",), ("a=b", ""), ("a=b",) * 4])
def test_roster_has_one_form_of_labels(labels):
    """Else the aggregator could not make the signed bytes again from a change."""
    with pytest.raises(WireError, match="labels of"):
        labelled(labels)


def test_a_run_counts_devices_with_its_label():
    """A part of a value is no label, and a revoked device stays out."""
    found = labelled(("line=3,site=berlin", "site=berlin2", "site=berlin"), revoked=("c",))
    assert found.only("") is found
    assert found.only("site=berlin").active() == ("a",)
    assert found.only("line=3").active() == ("a",)
    assert found.only("site=ber").active() == found.only("berlin").active() == ()
    assert (found.only("site=berlin").active_count, found.only("site=berlin").device("b")) == (1, None)
    assert decode(encode(found), Roster) == found
