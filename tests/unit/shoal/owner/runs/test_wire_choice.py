"""The wire version of a run, from what the owner, the aggregator and the devices speak."""

import pytest

from aggregator.status.record import REVOKED, DeviceStatus, FleetStatus
from shoal.errors import ConfigError, UsageError
from shoal.owner.runs.wire_choice import check_spoken, choose_wire, held_back
from shoal.protocol.wire_versions import WireRange

OWNER = WireRange(1, 3)


def fleet(aggregator, *devices, revoked=()):
    return FleetStatus(
        fleet="reef",
        running=True,
        connected=True,
        broker="mqtt://b",
        since_s=1,
        problems=(),
        run=None,
        devices=tuple(
            DeviceStatus(name=f"dev-{i}", version=f"0.{i}.0", wire=wire, reason=REVOKED if i in revoked else "")
            for i, wire in enumerate(devices)
        ),
        version="0.9.0",
        wire=aggregator,
    )


@pytest.mark.parametrize(
    ("aggregator", "devices", "wire"),
    [
        ((1, 3), [(1, 3), (1, 3)], 3),
        ((1, 2), [(1, 3), (2, 3)], 2),
        ((1, 3), [(1, 1), (1, 3)], 1),
        ((1, 3), [None, (1, 2)], 2),
        (None, [None], 3),
        ((2, 5), [], 3),
    ],
)
def test_the_newest_that_all_speak(aggregator, devices, wire):
    assert choose_wire(fleet(aggregator, *devices), OWNER) == wire


def test_a_revoked_device_holds_nothing_back():
    assert choose_wire(fleet((1, 3), (1, 1), (1, 3), revoked=[0]), OWNER) == 3


@pytest.mark.parametrize(
    ("aggregator", "devices", "words"),
    [
        ((1, 3), [(1, 3)], ""),
        ((1, 2), [(1, 2)], "the aggregator (shoal 0.9.0) speaks no newer"),
        ((1, 3), [(1, 3), (1, 2), (1, 2)], "dev-1 (shoal 0.1.0), dev-2 (shoal 0.2.0) speak no newer"),
        (None, [(1, 1), None], "dev-0 (shoal 0.0.0) speak no newer"),
    ],
)
def test_the_owner_sees_who_keeps_a_run_in_an_older_version(aggregator, devices, words):
    found = fleet(aggregator, *devices)
    assert held_back(found, OWNER, choose_wire(found, OWNER)) == words


def test_without_a_common_version_those_left_out_are_named():
    with pytest.raises(ConfigError, match=r"owner and the aggregator: dev-0 \(shoal 0\.0\.0, wire 1\)$") as caught:
        choose_wire(fleet((2, 3), (1, 1), (2, 3), None), OWNER)
    assert caught.value.hint.startswith("upgrade Shoal there first; or start the run with --wire 3")


@pytest.mark.parametrize(("aggregator", "first"), [((4, 5), "this program"), ((1, 1), "the aggregator")])
def test_owner_and_aggregator_without_a_common_version(aggregator, first):
    with pytest.raises(ConfigError, match=r"the aggregator \(shoal 0\.9\.0\) ") as caught:
        choose_wire(fleet(aggregator), WireRange(2, 3))
    assert caught.value.hint == f"upgrade {first} first"


def test_a_choice_by_hand_must_be_spoken():
    check_spoken(3, OWNER)
    with pytest.raises(UsageError, match="--wire 4: this program speaks wire version 1 to 3"):
        check_spoken(4, OWNER)


def test_a_range_that_is_none_is_no_crash():
    with pytest.raises(ConfigError, match="wire versions from 3 to 1"):
        choose_wire(fleet((3, 1)), OWNER)
