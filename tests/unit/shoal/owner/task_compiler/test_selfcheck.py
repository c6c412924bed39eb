"""The check of a compiled task against torch: every difference is found, and draws at kinks say nothing."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from edge_client.learning.model import NumpyModel, OrtModel
from shoal.errors import TaskError
from shoal.owner.task_compiler import selfcheck
from shoal.owner.task_compiler.builtin import cross_entropy
from shoal.owner.task_compiler.compile import compile_task
from shoal.owner.task_compiler.flat import FlatModel, flatten
from shoal.owner.task_compiler.selfcheck import PARTIAL_BATCH, check
from shoal.task.bundle import TaskBundle
from tests.helpers.refusals import refused
from tests.helpers.tasks import CLASSES, INPUTS, constant, logistic_bundle, logistic_models, manifest

pytestmark = pytest.mark.torch
BUNDLE = logistic_bundle()
LAYOUT = BUNDLE.manifest.parameters
FULL_BATCH = 16


class Logistic(nn.Module):
    """The model that the bundle's hand-made graphs compute."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(INPUTS, CLASSES)), nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x):
        return x @ self.weight + self.bias


class OtherGradient(Logistic):
    def forward(self, x):
        return x @ self.weight + self.bias + (self.bias - self.bias.detach()) * 0.01


class OtherOutputs(Logistic):
    """All logits shifted by one: the same probabilities, loss, gradient and labels."""

    def forward(self, x):
        return super().forward(x) + 1.0


def shifted_loss(outputs, y):
    return cross_entropy(outputs, y) + 0.01


def endless_loss(outputs, y):
    return cross_entropy(outputs, y) * float("nan")


def example(n):
    return torch.randn(n, INPUTS), torch.randint(0, CLASSES, (n,))


@pytest.fixture(autouse=True)
def theta():
    torch.manual_seed(0)
    return torch.randn(BUNDLE.length)


def flat(model=None, loss=cross_entropy, *, counts=True):
    return FlatModel(model or Logistic(), loss, LAYOUT, counts=counts)


def test_right_task_passes_at_any_batch(theta):
    """A right task passes at every batch size."""
    sizes = []

    def noted(n):
        sizes.append(n)
        return example(n)

    check(BUNDLE, flat(), theta, noted, FULL_BATCH)
    assert set(sizes) == {1, PARTIAL_BATCH, FULL_BATCH, 2 * PARTIAL_BATCH + 1}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (flat(OtherGradient()), r"batch of 1: gradient differs by .* \(at most 1e-05\), most in layer 'bias'"),
        (flat(OtherOutputs()), "outputs of predict.onnx differ"),
        (flat(loss=shifted_loss), r"loss of grad.onnx is .*, torch has"),
        (flat(loss=endless_loss), "gradient differs by nan"),
        (flat(counts=False), "correct labels, torch counts 0"),
    ],
    ids=["gradient", "outputs", "loss", "not a number", "labels"],
)
def test_each_difference_is_named(theta, model, message):
    with pytest.raises(TaskError, match=message) as caught:
        check(BUNDLE, model, theta, example, FULL_BATCH)
    assert str(caught.value).startswith("compiled task is not the torch model, batch of ")


class AtKinks(FlatModel):
    """Is on another side of a kink than its neighbours in the draws with these numbers."""

    def __init__(self, bad):
        super().__init__(Logistic(), cross_entropy, LAYOUT, counts=True)
        self.bad, self.draws, self.own = bad, 0, None

    def everything(self, theta, x, y):
        loss, correct, gradient, outputs = super().everything(theta, x, y)
        self.own = theta if self.own is None else self.own
        if theta is self.own:
            self.draws += 1
            gradient = gradient * (2.0 if self.draws - 1 in self.bad else 1.0)
        return loss, correct, gradient, outputs


@pytest.mark.parametrize(
    ("bad", "draws"), [({0}, 7), ({1, 2, 3}, 9), ({0, 1, 2, 3, 4, 5, 8, 9}, 14), (range(4, 20), 12)]
)
def test_draws_at_torchs_kinks_say_nothing(theta, bad, draws):
    """A large batch may have kinks in each draw."""
    model = AtKinks(bad)
    check(BUNDLE, model, theta, example, FULL_BATCH)
    assert model.draws == draws


def test_a_single_sample_may_not(theta):
    with pytest.raises(TaskError, match="torch's own gradient has no stable value"):
        check(BUNDLE, AtKinks(range(8)), theta, example, FULL_BATCH)


@pytest.mark.parametrize(
    ("bad", "passes"), [({0}, True), ({1}, True), ({0, 1}, False), ({0, 2}, False), ({2, 3}, False)]
)
def test_one_kink_is_forgiven(theta, monkeypatch, bad, passes):
    """One kink of onnx runtime is forgiven."""
    right, calls = OrtModel.grad, itertools.count()

    def unlucky(self, *inputs):
        loss, gradient = right(self, *inputs)
        return loss, gradient * (2.0 if next(calls) in bad else 1.0)

    monkeypatch.setattr(OrtModel, "grad", unlucky)
    monkeypatch.setattr(selfcheck, "lite_model", lambda _bundle: TaskError("no numpy"))
    with nullcontext() if passes else pytest.raises(TaskError, match="gradient differs"):
        check(BUNDLE, flat(), theta, example, FULL_BATCH)


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("grad", lambda found: (found[0], found[1] * 1.01), "gradient differs by 1.0e-02"),
        ("grad", lambda found: (found[0] + 0.1, found[1]), "loss is "),
        ("score", lambda found: replace(found, mean_loss=float("nan")), "loss is nan"),
        ("score", lambda found: replace(found, correct=found.correct + 2), "correct labels, not"),
        ("predict", lambda found: found + 1, "outputs differ"),
    ],
)
def test_numpy_has_to_agree(theta, monkeypatch, method, change, message):
    """Numpy has to agree with onnx runtime."""

    class Other(NumpyModel):
        """Numpy's model with one wrong result."""

    right = getattr(NumpyModel, method)
    monkeypatch.setattr(Other, method, lambda self, *inputs: change(right(self, *inputs)), raising=False)
    monkeypatch.setattr(selfcheck, "NumpyModel", Other)
    with pytest.raises(TaskError, match=message) as caught:
        check(BUNDLE, flat(), theta, example, FULL_BATCH)
    assert str(caught.value).startswith("numpy does not compute the task as ONNX Runtime does, batch of 1: ")


def test_loss_that_is_a_sum_is_refused(theta):
    """Devices score large batches in chunks, and weigh the chunks by their samples."""
    score, grad, predict = logistic_models()
    for model in (score, grad):
        for node in model.graph.node:
            if node.op_type == "ReduceMean":
                node.op_type = "ReduceSum"
            if node.op_type == "Div":
                node.input[1] = "one"
                model.graph.initializer.append(constant("one", torch.ones(()).numpy()))
    graphs = (model.SerializeToString() for model in (score, grad, predict))
    bundle = TaskBundle.seal_digests(manifest(), *graphs)

    def total(outputs, y):
        return functional.cross_entropy(outputs, y, reduction="sum")

    with refused(TaskError, "the loss is not a mean over samples", hint="reduction='mean'"):
        check(bundle, flat(loss=total), theta, example, FULL_BATCH)


def test_mean_weighted_by_labels_is_accepted():
    """A loss of the batch's statistics is not."""
    weights = torch.tensor([1.0, 5.0, 20.0])
    layers, samples = nn.Linear(4, 3), lambda n: (torch.randn(n, 4), torch.randint(0, 3, (n,)))
    loss = nn.CrossEntropyLoss(weight=weights)
    bundle = compile_task(layers, loss, samples, name="t", kind="classification")
    theta = flatten(layers, bundle.manifest.parameters)
    x, y = samples(50)
    found, _ = OrtModel(bundle).grad(theta.numpy(), x.numpy(), y.numpy())
    assert found == pytest.approx(loss(layers(x), y).item(), rel=1e-5)

    def spread(outputs, y):
        return functional.cross_entropy(outputs - outputs.mean(0), y)

    with pytest.raises(TaskError, match="not a mean over samples"):
        compile_task(nn.Linear(4, 3), spread, samples, name="t", kind="classification")
