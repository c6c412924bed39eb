"""A fleet's messages, and the final models of an undisturbed run of the standard small fleet, computed once."""

import pytest

from tests.helpers.fleets import Wiretap, make_exact_fleet, thetas


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Device -> bytes of its final model after FedAvg of three rounds on three devices without any trouble."""
    with make_exact_fleet(tmp_path_factory.mktemp("undisturbed") / "fleet") as fleet:
        fleet.run(10)
        return thetas(fleet)


@pytest.fixture
def tap():
    return Wiretap()
