"""A device that still waits for the models of a run that is over, while the package of the next one gets lost."""

import pytest
from shoal_lab.loopback.fleet import draw_origins
from shoal_lab.loopback.transport import Hop

from shoal.owner.runs.plan import origins_needed
from tests.helpers.fleets import (
    FULL_BATCH,
    make_fleet,
    restart_aggregator,
)
from tests.helpers.plans import a_recipe

OPTIONS = {"rounds": 1, "quorum": 0.5, "deadline_s": 20.0}


@pytest.mark.parametrize("times", [1, 2])
def test_it_finds_into_the_next_run(tmp_path, times, tap):
    with make_fleet(tmp_path / "fleet", faults=tap, **OPTIONS) as fleet:
        client, runtime = fleet.client_id("dev-02"), fleet.devices["dev-02"].runtime
        tap.rules.append(
            lambda p: (
                ()
                if p.client == client and p.hop is Hop.DOWN and "/s/model/" in p.topic and fleet.plan.run == 1
                else None
            )
        )
        assert fleet.run(200)[-1]["missing"] == ["dev-02"]
        assert runtime.session.labels
        next_run = a_recipe("fedavg", local=FULL_BATCH, seed=2, min_contributors=1, **OPTIONS)
        origins = draw_origins(fleet.bundle.manifest, origins_needed(next_run), 2)
        fleet.plan = fleet.stage.add_run(fleet.bundle, origins, next_run)
        tap.lose(client=client, ending="/s/plan", hop=Hop.DOWN, times=times)
        restart_aggregator(fleet)
        fleet.run_until(lambda: runtime.following == 2, 100)
        assert fleet.run(200)[-1]["contributed"] == 3
