"""A fleet's data at the end of a run."""

from __future__ import annotations

import dataclasses

from shoal_lab.experiments.wild import tables
from shoal_lab.experiments.wild.scenarios import SCENARIOS


def test_the_last_data_are_the_later_ones_if_there_are_any():
    fleet = tables.deal(SCENARIOS["table-iris"], seed=0)
    other = tables.deal(SCENARIOS["table-iris"], seed=1).population
    assert fleet.last is fleet.population
    assert dataclasses.replace(fleet, later=other).last is other
