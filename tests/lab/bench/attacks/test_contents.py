"""What one update shows of a device's data, on gradients made by hand."""

import numpy as np
import pytest
import torch
from shoal_lab.bench.attacks import contents
from shoal_lab.bench.attacks.contents import BATCH, MEMBERS, VIEWS, counts_of, gradient_of, match, overlap, read_rows
from shoal_lab.bench.attacks.lab import CLASSES, Images
from torch import nn

from crypto.mask.modes.registry import MODES

pytestmark = pytest.mark.torch
UNIFORM = np.full(CLASSES, 0.1)
PLAIN, SORTED, SORTED_ABSOLUTE, NORM = VIEWS


def bias_gradient(counts, mean_p=UNIFORM):
    """Return a gradient (d,) of a batch with these counts under mean outputs ``mean_p``; other layers come before."""
    return np.concatenate([np.full(20, 99.0), mean_p - np.array(counts) / BATCH]).astype(np.float32)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([8, 0, 0, 24, *[0] * 6], [8, 0, 0, 24, *[0] * 6]),
        ([40, -8, *[0] * 8], [BATCH, *[0] * 9]),
        ([-BATCH] * CLASSES, [BATCH / CLASSES] * CLASSES),
    ],
)
def test_label_counts(counts, expected):
    """Exact from a clear gradient, no less than zero, and even if the gradient shows no label."""
    np.testing.assert_allclose(counts_of(bias_gradient(counts), UNIFORM), expected, atol=1e-4)


def test_counts_that_overlap():
    truth = np.array([16, 16, 0, 0, 0, 0, 0, 0, 0, 0])
    assert overlap(truth.astype(float), truth) == 1.0
    assert overlap(np.array([16.4, 8, 8, 0, 0, 0, 0, 0, 0, 0]), truth) == 0.75


def first_layer_gradient(lab, images, errors):
    """Return a gradient (d,) whose first layer is that of ``images`` (n, pixels) with errors (n, units)."""
    weights, bias = errors.T @ images, errors.sum(0)
    rest = np.full(lab.length - weights.size - bias.size, 9.0)
    return np.concatenate([weights.ravel(), bias, rest]).astype(np.float32)


def test_each_row_over_its_bias_is_the_image(lab):
    """One image: of any sign and size of the error; a unit that it does not excite shows nothing."""
    image = lab.rng("image").random((1, lab.side**2))
    errors = np.linspace(-2, 2, lab.hidden)[None]
    errors[0, 5] = 0.0
    rows, bias = read_rows(first_layer_gradient(lab, image, errors), lab)
    excited = np.flatnonzero(errors[0])
    np.testing.assert_allclose(rows[excited], np.repeat(image, len(excited), 0), atol=1e-5)
    assert rows[5].tolist() == [0.0] * lab.side**2
    np.testing.assert_allclose(bias, errors[0], atol=1e-6)


@pytest.mark.parametrize(("second", "most"), [(-1.0, 0.0), (-0.99, 1.0)])
def test_two_images_stay_within_greys(lab, second, most):
    """Errors that cancel in the bias show nothing; where they nearly do, the quotient is far beyond."""
    images = np.stack([np.ones(lab.side**2), np.zeros(lab.side**2)])
    errors = np.ones((2, lab.hidden))
    errors[1] = second
    rows, _ = read_rows(first_layer_gradient(lab, images, errors), lab)
    assert (rows.min(), rows.max()) == (most, most)


@pytest.fixture
def linear():
    """Return softmax regression of two pixels with known weights."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
        model.bias.zero_()
    return model


def test_a_gradient_of_cross_entropy(linear):
    """(p - h) x^T, then (p - h), in the model's order; a differentiable one leads back to the image."""
    x = torch.tensor([[0.25, 0.75]], requires_grad=True)
    found = gradient_of(linear, x, torch.tensor([1]), differentiable=True)
    error = torch.softmax(linear(x), 1)[0].detach() - torch.tensor([0.0, 1.0])
    torch.testing.assert_close(found, torch.cat([torch.outer(error, x[0]).flatten(), error]))
    found.square().sum().backward()
    assert x.grad.abs().min() > 0


@pytest.mark.parametrize(
    ("mode", "views"),
    [
        ("none", set(VIEWS)),
        ("permutation", {SORTED, SORTED_ABSOLUTE, NORM}),
        ("signed-permutation", {SORTED_ABSOLUTE, NORM}),
        ("rotation", {NORM}),
    ],
)
def test_views_that_see_through_a_mask(lab, mode, views):
    assert set(MODES) == {"none", "permutation", "signed-permutation", "rotation"}
    vector = lab.rng("views").standard_normal(lab.length).astype(np.float32)
    clear, masked = torch.from_numpy(vector), torch.from_numpy(lab.masked(vector, mode))
    assert {name for name, look in VIEWS.items() if torch.allclose(look(clear), look(masked), rtol=1e-4)} == views


@pytest.mark.parametrize("adam", [False, True])
def test_the_image_of_a_gradient_is_found(linear, monkeypatch, adam):
    """From a grey image, which is left alone; the remaining distance is relative to the gradient's own length."""
    monkeypatch.setattr(contents, "ADAM_STEPS", 150)
    truth, start = np.array([0.25, 0.75], np.float32), np.full(2, 0.5, np.float32)
    seen = gradient_of(linear, torch.from_numpy(truth)[None], torch.tensor([1]), differentiable=False).numpy()
    image, left = match(linear, seen, 1, start, PLAIN, adam=adam)
    np.testing.assert_allclose(image, truth, atol=0.02)
    assert left < 1e-3
    assert start.tolist() == [0.5, 0.5]


def picture(levels=16, pixels=64, seed=0):
    """Return an image with all grey levels; half of it is black and a few pixels are white."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels + 1, pixels).astype(np.float32) / levels
    x[: pixels // 2] = 0
    x[-4:] = 1
    return x


def shuffled_gradient(x, units=20):
    """Return the first layer's gradient of one image in a random order, with random signs."""
    rng = np.random.default_rng(1)
    return rng.permutation((rng.standard_normal((units, 1)) * x).ravel()).astype(np.float32)


def test_the_true_histogram_leaves_out_black():
    found = contents.true_histogram(np.array([0, 0, 1 / 16, 1, 1, 0.5], np.float32), 16)
    assert (len(found), found[[0, 7, 15]].tolist()) == (16, [0.25, 0.25, 0.5])


@pytest.mark.parametrize("levels", [16, 255])
def test_grey_levels_are_read_in_any_order(levels):
    """Values without a common factor show less than the usual image does."""
    x = picture(levels, 256 if levels > 16 else 64)
    truth = contents.true_histogram(x, levels)
    assert np.minimum(contents.histogram(shuffled_gradient(x), levels), truth).sum() > 0.9
    noise = np.random.default_rng(3).standard_normal(20 * 64).astype(np.float32)
    usual = contents.true_histogram(np.concatenate([picture(levels, seed=s) for s in range(9)]), levels)
    assert np.minimum(contents.histogram(noise, levels), truth).sum() < np.minimum(usual, truth).sum()


class Bench:
    """Image i is the unit vector i, which is its gradient too; an update is the sum of its images' negative gradients."""

    def __init__(self, *, hidden=False):
        self.hidden = hidden
        self.drawn = []

    def trials(self, _full, quick):
        return quick

    def pick(self, what, n):
        order = np.random.default_rng(sum(what.encode())).permutation(n)
        return Images(np.eye(n, dtype=np.float32)[order], np.zeros(n, np.int64))

    def gradient(self, images):
        return images.x.sum(0)

    def update(self, images, _settings, *, seed):
        self.drawn.append((len(images), seed))
        return -self.gradient(images)

    def masked(self, vector, _mode, round_):
        assert round_ == self.drawn[-1][1] + 1
        return np.zeros_like(vector) if self.hidden else vector


@pytest.mark.parametrize(("hidden", "success"), [(False, 1.0), (True, 0.5)])
def test_members_are_nearer_than_others(hidden, success):
    """The update points against its own images' gradients. Every device has a seed of its own."""
    bench = Bench(hidden=hidden)
    (result,) = contents.membership(bench, "none")
    assert (result.success, result.chance, result.unit) == (success, 0.5, "AUC")
    assert bench.drawn == [(MEMBERS, seed) for seed in range(12)]
