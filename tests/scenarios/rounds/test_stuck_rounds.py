"""No round is stuck and none is used up in vain where devices lack models: real devices that vanish and come back.

Every run here must end, and all devices that took part in its final round must have the same bits.
"""

from random import Random

import pytest

from shoal.protocol.messages import Phase
from shoal.protocol.recipe import LocalTraining
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    names,
    restart_aggregator,
)

ROTATION = {"mode": "rotation", "deadline_s": 20.0}
QUICK = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.2)
END_S = 20_000.0


def kinds(records):
    return [e["kind"] for r in records for e in r["events"]]


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
        self.fleet, self.random, self.kills = fleet, Random(seed), kills
        self.back = {}

    def run(self, change):
        """Call ``change(self, round)`` before each round until the run has ended."""
        fleet, seen, end_s = self.fleet, -1, self.fleet.now_s + END_S
        while not fleet.finished:
            assert fleet.now_s < end_s, fleet.service.status()
            done = fleet.closed()
            if done != seen:
                seen = done
                change(self, done)
                if self.random.random() < self.kills:
                    restart_aggregator(fleet, steps=1)
            fleet.step()
            self.return_late()
        fleet.settle()

    def leave(self, name, within_s):
        """Kill a device; it comes back by itself after ``within_s`` seconds at the latest."""
        self.fleet.kill_device(name)
        self.back[name] = self.fleet.now_s + within_s

    def come(self, name):
        if name in self.back:
            del self.back[name]
            self.fleet.revive_device(name)

    def return_late(self):
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


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 12), *(pytest.param(s, 60, marks=pytest.mark.long) for s in range(20))]
)
def test_three_away_in_turn_finish_the_run(tmp_path, seed, rounds):
    """Three devices that are away in turn finish a run for which two are needed."""
    options = {"rounds": rounds, "min_contributors": 2, "quorum": 0.6, "local": QUICK, **ROTATION}
    with make_fleet(tmp_path / "fleet", grouped_data(3, n=12), **options) as fleet:
        churn = Churn(fleet, seed, kills=0.1 if seed % 2 else 0.0)
        churn.run(take_turns)
        for name in list(churn.back):
            churn.come(name)
        records = ends_with_one_model(fleet)
        assert len(records) == rounds + 1
        idle = [r["round"] for r in records if r["contributed"] < 2]
        assert len(idle) <= 3, (idle, kinds(records))


CFL = {
    "algorithm": "cfl",
    "rounds": 14,
    "local": LocalTraining(epochs=2, batch_size=10, lr=0.5),
    "min_contributors": 2,
    "quorum": 0.5,
    **ROTATION,
}


def in_sealing_round_of_a_trial(fleet):
    """Return whether the open round is a trial's last, and three devices seal its halves' models and the undivided one's."""
    if fleet.service.state.plan is None or not fleet.service.state.strategy.trials:
        return False
    sealing = [o for o in assigned(fleet).values() if o.seal]
    return len(sealing) == 3 and all(o.phase is Phase.ADAPT for o in sealing)


def test_sealers_of_a_trial_die_sealing(tmp_path):
    """All sealing devices of a trial die in the sealing round."""
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), **CFL) as fleet:
        fleet.run_until(lambda: in_sealing_round_of_a_trial(fleet), 600)
        dead = [d for d, o in assigned(fleet).items() if o.seal]
        for name in dead:
            fleet.kill_device(name)
        records = fleet.run(END_S)
        assert not [r["round"] for r in records if r["declined"]]
        assert "split" in kinds(records), "the trial was decided"
        assert records[-1]["contributed"] == 8 - len(dead) > 0
        clusters = records[-1]["clusters"]
        for cluster in set(clusters.values()):
            assert len(set(models(fleet, *(d for d in clusters if clusters[d] == cluster)))) == 1


def test_holders_of_half_the_models_vanish(tmp_path):
    """The others come back after the holders have left, and continue from the last checkpoints."""
    options = {"algorithm": "ifca", "settings": {"k": "3"}, "rounds": 24, "local": QUICK, "min_contributors": 2}
    with make_fleet(tmp_path / "fleet", grouped_data(12, 3, n=12), **options, quorum=0.3, **ROTATION) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 11, 600)
        for name in names(12)[6:]:
            fleet.kill_device(name)
        fleet.run_until(lambda: fleet.closed() >= 16, 600)
        for name in names(6):
            fleet.kill_device(name)
        for name in names(12)[6:]:
            fleet.revive_device(name)
        records = fleet.run(END_S)
        assert "model_went_back" in kinds(records)
        idle = [r["round"] for r in records if r["contributed"] < 2]
        assert len(idle) <= 3, (idle, kinds(records))
        assert records[-1]["contributed"] == 6
        clusters = records[-1]["clusters"]
        for cluster in set(clusters.values()):
            assert len(set(models(fleet, *(d for d in clusters if clusters[d] == cluster)))) == 1


def test_death_at_each_sealing_stops_nobody(tmp_path):
    """A device that dies whenever it is asked to seal holds no one up."""
    options = {"rounds": 24, "min_contributors": 2, "quorum": 0.5, "local": QUICK, "participation": 0.7, **ROTATION}
    with make_fleet(tmp_path / "fleet", grouped_data(5, n=12), **options) as fleet:
        churn, died = Churn(fleet, 1), []
        while not fleet.finished:
            assert fleet.now_s < END_S, fleet.service.status()
            order = assigned(fleet).get("dev-01")
            if order is not None and order.seal and "dev-01" in fleet.devices and not fleet.service.state.plan.final:
                died.append(fleet.service.state.round)
                churn.leave("dev-01", 5.0)
            fleet.step()
            churn.return_late()
        fleet.settle()
        assert died
        records = ends_with_one_model(fleet)
        assert not [r["round"] for r in records if r["contributed"] < 2]


def test_a_fifth_is_drawn_each_round(tmp_path):
    """A fifth of ten devices is drawn in each round."""
    options = {"rounds": 20, "min_contributors": 2, "quorum": 0.5, "local": QUICK, "participation": 0.2, **ROTATION}
    with make_fleet(tmp_path / "fleet", grouped_data(10, n=12), **options) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 9, 600)
        restart_aggregator(fleet, steps=1)
        records = ends_with_one_model(fleet)
        assert [r["contributed"] for r in records[:-1]] == [2] * 20
        assert not [r["declined"] for r in records if r["declined"]]
        assert "checkpoints_ordered" not in kinds(records)


def come_and_go(churn, done):
    """Of twelve devices, three tenths of those present leave and as many of the absent come back."""
    if done == 0:
        return
    for name in [n for n in list(churn.back) if churn.random.random() < 0.3]:
        churn.come(name)
    for name in [n for n in list(churn.fleet.devices) if churn.random.random() < 0.3]:
        if len(churn.fleet.devices) > 3:
            churn.leave(name, 300.0)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_tenths_come_and_go(tmp_path, seed):
    """Three tenths of twelve devices leave and come in each round."""
    options = {"rounds": 40, "min_contributors": 2, "quorum": 0.4, "local": QUICK, **ROTATION}
    with make_fleet(tmp_path / "fleet", grouped_data(12, n=12), **options) as fleet:
        churn = Churn(fleet, seed, kills=0.1)
        churn.run(come_and_go)
        records = ends_with_one_model(fleet)
        idle = [r["round"] for r in records if r["contributed"] < 2]
        assert len(idle) <= 3, (idle, kinds(records))
