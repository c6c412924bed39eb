"""FedGroup's placement rounds on the loopback fleet while devices and the aggregator are killed."""

import pytest

from shoal.protocol.messages import Phase
from shoal.task.manifest import LocalTraining
from tests.helpers.fleets import grouped_data, make_fleet, same_partition, truth_of

LATE = "dev-06"
FEDGROUP = {
    "algorithm": "fedgroup",
    "rounds": 10,
    "settings": {"groups": "2", "alpha": "3"},
    "local": LocalTraining(epochs=2, batch_size=10, lr=0.5),
    "pretrain": LocalTraining(epochs=6, batch_size=10, lr=0.5),
    "mode": "rotation",
    "deadline_s": 30.0,
}


def events(records, kind):
    return [e for r in records for e in r["events"] if e["kind"] == kind]


def open_plan(fleet):
    return fleet.service.state.plan if fleet.service is not None else None


def placing(fleet):
    """Whether a placement round is open."""
    plan = open_plan(fleet)
    return plan is not None and any(o.phase is Phase.PLACE for o in plan.assignments.values())


def lending(fleet):
    """Return the devices that seal a model of which no assignment makes use: a newcomer waits for it."""
    plan = open_plan(fleet)
    if plan is None:
        return []
    used = {m for o in plan.assignments.values() for m in o.models}
    return [d for d, o in plan.assignments.items() if set(o.seal) - used]


@pytest.fixture
def fleet(tmp_path):
    """Yield a fleet of six, all in the cold start, after three rounds."""
    data = grouped_data(7, 2)
    late = data.pop(LATE)
    with make_fleet(tmp_path / "fleet", data, quorum=0.6, **FEDGROUP) as fleet:
        fleet.run_until(lambda: len(fleet.records()) == 3, 20)
        fleet.add_device(LATE, late)
        yield fleet


def finish(fleet):
    """Run to the end; all devices are in their true groups. Return the events of newcomers."""
    records = fleet.run(900)
    assert same_partition(records[-1]["clusters"], truth_of(7, 2))
    return events(records, "newcomers")


def test_a_newcomer_takes_origin_and_directions_from_checkpoints(fleet):
    """It has keys of its own key version, so it opens neither the run package's origin nor the means of the first round."""
    (found,) = finish(fleet)
    assert (list(found["groups"]), found["by"]) == ([LATE], "direction")


@pytest.mark.parametrize("revive", [True, False])
def test_a_device_that_dies_while_it_hands_a_direction_over_stops_no_placement(fleet, revive):
    fleet.run_until(lambda: lending(fleet), 60)
    killed = lending(fleet)[0]
    fleet.kill_device(killed)
    if revive:
        fleet.revive_device(killed)
        (found,) = finish(fleet)
        assert (list(found["groups"]), found["by"]) == ([LATE], "direction")
        return
    fleet.run_until(lambda: events(fleet.records(), "newcomers"), 300)
    fleet.revive_device(killed)
    (found,) = finish(fleet)
    assert list(found["groups"]) == [LATE]


@pytest.mark.parametrize("when", [lending, placing])
def test_an_aggregator_that_is_killed_opens_the_same_round_again(fleet, when):
    fleet.run_until(lambda: when(fleet), 60)
    before = open_plan(fleet)
    fleet.kill_aggregator()
    fleet.revive_aggregator()
    after = open_plan(fleet)
    assert (after.round, after.assignments) == (before.round, before.assignments)
    (found,) = finish(fleet)
    assert (list(found["groups"]), found["by"]) == ([LATE], "direction")


@pytest.mark.parametrize("times", [1, 2])
def test_a_newcomer_that_is_killed_while_it_is_placed_finds_its_group(fleet, times):
    for _ in range(times):
        fleet.run_until(lambda: placing(fleet), 60)
        fleet.kill_device(LATE)
        fleet.revive_device(LATE)
    found = finish(fleet)
    assert list(found[-1]["groups"]) == [LATE]


def test_a_newcomer_that_is_gone_in_its_placement_round_chooses_by_loss_later(fleet):
    fleet.run_until(lambda: placing(fleet), 60)
    fleet.kill_device(LATE)
    closed = len(fleet.records())
    fleet.run_until(lambda: len(fleet.records()) > closed, 200)
    fleet.revive_device(LATE)
    found = finish(fleet)[-1]
    assert (list(found["groups"]), found["by"]) == ([LATE], "loss")
