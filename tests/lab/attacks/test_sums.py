"""Attacks on a run with a keeper: what the aggregator and one device have says no more of an update than its cell's mean."""

import numpy as np
import pytest
from shoal_lab.bench.attacks import sums
from shoal_lab.bench.numerics.kernels import one_thread

MOST_R = {3: 0.65, 5: 0.55, 10: 0.45}
"""Of few trials; the whole bench has .56, .42 and .29."""


@pytest.fixture
def lab(attacked):
    return attacked.lab


def test_words_and_a_device_show_no_update(lab):
    with one_thread():
        found = sums.colluding(lab)
    assert not found.works
    assert found.success < found.chance + 0.01


def test_search_finds_what_is_there():
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(3, 500))
    assert sums.nearest(updates[0], [updates.sum(0), updates[1:].sum(0)]) > 0.999
    assert sums.nearest(updates[0], [updates.sum(0)]) < 0.7


def test_label_mix_fades_with_the_cell(lab):
    with one_thread():
        found = {r.devices: r.success for r in sums.label_mix(lab)}
    assert {devices: r <= MOST_R[devices] for devices, r in found.items()} == dict.fromkeys(sums.CELLS, True)


@pytest.mark.long
def test_rule_hides_a_leaver(lab):
    with one_thread():
        found = {(r.name, r.devices): r for r in sums.leaver(lab)}
    for count in sums.LEAVERS:
        assert not found["leaver", count].works
        assert found["leaver, rule off", count].works
