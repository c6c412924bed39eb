"""Built-in task sources and users' own files."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import TaskError
from shoal.owner.task_compiler.builtin import build, cross_entropy, load_user, sizes_of
from shoal.owner.task_compiler.features import declare
from shoal.protocol.recipe import LocalTraining
from shoal.util.extensions import TASKS_GROUP
from tests.helpers.extensions import install
from tests.helpers.refusals import refused

pytestmark = pytest.mark.torch

GOOD = """
import torch
from torch import nn

def loss(outputs, y):
    return nn.functional.mse_loss(outputs, y)

def example(n):
    return torch.randn(n, 2), torch.randn(n, 1)

def as_tuple():
    return nn.Linear(2, 1), loss, example, "regression", {"lr": 0.5}

def as_dict():
    return {"model": nn.Linear(2, 1), "loss": loss, "example": example, "kind": "regression"}

def broken():
    raise RuntimeError("no data")

def wrong_type():
    return nn.Linear(2, 1)

def wrong_kind():
    return nn.Linear(2, 1), loss, example, "ranking"

def wrong_model():
    return 3, loss, example, "regression"

def wrong_key():
    return as_dict() | {"optimizer": 1}

def wrong_hyper():
    return nn.Linear(2, 1), loss, example, "regression", {"learning_rate": 0.5}

def missing():
    return {"model": nn.Linear(2, 1)}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_sizes_follow_the_options():
    """Synthetic(1,1) of FedGroup has 60 inputs, 10 classes."""
    model = build("mlp", inputs=7, hidden=5, classes=3).model
    assert sum(p.numel() for p in model.parameters()) == 7 * 5 + 5 + 5 * 3 + 3
    assert sum(p.numel() for p in build("logistic", inputs=60).model.parameters()) == 610
    source = build("lstm", vocabulary=9, embedding=2, hidden=3, layers=1, length=4)
    x, y = source.example(6)
    assert (source.model(x).shape, y.shape) == ((6, 4, 9), (6, 4))


def test_cross_entropy_is_torchs():
    outputs, y = torch.randn(5, 3, 4), torch.randint(0, 4, (5, 3))
    expected = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten())
    torch.testing.assert_close(cross_entropy(outputs, y), expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet", {}, "no task 'resnet'"),
        ("mlp", {"depth": 3}, "no option 'depth'"),
        ("mlp", {"hidden": 0}, "at least 1"),
        ("mlp", {"hidden": 2.5}, "at least 1"),
        ("cnn", {"kernel": 4}, "odd kernel"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(TaskError, match=message):
        build(name, **options)


def test_user_task_as_tuple_and_dict(file):
    assert load_user(f"{file}:as_tuple").hyper == LocalTraining(lr=0.5)
    source = load_user(f"{file}:as_dict")
    assert (source.kind, source.hyper) == ("regression", LocalTraining())


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("{}/mine.py:broken", "RuntimeError: no data", ""),
        ("{}/mine.py:nothing", "no function 'nothing'", ""),
        ("{}/mine.py:wrong_type", "must return", ""),
        ("{}/mine.py:wrong_kind", "kind must be one of", ""),
        ("{}/mine.py:wrong_model", "must return an nn.Module", ""),
        ("{}/mine.py:wrong_key", "unknown key 'optimizer'", ""),
        (
            "{}/mine.py:wrong_hyper",
            "hyper has no 'learning_rate'",
            "it has epochs, steps, batch_size, lr, momentum, lr_decay, clip, prox_mu",
        ),
        ("{}/mine.py:missing", "returned no 'loss'", ""),
        ("{}/bad.py:f", "fails when it is loaded: ModuleNotFoundError", ""),
        ("{}/none.py:f", "does not exist", ""),
        ("mine.py", "does not name a function", ""),
        ("mine.txt:f", "does not name a function", ""),
        ("mine.py:not a name", "does not name a function", ""),
    ],
)
def test_user_mistakes_are_explained(file, spec, message, hint):
    """And so are files that are missing or broken."""
    file.with_name("bad.py").write_text("import nonexistent_module_xyz")
    with refused(TaskError, message, hint=hint):
        load_user(spec.format(file.parent))


TASKS = """
import torch
from torch import nn
from torch.nn import functional

def wide(inputs: int = 3, classes: int = 2):
    def example(n):
        return torch.randn(n, inputs), torch.randint(0, classes, (n,))
    return nn.Linear(inputs, classes), functional.cross_entropy, example, "classification", {"lr": 0.5}

def broken():
    raise RuntimeError("no model")

other = 3
"""


def test_packages_task_is_built_by_its_name(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, TASKS_GROUP, {"wide": "wide", "broken": "broken", "other": "other"}, TASKS)
    made = build("wide", inputs=7)
    assert (made.model.in_features, made.kind, made.hyper) == (7, "classification", LocalTraining(lr=0.5))
    declared = declare(features="a,b,c,d", label="", labels="x,y", standardise="off", missing="error")
    assert sizes_of("wide", declared) == {"inputs": 4, "classes": 2}
    with pytest.raises(TaskError, match="broken fails: RuntimeError: no model"):
        build("broken")
    with pytest.raises(TaskError, match="the task 'other' of an installed package is no function"):
        build("other")
    choices = "choose one of linear, logistic, mlp, cnn, lstm, broken, other, wide, or give file.py:function"
    with refused(TaskError, "there is no task 'narrow'", hint=choices):
        build("narrow")
    with pytest.raises(TaskError, match="has no option 'hidden'"):
        build("wide", hidden=3)


@pytest.mark.parametrize("name", ["model.onnx", "models/model.keras", "model.pt"])
def test_a_stored_model_has_its_own_hint(name):
    with refused(TaskError, "is a stored model, and a task is compiled from source in torch", hint="load_state_dict"):
        build(name)
