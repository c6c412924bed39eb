"""Directories of fleets with a keeper."""

import pytest
from shoal_lab.loopback.fleet import BROKER_URL

from shoal.simulation.process_fleet import Stage
from tests.helpers.fleets import names


@pytest.fixture(scope="session")
def stages(tmp_path_factory):
    """Directories of fleets with a keeper, by number of devices; tests work on copies."""
    made = {}

    def stage(root, count):
        if count not in made:
            folder = tmp_path_factory.mktemp("keeper") / "stage"
            made[count] = Stage(folder, BROKER_URL, names(count), keeper="keeper")
        return made[count].copy_to(root)

    return stage
