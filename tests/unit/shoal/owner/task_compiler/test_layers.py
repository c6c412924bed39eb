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
    """A frozen or stateless layer is not refused."""
    refuse_stateful(around(layer))


def test_untrained_statistics_are_named():
    """Frozen batch norm as it was made; not one that was trained, nor one that is refused anyway."""
    frozen, trained = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).eval(), nn.BatchNorm1d(5).eval()
    trained.running_mean += 0.1
    assert untrained_statistics(nn.Sequential(nn.BatchNorm1d(4), trained)) == ""
    note = untrained_statistics(nn.Sequential(frozen, nn.BatchNorm1d(5).eval()))
    assert note.startswith("layer '0.1' (BatchNorm1d) and 1 more: frozen with mean 0 and variance 1")


def test_inner_layer_has_its_whole_name():
    """A layer inside another is found by its whole name."""
    with pytest.raises(TaskError, match=r"layer 'block\.1' \(Dropout\)"):
        refuse_stateful(nn.ModuleDict({"block": around(nn.Dropout(0.5))}))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: functional.dropout(x, 0.5), r"layer 'model' draws random numbers"),
        (lambda x: x + torch.rand_like(x), r"layer 'model' draws random numbers \(rand_like\)"),
        (lambda x: x + torch.randn(3), r"layer 'model' draws random numbers \(randn\)"),
        (lambda x: torch.bernoulli(x.sigmoid()), r"draws random numbers \(bernoulli\)"),
    ],
)
def test_random_numbers_are_found(function, message):
    """Random numbers in the forward pass are found."""
    with refused(TaskError, message, hint="self.training"):
        refuse_random(Lambda(function), X)


def test_inner_layer_is_blamed():
    """Random numbers of an inner layer are blamed on it."""
    model = nn.Sequential(Lambda(lambda x: x), nn.Linear(3, 4), Lambda(lambda x: x + torch.rand_like(x)))
    with pytest.raises(TaskError, match=r"layer '2 \(Lambda\)' draws random numbers"):
        refuse_random(model, X)


def test_model_keeps_no_hooks():
    """A model without random numbers is not refused and keeps no hooks."""
    model = Lambda(lambda x: functional.dropout(x, 0.5, training=False))
    refuse_random(model, X)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Tables(nn.Module):
    """Two tables that read x, and a smaller one that reads something else."""

    def __init__(self):
        super().__init__()
        self.large, self.small, self.other = nn.Embedding(9, 2), nn.Embedding(7, 2), nn.Embedding(3, 2)

    def forward(self, x):
        return self.large(x) + self.small(x) + self.other(x % 3)


def test_smallest_table_bounds_x():
    """The smallest table that reads x bounds it."""
    model = Tables()
    assert embedding_limit(model, torch.tensor([[0, 6]])) == 7
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_without_a_table_nothing_is_run():
    """Without a table x has no bound and the model is not run."""
    assert embedding_limit(Lambda(lambda _x: pytest.fail("was run")), X) == 0


def test_a_failure_leaves_no_hooks():
    model = Tables()
    with pytest.raises(IndexError):
        embedding_limit(model, torch.tensor([[8]]))
    assert not any(m._forward_pre_hooks for m in model.modules())


POOL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten())
IMAGE = torch.zeros(1, 1, 9, 9)


@pytest.mark.parametrize("text", ["no aten.adaptive_max_pool2d_backward.default", "aten::adaptive_max_pool2d"])
def test_layer_of_the_operator_is_blamed(text):
    """The layer that uses the operator of the message is blamed."""
    error = blame(POOL, IMAGE, RuntimeError(text))
    assert str(error).startswith("layer '1 (AdaptiveMaxPool2d)' can't be compiled: no ONNX form of adaptive_max_pool2d")
    assert "replace that layer" in error.hint


def test_operator_may_be_named_by_the_cause():
    error = RuntimeError("export failed")
    error.__cause__ = ValueError("aten.adaptive_max_pool2d.default has no decomposition")
    assert "AdaptiveMaxPool2d" in str(blame(POOL, IMAGE, error))


def test_unused_operator_names_itself():
    """An operator that no layer uses is named itself."""
    assert (
        str(blame(POOL, IMAGE, RuntimeError("aten.fft_fft"))) == "the model can't be compiled: no ONNX form of fft_fft"
    )


def test_first_line_without_an_operator():
    """Without an operator the first line of the message is given."""
    error = blame(POOL, IMAGE, RuntimeError("\n" + "too deep " * 100 + "\nsecond line"))
    assert str(error).startswith("the model can't be compiled: too deep too deep")
    assert "second line" not in str(error)
    assert len(str(error)) < 350


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("Constraints violated (B)! For more", "x.shape[0]"),
        ("Could not guard on data-dependent expression", "torch.where"),
    ],
)
def test_causes_without_an_operator(text, hint):
    """A fixed batch, and a choice by the values of x."""
    assert hint in blame(POOL, IMAGE, RuntimeError(text)).hint


def test_textless_error_has_its_class():
    """As an assertion inside torch's exporter raises it."""
    assert str(blame(POOL, IMAGE, AssertionError())) == "the model can't be compiled: AssertionError"


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
