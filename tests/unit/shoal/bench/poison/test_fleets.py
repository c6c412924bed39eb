"""Fleets with attackers: sizes, shares and flipped labels."""

import numpy as np
import pytest

from shoal.bench.poison import fleets
from shoal.errors import UsageError


def test_the_digits_are_dealt_without_a_file_and_no_image_twice():
    population = fleets.deal("digits", 0, None).population
    assert len(population) == fleets.DEVICES
    shares = (population.train, population.validation, population.test)
    assert [{len(s) for s in share} for share in shares] == [{90}, {30}, {50}]
    assert len(np.unique(np.vstack([s.x for share in shares for s in share]), axis=0)) > 1690
    assert "digits" in fleets.present(None)


def test_equal_seeds_deal_equal_images():
    one, same, other = (fleets.deal("digits", seed, None).population.train[0].y for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


def test_attackers_are_taken_out_or_get_flipped_labels():
    population = fleets.deal("digits", 0, None).population
    false = fleets.attackers(population)
    assert len(false) == fleets.ATTACKERS
    assert set(fleets.without(population, false).names) == set(population.names) - set(false)
    flipped = fleets.with_flipped_labels(population, false)
    for before, after, name in zip(population.train, flipped.train, population.names, strict=True):
        assert (after.y == (9 - before.y if name in false else before.y)).all()


def test_unknown_data_are_refused():
    with pytest.raises(UsageError, match="no data 'letters'"):
        fleets.deal("letters", 0, None)
