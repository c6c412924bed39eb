"""The projection of a masked update on known ones."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.known_mean import project, run, updates

RNG_SEED = 5


def normal(*shape, seed=RNG_SEED):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_projection_gives_the_part_in_the_span_and_no_more():
    known = [normal(50, seed=s) for s in (1, 2)]
    turn = np.linalg.qr(normal(50, 50).astype(float))[0].astype(np.float32)
    inside = 2 * known[0] - known[1]
    masked = [turn @ k for k in known]
    assert np.allclose(project(known, masked, turn @ inside), inside, atol=1e-4)
    outside = normal(50, seed=9).astype(float)
    for axis in np.linalg.qr(np.stack(known).T.astype(float))[0].T:
        outside -= (outside @ axis) * axis
    assert np.linalg.norm(project(known, masked, (turn @ outside).astype(np.float32))) < 1e-3


@pytest.mark.torch
def test_the_updates_of_the_round_are_of_ten_devices_that_differ(lab):
    found = updates(lab)
    assert len(found) == 10
    assert len({u.tobytes() for u in found}) == 10
    assert updates(lab) is found


@pytest.mark.torch
def test_a_clear_mean_opens_a_permutation_and_not_a_rotation(lab):
    """The projection on nine known updates needs no mask's weakness: it is the same under both."""
    permuted, rotated = (run(lab, mode) for mode in ("permutation", "rotation"))
    assert permuted[0].success > 0.98
    assert not rotated[0].works
    assert permuted[1].success == pytest.approx(rotated[1].success, abs=1e-3)
    assert permuted[0].chance == rotated[0].chance
    assert permuted[1].chance < permuted[1].success < 0.99
