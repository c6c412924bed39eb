"""Parties of a small fleet, and an aggregator's runs."""

import pytest

from tests.helpers.parties import Line, Parties
from tests.helpers.run_places import RunPlace


@pytest.fixture
def parties(tmp_path):
    return Parties(tmp_path, "dev-1")


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def place(tmp_path):
    return RunPlace(tmp_path)
