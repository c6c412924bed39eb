"""A cluster of as few devices as a mean takes trains again once its devices are back, however long one was away.

Three devices of one group and three of another, and means of at least three: while one device is away, its cluster stands
still and the other goes on.
"""

import pytest

from edge_client.models.store import STATE_FILES
from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    restart_aggregator,
    same_partition,
    truth_of,
)

QUICK = LocalTraining(epochs=0, steps=4, batch_size=0, lr=0.8)
ALONE = LocalTraining(epochs=0, steps=12, batch_size=0, lr=0.8)
APART = {"one-shot": 5, "fedgroup": 5, "cfl": 9, "ifca": 9}
"""Rounds after which `until_apart` returns."""
SMALL = ("dev-01", "dev-03", "dev-05")
ONE_SHOT = {"algorithm": "one-shot", "settings": {"k": "2"}, "local": QUICK, "pretrain": ALONE}
ALGORITHMS = {
    "one-shot": ONE_SHOT,
    "fedgroup": {"algorithm": "fedgroup", "settings": {"groups": "2", "alpha": "3"}, "local": QUICK, "pretrain": ALONE},
    "cfl": {"algorithm": "cfl", "settings": {}, "local": LocalTraining(epochs=2, batch_size=10, lr=0.5)},
    "ifca": {"algorithm": "ifca", "settings": {"k": "2", "restarts": "3", "restart_rounds": "2"}, "local": QUICK},
}


def small_fleet(root, rounds, *, data=None, **options):
    fields = {"rounds": rounds, "min_contributors": 3, "quorum": 0.5, "deadline_s": 5.0, **ONE_SHOT, **options}
    return make_fleet(root, data or grouped_data(6, 2, n=300), **fields)


def until(fleet, rounds):
    fleet.run_until(lambda: fleet.closed() >= rounds, 5000)


def until_apart(fleet, devices=6):
    """Run until both groups have trained their own models for two rounds; return the number of closed rounds."""
    truth = truth_of(devices, 2)

    def apart():
        records = fleet.records()
        return len(records) > 2 and all(
            same_partition({d: r["clusters"].get(d, -1) for d in truth}, truth) for r in records[-3:]
        )

    fleet.run_until(apart, 2000)
    until(fleet, len(fleet.records()) + 2)
    return len(fleet.records())


def newest(fleet, device="dev-01"):
    """Return the round of the newest state of a device's model."""
    cluster = fleet.records()[-1]["clusters"][device]
    return max(state.round for state in fleet.service.state.held.states.names.values() if state.model == cluster)


def kinds(records):
    return [e["kind"] for r in records for e in r["events"]]


def ends_in_step(fleet, small=SMALL, *, end_s=20_000):
    """Assert that the small cluster has trained to the end of the run; return the records."""
    fleet.run_until(lambda: fleet.closed() == fleet.plan.recipe.rounds, end_s)
    assert newest(fleet, small[0]) == fleet.plan.recipe.rounds
    records = fleet.run(end_s)
    assert not records[-1]["still"], records[-1]["still"]
    assert len({fleet.model(name).theta.tobytes() for name in small}) == 1
    return records


def away(fleet, name, rounds):
    """Kill a device for some rounds, and start it again."""
    fleet.kill_device(name)
    until(fleet, len(fleet.records()) + rounds)
    fleet.revive_device(name)


@pytest.mark.parametrize(
    ("missed", "algorithm"),
    with_long([(missed, algorithm) for missed in (1, 5) for algorithm in ALGORITHMS], (5, "cfl")),
)
def test_absent_device_rejoins_its_cluster(tmp_path, algorithm, missed):
    """A device that was away comes back into its cluster."""
    with small_fleet(tmp_path, APART[algorithm] + missed + 7, **ALGORITHMS[algorithm]) as fleet:
        assert until_apart(fleet) <= APART[algorithm]
        away(fleet, "dev-01", missed)
        back = len(fleet.records())
        before = newest(fleet)
        until(fleet, back + 4)
        assert newest(fleet) > max(before, back), "within three rounds"
        ends_in_step(fleet)


@pytest.mark.parametrize(
    "mode", ["signed-permutation", *(pytest.param(m, marks=pytest.mark.long) for m in ("none", "permutation"))]
)
def test_under_every_mask_mode(tmp_path, mode):
    with small_fleet(tmp_path, 14, mode=mode) as fleet:
        until_apart(fleet)
        away(fleet, "dev-01", 4)
        ends_in_step(fleet)


@pytest.mark.long
def test_after_a_hundred_rounds(tmp_path):
    with small_fleet(tmp_path, 115) as fleet:
        until_apart(fleet)
        away(fleet, "dev-01", 100)
        records = ends_in_step(fleet)
    assert "model_went_back" not in kinds(records)


@pytest.mark.parametrize("lost", with_long([2, 4], 4))
def test_a_device_whose_uploads_were_lost(tmp_path, lost, tap):
    """It holds the model all the time, and the aggregator can't know."""
    with small_fleet(tmp_path, 14, faults=tap) as fleet:
        done = until_apart(fleet)
        rule = tap.lose(client=fleet.client_id("dev-01"), ending="/up")
        until(fleet, done + lost)
        tap.forgive(rule)
        ends_in_step(fleet)


@pytest.mark.parametrize("crash", [pytest.param(False, marks=pytest.mark.long), True])
def test_two_devices_away_in_turn(tmp_path, crash):
    with small_fleet(tmp_path, 19) as fleet:
        until_apart(fleet)
        for name in ("dev-01", "dev-03", "dev-01"):
            fleet.kill_device(name)
            until(fleet, len(fleet.records()) + 3)
            if crash:
                restart_aggregator(fleet)
            fleet.revive_device(name)
        ends_in_step(fleet)


def test_two_devices_away_at_once(tmp_path):
    with small_fleet(tmp_path, 16) as fleet:
        until_apart(fleet)
        fleet.kill_device("dev-03")
        away(fleet, "dev-01", 4)
        until(fleet, len(fleet.records()) + 2)
        fleet.revive_device("dev-03")
        ends_in_step(fleet)


def test_device_away_while_keys_were_drawn(tmp_path):
    """The mean that it needs is masked under the keys of the version before."""
    with small_fleet(tmp_path, 16) as fleet:
        until_apart(fleet)
        fleet.kill_device("dev-01")
        until(fleet, len(fleet.records()) + 2)
        fleet.add_device("dev-06", grouped_data(7, 2)["dev-06"])
        fleet.publish()
        until(fleet, len(fleet.records()) + 4)
        fleet.revive_device("dev-01")
        ends_in_step(fleet)


@pytest.mark.parametrize("algorithm", with_long(ALGORITHMS, "cfl"))
def test_lost_model_takes_the_cluster_back(tmp_path, algorithm):
    """Two devices can't certify the state that they hold, so the cluster returns to one that three have certified."""
    with small_fleet(tmp_path, APART[algorithm] + 14, **ALGORITHMS[algorithm]) as fleet:
        until_apart(fleet)
        fleet.kill_device("dev-01")
        until(fleet, len(fleet.records()) + 3)
        damaged = list(fleet.stage.device_dir("dev-01").rglob(STATE_FILES))
        assert damaged
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-1])
        fleet.revive_device("dev-01")
        records = ends_in_step(fleet)
    if algorithm != "ifca":
        assert "model_went_back" in kinds(records)


def test_fourth_device_missed_too_much(tmp_path):
    """It returns with a checkpoint of the last state that three devices have certified, and the mean that follows."""
    data = grouped_data(8, 2)
    with small_fleet(tmp_path, 22, data=data) as fleet:
        until_apart(fleet, 8)
        fleet.kill_device("dev-07")
        until(fleet, len(fleet.records()) + 4)
        fleet.kill_device("dev-01")
        until(fleet, len(fleet.records()) + 4)
        fleet.revive_device("dev-07")
        ends_in_step(fleet, ("dev-03", "dev-05", "dev-07"))
