"""Heads of the transcript in devices' presences: which ones the owner believes, and what it concludes from them."""

import dataclasses

import pytest

from crypto.seal.envelope import SealError, seal_to_group
from crypto.seal.identity import Identity
from shoal.errors import ShoalError, WireError
from shoal.owner.models.reader import disagreements, open_presence
from shoal.protocol import channels
from shoal.protocol.codec import encode
from shoal.protocol.messages import Presence
from shoal.protocol.states import FORKED_ROUND, TranscriptHead
from tests.helpers.fleets import device_identity, group_key, make_fleet
from tests.helpers.plans import run_plan

RUN, OTHER_RUN = b"r" * 16, b"s" * 16
HEAD = TranscriptHead(RUN, 20, b"a" * 32)
OTHER = dataclasses.replace(HEAD, transcript=b"b" * 32)
LEFT = dataclasses.replace(HEAD, round=FORKED_ROUND)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with make_fleet(tmp_path_factory.mktemp("histories") / "fleet") as made:
        yield made


def sealed(fleet, device="dev-01", *, signer=None, group=None, head=HEAD, purpose="presence", inside="dev-01"):
    outer = dataclasses.replace(channels.PRESENCE.head("demo", device), purpose=purpose)
    signer = signer or device_identity(fleet, device)
    return seal_to_group(signer, group or group_key(fleet), outer, encode(Presence("demo", inside, 7, True, head=head)))


@pytest.mark.parametrize("head", [HEAD, None])
def test_the_head_in_a_presence_is_read(fleet, head):
    assert open_presence(sealed(fleet, head=head), "dev-01", fleet.stage.fleet).head == head


def test_read_under_an_earlier_version(tmp_path):
    """It is read under an earlier key version."""
    with make_fleet(tmp_path / "fleet") as fleet:
        before = sealed(fleet)
        fleet.stage.fleet.rotate()
        assert open_presence(before, "dev-01", fleet.stage.fleet).head == HEAD


@pytest.mark.parametrize(
    "changes",
    [
        {"signer": Identity.generate("dev-01")},
        {"device": "dev-02"},
        {"purpose": "announcement"},
        {"group": "strange"},
    ],
)
def test_foreign_presence_is_refused(fleet, changes):
    """A presence that is not the devices own is refused."""
    if "group" in changes:
        changes = {"group": dataclasses.replace(group_key(fleet), secret=bytes(32))}
    with pytest.raises(ShoalError):
        open_presence(sealed(fleet, **changes), "dev-01", fleet.stage.fleet)


def test_device_can_not_speak_for_another(fleet):
    """A device can't speak for another or from outside the roster."""
    with pytest.raises(ShoalError):
        open_presence(sealed(fleet, inside="dev-02"), "dev-01", fleet.stage.fleet)
    with pytest.raises(ShoalError, match="no presence of dev-09"):
        open_presence(sealed(fleet), "dev-09", fleet.stage.fleet)
    with pytest.raises((SealError, WireError, ShoalError)):
        open_presence(sealed(fleet)[:-9], "dev-01", fleet.stage.fleet)


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        ({}, []),
        ({"pi-1": HEAD, "pi-2": HEAD}, []),
        ({"pi-1": HEAD, "pi-2": dataclasses.replace(OTHER, round=21)}, []),
        ({"pi-1": HEAD, "pi-2": dataclasses.replace(OTHER, run_id=OTHER_RUN)}, []),
        (
            {"pi-1": HEAD, "pi-2": HEAD, "pi-3": OTHER},
            ["two histories of run 3: the heads of round 20 differ between pi-1, pi-2; pi-3"],
        ),
        (
            {"pi-1": LEFT, "pi-2": HEAD},
            ["pi-1 has left run 3: the aggregator has shown it another history than before or than others"],
        ),
        ({"pi-1": dataclasses.replace(OTHER, round=21)}, []),
        (
            {"pi-1": dataclasses.replace(OTHER, round=22), "pi-2": HEAD},
            ["pi-1 states the history of round 22 of run 3, which has 20 rounds"],
        ),
    ],
    ids=[
        "none",
        "equal",
        "other rounds",
        "an unknown run",
        "a fork",
        "a device that has left",
        "the final round",
        "beyond it",
    ],
)
def test_heads_of_one_round_are_compared(heads, found):
    assert disagreements(heads, {RUN: run_plan(run=3)}) == found
