"""A device whose data do not fit the task, as real programs on a real broker: rounds do not wait for it, and it is named."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.calls import call
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.trees import ROOT

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1", "dev-2", "dev-odd")
DEADLINE_S = 100.0
OPTIONS = Recipe(
    "fedavg",
    rounds=3,
    local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
    min_contributors=1,
    quorum=0.5,
    deadline_s=DEADLINE_S,
    seed=1,
)


def status(directory, *options):
    return call("shoal-aggregator", ["status", str(directory), *options], ROOT, dict(os.environ)).out


@pytest.mark.long
def test_rounds_do_not_wait_for_it(tmp_path):
    for seed, name in enumerate(NAMES):
        x, y = samples(60, seed=seed)
        np.savez(tmp_path / f"{name}.npz", x=x[:, 1:] if name == "dev-odd" else x, y=y)
    (tmp_path / "broker").mkdir()
    with (
        start_broker("mosquitto", tmp_path / "broker") as broker,
        ForkedStage(tmp_path / "s", broker.url, NAMES) as stage,
    ):
        bundle = logistic_bundle()
        run = stage.add_run(bundle, np.zeros((1, bundle.length), np.float32), OPTIONS).run
        began = time.monotonic()
        server = stage.start_aggregator()
        programs = {name: stage.start_device(name, tmp_path / f"{name}.npz") for name in NAMES}
        records = stage.wait(run, timeout_s=60)
        assert time.monotonic() - began < DEADLINE_S / 2
        assert [r["declined"] for r in records] == [{"dev-odd": "data"}] * 4
        assert programs["dev-odd"].process.poll() is None
        assert "dev-odd.npz" in programs["dev-odd"].log.read_text()
        told = server.log.read_text()
        assert "data do not fit the task: dev-odd" in told
        assert "dev-odd.npz" not in told
        assert "data do not fit the task: dev-odd" in status(stage.aggregator_dir)
        as_json = json.loads(status(stage.aggregator_dir, "--json"))
        assert as_json["data"]["runs"][0]["declined"] == {"dev-odd": "data"}
