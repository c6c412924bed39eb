"""A run with a keeper as real programs over mosquitto, any of which is killed at any time."""

import random
import signal
import time

import numpy as np
import pytest
from shoal_lab.loopback.fleet import draw_origins

from aggregator.keeper.memory import KeeperMemory
from shoal.protocol.recipe import LocalTraining
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.fleets import CLASSES, grouped_data
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import logistic_bundle

pytestmark = [pytest.mark.broker, pytest.mark.process]

INPUTS, DEVICES, WAIT_S = 40, 8, 300.0
QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)


def chaos(tmp_path, algorithm, kills, rounds, seed=0):
    """Run an algorithm under kill -9 of the keeper, the aggregator and devices; return records and the keeper's memory."""
    pick = random.Random(seed)
    data = grouped_data(DEVICES, groups=2, inputs=INPUTS)
    (tmp_path / "broker").mkdir()
    broker = start_broker("mosquitto" if find_mosquitto() else "amqtt", tmp_path / "broker")
    with broker, ForkedStage(tmp_path / "fleet", broker.url, tuple(data), keeper="keeper") as stage:
        bundle = logistic_bundle(INPUTS, CLASSES)
        options = a_recipe(algorithm, rounds=rounds, local=QUICK, deadline_s=5.0, seed=1)
        plan = stage.add_run(bundle, draw_origins(bundle.manifest, 1, 1), options)
        for name, batch in data.items():
            np.savez(tmp_path / f"{name}.npz", x=batch.x, y=batch.y)
        starts = {name: lambda name=name: stage.start_device(name, tmp_path / f"{name}.npz") for name in data}
        starts |= {"keeper": stage.start_keeper, "aggregator": stage.start_aggregator}
        for start in starts.values():
            start()
        done, end = 0, time.monotonic() + WAIT_S
        while not stage.finished(plan.run):
            assert time.monotonic() < end, stage.programs["aggregator"].tail()
            time.sleep(0.05 * pick.random())  # a fraction of a round, or the run ends before the last kill
            if done < kills and stage.closed(plan.run) >= done * rounds // (kills + 1):
                party = pick.choice(["keeper", "keeper", "aggregator", *data])
                stage.stop(party, signal.SIGKILL)
                starts[party]()
                done += 1
        return stage.records(plan.run), KeeperMemory.load(stage.keeper_dir), done


def check(records, memory, rounds):
    assert [r["round"] for r in records] == list(range(1, rounds + 2))
    assert len(records[-1]["clusters"]) >= 3
    places = [(one.run, one.round) for one in memory.opened]
    assert len(set(places)) == len(places)
    assert all(len(cell) >= 3 for one in memory.opened for cell in one.cells)
    assert all(r["device_accuracy"] == {} for r in records)


@pytest.mark.parametrize("algorithm", ["fedavg", "cfl"])
def test_run_over_a_broker(tmp_path, algorithm):
    records, memory, done = chaos(tmp_path, algorithm, kills=3, rounds=24)
    assert done == 3
    check(records, memory, 24)
    looked = [event for record in records for event in record["events"] if event["kind"] == "look"]
    assert len(memory.looks.begun) == len(memory.looks.ended) >= len(looked)
    assert bool(looked) == (algorithm == "cfl")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["fedavg", "cfl"])
def test_fifty_random_kills(tmp_path, algorithm):
    records, memory, done = chaos(tmp_path, algorithm, kills=50, rounds=300, seed=7)
    assert done == 50
    check(records, memory, 300)
