"""Uploads of past rounds stay closed, unless owner or device leave out what protects them."""

from functools import cache
from types import SimpleNamespace
from unittest.mock import PropertyMock

import numpy as np
import pytest
from shoal_lab.bench.attacks.broker import SeenUpload, Tap, quiet_fleet, recorded_uploads
from shoal_lab.bench.attacks.past import (
    ABSENT,
    LARGEST_FILE,
    LEFT,
    NEWCOMER,
    OUTSIDE,
    RESTORED_ROUNDS,
    ROUNDS,
    STOLEN,
    VICTIM,
    Ambush,
    Keyring,
    Loot,
    _in_memory,
    evidence,
    evidence_of,
    fleet_data,
    fleet_options,
    opened,
    past,
    restored,
    since,
    steal,
)
from shoal_lab.loopback.fleet import LoopbackFleet
from shoal_lab.loopback.transport import Hop, Passage

from aggregator.membership import AggregatorMembership
from crypto.mask.derivation import derive
from crypto.mask.masking import mask
from crypto.mask.schedule import VersionKey
from crypto.seal.identity import Identity
from crypto.seal.receiving import ReceivingSecrets
from edge_client.membership import DeviceMembership
from shoal.membership.directory import KEY_FILE, RECEIVING_FILE
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs import plan as owner_plan
from shoal.protocol.documents import SegmentSpec
from shoal.types import Segment
from tests.helpers.cases import with_long
from tests.helpers.masks import key_of
from tests.helpers.plans import run_plan

LENGTH = 8
VECTOR = np.linspace(-1, 1, LENGTH, dtype=np.float32)
DRAWN, SECRET, HIDDEN = bytes(range(32)), bytes(range(2, 34)), bytes(range(1, 33))
VERSION, RUN = 5, 2
ALL = range(1, 6)
PLAN = run_plan(run=RUN, mode="rotation", task_digest=bytes(32), segments=(SegmentSpec("cluster", LENGTH),))
slow = pytest.mark.slow
torch = pytest.mark.torch


class Device:
    def __init__(self, *things):
        self.things = things


def test_small_private_files_are_searched(tmp_path):
    """At every offset; and loot of two times is joined."""
    Identity.generate("dev-00").save(tmp_path / KEY_FILE)
    ReceivingSecrets.generate().save(tmp_path / RECEIVING_FILE)
    (tmp_path / "models").mkdir()
    (tmp_path / "state.bin").write_bytes(bytes(LARGEST_FILE) + HIDDEN)
    (tmp_path / "roster.signed").write_bytes(HIDDEN)
    before = steal(tmp_path)
    (tmp_path / "models" / "index.bin").write_bytes(b"head" + SECRET + b"tail")
    both = before | steal(tmp_path)
    assert SECRET in both.secrets - before.secrets
    assert HIDDEN not in both.secrets
    assert len(both.privates) == 2 * len(before.privates) > 2


def test_memory_is_searched_through_closures():
    """And no further than the device goes."""
    key = key_of("rotation", 4)
    device = Device({"a": [SECRET]}, key, np.zeros(3), b"short")
    hidden = bytes(HIDDEN)
    device.things[0]["later"] = lambda: hidden
    found = set(_in_memory(device))
    assert {SECRET, HIDDEN, key} <= found
    assert b"short" not in found
    assert set(_in_memory(Device(np, Device, *OUTSIDE))) == set()


def chain_at(round_):
    version = VersionKey(PLAN.fleet, VERSION, DRAWN)
    version.skip_to_run(RUN)
    chain = version.begin_run(PLAN.run_id)
    chain.skip_to(round_)
    return chain


@cache
def round_key(round_):
    keys = chain_at(round_).take()
    return derive(keys.mask, keys.context(bytes(32), "rotation", (Segment("cluster", LENGTH),)))


def rounds_opened(*secrets, masks=()):
    uploads = [
        SeenUpload(
            SimpleNamespace(round=round_, key_version=VERSION, key_id=round_key(round_).key_id),
            mask(VECTOR, round_key(round_)).values,
            bytes(32),
        )
        for round_ in ALL
    ]
    found = Keyring(uploads, PLAN).masks(Loot(Identity.generate("dev-00"), frozenset(secrets), (), masks))
    return [u.head.round for u in uploads if np.allclose(opened(u, found), VECTOR, atol=1e-6)]


@pytest.mark.parametrize("at", ALL)
def test_chain_gives_its_rounds_and_later(at):
    """A chain gives its rounds and those after."""
    assert rounds_opened(chain_at(at).reveal()) == list(range(at, 6))


def test_a_rounds_secret_gives_its_round():
    """And so does a derived mask; other secrets give nothing."""
    assert rounds_opened(chain_at(3).take().mask.reveal()) == [3]
    assert rounds_opened(masks=(round_key(2),)) == [2]
    assert rounds_opened(bytes(32), bytes([1]) * 32, chain_at(6).reveal(), chain_at(2).take().content) == []


@pytest.mark.parametrize(("run", "found"), [(1, list(ALL)), (2, list(ALL)), (3, [])])
def test_a_versions_secret_gives_its_runs(run, found):
    """All rounds, unless it was stepped past the run."""
    version = VersionKey(PLAN.fleet, VERSION, DRAWN)
    version.skip_to_run(run)
    assert rounds_opened(version.reveal()) == found


def test_the_ambush_strikes_once():
    """As the client's upload leaves."""
    struck, tap = [], Ambush()
    tap.arm("a", lambda: struck.append(len(tap.heard)))
    up, state = "shoal/v1/lab/d/a/up", "shoal/v1/lab/d/a/state"
    for hop, client, topic in ((Hop.UP, "b", up), (Hop.DOWN, "a", up), (Hop.UP, "a", state), *[(Hop.UP, "a", up)] * 2):
        assert tuple(tap(Passage(hop, client, topic, b"x"))) == (0.0,)
    assert (struck, len(tap.heard)) == ([3], 5)


def shares(found, stolen=STOLEN):
    """Return the shares that newcomer and thief open of the past, and the thief of the rounds from the theft on."""
    return (
        found.share(NEWCOMER, found.before),
        found.share(VICTIM, found.rounds(1, stolen - 1)),
        found.share(VICTIM, found.rounds(stolen, ROUNDS)),
    )


@torch
@slow
@pytest.mark.parametrize(
    ("mode", "stolen"),
    with_long([("permutation", 2), ("rotation", STOLEN), ("rotation", STOLEN - 1)], ("rotation", STOLEN)),
)
def test_nothing_of_the_past_is_opened(lab, mode, stolen):
    """What follows the theft is opened, so the search finds keys where there are any; in an odd round one more is."""
    found = evidence_of(lab, mode) if stolen == STOLEN else evidence(lab, mode, stolen)
    assert shares(found, stolen - stolen % 2) == (0, 0, 1)


@torch
@slow
def test_absent_device_opens_rounds_since(lab):
    """Also those under the version that was drawn meanwhile: its delivery waits for the device, which holds the key to it."""
    found = evidence_of(lab, "rotation")
    assert {u.head.key_version for u in found.rounds(LEFT, ROUNDS)} == {0, 7}
    assert found.share(ABSENT, found.rounds(LEFT, ROUNDS)) == 1
    assert found.share(ABSENT, found.rounds(1, LEFT - 2)) == 0
    assert found.share(ABSENT, found.rounds(LEFT - 1, LEFT - 1)) == 1, "its state of that round was not stored"
    assert [(r.keys, r.works) for r in (*past(lab, "rotation"), *since(lab, "rotation"))] == [
        *[("round", False)] * 2,
        *[("round", True)] * 2,
    ]


@torch
@slow
def test_a_theft_at_any_message(lab, tmp_path):
    """Whichever message of the device is under way, it holds no key of a round before the last one whose state it has stored."""
    data = {name: batch for name, batch in fleet_data(lab).items() if name != NEWCOMER}
    tap, thefts, rounds = Tap(), [], 4
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
    stored = [max(1, 2 * (sent // 2)) for sent, _ in first]
    assert all(opened >= min(at, none) for at, (_, opened) in zip(stored, first, strict=True))
    assert {opened for _, opened in first} == {1, 2, 4, none}


@torch
@slow
@pytest.mark.parametrize(
    ("place", "name", "instead", "expected"),
    with_long(
        [
            (FleetDirectory, "admission_draws", PropertyMock(return_value=False), (1, 0, 1)),
            (DeviceMembership, "keep_version", lambda _self, _key: None, (0, 1, 1)),
        ]
    ),
)
def test_past_is_opened_without_protection(lab, monkeypatch, place, name, instead, expected):
    """No version is drawn for a newcomer, or a device keeps the secret of its version."""
    monkeypatch.setattr(place, name, instead)
    assert shares(evidence(lab, "rotation")) == expected


@torch
@pytest.mark.long
def test_without_a_mask_nothing_needs_a_key(lab):
    assert {r.success for r in (*past(lab, "none"), *since(lab, "none"))} == {1.0}


@torch
@slow
@pytest.mark.parametrize("repeated", with_long([False, True], True))
def test_masks_after_a_restore(lab, monkeypatch, repeated):
    """They are repeated only if the run's id is repeated as well."""
    if repeated:
        monkeypatch.setattr(owner_plan, "os", SimpleNamespace(urandom=lambda n: bytes([7]) * n))
    (found,) = restored(lab, "rotation")
    assert (found.name, found.keys, found.success) == ("restored-owner", "round", repeated * RESTORED_ROUNDS)
    assert "in run 1 after" in found.note
    assert "run 1 before" in found.note
