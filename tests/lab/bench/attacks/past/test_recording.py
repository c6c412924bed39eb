"""A record holds the uploads of all devices, and the truth about them."""

import logging

import numpy as np
from shoal_lab.bench.attacks.past.recording import (
    Tap,
    quiet_fleet,
    recorded_grants,
    recorded_uploads,
    watched_masking,
)

from aggregator.membership import AggregatorMembership
from crypto.mask.masking import mask
from edge_client.learning import update
from tests.helpers.fleets import make_fleet, publish
from tests.helpers.masks import key_of


def test_uploads_and_grants_are_in_the_record_once_and_the_truth_masks_to_them(tmp_path):
    tap = Tap()
    with (
        watched_masking() as truth,
        make_fleet(tmp_path / "fleet", count=3, rounds=3, faults=tap, mode="rotation") as fleet,
    ):
        fleet.run_until(lambda: fleet.closed() >= 1, 20)
        fleet.stage.fleet.rotate()
        publish(fleet)
        fleet.run(20)
        aggregator = AggregatorMembership(fleet.stage.aggregator_dir)
        found = recorded_uploads(tap.heard, aggregator)
        grants = {name: len(recorded_grants(tap.heard, name)) for name in fleet.stage.devices}
    assert sorted((u.round, u.device) for u in found) == [(r, f"dev-{i:02d}") for r in (1, 2, 3) for i in range(3)]
    assert {u.round for u in found if u.key_version == 0} < {u.round for u in found}
    for u in found:
        masking = truth[u.digest]
        assert np.array_equal(mask(masking.clear, masking.key).values, u.masked)
        context = masking.key.context
        assert (masking.key.key_id, context.key_version, context.round) == (u.key_id, u.key_version, u.round)
    assert set(grants.values()) == {1}


def test_masking_is_watched_only_inside_the_block():
    real, key = update.encode_update, key_of("rotation", 4)
    with watched_masking() as truth:
        body = update.encode_update(np.ones(4, np.float32), key, "float32", b"").body
    assert update.encode_update is real
    assert [m.clear.tolist() for m in truth.values()] == [[1, 1, 1, 1]]
    assert body == mask(np.ones(4, np.float32), key).values.tobytes()


def test_the_fleets_log_is_quiet_only_inside_the_block():
    logger = logging.getLogger("shoal.edge")
    with quiet_fleet():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.WARNING)
