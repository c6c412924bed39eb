"""Masks of rounds that the owner derives."""

import pytest

from shoal.errors import ConfigError
from shoal.owner.runs.plan import make_plan, round_mask, run_chain
from shoal.protocol.recipe import Recipe
from tests.helpers.fleets import make_fleet
from tests.helpers.tasks import logistic_bundle


def test_owner_derives_masks_of_the_uploads(tmp_path):
    """Each round has its own; the id is the one that the aggregator received."""
    with make_fleet(tmp_path / "fleet", rounds=3) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        owner = fleet.stage.fleet
        (kept,) = {mean.key_id for step in fleet.service.state.held.steps[-1:] for mean in step.means}
        ids = [round_mask(owner, fleet.plan, round_).key_id for round_ in (1, 2, 3)]
        assert len(set(ids)) == 3
        assert kept == ids[1]


def test_earlier_plan_has_no_masks_here(tmp_path):
    """A plan of an earlier key version has no masks here."""
    with make_fleet(tmp_path / "fleet") as fleet:
        owner = fleet.stage.fleet
        plan = make_plan(owner, logistic_bundle(), Recipe("fedavg", min_contributors=1))
        owner.rotate()
        with pytest.raises(ConfigError, match=f"for key version {plan.key_version}, and the fleet's is"):
            run_chain(owner, plan)
