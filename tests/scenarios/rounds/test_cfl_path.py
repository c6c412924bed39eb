"""Every model from a device's leaf to the root (cfl section V-C): requested, stored, and used to predict."""

import json

import numpy as np
import pytest

from edge_client.answers import inference as answers
from edge_client.learning.model import OrtModel
from edge_client.storage.finished_models import FinishedModels
from edge_client.storage.state import DeviceState
from shoal.errors import ConfigError
from shoal.protocol.recipe import LocalTraining
from shoal.util.console import run_program
from tests.helpers.fleets import CLASSES, INPUTS, grouped_data, make_fleet, same_partition, truth_of
from tests.helpers.tasks import logistic_bundle

CFL = {
    "algorithm": "cfl",
    "rounds": 8,
    "local": LocalTraining(epochs=2, batch_size=10, lr=0.5),
    "settings": {"path": "on"},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return (fleet, records) of a run that was split into two groups and stored all models."""
    with make_fleet(tmp_path_factory.mktemp("path") / "fleet", grouped_data(8, 2), **CFL) as fleet:
        yield fleet, fleet.run(10)


@pytest.fixture
def samples(tmp_path):
    x = np.random.default_rng(3).standard_normal((50, INPUTS)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    return tmp_path / "x.npz", x


def models_of(fleet, name):
    """Return the stored models of a device's finished run, from the root to its own."""
    _, _, models = FinishedModels(fleet.stage.device_dir(name)).answering()
    return models


def outputs(theta, x):
    return OrtModel(logistic_bundle(INPUTS, CLASSES)).predict(theta, x)


def test_final_round_reports_leaf_keeps_path(ended):
    """Clusters and accuracy are the leaves', as without `path`; the root's model is stored as well, the same for all devices."""
    fleet, records = ended
    assert same_partition(records[-1]["clusters"], truth_of(8, 2))
    assert 0 not in records[-1]["clusters"].values()
    assert records[-1]["correct"] / records[-1]["tested"] > 0.75
    roots = set()
    for name in fleet.stage.devices:
        own = fleet.model(name)
        root, _ = models_of(fleet, name)
        assert (own.cluster, root.cluster) == (records[-1]["clusters"][name], 0)
        assert not np.array_equal(root.theta, own.theta)
        roots.add(root.theta.tobytes())
        assert DeviceState(fleet.stage.device_dir(name)).load_status()["path"] == [0, own.cluster]
    assert len(roots) == 1


def test_predictions_by_node_and_ensemble(ended, samples, tmp_path):
    """Any model on the path answers and can be exported, and the average of all models' outputs answers; no other node does."""
    onnxruntime = pytest.importorskip("onnxruntime")
    fleet, records = ended
    path, x = samples
    chosen, own = answers.choose(fleet.stage.device_dir("dev-01")), fleet.model("dev-01")
    root, _ = models_of(fleet, "dev-01")
    mine, general = outputs(own.theta, x), outputs(root.theta, x)
    assert np.array_equal(chosen.predict(path), mine.argmax(1))
    assert np.array_equal(chosen.predict(path, node=own.cluster), mine.argmax(1))
    assert np.array_equal(chosen.predict(path, node=0), general.argmax(1))
    assert np.array_equal(chosen.predict(path, ensemble=True), (mine + general).argmax(1))
    assert not np.array_equal(mine.argmax(1), general.argmax(1))
    assert chosen.export(tmp_path / "root.onnx", node=0).cluster == 0
    session = onnxruntime.InferenceSession(str(tmp_path / "root.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], general, rtol=1e-6)
    (other,) = set(records[-1]["clusters"].values()) - {own.cluster}
    with pytest.raises(ConfigError, match=f"no model of node {other}, but of 0, {own.cluster}"):
        chosen.predict(path, node=other)


def test_command_line_answers_by_node(ended, samples, capsys, monkeypatch):
    """`shoal-edge predict --node N | --ensemble`; both at once are refused."""
    from edge_client import cli

    fleet, _ = ended
    directory, path = str(fleet.stage.device_dir("dev-03")), str(samples[0])

    def call(*options):
        monkeypatch.setattr("sys.argv", ["shoal-edge", "predict", directory, "--data", path, "--json", *options])
        with pytest.raises(SystemExit) as ended_with:
            run_program(cli.app, prog="shoal-edge")
        out = capsys.readouterr().out
        return ended_with.value.code, json.loads(out or "{}").get("data", {})

    _, general = call("--node", "0")
    _, together = call("--ensemble")
    chosen = answers.choose(fleet.stage.device_dir("dev-03"))
    assert general["predictions"] == chosen.predict(samples[0], node=0).tolist()
    assert together["predictions"] == chosen.predict(samples[0], ensemble=True).tolist()
    assert call("--node", "0", "--ensemble")[0] not in (0, None)


def test_without_path_only_own_model_is_kept(tmp_path, samples):
    """Without path nothing is kept beside the own model."""
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), **{**CFL, "settings": {}}) as fleet:
        fleet.run(10)
        directory, own = fleet.stage.device_dir("dev-00"), fleet.model("dev-00")
        assert "path" not in DeviceState(directory).load_status()
        assert len(models_of(fleet, "dev-00")) == 1
        assert own.cluster != 0
        with pytest.raises(ConfigError, match="no model of node 0"):
            answers.choose(directory).predict(samples[0], node=0)
