"""The record of a fleet's traffic: what a search of it finds, and the truth by which attacks are scored."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.broker import (
    Tap,
    _population,
    found_in,
    groups_seen,
    recorded_grants,
    recorded_uploads,
    senders_seen,
    watched_masking,
)
from shoal_lab.bench.attacks.lab import CLASSES
from shoal_lab.loopback.transport import Hop, Passage

from aggregator.membership import AggregatorMembership
from crypto.mask.masking import mask
from tests.helpers.fleets import make_fleet


def test_a_stretch_of_an_update_is_found():
    """24 bytes of it that are not all zeros are enough."""
    vector, sparse = np.random.default_rng(5).standard_normal(500).astype(np.float32), np.zeros(500, np.float32)
    sparse[0] = 7.0
    raw = vector.astype("<f4").tobytes()
    assert found_in(vector, b"x" + raw[:24])
    assert not found_in(vector, raw[:23])
    assert found_in(sparse, sparse[:6].tobytes())
    assert not any(found_in(v, bytes(5000)) for v in (sparse, np.zeros(500, np.float32)))


def test_groups_are_those_of_last_model_sent():
    """Only the model that a device is sent is its own; its uploads and the round are not."""

    def passage(client, label, hop=Hop.DOWN):
        return Passage(hop, client, f"shoal/v1/lab/s/{label}", b"")

    first, second = (f"model/{digit * 16}" for digit in "01")
    heard = [passage("a", first), passage("b", first), passage("b", second), passage("a", second, Hop.UP)]
    assert groups_seen([*heard, passage("c", "round")]) == {"a": "0" * 16, "b": "1" * 16}


def test_uploads_are_named_by_topic():
    """Uploads are named by the topics device."""

    def sent(client, device, hop=Hop.UP):
        return Passage(hop, client, f"shoal/v1/lab/d/{device}/up", b"")

    heard = [sent("shoal-lab-dev-1", "dev-1"), sent("attacker", "dev-1"), sent("aggregator", "dev-2", Hop.DOWN)]
    assert senders_seen(heard) == 0.5


@pytest.mark.torch
def test_two_groups_whose_labels_differ(lab):
    data, truth = _population(lab)
    assert truth == [0, 1] * 4
    for (name, own), group in zip(data.items(), truth, strict=True):
        assert np.array_equal(own.y, (own.x[:, :CLASSES].argmax(1) + group) % CLASSES), name


def test_the_record_of_a_fleet(tmp_path):
    """Uploads and grants are in it once, and the truth masks to them."""
    tap = Tap()
    with (
        watched_masking() as truth,
        make_fleet(tmp_path / "fleet", count=3, rounds=3, faults=tap, mode="rotation") as fleet,
    ):
        fleet.run_until(lambda: fleet.closed() >= 1, 20)
        fleet.stage.fleet.rotate()
        fleet.publish()
        fleet.run(20)
        found = recorded_uploads(tap.heard, AggregatorMembership(fleet.stage.aggregator_dir))
        grants = {name: len(recorded_grants(tap.heard, name)) for name in fleet.stage.devices}
    assert sorted((u.head.round, u.head.device) for u in found) == [
        (r, f"dev-{i:02d}") for r in (1, 2, 3) for i in range(3)
    ]
    assert {u.head.round for u in found if u.head.key_version == 0} < {u.head.round for u in found}
    for u in found:
        masking = truth[u.digest]
        assert np.array_equal(mask(masking.clear, masking.key).values, u.masked)
        context = masking.key.context
        assert (masking.key.key_id, context.key_version, context.round) == (
            u.head.key_id,
            u.head.key_version,
            u.head.round,
        )
    assert set(grants.values()) == {1}
