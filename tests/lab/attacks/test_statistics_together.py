"""What means of statistics tell together: of no sequence of clusters those of fewer than the plan's fewest devices.

The attack is that of a party which reads means, as devices do, and subtracts: it looks for a combination of the means so far that
holds few devices. An aggregator reads no mean, and its masked ones are under another matrix in each round.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from aggregator.strategies.statistics import shown_together
from crypto.mask.dense import behind_matrix
from crypto.mask.derivation import MaskContext, derive
from crypto.mask.masking import mask
from crypto.mask.secret import MaskSecret
from shoal.types import Segment

FEWEST = 3
FLEET = tuple(f"dev-{i:02}" for i in range(14))


def told(means, fewest=FEWEST):
    """Return the smallest set of devices, below ``fewest``, whose sum some combination of the means has alone; () if none."""
    rows = np.array([[device in mean for device in FLEET] for mean in means], float)
    for size in range(1, fewest):
        for few in combinations(range(len(FLEET)), size):
            others = np.delete(rows, few, axis=1)
            # Combinations in which all others cancel, and these devices do not.
            if np.linalg.matrix_rank(rows) > np.linalg.matrix_rank(others):
                return tuple(FLEET[i] for i in few)
    return ()


def sequence(seed):
    """Return the clusters that ask for statistics, one after another: halves, with absences, moves and newcomers."""
    rng = np.random.default_rng(seed)
    there = [d for d in FLEET if rng.random() < 0.9]
    asked, groups = [there], [list(FLEET)]
    for _ in range(6):
        group = groups[rng.integers(len(groups))]
        side = rng.random(len(group)) < rng.uniform(0.2, 0.8)
        halves = [[d for d, s in zip(group, side.tolist(), strict=True) if s is which] for which in (True, False)]
        moved = FLEET[rng.integers(len(FLEET))]
        halves = [[*(d for d in half if d != moved), *([moved] if at == 0 else [])] for at, half in enumerate(halves)]
        groups += [half for half in halves if half]
        asked += [[d for d in half if rng.random() < 0.9] for half in halves]
    return asked


@pytest.mark.parametrize("seed", range(12))
def test_no_means_tell_of_few_devices(seed):
    means = []
    for devices in sequence(seed):
        shown = shown_together(means, devices, FEWEST)
        assert set(shown) <= set(devices)
        means += [shown] if shown else []
    assert len(means) > 1, "some clusters do get statistics"
    assert told(means) == ()
    assert told([set(d) for d in sequence(seed)]), "without the rule the attack succeeds"


def test_a_device_that_left_is_covered():
    fleet, without_two = FLEET[:8], FLEET[:6]
    assert told([fleet, without_two]) == FLEET[6:8]
    shown = shown_together([fleet], without_two, FEWEST)
    assert shown == FLEET[:5]
    assert told([fleet, shown]) == ()


@pytest.mark.parametrize("mode", ["rotation", "permutation"])
def test_masked_means_hide_their_difference(mode):
    """The difference of two masked means is as long as that of unrelated vectors, unless both rounds had one secret."""
    rng = np.random.default_rng(5)
    fleet = np.zeros(600, np.float32)
    fleet[:65] = rng.uniform(-1, 1, 65)
    cluster = fleet.copy()
    cluster[:65] += rng.normal(0, 0.01, 65).astype(np.float32)
    context = MaskContext(
        fleet="plant-7", run_id=b"run", task_digest=bytes(32), mode=mode, segments=(Segment("cluster", 600),)
    )

    def sent(vector, round_):
        secret = MaskSecret.from_bytes(bytes([round_]) * 32)
        return mask(vector, behind_matrix(derive(secret, context), secret, 96)).values

    apart = np.linalg.norm(fleet - cluster)
    assert np.linalg.norm(sent(fleet, 1) - sent(cluster, 1)) == pytest.approx(apart, rel=1e-3)
    assert np.linalg.norm(sent(fleet, 1) - sent(cluster, 2)) > 20 * apart
