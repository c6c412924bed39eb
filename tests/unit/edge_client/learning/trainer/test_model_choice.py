"""The backend of a task on a device."""

import pytest

from edge_client.learning.model import NumpyModel, OrtModel
from edge_client.learning.trainer.model import TrainerModel, device_model, make_model
from shoal.errors import TrainerError
from tests.helpers.own_trainers import bundle, command
from tests.helpers.tasks import logistic_bundle


def test_the_setting_chooses_the_model():
    for setting, kind in (("numpy", NumpyModel), ("onnxruntime", OrtModel), ("auto", OrtModel)):
        assert isinstance(make_model(setting)(logistic_bundle(), 1), kind)
    assert isinstance(device_model(logistic_bundle()), OrtModel)


def test_the_task_chooses_own_code():
    assert isinstance(make_model("auto", command())(bundle(), 1), TrainerModel)
    assert isinstance(make_model("numpy", command())(logistic_bundle(), 1), NumpyModel)


def test_a_device_without_it_says_so():
    with pytest.raises(TrainerError, match="needs the trainer softmax 1, and this device has none"):
        device_model(bundle())
