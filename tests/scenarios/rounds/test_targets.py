"""A fleet that predicts large numbers: grouped like small ones, answered in the data's unit, and a device with false ones."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.loopback.fleet import LoopbackFleet

from edge_client.answers.inference import choose
from edge_client.learning.data import Dataset
from shoal.owner.task_compiler.builtin import build
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.task.data_declaration import DataDeclaration

pytestmark = pytest.mark.torch

UNIT = 1000.0
LIMIT_S = 3600.0
LIAR = "dev-0"
SLOPES = np.array([1.0, -2.0, 0.5, 1.0], np.float32)


def data():
    """Return samples of eight devices: half of them have the other sign, and dev-0's targets are a million times too large."""
    rng, found = np.random.default_rng(0), {}
    for i in range(8):
        x = rng.standard_normal((100, 4)).astype(np.float32)
        y = x @ SLOPES * (1 if i % 2 else -1) + rng.normal(0, 0.1, 100)
        found[f"dev-{i}"] = Dataset(x, (UNIT * y * (1e6 if i == 0 else 1)).astype(np.float32))
    return found


def test_large_numbers_are_grouped(tmp_path, compile_once):
    """Large numbers are grouped and false ones left out."""
    declared = DataDeclaration(target=(-4 * UNIT, 4 * UNIT))
    bundle = compile_once(*build("linear", inputs=4)[:3], name="prices", kind="regression", data=declared)
    local = LocalTraining(epochs=1, batch_size=10, lr=0.05)
    options = Recipe("cfl", rounds=12, local=local, quorum=1.0, deadline_s=30.0, seed=1, min_contributors=3)
    with LoopbackFleet(tmp_path, bundle, data(), options) as fleet:
        records = fleet.run(LIMIT_S)
        assert any(LIAR in record["declined"] for record in records), "the aggregator names it"
        (split,) = (e for record in records for e in record["events"] if e["kind"] == "split")
        assert split["sizes"] == [4, 3]
        for name, samples in data().items():
            if name != LIAR:
                answers = choose(fleet.stage.device_dir(name)).outputs(samples.x)
                assert np.square(answers - samples.y).mean() < (UNIT / 4) ** 2
