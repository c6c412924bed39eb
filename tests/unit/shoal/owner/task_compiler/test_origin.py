"""Origins: torch's distributions, full-entropy seeds, the bundle's order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import TaskError
from shoal.owner.task_compiler.builtin import TaskSource, build
from shoal.owner.task_compiler.compile import layout
from shoal.owner.task_compiler.origin import make_origins
from shoal.task.manifest import TensorSpec
from tests.helpers.tasks import manifest

pytestmark = pytest.mark.torch

SIZES = {"inputs": 9, "hidden": 50, "classes": 4}
SPEC = TensorSpec((4,), "float32")


def test_shape_dtype_and_independence():
    """A seed repeats, and no seed does not: the 32 bits that torch's generator takes must not be enough to repeat an origin."""
    origins = make_origins("mlp", 3, 7, **SIZES)
    assert origins.shape == (3, 9 * 50 + 50 + 50 * 4 + 4)
    assert origins.dtype == np.float32
    assert abs(np.corrcoef(origins)[0, 1]) < 0.2
    np.testing.assert_array_equal(make_origins("mlp", 2, 7, **SIZES), origins[:2])
    drawn = [make_origins("mlp", 1, 8, **SIZES)]
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(make_origins("mlp", 1, None, **SIZES))
    assert len({each.tobytes() for each in (*drawn, origins[:1])}) == 4


def test_torchs_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    make_origins("cnn", 1, None, side=4, filters1=2, filters2=2, hidden=3)
    torch.testing.assert_close(torch.rand(2), expected)


def test_linear_layers_have_torchs_range():
    """nn.Linear draws from U(-1/sqrt(inputs), 1/sqrt(inputs)), standard deviation bound / sqrt(3)."""
    weights = make_origins("mlp", 20, 1, **SIZES)[:, : 9 * 50]
    bound = 1 / math.sqrt(9)
    assert np.abs(weights).max() <= bound
    assert np.abs(weights).max() > 0.99 * bound
    assert weights.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_embeddings_have_torchs_normal_range():
    origin = make_origins("lstm", 1, 2, vocabulary=200, embedding=50, hidden=2, layers=1)[0]
    table = origin[: 200 * 50]
    assert table.std() == pytest.approx(1.0, rel=0.03)
    assert abs(table.mean()) < 0.05


def test_order_is_the_bundles():
    """With a shared readout the same draws stand in another order; private ones are left out, other models refused."""
    model = build("logistic", inputs=4, classes=3).model
    made = lambda parameters: make_origins(  # noqa: E731
        "logistic", 2, 3, manifest=manifest(4, 3, parameters=parameters, input=SPEC), inputs=4, classes=3
    )
    plain = make_origins("logistic", 2, 3, inputs=4, classes=3)
    np.testing.assert_array_equal(made(layout(model, ["fc.bias"])), np.roll(plain, 3, axis=1))
    np.testing.assert_array_equal(made(layout(model, private=["fc.weight"])), plain[:, 12:])
    with pytest.raises(TaskError, match="not the compiled task's"):
        made(layout(build("logistic", inputs=5, classes=3).model))


def test_files_and_functions_are_sources(tmp_path):
    """User files and functions are sources."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from shoal.owner.task_compiler.builtin import build\ndef make_model():\n    return build('linear', inputs=5)\n"
    )
    assert make_origins(f"{path}:make_model", 2, 1).shape == (2, 5)
    assert make_origins(lambda: build("linear", inputs=5), 2, 1).shape == (2, 5)


def test_zero_origins_are_refused():
    """Zero origins and non finite values are refused."""
    with pytest.raises(TaskError, match="at least one origin"):
        make_origins("mlp", 0, 1)

    def bad() -> TaskSource:
        source = build("linear", inputs=2)
        nn.init.constant_(source.model.fc.weight, float("nan"))
        return source

    with pytest.raises(TaskError, match="not finite"):
        make_origins(bad, 1, 1)
