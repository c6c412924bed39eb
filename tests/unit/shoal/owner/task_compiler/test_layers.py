"""The layer that prevents compilation is named, with a replacement."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.errors import TaskError
from shoal.owner.task_compiler.layers import blame, embedding_limit, refuse_random, refuse_stateful, refuse_unsupported

pytestmark = pytest.mark.torch
X = torch.zeros(2, 4)


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(4, 3), function

    def forward(self, x):
        return self.function(self.fc(x))


def around(layer):
    return nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3))


@pytest.mark.parametrize(
    ("layer", "message", "hint"),
    [
        (nn.Dropout(0.5), r"layer '1' \(Dropout\) drops activations", "eval"),
        (nn.LSTM(5, 5, 2, dropout=0.1), r"layer '1' \(LSTM\) drops activations", "eval"),
        (nn.BatchNorm1d(5), r"layer '1' \(BatchNorm1d\) normalises by the batch's statistics", "GroupNorm"),
        (nn.BatchNorm1d(5, track_running_stats=False).eval(), "normalises by the batch's statistics", "GroupNorm"),
        (
            nn.InstanceNorm1d(5, track_running_stats=True),
            "tracks statistics while training",
            "track_running_stats=False",
        ),
        (nn.ConvTranspose1d(4, 4, 1), r"layer '1' \(ConvTranspose1d\) is a transposed convolution", "Upsample"),
    ],
)
def test_an_unsupported_layer_is_named_with_a_replacement(layer, message, hint):
    with pytest.raises(TaskError, match=message) as caught:
        refuse_unsupported(around(layer))
    assert hint in caught.value.hint


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
def test_a_frozen_or_stateless_layer_is_not_refused(layer):
    refuse_unsupported(around(layer))


def test_a_layer_inside_another_is_found_by_its_whole_name():
    with pytest.raises(TaskError, match=r"layer 'block\.1' \(Dropout\)"):
        refuse_stateful(nn.ModuleDict({"block": around(nn.Dropout(0.5))}))


def test_the_simulator_may_train_convolutions_that_can_not_be_compiled():
    """It shares only the refusal of layers with a state."""
    refuse_stateful(around(nn.ConvTranspose1d(4, 4, 1)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: functional.dropout(x, 0.5), r"layer 'model' draws random numbers"),
        (lambda x: x + torch.rand_like(x), r"layer 'model' draws random numbers \(rand_like\)"),
        (lambda x: x + torch.randn(3), r"layer 'model' draws random numbers \(randn\)"),
        (lambda x: torch.bernoulli(x.sigmoid()), r"draws random numbers \(bernoulli\)"),
    ],
)
def test_random_numbers_in_the_forward_pass_are_found(function, message):
    with pytest.raises(TaskError, match=message) as caught:
        refuse_random(Lambda(function), X)
    assert "self.training" in caught.value.hint


def test_random_numbers_of_an_inner_layer_are_blamed_on_it():
    model = nn.Sequential(Lambda(lambda x: x), nn.Linear(3, 4), Lambda(lambda x: x + torch.rand_like(x)))
    with pytest.raises(TaskError, match=r"layer '2 \(Lambda\)' draws random numbers"):
        refuse_random(model, X)


def test_a_model_without_random_numbers_is_not_refused_and_keeps_no_hooks():
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


def test_the_smallest_table_that_reads_x_bounds_it():
    model = Tables()
    assert embedding_limit(model, torch.tensor([[0, 6]])) == 7
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_without_a_table_x_has_no_bound_and_the_model_is_not_run():
    assert embedding_limit(Lambda(lambda _x: pytest.fail("was run")), X) == 0


def test_a_failure_leaves_no_hooks():
    model = Tables()
    with pytest.raises(IndexError):
        embedding_limit(model, torch.tensor([[8]]))
    assert not any(m._forward_pre_hooks for m in model.modules())


POOL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten())
IMAGE = torch.zeros(1, 1, 9, 9)


@pytest.mark.parametrize("text", ["no aten.adaptive_max_pool2d_backward.default", "aten::adaptive_max_pool2d"])
def test_the_layer_that_uses_the_operator_of_the_message_is_blamed(text):
    error = blame(POOL, IMAGE, RuntimeError(text))
    assert str(error).startswith("layer '1 (AdaptiveMaxPool2d)' can't be compiled: no ONNX form of adaptive_max_pool2d")
    assert "replace that layer" in error.hint


def test_the_operator_may_be_named_by_the_cause():
    error = RuntimeError("export failed")
    error.__cause__ = ValueError("aten.adaptive_max_pool2d.default has no decomposition")
    assert "AdaptiveMaxPool2d" in str(blame(POOL, IMAGE, error))


def test_an_operator_that_no_layer_uses_is_named_itself():
    assert (
        str(blame(POOL, IMAGE, RuntimeError("aten.fft_fft"))) == "the model can't be compiled: no ONNX form of fft_fft"
    )


def test_without_an_operator_the_first_line_of_the_message_is_given():
    error = blame(POOL, IMAGE, RuntimeError("\n" + "too deep " * 100 + "\nsecond line"))
    assert str(error).startswith("the model can't be compiled: too deep too deep")
    assert "second line" not in str(error)
    assert len(str(error)) < 350


def test_an_error_without_a_text_is_named_by_its_class():
    """As an assertion inside torch's exporter raises it."""
    assert str(blame(POOL, IMAGE, AssertionError())) == "the model can't be compiled: AssertionError"
