"""ONNX Runtime as an executor."""

import weakref

import numpy as np
import pytest

from edge_client.learning.executor import onnx_runtime
from edge_client.learning.executor.base import Graph
from edge_client.learning.executor.onnx_runtime import OrtExecutor
from shoal.errors import TaskError
from shoal.task.onnx_contents import TensorType
from tests.helpers.tasks import logistic_models, samples


def loaded(model=None):
    return OrtExecutor(Graph("grad", (model or logistic_models()[1]).SerializeToString()))


def test_names_are_numpys():
    """Inputs and outputs have numpys names."""
    made = loaded()
    assert made.inputs == (
        TensorType("theta", "float32", (15,)),
        TensorType("x", "float32", (None, 4)),
        TensorType("y", "int64", (None,)),
    )
    assert made.outputs == ("loss", "grad")


def test_inputs_that_do_not_fit_are_refused():
    x, y = samples(3)
    with pytest.raises(TaskError, match=r"^ONNX Runtime refused grad\.onnx: "):
        loaded().run({"theta": np.zeros(14, np.float32), "x": x, "y": y})


def test_missing_onnx_runtime_has_a_hint(monkeypatch):
    """A device without onnx runtime gets a hint."""

    def missing():
        raise ImportError("No module named 'onnxruntime'")

    monkeypatch.setattr(onnx_runtime, "import_onnxruntime", missing)
    with pytest.raises(TaskError, match="ONNX Runtime can't be loaded") as caught:
        loaded()
    assert "pip install 'shoal[edge]'" in caught.value.hint


def test_each_run_reads_its_inputs_anew():
    """Each run reads the values that its inputs have then."""
    model, theta = loaded(), np.zeros(15, np.float32)
    (x, y), (other, other_y) = samples(3), samples(3, seed=1)
    fresh = {
        seed: loaded().run({"theta": theta, "x": a, "y": b})[1].copy()
        for seed, a, b in ((0, x, y), (1, other, other_y))
    }
    buffer, labels = x.copy(), y.copy()
    feed = {"theta": theta, "x": buffer, "y": labels}
    np.testing.assert_array_equal(model.run(feed)[1], fresh[0])
    buffer[:], labels[:] = other, other_y
    np.testing.assert_array_equal(model.run(feed)[1], fresh[1])
    wide = np.repeat(x, 2, axis=1)
    feed = {"theta": theta, "x": wide[:, ::2], "y": y}
    np.testing.assert_array_equal(model.run(feed)[1], fresh[0])
    wide[:, ::2], feed["y"] = other, other_y
    np.testing.assert_array_equal(model.run(feed)[1], fresh[1])
    loss, _ = model.run({"theta": theta, "x": x[:2], "y": y[:2]})
    assert float(loss) == float(loaded().run({"theta": theta, "x": x[:2], "y": y[:2]})[0])


def test_gradient_goes_with_its_caller():
    """Its memory is that of the last run as long as the caller has it, and so is theta's."""
    model, theta = loaded(), np.zeros(15, np.float32)
    x, y = samples(3)
    gradient = model.run({"theta": theta, "x": x, "y": y})[1]
    assert model.run({"theta": theta, "x": x, "y": y})[1] is gradient
    copy, (held, first) = gradient.copy(), map(weakref.ref, (gradient, theta))
    del gradient, theta
    assert held() is None
    assert first() is None
    np.testing.assert_array_equal(model.run({"theta": np.zeros(15, np.float32), "x": x, "y": y})[1], copy)
