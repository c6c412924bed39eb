"""The exported file runs in plain ONNX Runtime, with x as its only input."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edge_client.answers.inference import export
from edge_client.learning.model import OrtModel
from edge_client.learning.standardisation import local_scale, standardised
from shoal.errors import ConfigError, TaskError
from tests.helpers.tasks import logistic_bundle, samples


@pytest.fixture(scope="module")
def bundle():
    return logistic_bundle()


def answers_of(path, x):
    """Return what plain ONNX Runtime answers with a file that is valid ONNX and takes x alone."""
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    outputs, _ = session.run(None, {"x": x})
    return outputs


def test_export_is_valid_onnx(bundle, tmp_path):
    """Exported file is valid onnx and needs only x."""
    theta = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    x, _ = samples(8)
    export(bundle, theta, tmp_path / "model.onnx")
    np.testing.assert_allclose(answers_of(tmp_path / "model.onnx", x), OrtModel(bundle).predict(theta, x), rtol=1e-6)
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


def test_export_standardises(bundle, tmp_path):
    """An exported file standardises as the device does."""
    theta = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    x = samples(8)[0] * np.array([1, 1000, 1, 0], np.float32) + np.array([0, 5e4, 0, 3], np.float32)
    scale = local_scale(x, bytes(16))
    x[0, 1] = np.nan
    export(bundle, theta, tmp_path / "m.onnx", scale)
    expected = OrtModel(bundle).predict(theta, standardised(x, scale))
    np.testing.assert_allclose(answers_of(tmp_path / "m.onnx", x), expected, rtol=1e-3, atol=1e-3)
