"""Gradient matching: the gradient, the views that a mask leaves alone, and the search."""

import numpy as np
import pytest
import torch
from shoal_lab.bench.attacks.gradient_matching import VIEWS, gradient_of, match
from torch import nn

from crypto.mask.modes.registry import MODES

pytestmark = pytest.mark.torch
PLAIN, SORTED, SORTED_ABSOLUTE, NORM = VIEWS


@pytest.fixture
def linear():
    """Return softmax regression of two pixels with known weights."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
        model.bias.zero_()
    return model


def test_the_gradient_is_that_of_cross_entropy_in_the_models_order(linear):
    """(p - h) x^T, then (p - h)."""
    x = torch.tensor([[0.25, 0.75]])
    found = gradient_of(linear, x, torch.tensor([1]), differentiable=False)
    p = torch.softmax(linear(x), 1)[0].detach()
    error = p - torch.tensor([0.0, 1.0])
    torch.testing.assert_close(found, torch.cat([torch.outer(error, x[0]).flatten(), error]))
    assert not found.requires_grad


def test_a_differentiable_gradient_leads_back_to_the_image(linear):
    x = torch.tensor([[0.25, 0.75]], requires_grad=True)
    gradient_of(linear, x, torch.tensor([1]), differentiable=True).square().sum().backward()
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
def test_a_view_sees_through_the_masks_that_leave_it_alone(lab, mode, views):
    assert set(MODES) == {"none", "permutation", "signed-permutation", "rotation"}
    vector = lab.rng("views").standard_normal(lab.length).astype(np.float32)
    clear, masked = torch.from_numpy(vector), torch.from_numpy(lab.masked(vector, mode))
    assert {name for name, look in VIEWS.items() if torch.allclose(look(clear), look(masked), rtol=1e-4)} == views


@pytest.mark.parametrize("adam", [False, True])
def test_the_search_finds_the_image_of_a_gradient(linear, monkeypatch, adam):
    """From a grey image, which is left alone; the remaining distance is relative to the gradient's own length."""
    monkeypatch.setattr("shoal_lab.bench.attacks.gradient_matching.ADAM_STEPS", 150)
    truth, start = np.array([0.25, 0.75], np.float32), np.full(2, 0.5, np.float32)
    seen = gradient_of(linear, torch.from_numpy(truth)[None], torch.tensor([1]), differentiable=False).numpy()
    image, left = match(linear, seen, 1, start, PLAIN, adam=adam)
    np.testing.assert_allclose(image, truth, atol=0.02)
    assert left < 1e-3
    assert start.tolist() == [0.5, 0.5]


def test_an_image_stays_between_black_and_white(linear):
    """A gradient that no image has, ten times too long."""
    seen = np.array([5, -5, 5, 5, 10, -10], np.float32)
    image, left = match(linear, seen, 1, np.full(2, 0.5, np.float32), PLAIN, adam=False)
    assert 0 <= image.min() <= image.max() <= 1
    assert left > 0.01
