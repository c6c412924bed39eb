"""The layer that prevents compilation is named, with a replacement."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.errors import TaskError
from shoal.owner.task_compiler.layers import (
    blame,
    embedding_limit,
    refuse_random,
    refuse_stateful,
    untrained_statistics,
)
from tests.helpers.refusals import refused
from tests.unit.shoal.owner.task_compiler.zoo import Lambda

pytestmark = pytest.mark.torch
X = torch.zeros(2, 4)


def around(layer):
    return nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("layer", "message", "hint"),
    [
        (nn.Dropout(0.5), r"layer '1' \(Dropout\) drops activations", "eval"),
        (nn.LSTM(5, 5, 2, dropout=0.1), r"layer '1' \(LSTM\) drops activations", "eval"),
        (nn.BatchNorm1d(5), r"layer '1' \(BatchNorm1d\) normalises by the batch's statistics", "GroupNorm"),
        (nn.BatchNorm1d(5, track_running_stats=False).eval(), "normalises by the batch's statistics", "GroupNorm"),
        (nn.utils.spectral_norm(nn.Linear(5, 5)), "layer '1' is under spectral_norm", "eval"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), "is under spectral_norm", "eval"),
        (
            nn.InstanceNorm1d(5, track_running_stats=True),
            "tracks statistics while training",
            "track_running_stats=False",
        ),
    ],
)
def test_unsupported_layer_is_named(layer, message, hint):
    """An unsupported layer is named with a replacement."""
    with refused(TaskError, message, hint=hint):
        refuse_stateful(around(layer))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.0),
        nn.Dropout(0.5).eval(),
        nn.BatchNorm1d(5).eval(),
        nn.InstanceNorm1d(5),
        nn.GroupNorm(1, 5),
        nn.LSTM(5, 5, 2),
        nn.LSTM(5, 5, 2, dropout=0.1).eval(),
        nn.Conv1d(4, 4, 1),
    ],
)
def test_stateless_layer_is_not_refused(layer):
    """A frozen or stateless layer is not refused; one inside another is found by its whole name."""
    refuse_stateful(around(layer))
    with pytest.raises(TaskError, match=r"layer 'block\.1' \(Dropout\)"):
        refuse_stateful(nn.ModuleDict({"first": layer, "block": around(nn.Dropout(0.5))}))


def test_untrained_statistics_are_named():
    """Frozen batch norm as it was made; not one that was trained, nor one that is refused anyway."""
    frozen, trained = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).eval(), nn.BatchNorm1d(5).eval()
    trained.running_mean += 0.1
    assert untrained_statistics(nn.Sequential(nn.BatchNorm1d(4), trained)) == ""
    note = untrained_statistics(nn.Sequential(frozen, nn.BatchNorm1d(5).eval()))
    assert note.startswith("layer '0.1' (BatchNorm1d) and 1 more: frozen with mean 0 and variance 1")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Lambda(lambda x: functional.dropout(x, 0.5)), r"layer 'model' draws random numbers"),
        (Lambda(lambda x: x + torch.rand_like(x)), r"layer 'model' draws random numbers \(rand_like\)"),
        (Lambda(lambda x: x + torch.randn(3)), r"layer 'model' draws random numbers \(randn\)"),
        (Lambda(lambda x: torch.bernoulli(x.sigmoid())), r"draws random numbers \(bernoulli\)"),
        (
            nn.Sequential(Lambda(lambda x: x), nn.Linear(3, 4), Lambda(lambda x: x + torch.rand_like(x))),
            r"layer '2 \(Lambda\)' draws random numbers",
        ),
    ],
    ids=["dropout", "rand_like", "randn", "bernoulli", "an inner layer"],
)
def test_random_numbers_are_found(model, message):
    """Random numbers in the forward pass are found, and blamed on the innermost layer."""
    with refused(TaskError, message, hint="self.training"):
        refuse_random(model, X)


def test_model_keeps_no_hooks():
    """A model without random numbers is not refused and keeps no hooks; without a table x has no bound and it is not run."""
    model = Lambda(lambda x: functional.dropout(x, 0.5, training=False))
    refuse_random(model, X)
    assert [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks] == []
    assert embedding_limit(Lambda(lambda _x: pytest.fail("was run")), X) == 0


class Tables(nn.Module):
    """Two tables that read x, and a smaller one that reads something else."""

    def __init__(self):
        super().__init__()
        self.large, self.small, self.other = nn.Embedding(9, 2), nn.Embedding(7, 2), nn.Embedding(3, 2)

    def forward(self, x):
        return self.large(x) + self.small(x) + self.other(x % 3)


def test_smallest_table_bounds_x():
    """The smallest table that reads x bounds it; neither that nor a failure leaves hooks."""
    model = Tables()
    assert embedding_limit(model, torch.tensor([[0, 6]])) == 7
    with pytest.raises(IndexError):
        embedding_limit(model, torch.tensor([[8]]))
    assert [m for m in model.modules() if m._forward_pre_hooks] == []


POOL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten())
IMAGE = torch.zeros(1, 1, 9, 9)


POOLED = "layer '1 (AdaptiveMaxPool2d)' can't be compiled: no ONNX form of adaptive_max_pool2d"
CAUSED = RuntimeError("export failed")
CAUSED.__cause__ = ValueError("aten.adaptive_max_pool2d.default has no decomposition")


@pytest.mark.parametrize(
    ("error", "text", "hint"),
    [
        (RuntimeError("no aten.adaptive_max_pool2d_backward.default"), POOLED, "replace that layer"),
        (RuntimeError("aten::adaptive_max_pool2d"), POOLED, "replace that layer"),
        (CAUSED, POOLED, "replace that layer"),
        (RuntimeError("aten.fft_fft"), "the model can't be compiled: no ONNX form of fft_fft", ""),
        (RuntimeError("Constraints violated (B)! For more"), "", "x.shape[0]"),
        (RuntimeError("Could not guard on data-dependent expression"), "", "torch.where"),
        (AssertionError(), "the model can't be compiled: AssertionError", ""),
        (
            RuntimeError("\n" + "too deep " * 100 + "\nsecond line"),
            "the model can't be compiled: too deep too deep",
            "",
        ),
    ],
    ids=[
        *("backward", "forward", "by its cause", "of no layer", "a fixed batch", "a choice by the values of x"),
        *("without a text", "only its first line"),
    ],
)
def test_layer_of_the_operator_is_blamed(error, text, hint):
    """The layer that uses the operator of the message, or of its cause, is blamed."""
    found = blame(POOL, IMAGE, error)
    assert str(found).startswith(text)
    assert hint in found.hint
    assert "second line" not in str(found)
    assert len(str(found)) < 350


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (lambda h: h.topk(2, 1).values, "argsort"),
        (lambda h: h.sort(1)[0], "argsort"),
        (lambda h: h.unfold(1, 2, 1), "torch.stack"),
        (lambda h: torch.fft.rfft(h).abs(), "cosines"),
    ],
    ids=["topk", "sort", "unfold", "rfft"],
)
def test_operator_has_a_form_that_works(function, form):
    """An executor's refusal of the graph names it too; an error with a hint of its own stays."""
    for error in (RuntimeError("aten.copy"), TaskError("ONNX Runtime refused score.onnx")):
        assert form in blame(Lambda(function), X, error).hint
    own = TaskError("the labels differ", hint="sort them")
    assert blame(Lambda(function), X, own) is own
