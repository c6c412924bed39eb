"""Fleets with attackers: sizes, shares and flipped labels."""

import numpy as np
import pytest
from shoal_lab.bench.poison import fleets

from shoal.errors import UsageError


def test_the_digits_are_dealt_without_a_file_and_no_image_twice():
    population = fleets.deal("digits", 0, None, 10).population
    assert len(population) == 10
    shares = (population.train, population.validation, population.test)
    assert [{len(s) for s in share} for share in shares] == [{90}, {30}, {50}]
    assert len(np.unique(np.vstack([s.x for share in shares for s in share]), axis=0)) > 1690
    assert "digits" in fleets.present(None)


def test_equal_seeds_deal_equal_images():
    one, same, other = (fleets.deal("digits", seed, None, 10).population.train[0].y for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


def test_attackers_are_taken_out_or_get_flipped_labels():
    population = fleets.deal("digits", 0, None, 10).population
    false = population.names[:3]
    assert set(fleets.without(population, false).names) == set(population.names) - set(false)
    flipped = fleets.changed(population, false, fleets.flipped)
    for before, after, name in zip(population.train, flipped.train, population.names, strict=True):
        assert (after.y == (9 - before.y if name in false else before.y)).all()


def test_a_backdoor_is_a_white_corner_with_the_label_of_a_part_of_the_images():
    share = fleets.deal("digits", 0, None, 20).population.train[0]
    assert len(share) == 45
    found = fleets.poisoned(share)
    corner = found.x.reshape(-1, 8, 8)[:: fleets.PAINTED, -2:, -2:]
    assert (corner == 1.0).all()
    assert (found.y[:: fleets.PAINTED] == fleets.TARGET).all()
    rest = np.arange(45) % fleets.PAINTED > 0
    assert (found.x[rest] == share.x[rest]).all()
    assert (found.y[rest] == share.y[rest]).all()


def test_the_images_that_measure_a_backdoor_are_of_other_classes():
    share = fleets.deal("digits", 0, None, 20).population.test[0]
    found = fleets.triggered(share)
    assert len(found) == np.count_nonzero(share.y != fleets.TARGET) < len(share)
    assert (found.y == fleets.TARGET).all()
    assert (found.x.reshape(-1, 8, 8)[:, -2:, -2:] == 1.0).all()


def test_unknown_data_are_refused():
    with pytest.raises(UsageError, match="no data 'letters'"):
        fleets.deal("letters", 0, None, 10)
