"""The result of a simulated run: models, data frame and figure of records made by hand."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.simulation.api.result import Result, Round

pytestmark = pytest.mark.torch
HISTORY = [
    Round(round=1, loss=None, accuracy=0.5, test_loss=0.9, clusters=1, sizes=(4,)),
    Round(round=2, loss=0.7, accuracy=None, test_loss=0.8, clusters=2, sizes=(3, 1)),
    Round(round=3, loss=0.6, accuracy=0.75, test_loss=0.4, clusters=2, sizes=(2, 2)),
]


def result(**changes):
    fields = {
        "accuracy": np.array([0.5, 1.0]),
        "loss": np.array([0.3, 0.5]),
        "clusters": np.array([4, 9]),
        "history": HISTORY,
        "events": [],
        "_template": nn.Sequential(nn.Linear(2, 1), nn.Dropout()),
        "_finish": lambda: np.array([0.5, 0.75]),
        "_own": lambda device: np.full(3, device, np.float32),
        "_thetas": {4: np.array([1, 2, 3], np.float32), 9: np.array([4, 5, 6], np.float32)},
    }
    return Result(**{**fields, **changes})


def test_models_are_in_eval_mode():
    """Models hold their cluster's theta in eval mode; a device's model is its own."""
    made = result()
    models = made.models
    assert sorted(models) == [4, 9]
    assert [p.tolist() for p in models[9].parameters()] == [[[4, 5]], [6]]
    assert not any(m.training for model in models.values() for m in model.modules())
    assert made.models is models
    own = made.device_model(1)
    assert [p.tolist() for p in own.parameters()] == [[[1, 1]], [1]]
    assert not own.training


def test_models_share_nothing():
    """Models share nothing with each other the template and theta."""
    made = result()
    before = [p.tolist() for p in made._template.parameters()]
    with torch.no_grad():
        made.models[4][0].weight += 1
    assert made.models[9][0].weight.tolist() == [[4, 5]]
    assert made._thetas[4].tolist() == [1, 2, 3]
    assert [p.tolist() for p in made._template.parameters()] == before
    assert made._template.training


def test_data_frame_has_a_row_a_round():
    """A data frame has a row a round and a column a field."""
    pytest.importorskip("pandas")
    frame = result().to_dataframe()
    assert frame.columns.tolist() == [f.name for f in dataclasses.fields(Round)]
    assert frame["round"].tolist() == [1, 2, 3]
    assert frame["test_loss"].tolist() == [0.9, 0.8, 0.4]
    assert frame["sizes"].tolist() == [(4,), (3, 1), (2, 2)]


@pytest.mark.parametrize(
    ("module", "extra", "use"), [("pandas", "frames", "to_dataframe"), ("matplotlib.figure", "plot", "plot")]
)
def test_extras_that_are_missing_are_named(monkeypatch, module, extra, use):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        getattr(result(), use)()
    assert f"shoal[{extra}]" in caught.value.hint


UNTESTED = [dataclasses.replace(r, accuracy=None) for r in HISTORY]


@pytest.mark.parametrize(
    ("changes", "panels"),
    [
        ({}, {"accuracy": ([1, 3], [0.5, 0.75]), "loss": ([2, 3], [0.7, 0.6])}),
        ({"accuracy": None}, {"test loss": ([1, 2, 3], [0.9, 0.8, 0.4]), "loss": ([2, 3], [0.7, 0.6])}),
        ({"history": UNTESTED}, {"loss": ([2, 3], [0.7, 0.6])}),
    ],
    ids=["classification", "regression", "never tested"],
)
def test_figure_shows_measured_rounds(changes, panels):
    """The figure has a panel for each quantity that was measured, and shows the rounds that have a figure."""
    pytest.importorskip("matplotlib")
    drawn = {
        a.get_ylabel(): tuple(values.tolist() for values in a.lines[0].get_data())
        for a in result(**changes).plot().axes
    }
    assert drawn == panels
    assert list(drawn) == list(panels)


def test_finish_runs_once_when_asked():
    """The personal finish runs once when it is asked."""
    calls = []
    made = result(_finish=lambda: calls.append(1) or np.array([0.5, 0.75]))
    assert calls == []
    assert made.personal.tolist() == [0.5, 0.75]
    assert made.personal is made.personal
    assert calls == [1]
