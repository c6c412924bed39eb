"""`shoal-fleet models` with a real broker and real programs: a run under round keys from its start to the owner's files."""

import json
import os

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto
from tests.helpers import calls
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.trees import ONE_THREAD

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]

NAMES = ("dev-1", "dev-2", "dev-3")
WAIT_S = 90.0


@pytest.mark.long
def test_owner_fetches_finished_runs_models(tmp_path):
    """The owner fetches the models of a finished run."""
    bundle = logistic_bundle()
    local = LocalTraining(epochs=1, batch_size=16, lr=0.2)
    options = Recipe("fedavg", rounds=3, mode="rotation", local=local, min_contributors=3, seed=1)

    def call(*arguments, status=0):
        done = calls.call("shoal-fleet", ["models", *map(str, arguments)], tmp_path, {**os.environ, **ONE_THREAD})
        assert done.status == status, done.err
        assert "Traceback" not in done.err
        return done

    with stage_of(tmp_path, NAMES) as (stage, _):
        owner = stage.fleet.path
        none = call("get", owner, "--out", "m", "--json", status=11)
        assert json.loads(none.out)["error"]["type"] == "NotReadyError"
        assert "hint: start the aggregator" in none.err
        plan = begin(stage, options, bundle)
        assert call("list", owner).out == "run 1: fedavg, 3 rounds; not at the broker\n"
        stage.start_aggregator()
        for name in NAMES:
            stage.start_device(name, tmp_path / f"{name}.npz", "--personal", "off")
        stage.wait(plan.run, WAIT_S)
        first, second, *online = call("list", owner).out.splitlines()
        assert (first, second) == ("run 1: fedavg, 3 rounds; models at the broker", "  model 0: state of round 3")
        assert all(line.endswith("with the model of run 1") for line in online), "devices that have said so already"
        (listed,) = json.loads(call("list", owner, "--json").out)["data"]["runs"]
        assert (listed["state"], listed["models"]) == ("ready", [{"model": 0, "round": 3, "sealed": True}])
        stage.fleet.rotate()
        got = call("get", owner, 1, "--out", "m")
        assert got.out.splitlines() == ["m/model-0.onnx", "m/model-0.npz", "m/models.json"]
        assert call("get", owner, 2, "--out", "m2", status=11).out == ""
        call("get", owner, "--out", "m", status=3)
        data = json.loads(call("get", owner, "--out", "m", "--force", "--json").out)["data"]
        exported = calls.call(
            "shoal-edge",
            ["export", str(stage.device_dir("dev-1")), "own.onnx"],
            tmp_path,
            {**os.environ, **ONE_THREAD},
        )
    assert exported.status == 0, exported.err
    mine, own = (onnx.load(tmp_path / name) for name in ("m/model-0.onnx", "own.onnx"))
    assert {p.key: p.value for p in own.metadata_props}["round"] == "4"
    assert (mine.graph, mine.opset_import) == (own.graph, own.opset_import)
    assert (data["folder"], data["run"], data["complete"]) == ("m", 1, True)
    assert len(data["models"][0]["certified_by"]) == 3
    with np.load(tmp_path / "m/model-0.npz", allow_pickle=False) as found:
        assert {n: found[n].shape for n in found} == {p.name: p.shape for p in bundle.manifest.parameters}
    x, _ = samples(5, seed=9)
    (outputs,) = ort.InferenceSession((tmp_path / "m/model-0.onnx").read_bytes()).run(["outputs"], {"x": x})
    assert np.isfinite(outputs).all()
