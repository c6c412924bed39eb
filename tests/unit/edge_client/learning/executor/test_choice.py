"""The setting `executor`."""

import pytest

from edge_client.learning.executor import choice
from edge_client.learning.executor.choice import AUTO, NUMPY, ONNX_RUNTIME, choose
from shoal.errors import ConfigError


def test_onnx_runtime_is_taken_if_present():
    """Onnx runtime is taken if it is installed."""
    assert choose(AUTO) == choose(ONNX_RUNTIME) == ONNX_RUNTIME
    assert choose(NUMPY) == NUMPY


def test_numpy_is_taken_otherwise(monkeypatch):
    monkeypatch.setattr(choice, "_is_installed", lambda _package: False)
    assert choose(AUTO) == choose(NUMPY) == NUMPY
    with pytest.raises(ConfigError, match="ONNX Runtime is not installed") as caught:
        choose(ONNX_RUNTIME)
    assert "pip install 'shoal[edge]'" in caught.value.hint


@pytest.mark.parametrize("setting", ["", "torch", "Numpy"])
def test_other_settings_are_refused(setting):
    with pytest.raises(ConfigError, match="executor is auto, onnxruntime or numpy, not"):
        choose(setting)


def test_absent_package_is_not_installed():
    """A package that is not there is not installed."""
    assert choice._is_installed("numpy")
    assert not choice._is_installed("shoal_no_such_package")
    assert not choice._is_installed("shoal_no_such_package.part")
