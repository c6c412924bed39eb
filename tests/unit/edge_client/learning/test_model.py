"""A task in ONNX Runtime and in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.learning.model import GRAD_ROWS, SCORE_ROWS, NumpyModel, OrtModel
from shoal.errors import TaskError
from shoal.task.bundle import TaskBundle
from tests.helpers.tasks import logistic_bundle, logistic_models, manifest, samples


@pytest.fixture(scope="module", params=[OrtModel, NumpyModel])
def model(request):
    return request.param(logistic_bundle())


@pytest.fixture
def theta():
    return np.random.default_rng(3).standard_normal(15).astype(np.float32)


def reference(theta, x, y):
    """Loss, gradient and correct count of multinomial logistic regression in float64."""
    w, b = theta[:12].reshape(4, 3).astype(np.float64), theta[12:].astype(np.float64)
    logits = x @ w + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    r = (p - np.eye(3)[y]) / len(y)
    return loss, np.concatenate([(x.T @ r).ravel(), r.sum(0)]), int((logits.argmax(1) == y).sum())


@pytest.mark.parametrize("n", [1, 7, SCORE_ROWS, SCORE_ROWS + 1, GRAD_ROWS, 2 * GRAD_ROWS + 3])
def test_gradient_matches_in_every_chunking(model, theta, n):
    """Score and gradient match numpy in every chunking."""
    x, y = samples(n, seed=n)
    loss, gradient, correct = reference(theta, x, y)
    found = model.score(theta, x, y)
    assert (found.correct, found.count) == (correct, n)
    assert found.mean_loss == pytest.approx(loss, rel=1e-5)
    ort_loss, ort_gradient = model.grad(theta, x, y)
    assert ort_loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(ort_gradient, gradient, rtol=1e-4, atol=1e-6)
    assert ort_gradient.flags.writeable


def test_predict_returns_all_rows_in_order(model, theta):
    x, _ = samples(2 * SCORE_ROWS + 5)
    expected = x @ theta[:12].reshape(4, 3) + theta[12:]
    np.testing.assert_allclose(model.predict(theta, x), expected, rtol=1e-5, atol=1e-5)


def test_wrong_shapes_and_dtypes_are_refused(model, theta):
    x, y = samples(4)
    for bad in (
        (theta[:-1], x, y),
        (theta.astype(np.float64), x, y),
        (theta, x[:, :-1], y),
        (theta, x.astype(np.float64), y),
        (theta, x, y[:-1]),
        (theta, x, y.astype(np.int32)),
        (theta, x[:0], y[:0]),
    ):
        with pytest.raises(TaskError):
            model.score(*bad)


@pytest.mark.parametrize("kind", [OrtModel, NumpyModel])
def test_graph_with_other_inputs_is_refused(theta, kind):
    """A manifest for 5 inputs and 2 classes has d = 12 and cannot stand over graphs of d = 15."""
    models = (m.SerializeToString() for m in logistic_models())
    lying = TaskBundle.seal_digests(manifest(5, 2), *models)
    x, y = samples(3, 5, 2)
    with pytest.raises(TaskError, match=r"score\.onnx does not have"):
        kind(lying).score(theta[:12], x, y)


def test_an_invalid_graph_is_a_task_error(theta):
    score_model, grad, predict = logistic_models()
    score_model.graph.node[2].op_type = "NoSuchOperator"
    model = OrtModel(
        TaskBundle.seal_digests(manifest(), *(m.SerializeToString() for m in (score_model, grad, predict)))
    )
    with pytest.raises(TaskError, match=r"ONNX Runtime refused score\.onnx"):
        model.score(theta, *samples(3))


def test_sessions_are_made_on_first_use(theta):
    model = OrtModel(logistic_bundle())
    assert (model._executors, model._threads) == ({}, 1)
    model.score(theta, *samples(3))
    assert list(model._executors) == ["score"]


def test_numpy_refuses_a_task_at_loading():
    """Numpy refuses a task when it is loaded."""
    score, grad, predict = logistic_models()
    predict.graph.node[2].op_type = "Conv"
    bundle = TaskBundle.seal_digests(manifest(), *(m.SerializeToString() for m in (score, grad, predict)))
    with pytest.raises(
        TaskError, match=r"predict\.onnx can't be computed with numpy: .* the operator 'Conv'"
    ) as caught:
        NumpyModel(bundle)
    assert "pip install 'shoal[edge]'" in caught.value.hint
