"""A fleet of real programs over mosquitto whose devices train with code of their own."""

from __future__ import annotations

import dataclasses
import random
import signal
import time

import numpy as np
import pytest

from edge_client.storage.state import DeviceState
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.fleets import grouped_data
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.own_trainers import bundle, command
from tests.helpers.tasks import CLASSES, INPUTS
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
DATA = grouped_data(3, inputs=INPUTS, classes=CLASSES)
RECIPE = Recipe(
    "fedavg", local=LocalTraining(epochs=2, lr=0.5), min_contributors=3, quorum=1.0, deadline_s=300.0, seed=1
)
WAIT_S = 300.0


@pytest.fixture
def stage(tmp_path):
    for name, batch in DATA.items():
        np.savez(tmp_path / f"{name}.npz", x=batch.x, y=batch.y)
    (tmp_path / "broker").mkdir()
    with (
        start_broker("mosquitto", tmp_path / "broker") as broker,
        ForkedStage(tmp_path / "s", broker.url, tuple(DATA), environment={"SHOAL_EDGE_PERSONAL": "off"}) as made,
    ):
        made.start_aggregator()
        yield made


def begin(stage, rounds):
    """Begin a run, and the devices; return its number."""
    task = bundle()
    origin = np.zeros((1, task.manifest.federated_length), np.float32)
    run = stage.add_run(task, origin, dataclasses.replace(RECIPE, rounds=rounds)).run
    for name in DATA:
        start(stage, name)
    return run


def start(stage, name):
    stage.start_device(name, stage.root.parent / f"{name}.npz", "--trainer", command().spec)


def ended(stage, run, rounds):
    """Wait for the end of a run, and check that every round and every device's own state had all of them."""
    until(lambda: stage.finished(run), "the final round", WAIT_S)
    records = [r for r in stage.records(run) if not r["final"]]
    assert [(r["round"], r["contributed"], r["declined"]) for r in records] == [
        (i, 3, {}) for i in range(1, rounds + 1)
    ]
    assert records[-1]["loss"] < records[0]["loss"]
    for name in DATA:
        files = DeviceState(stage.device_dir(name))
        until(lambda files=files: files.load_model().round == rounds + 1, f"{name}'s final model")
        assert files.load_model().theta[-1] == rounds, "the private count of rounds trained"


def test_three_devices_train_to_the_end(stage):
    ended(stage, begin(stage, 3), 3)


@pytest.mark.long
def test_killed_devices_lose_nothing(stage):
    """Twenty times a device is killed, at a random moment, and started again."""
    rounds, draw = 300, random.Random(7)
    run = begin(stage, rounds)
    for _ in range(20):
        name = draw.choice(tuple(DATA))
        time.sleep(draw.uniform(0.05, 1.5))
        stage.stop(name, signal.SIGKILL)
        start(stage, name)
    assert not stage.finished(run), "the kills hit a run that goes on"
    ended(stage, run, rounds)
