"""Daemon runs of FedGroup, FeSEM and one-shot clustering: real programs, a real broker, six devices in two hidden groups.

The default tests run FedGroup; tests/scenarios/rounds/test_strategies.py runs all of them on the loopback fleet.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.loopback_fleet import draw_origins
from shoal.task.bundle import TaskBundle
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.fleets import CLASSES, INPUTS, grouped_data, same_partition, truth_of
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.plans import a_recipe

pytestmark = [pytest.mark.broker, pytest.mark.process]

DEVICES = 6
WAIT_S = 60.0
QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
ALONE = LocalTraining(epochs=6, batch_size=10, lr=0.5)
FORGETFUL = LocalTraining(epochs=30, batch_size=10, lr=0.8)
RUNS = {
    "fedgroup": {"rounds": 5, "settings": {"groups": "2", "alpha": "2"}, "local": QUICK, "pretrain": ALONE},
    "fesem": {"rounds": 5, "settings": {"k": "2"}, "local": FORGETFUL, "seed": 3},
    "one-shot": {"rounds": 3, "settings": {"k": "2"}, "local": QUICK, "pretrain": ALONE},
}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", RUNS)
def test_the_daemons_find_the_hidden_groups(
    tmp_path: Path, logistic: Callable[..., TaskBundle], algorithm: str
) -> None:
    """Six device programs train; no device misses a round, and the hidden groups are found."""
    bundle, data = logistic(INPUTS, CLASSES), grouped_data(DEVICES, 2)
    options = a_recipe(
        algorithm, **{"min_contributors": 1, "quorum": 1.0, "deadline_s": 30.0, "seed": 1, **RUNS[algorithm]}
    )
    (tmp_path / "broker").mkdir()
    with (
        start_broker("mosquitto" if find_mosquitto() else "amqtt", tmp_path / "broker") as broker,
        ForkedStage(tmp_path / "fleet", broker.url, tuple(data)) as stage,
    ):
        plan = stage.add_run(bundle, draw_origins(bundle.manifest, 1, 1), options)
        stage.start_aggregator()
        for name, batch in data.items():
            np.savez(tmp_path / f"{name}.npz", x=batch.x, y=batch.y)
            stage.start_device(name, tmp_path / f"{name}.npz")
        records = stage.wait(plan.run, WAIT_S)
    assert [r["round"] for r in records] == list(range(1, options.rounds + 2))
    assert not any(r["missing"] for r in records)
    assert same_partition(records[-1]["clusters"], truth_of(DEVICES, 2))
    assert records[-1]["correct"] / records[-1]["tested"] > 0.75
