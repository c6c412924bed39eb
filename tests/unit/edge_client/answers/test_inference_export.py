"""The exported file runs in plain ONNX Runtime, with x as its only input."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edge_client.answers.inference import export
from edge_client.learning.model import OrtModel
from shoal.errors import ConfigError, TaskError
from tests.helpers.tasks import logistic_bundle, samples


@pytest.fixture(scope="module")
def bundle():
    return logistic_bundle()


def test_export_is_valid_onnx(bundle, tmp_path):
    """Exported file is valid onnx and needs only x."""
    theta = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    x, _ = samples(8)
    path = tmp_path / "model.onnx"
    export(bundle, theta, path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    outputs, _ = session.run(None, {"x": x})
    np.testing.assert_allclose(outputs, OrtModel(bundle).predict(theta, x), rtol=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("theta", [np.zeros(14, np.float32), np.zeros(15), np.full(15, np.nan, np.float32)])
def test_models_that_do_not_fit_are_refused(bundle, tmp_path, theta):
    with pytest.raises(TaskError):
        export(bundle, theta, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_does_not_exist_is_named(bundle, tmp_path):
    path = tmp_path / "none" / "m.onnx"
    with pytest.raises(ConfigError, match="No such file or directory") as caught:
        export(bundle, np.zeros(15, np.float32), path)
    assert str(caught.value).startswith(f"can't write {path}: ")
    assert "check the folder" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
