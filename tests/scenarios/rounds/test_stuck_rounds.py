"""No round is stuck and none is used up in vain where devices lack models: real devices that vanish and come back.

Every run here must end, and all devices that took part in its final round must have the same bits.
"""

from random import Random

import pytest

from shoal.task.manifest import LocalTraining
from tests.helpers.fleets import grouped_data, make_fleet, names

ROUND_KEYS = {"keys": "round", "mode": "rotation", "deadline_s": 20.0}
QUICK = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.2)
END_S = 20_000.0


def kinds(records):
    return [e["kind"] for r in records for e in r["events"]]


def events(records, kind):
    return [e for r in records for e in r["events"] if e["kind"] == kind]


def assigned(fleet):
    """Return device -> assignment of the open round; empty without one."""
    plan = fleet.service.state.plan
    return {} if plan is None else plan.assignments


def models(fleet, *devices):
    return [fleet.model(name).theta.tobytes() for name in devices]


def ends_with_one_model(fleet):
    """Assert that the run ends, with the same model on all devices that have contributed to its final round."""
    records = fleet.run(END_S)
    last = records[-1]
    assert last["final"]
    took_part = sorted(last["device_accuracy"]) or sorted(last["norms"])
    assert len(took_part) == last["contributed"] > 0
    assert len(set(models(fleet, *took_part))) == 1
    return records


class Churn:
    """Kills and starts devices after each round, and sometimes the aggregator, by a seeded generator."""

    def __init__(self, fleet, seed, *, kills=0.0):
        self.fleet, self.random, self.kills = fleet, Random(seed), kills  # noqa: S311 - a test
        self.back = {}

    def run(self, change):
        """Call ``change(self, round)`` before each round until the run has ended."""
        fleet, seen, end_s = self.fleet, -1, self.fleet.now_s + END_S
        while not fleet.finished:
            assert fleet.now_s < end_s, fleet.service.status()
            done = len(fleet.records())
            if done != seen:
                seen = done
                change(self, done)
                if self.random.random() < self.kills:
                    fleet.kill_aggregator()
                    fleet.step()
                    fleet.revive_aggregator()
            fleet.step()
            self._return_late()
        fleet.settle()

    def leave(self, name, within_s):
        """Kill a device; it comes back by itself after ``within_s`` seconds at the latest."""
        self.fleet.kill_device(name)
        self.back[name] = self.fleet.now_s + within_s

    def come(self, name):
        if name in self.back:
            del self.back[name]
            self.fleet.revive_device(name)

    def _return_late(self):
        for name, at_s in list(self.back.items()):
            if self.fleet.now_s >= at_s:
                self.come(name)


def take_turns(churn, done):
    """Of three devices one is away, for 1 to 6 rounds."""
    if done < 2 or done < getattr(churn, "until", 0):
        return
    for name in list(churn.back):
        churn.come(name)
    churn.until = done + churn.random.randint(1, 6)
    churn.leave(churn.random.choice(names(3)), 600.0)


@pytest.mark.parametrize("seed", range(20))
def test_three_devices_that_are_away_in_turn_finish_a_run_for_which_two_are_needed(tmp_path, seed):
    options = {"rounds": 60, "min_contributors": 2, "quorum": 0.6, "local": QUICK, **ROUND_KEYS}
    with make_fleet(tmp_path / "fleet", grouped_data(3, n=12), **options) as fleet:
        churn = Churn(fleet, seed, kills=0.1 if seed % 2 else 0.0)
        churn.run(take_turns)
        for name in list(churn.back):
            churn.come(name)
        records = ends_with_one_model(fleet)
        assert len(records) == 61
        idle = [r["round"] for r in records if r["contributed"] < 2]
        assert len(idle) <= 3, (idle, kinds(records))
