"""Component analysis finds units from many vectors under one rotation, and not over fresh ones or from few."""

import pytest
from shoal_lab.bench.attacks.structure.independence import purity, run

pytestmark = pytest.mark.torch


def test_one_rotation_falls_to_many_vectors(lab):
    found = purity(lab, "rotation", "run", 4.0)
    assert found.works
    assert found.success >= 0.6


def test_few_vectors_and_fresh_rotations_hold(lab):
    for lifetime, count in (("run", 0.1), ("round", 0.1), ("round", 4.0)):
        assert not purity(lab, "rotation", lifetime, count).works


def test_only_masks_that_mix_coordinates_are_analysed(lab):
    assert run(lab, "permutation") == []
