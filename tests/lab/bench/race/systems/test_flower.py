"""The race's program of flower, where its environment is installed."""

import pytest

from tests.helpers.peers import accuracy_of

pytestmark = [pytest.mark.torch, pytest.mark.process]


@pytest.mark.long
def test_it_learns_as_much_as_shoal(work_file):
    """Ten small devices and three rounds, in batches of ten samples."""
    path, _ = work_file("logistic")
    found, ours = accuracy_of("flower", path), accuracy_of("shoal", path)
    assert ours > 0.9
    assert found == pytest.approx(ours, abs=0.04)
