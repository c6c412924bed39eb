"""ONNX Runtime as an executor."""

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


def test_inputs_and_outputs_have_numpys_names():
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


def test_a_device_without_onnx_runtime_gets_a_hint(monkeypatch):
    def missing():
        raise ImportError("No module named 'onnxruntime'")

    monkeypatch.setattr(onnx_runtime, "import_onnxruntime", missing)
    with pytest.raises(TaskError, match="ONNX Runtime can't be loaded") as caught:
        loaded()
    assert "pip install 'shoal[edge]'" in caught.value.hint
