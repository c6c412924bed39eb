"""Uploads of past rounds stay closed, unless owner or device leave out what protects them."""

from unittest.mock import PropertyMock

import pytest
from shoal_lab.bench.attacks.past.keyring import Keyring
from shoal_lab.bench.attacks.past.recording import Tap, quiet_fleet, recorded_uploads
from shoal_lab.bench.attacks.past.rounds import (
    ABSENT,
    LEFT,
    NEWCOMER,
    ROUNDS,
    STOLEN,
    VICTIM,
    Ambush,
    evidence,
    evidence_of,
    fleet_data,
    fleet_options,
    past,
    since,
)
from shoal_lab.bench.attacks.past.theft import steal

from aggregator.membership import AggregatorMembership
from edge_client.membership import DeviceMembership
from shoal.owner.keys.directory import FleetDirectory
from shoal.simulation.loopback_fleet import LoopbackFleet
from shoal.transport.faults import Hop, Passage
from tests.helpers.cases import with_long

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def shares(found, stolen):
    """Return the shares that newcomer and thief open of the past, and the thief of the rounds from the theft on."""
    return (
        found.share(NEWCOMER, found.before),
        found.share(VICTIM, found.rounds(1, stolen - 1)),
        found.share(VICTIM, found.rounds(stolen, ROUNDS)),
    )


@pytest.mark.parametrize(("mode", "stolen"), with_long([("permutation", 2), ("rotation", STOLEN)], ("permutation", 2)))
def test_nothing_of_the_past_is_opened(lab, mode, stolen):
    """What follows the theft is opened, so the thief's search finds keys where there are any."""
    found = evidence_of(lab, mode) if stolen == STOLEN else evidence(lab, mode, stolen)
    assert shares(found, stolen) == (0, 0, 1)


def test_a_theft_at_any_message_opens_no_round_before_the_last_upload(lab, tmp_path):
    """Whichever message of the device is under way, its disk and memory hold no key of a round that it has left."""
    data = {name: batch for name, batch in fleet_data(lab).items() if name != NEWCOMER}
    tap, thefts, rounds = Tap(), [], 3
    options = fleet_options("permutation", rounds)
    with quiet_fleet(), LoopbackFleet(tmp_path, lab.bundle, data, options, origins=lab.origin[None].copy()) as fleet:
        victim = fleet.client_id(VICTIM)

        def robbed(passage):
            fate = tap(passage)
            if passage.client == victim:
                sent = sum(p.hop is Hop.UP and p.client == victim and p.topic.endswith("/up") for p in tap.heard)
                thefts.append((sent, steal(fleet.stage.device_dir(VICTIM), fleet.devices[VICTIM].runtime)))
            return fate

        fleet.broker.faults = robbed
        fleet.run(100)
        uploads = recorded_uploads(tap.heard, AggregatorMembership(fleet.stage.aggregator_dir))
        ring = Keyring(uploads, fleet.plan)
    none = rounds + 1
    first = [(sent, min((k.context.round for k in ring.masks(loot).values()), default=none)) for sent, loot in thefts]
    assert all(opened >= min(sent, none) for sent, opened in first)
    assert {opened for _, opened in first} == {1, 2, 3, none}


def test_an_absent_device_opens_the_rounds_since_it_left(lab):
    """Also those under the version that was drawn meanwhile: its delivery waits for the device, which holds the key to it."""
    found = evidence_of(lab, "rotation")
    assert {u.key_version for u in found.rounds(LEFT, ROUNDS)} == {0, 7}
    assert found.share(ABSENT, found.rounds(LEFT, ROUNDS)) == 1
    assert found.share(ABSENT, found.rounds(1, LEFT - 1)) == 0


def test_a_newcomer_opens_the_past_if_no_version_is_drawn_for_it(lab, monkeypatch):
    monkeypatch.setattr(FleetDirectory, "admission_draws", PropertyMock(return_value=False))
    found = evidence(lab, "rotation")
    assert shares(found, STOLEN) == (1, 0, 1)


def test_a_thief_opens_the_past_if_the_device_keeps_the_secret_of_the_version(lab, monkeypatch):
    monkeypatch.setattr(DeviceMembership, "keep_version", lambda _self, _key: None)
    found = evidence(lab, "rotation")
    assert shares(found, STOLEN) == (0, 1, 1)


def test_without_a_mask_nothing_needs_a_key(lab):
    assert {r.success for r in (*past(lab, "none"), *since(lab, "none"))} == {1.0}


def test_the_attacks_work_where_the_thief_holds_the_keys_alone(lab):
    rows = [(r.name, r.keys, r.works) for r in (*past(lab, "rotation"), *since(lab, "rotation"))]
    assert rows == [
        ("past-rounds-newcomer", "round", False),
        ("past-rounds-stolen", "round", False),
        ("past-rounds-absent", "round", True),
        ("colluding-device", "round", True),
    ]


def test_the_ambush_strikes_once_as_the_clients_upload_leaves():
    struck = []
    tap = Ambush()
    tap.arm("a", lambda: struck.append(len(tap.heard)))
    up, state = "shoal/v1/lab/d/a/up", "shoal/v1/lab/d/a/state"
    for hop, client, topic in [
        (Hop.UP, "b", up),
        (Hop.DOWN, "a", up),
        (Hop.UP, "a", state),
        (Hop.UP, "a", up),
        (Hop.UP, "a", up),
    ]:
        assert tuple(tap(Passage(hop, client, topic, b"x"))) == (0.0,)
    assert struck == [3]
    assert len(tap.heard) == 5
