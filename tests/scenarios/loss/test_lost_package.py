"""A device that still waits for the models of a run that is over, while the package of the next one gets lost."""

import pytest
from shoal_lab.loopback.transport import Hop

from tests.helpers.fleets import (
    begin_run,
    make_fleet,
)

OPTIONS = {"rounds": 1, "quorum": 0.5, "deadline_s": 20.0}


@pytest.mark.parametrize("times", [1, 2])
def test_it_finds_into_the_next_run(tmp_path, times, tap):
    with make_fleet(tmp_path / "fleet", faults=tap, **OPTIONS) as fleet:
        client, runtime = fleet.client_id("dev-02"), fleet.devices["dev-02"].runtime
        models = tap.lose(client=client, hop=Hop.DOWN, holding="/s/model/")
        assert fleet.run(200)[-1]["missing"] == ["dev-02"]
        assert runtime.session.labels
        tap.forgive(models)
        tap.lose(client=client, ending="/s/plan", hop=Hop.DOWN, times=times)
        begin_run(fleet, **OPTIONS)
        fleet.run_until(lambda: runtime.following == 2, 100)
        assert fleet.run(200)[-1]["contributed"] == 3
