"""The keys that one device holds in a round open every other device's update of it, and no other keys do."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.collusion import opened, run

from crypto.mask.modes.registry import MODES

pytestmark = pytest.mark.torch
MASKS = [mode for mode in MODES if mode != "none"]


@pytest.mark.parametrize("mode", MODES)
def test_the_key_opens_the_vectors_it_masked(lab, mode):
    vector = lab.rng("opened").standard_normal(lab.length).astype(np.float32)
    np.testing.assert_allclose(opened(lab, lab.masked(vector, mode), mode), vector, atol=1e-5)


@pytest.mark.parametrize("mode", MASKS)
def test_another_fleets_key_opens_nothing(lab, mode):
    vector = lab.rng("opened").standard_normal(lab.length).astype(np.float32)
    found = opened(lab, lab.masked(vector, mode), mode, "another")
    assert abs(np.corrcoef(found, vector)[0, 1]) < 0.1


def test_an_update_and_an_image_are_read_under_the_mask(lab):
    """The attacker's own training recovers far less, and the made-up key nothing."""
    share, image, *_ = run(lab, "rotation")
    assert share.success > 0.99
    assert share.chance < 0.5
    assert float(share.note.split("key ")[1].split(";")[0]) < 0.05
    assert image.success > 40
    assert image.works
    true, read = image.pictures
    assert true.image.shape == read.image.shape == (lab.side, lab.side)
    np.testing.assert_allclose(read.image, true.image, atol=0.01)


@pytest.mark.parametrize("mode", MASKS)
def test_one_rounds_key_opens_its_round_and_no_other_under_fresh_keys(lab, mode):
    """Under one key a run it opens the other round too."""
    found = {r.keys: r for r in run(lab, mode) if r.name == "colluding-device"}
    other = {keys: float(r.note.split()[-1]) for keys, r in found.items()}
    assert all(r.success > 0.99 for r in found.values())
    assert other["run"] > 0.99
    assert other["round"] < 0.1
