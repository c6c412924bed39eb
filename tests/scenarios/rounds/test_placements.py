"""Newcomers of FedGroup and CFL on the loopback fleet while devices and the aggregator are killed."""

import pytest

from shoal.protocol.messages import Phase
from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    events,
    grouped_data,
    make_fleet,
    restart_aggregator,
    restart_device,
    same_partition,
    truth_of,
)

LATE = "dev-06"
CFL = {"algorithm": "cfl", "rounds": 11, "local": LocalTraining(epochs=2, batch_size=10, lr=0.5)}
COMMON = {"mode": "rotation", "deadline_s": 30.0}
FEDGROUP = {
    "algorithm": "fedgroup",
    "rounds": 8,
    "settings": {"groups": "2", "alpha": "3"},
    "local": LocalTraining(epochs=2, batch_size=10, lr=0.5),
    "pretrain": LocalTraining(epochs=6, batch_size=10, lr=0.5),
}


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


@pytest.fixture(params=["fedgroup", "cfl"])
def fleet(tmp_path, request):
    """Yield a fleet of six, whose groups have stood for a round when another device joins."""
    data = grouped_data(7, 2)
    late = data.pop(LATE)
    options = {"fedgroup": FEDGROUP, "cfl": CFL}[request.param]
    with make_fleet(tmp_path / "fleet", data, quorum=0.6, **{**COMMON, **options}) as fleet:
        fleet.run_until(lambda: events(fleet.records(), "cold-start") or events(fleet.records(), "split"), 20)
        stood = len(fleet.records()) + 1
        fleet.run_until(lambda: fleet.closed() == stood, 20)
        fleet.add_device(LATE, late)
        yield fleet


def placements(records):
    """Return (device, by) of each newcomer that was placed."""
    of_fedgroup = [(device, e["by"]) for e in events(records, "newcomers") for device in e["groups"]]
    return of_fedgroup + [(e["device"], e["by"]) for e in events(records, "newcomer")]


def finish(fleet):
    """Run to the end, at which all devices are in their true groups; return the placements."""
    records = fleet.run(900)
    assert same_partition(records[-1]["clusters"], truth_of(7, 2))
    return placements(records)


@pytest.mark.parametrize("fleet", with_long(["fedgroup", "cfl"], "fedgroup"), indirect=True)
def test_newcomer_takes_all_from_checkpoints(fleet):
    """It has keys of its own key version, so it opens neither the run package's origin nor the means of the first round."""
    assert finish(fleet) == [(LATE, "direction")]


@pytest.mark.parametrize(
    ("settings", "participation"),
    with_long([({"eta_g": "0.05"}, 1.0), ({"start": "origin"}, 1.0), ({}, 0.6)], ({}, 0.6)),
)
def test_newcomers_find_the_directions(tmp_path, settings, participation):
    """Models that are added up, directions that are no group's model, and rounds of a few devices."""
    data = grouped_data(7, 2)
    late = data.pop(LATE)
    options = {**FEDGROUP, "rounds": 8 if participation == 1 else 14, "participation": participation}
    options["settings"] = {**FEDGROUP["settings"], **settings}
    with make_fleet(tmp_path / "fleet", data, quorum=0.6, **COMMON, **options) as fleet:
        fleet.run_until(lambda: fleet.closed() == 3, 20)
        fleet.add_device(LATE, late)
        placed = dict(finish(fleet))
        assert set(placed.values()) == {"direction"}
        assert LATE in placed


def each_in_one(name, of_fedgroup, of_cfl):
    """Parametrise ``fleet`` and another value: each algorithm has one of the two values, and in `make long` both."""
    chosen = [("fedgroup", of_fedgroup), ("cfl", of_cfl)]
    others = [("fedgroup", of_cfl), ("cfl", of_fedgroup)]
    cases = [*chosen, *(pytest.param(*other, marks=pytest.mark.long) for other in others)]
    return pytest.mark.parametrize(("fleet", name), cases, indirect=["fleet"])


@each_in_one("revive", True, False)
def test_death_at_handover_stops_nobody(fleet, revive):
    """A device that dies while it hands a direction over stops no placement."""
    fleet.run_until(lambda: lending(fleet), 60)
    killed = lending(fleet)[0]
    fleet.kill_device(killed)
    if revive:
        fleet.revive_device(killed)
        assert finish(fleet) == [(LATE, "direction")]
        return
    fleet.run_until(lambda: placements(fleet.records()), 300)
    fleet.revive_device(killed)
    assert [device for device, _ in finish(fleet)] == [LATE]


@each_in_one("when", lending, placing)
def test_killed_aggregator_opens_same_round(fleet, when):
    """An aggregator that is killed opens the same round again."""
    fleet.run_until(lambda: when(fleet), 60)
    before = open_plan(fleet)
    restart_aggregator(fleet)
    after = open_plan(fleet)
    assert (after.round, after.assignments) == (before.round, before.assignments)
    assert finish(fleet) == [(LATE, "direction")]


@each_in_one("times", 2, 1)
def test_killed_newcomer_finds_its_group(fleet, times):
    """A newcomer that is killed while it is placed finds its group."""
    for _ in range(times):
        fleet.run_until(lambda: placing(fleet), 60)
        restart_device(fleet, LATE)
    assert [device for device, _ in finish(fleet)] == [LATE]


@pytest.mark.parametrize("fleet", with_long(["fedgroup", "cfl"], "fedgroup"), indirect=True)
def test_absent_newcomer_is_placed_later(fleet):
    """FedGroup does not spend another round of its own on it."""
    fleet.run_until(lambda: placing(fleet), 60)
    fleet.kill_device(LATE)
    closed = len(fleet.records())
    fleet.run_until(lambda: fleet.closed() > closed, 200)
    fleet.revive_device(LATE)
    assert finish(fleet) == [(LATE, "direction" if fleet.plan.recipe.algorithm == "cfl" else "loss")]
