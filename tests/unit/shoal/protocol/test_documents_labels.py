"""Labels in a roster: what they may be, whom a run for a label counts, and what a damaged text gives."""

import pytest

from shoal.errors import WireError
from shoal.limits import MAX_LABELS_CHARS
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Member, Roster, read_labels, write_labels


def roster(labels, revoked=()):
    devices = tuple(Member(name, bytes(32), bytes(32)) for name in "abc")
    return Roster(
        fleet="reef",
        sequence=1,
        issued_at_s=1,
        expires_at_s=2,
        aggregator=None,
        devices=devices,
        revoked=revoked,
        labels=labels,
    )


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
        roster((text,))


@pytest.mark.parametrize("labels", [("",), ("a=b", ""), ("a=b",) * 4])
def test_roster_has_one_form_of_labels(labels):
    """Else the aggregator could not make the signed bytes again from a change."""
    with pytest.raises(WireError, match="labels of"):
        roster(labels)


def test_a_run_counts_devices_with_its_label():
    """A part of a value is no label, and a revoked device stays out."""
    found = roster(("line=3,site=berlin", "site=berlin2", "site=berlin"), revoked=("c",))
    assert found.only("") is found
    assert found.only("site=berlin").active() == ("a",)
    assert found.only("line=3").active() == ("a",)
    assert found.only("site=ber").active() == found.only("berlin").active() == ()
    assert (found.only("site=berlin").active_count, found.only("site=berlin").device("b")) == (1, None)
    assert decode(encode(found), Roster) == found
