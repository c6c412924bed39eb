"""Compiled tasks against torch, and the models that are refused."""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from edge_client.answers.inference import export
from edge_client.learning.model import NumpyModel, OrtModel
from shoal.errors import TaskError
from shoal.owner.task_compiler.builtin import build, cross_entropy, squared_error
from shoal.owner.task_compiler.compile import compile_task, layout, quiet
from shoal.owner.task_compiler.flat import flatten
from shoal.owner.task_compiler.selfcheck import lite_words
from shoal.protocol.recipe import LocalTraining
from shoal.task.bundle import TaskBundle
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.cases import with_long
from tests.helpers.refusals import refused
from tests.unit.shoal.owner.task_compiler.zoo import Lambda

pytestmark = pytest.mark.torch


def vectors(*shape, classes=3):
    return lambda n: (torch.randn(n, *shape), torch.randint(0, classes, (n,)))


def classify(model, *shape, classes=3, loss=cross_entropy, **options):
    options = {"name": "t", "kind": "classification"} | options
    return compile_task(model, loss, vectors(*shape, classes=classes), **options)


def eager(source, bundle, x, y):
    """Loss and flat gradient by plain autograd on the module itself."""
    source.model.zero_grad()
    loss = source.loss(source.model(x), y)
    loss.backward()
    named = dict(source.model.named_parameters())
    return loss.item(), torch.cat([named[p.name].grad.reshape(-1) for p in bundle.manifest.parameters]).numpy()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("mlp", "cnn", "lstm")),
        *with_long([("linear", {}), ("logistic", {}), ("lstm", {"layers": 2})]),
    ],
)
def test_builtins_match_plain_autograd(compiled, name, options, tmp_path):
    source, bundle = compiled(name, **options)
    theta = flatten(source.model, bundle.manifest.parameters).numpy()
    model = OrtModel(bundle)
    torch.manual_seed(1)
    for n in (1, 5, 40):
        x, y = source.example(n)
        loss, gradient = eager(source, bundle, x, y)
        found, found_gradient = model.grad(theta, x.numpy(), y.numpy())
        assert found == pytest.approx(loss, rel=1e-5)
        assert np.linalg.norm(found_gradient - gradient) <= 1e-5 * np.linalg.norm(gradient)
        with torch.no_grad():
            outputs = source.model(x)
        np.testing.assert_allclose(model.predict(theta, x.numpy()), outputs.numpy(), rtol=1e-4, atol=1e-5)
        score = model.score(theta, x.numpy(), y.numpy())
        assert score.mean_loss == pytest.approx(loss, rel=1e-5)
        assert score.count == y.numel()
        assert score.correct == (0 if name == "linear" else int((outputs.argmax(-1) == y).sum()))
    export(bundle, theta, tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"), full_check=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("linear", "logistic", "mlp", "lstm")),
        pytest.param("lstm", {"layers": 2}, marks=pytest.mark.long),
    ],
)
def test_builtins_are_the_same_in_numpy(compiled, name, options):
    """Builtins without convolutions are the same in numpy."""
    source, bundle = compiled(name, **options)
    assert lite_words(bundle).endswith("or numpy alone (edge-lite)")
    theta = flatten(source.model, bundle.manifest.parameters).numpy()
    model, light = OrtModel(bundle), NumpyModel(bundle)
    torch.manual_seed(1)
    for n in (1, 5, 40, 130):
        x, y = (each.numpy() for each in source.example(n))
        (loss, gradient), (found, found_gradient) = (each.grad(theta, x, y) for each in (model, light))
        assert found == pytest.approx(loss, rel=1e-5)
        assert np.linalg.norm(found_gradient - gradient) <= 1e-5 * np.linalg.norm(gradient)
        np.testing.assert_allclose(light.predict(theta, x), model.predict(theta, x), rtol=1e-5, atol=1e-6)
        score, found_score = model.score(theta, x, y), light.score(theta, x, y)
        assert found_score.mean_loss == pytest.approx(score.mean_loss, rel=1e-5)
        assert (found_score.correct, found_score.count) == (score.correct, score.count)


def test_convolutions_need_onnx_runtime(compiled):
    """ONNX has no gradient of fractional or adaptive max pooling; the message must say which layer that is."""
    bundle = compiled("cnn")[1]
    assert lite_words(bundle).startswith("devices need ONNX Runtime (the extra edge): ")
    with refused(TaskError, "does not have the operator 'Conv'", hint="pip install 'shoal[edge]'"):
        NumpyModel(bundle)
    pooling = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    with refused(TaskError, "AdaptiveMaxPool2d", hint="replace that layer"):
        classify(pooling, 1, 9, 9)


def test_manifest_says_what_the_module_is(compiled):
    source, bundle = compiled("cnn")
    assert [(p.name, p.shape) for p in bundle.manifest.parameters] == [
        (name, tuple(value.shape)) for name, value in source.model.named_parameters()
    ]
    assert bundle.manifest.input.shape == (2, 9, 9)
    assert bundle.manifest.label.limit == 4
    assert compiled("lstm")[1].manifest.input.limit == 11


def test_bundle_leaks_no_path(compiled):
    """Bundle survives the wire and leaks no path."""
    bundle = compiled("mlp")[1]
    data = bundle.to_bytes()
    assert TaskBundle.from_bytes(data) == bundle
    assert len(data) < 8192
    leaks = (b".py", b"site-packages", b"torch", b"pkg.", str(Path.cwd()).encode())
    assert [leak for leak in leaks if leak in bundle.grad] == []


def test_prefixes_match_whole_name_parts():
    model = nn.ModuleDict({"conv": nn.Linear(1, 1), "conv2": nn.Linear(1, 1)})
    assert [p.segment for p in layout(model, ["conv"])] == ["shared", "shared", "cluster", "cluster"]
    assert layout(model, ["conv2"])[0].name == "conv2.weight"
    with pytest.raises(TaskError, match="no parameter begins with 'con'"):
        layout(model, ["con"])


class Pools(nn.Module):
    """Average pools of every kind, group norm, strided convolution, overlapping padded max pool."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.average = nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False)
        self.plain = nn.AvgPool2d(2)
        self.maximum = nn.MaxPool2d(3, stride=1, padding=1)
        self.adaptive = nn.AdaptiveAvgPool2d((2, 1))
        self.head = nn.Linear(8 + 4, 3)

    def forward(self, x):
        x = self.maximum(self.average(functional.gelu(self.norm(self.conv(x)))))
        return self.head(torch.cat([self.adaptive(x).flatten(1), self.plain(x).flatten(1)[:, :4]], 1))


def test_pooling_layers_compile():
    """The compiler's own check holds the gradients to 1e-5; 13 pixels leave partial windows everywhere."""
    torch.manual_seed(3)
    assert classify(Pools(), 1, 13, 13).length > 0
    frozen = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).eval()
    assert classify(frozen, 4).length == 25 + 10 + 18


@pytest.mark.parametrize(
    ("first", "options", "names", "segments"),
    [
        (
            nn.Linear(4, 5),
            {"shared": ["2"]},
            ["2.weight", "2.bias", "0.weight", "0.bias"],
            [("shared", 18), ("cluster", 25)],
        ),
        (nn.Linear(4, 5).requires_grad_(False), {}, ["2.weight", "2.bias"], [("cluster", 18)]),
    ],
    ids=["shared", "frozen"],
)
def test_shared_parameters_come_first(first, options, names, segments):
    """Frozen ones are constants: they keep the values that the owner's model has, and are no coordinates."""
    torch.manual_seed(0)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(5, 3))
    bundle = classify(model, 4, **options)
    assert [p.name for p in bundle.manifest.parameters] == names
    assert [(s.name, s.length) for s in bundle.segments] == segments
    theta, x = flatten(model, bundle.manifest.parameters).numpy(), torch.randn(6, 4)
    expected = model(x).detach().numpy()
    np.testing.assert_allclose(OrtModel(bundle).predict(theta, x.numpy()), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            partial(functional.cross_entropy, reduction="none"),
            r"one number, the mean over the samples, not shape \(8,\)",
        ),
        (lambda _outputs, _y: 0.5, "one number, the mean over the samples, not float"),
        (lambda outputs, _y: outputs @ outputs, "the loss fails on the model's own example"),
        (partial(functional.cross_entropy, reduction="sum"), "mean over samples"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused(loss, message):
    with pytest.raises(TaskError, match=message):
        classify(nn.Linear(4, 3), 4, loss=loss)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.ReLU(), {}, "no parameters"),
        (nn.Linear(4, 3).requires_grad_(False), {}, "no parameters to train"),
        (nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)), {}, r"layer '1' \(Dropout\)"),
        (Lambda(lambda x: functional.dropout(x, 0.5)), {}, r"layer .model. draws random numbers"),
        (nn.Linear(5, 3), {}, "fails on its own example"),
        (nn.Linear(4, 3, dtype=torch.float64), {}, "float64"),
        (nn.Linear(4, 3), {"kind": "regression"}, "regression"),
        (nn.Linear(4, 2), {}, "2 classes"),
        (Lambda(lambda x: x.sum()), {}, "one tensor"),
        (Lambda(lambda x: x * float("nan")), {}, "not finite"),
        (nn.Linear(4, 3), {"name": "Bad Name"}, "not a valid name"),
        (nn.LazyLinear(3), {}, "'weight' has no shape yet"),
    ],
)
def test_models_that_are_no_task_are_refused(model, options, message):
    with pytest.raises(TaskError, match=message):
        classify(model, 4, **options)


@pytest.mark.parametrize(
    ("model", "y", "kind", "hint"),
    [
        (nn.Linear(4, 3), torch.zeros(8), "regression", "unsqueeze"),
        (nn.Linear(4, 3), torch.zeros(8, 3, dtype=torch.int64), "classification", "BCEWithLogitsLoss"),
        (nn.Linear(4, 1), torch.ones(8, dtype=torch.int64), "classification", "kind 'regression'"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 2, 2))),
            torch.zeros(8, 2, 2).long(),
            "classification",
            "y.flatten(1)",
        ),
    ],
)
def test_shapes_that_do_not_fit_have_a_hint(model, y, kind, hint):
    with refused(TaskError, hint=hint):
        compile_task(model, squared_error, lambda n: (torch.ones(n, 4), y[:n]), name="t", kind=kind)


@pytest.mark.parametrize(
    "answer", [torch.ones(8, 4), (torch.ones(8, 4),), (torch.ones(8, 4), 3), (torch.ones(7, 4), torch.ones(8))]
)
def test_example_needs_two_tensors(answer):
    """An example without two tensors is refused."""
    with refused(TaskError, "must return tensors", hint="return x, x"):
        compile_task(nn.Linear(4, 4), squared_error, lambda _n: answer, name="t", kind="regression")


def test_compiling_is_silent(capfd):
    """Nothing on either stream, no warning filter left, torch's random state untouched."""
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    filters = list(warnings.filters)

    def example(n):
        return torch.randn(n, 3), torch.randn(n)

    compile_task(Lambda2(), squared_error, example, name="t", kind="regression", hyper=LocalTraining(lr=0.5))
    torch.testing.assert_close(torch.rand(3), expected)
    assert warnings.filters == filters
    assert capfd.readouterr() == ("", "")


class Lambda2(nn.Module):
    """Linear regression of a bare parameter, started at zero, with a scalar shift."""

    def __init__(self):
        super().__init__()
        self.w, self.shift = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x @ self.w + self.shift


def test_training_is_in_the_targets_unit(tmp_path):
    """Theta, loss and gradient are those of targets less the centre of their range, in quarters of its width."""
    source = build("linear", inputs=3)
    plain, ranged = (
        compile_task(*source[:3], name="t", kind="regression", data=DataDeclaration(target=target))
        for target in ((), (100, 500))
    )
    rng = np.random.default_rng(0)
    theta, x, y = (rng.standard_normal(shape).astype(np.float32) for shape in (3, (9, 3), 9))
    for make in (OrtModel, NumpyModel):
        own, other = make(plain), make(ranged)
        loss, gradient = own.grad(theta, x, y)
        in_data, same = other.grad(theta, x, 300 + 100 * y)
        assert in_data == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(same, gradient, rtol=1e-4)
        assert other.score(theta, x, 300 + 100 * y).mean_loss == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(other.predict(theta, x), 300 + 100 * own.predict(theta, x), rtol=1e-5)
    export(ranged, theta, tmp_path / "model.onnx")
    answers = onnx.reference.ReferenceEvaluator(onnx.load(tmp_path / "model.onnx")).run(None, {"x": x})[0]
    np.testing.assert_allclose(answers, 300 + 100 * x @ theta, rtol=1e-5)


def test_private_parameters_keep_own_values():
    """Private parameters come last with the models own values."""
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    source = build("mlp", inputs=5, hidden=4, classes=3)
    bundle = compile_task(model, *source[1:3], name="small", kind="classification", shared=["2"], private=["0"])
    assert [p.name for p in bundle.manifest.parameters] == ["2.weight", "2.bias", "0.weight", "0.bias"]
    assert [(s.name, s.length) for s in bundle.segments] == [("shared", 15)]
    own = torch.cat([model[0].weight.reshape(-1), model[0].bias]).detach().numpy()
    np.testing.assert_array_equal(np.frombuffer(bundle.private, "<f4"), own)


@pytest.mark.parametrize(
    ("prefixes", "message", "hint"),
    [
        ({"private": ["head"]}, "no parameter begins with 'head'", "hidden.weight"),
        ({"private": ["hidden", "readout"]}, "all parameters are private", "'local'"),
        ({"private": ["readout"], "shared": ["readout.bias"]}, "'readout.bias' is both shared", "one of the two"),
    ],
)
def test_senseless_prefix_is_refused(prefixes, message, hint):
    """A prefix that makes no sense is refused."""
    with refused(TaskError, message, hint=hint):
        layout(build("mlp", inputs=5, hidden=4, classes=3).model, **prefixes)


# -- Silence inside the block, and the process as it was afterwards --


class FailedError(Exception):
    """Ends the block."""


def make_noise():
    """Print, warn and log as torch's exporter does."""
    sys.stdout.write("to stdout\n")
    sys.stderr.write("to stderr\n")
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("torch.onnx").error("an error")
    logging.getLogger("onnxscript").warning("a warning")


@pytest.mark.parametrize("failing", [False, True])
def test_streams_and_loggers_are_restored(capsys, caplog, failing):
    """Nothing is printed or logged inside the block; then streams, warnings and loggers are as before."""
    level, filters, streams = logging.getLogger("torch.onnx").level, list(warnings.filters), (sys.stdout, sys.stderr)
    with pytest.raises(FailedError) if failing else nullcontext(), quiet():
        make_noise()
        if failing:
            raise FailedError
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []
    assert (logging.getLogger("torch.onnx").level, warnings.filters) == (level, filters)
    assert (sys.stdout, sys.stderr) == streams
    with pytest.warns(UserWarning, match="a warning"):
        make_noise()
    assert capsys.readouterr().out == "to stdout\n"
    assert [r.getMessage() for r in caplog.records] == ["an error", "a warning"]


def test_earlier_level_is_set_again():
    """A level that was set before is set again."""
    logger = logging.getLogger("onnxscript")
    before = logger.level
    try:
        logger.setLevel(logging.DEBUG)
        with quiet():
            assert logger.level == logging.CRITICAL
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
