"""Coordinates are found again under the next key of a permutation, and not under that of a rotation."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.linking import by_profile, by_rank, by_span, linked, resent

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("mode", "least"), [("permutation", 0.6), ("signed-permutation", 0.4)])
def test_permutations_are_linked(lab, mode, least):
    """By profile; and if one update is sent under two keys."""
    profile, invariants = linked(lab, mode, "round", 15)
    assert profile.success >= least
    assert invariants.success > invariants.chance + 0.01
    assert resent(lab, mode, "round").success >= 0.95


@pytest.mark.parametrize("devices", [15, 100])
def test_rotations_are_not(lab, devices):
    assert all(
        r.success <= 0.01 for r in (*linked(lab, "rotation", "round", devices), resent(lab, "rotation", "round"))
    )


def test_one_key_needs_no_linking(lab):
    (found,) = linked(lab, "rotation", "run", 15)
    assert found.success == resent(lab, "rotation", "run").success == 1


def test_profile_rank_and_span_find_columns():
    """On a permutation made here; the span finds columns if updates are the same and as many as coordinates."""
    rng = np.random.default_rng(3)
    before, order, asked = rng.standard_normal((40, 30)).astype(np.float32), rng.permutation(30), np.arange(30)
    after, truth = before[:, order], np.argsort(order)
    assert np.array_equal(by_profile(before, after, asked, np.asarray, signed=True).argmax(1), truth)
    assert np.array_equal(by_profile(before, -after, asked, np.asarray, signed=False).argmax(1), truth)
    assert np.array_equal(by_rank(before[:1], -after[:1], asked), truth)
    assert np.array_equal(by_span(before[:29], after[:29], asked).argmax(1), truth)
