"""Images read from the gradient of the first layer, against gradients made by hand."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.first_layer import nearest, read_rows, run

pytestmark = pytest.mark.torch


def gradient_of(lab, images, errors):
    """Return a gradient (d,) whose first layer is that of ``images`` (n, pixels) with errors (n, units)."""
    weights, bias = errors.T @ images, errors.sum(0)
    rest = np.full(lab.length - weights.size - bias.size, 9.0)
    return np.concatenate([weights.ravel(), bias, rest]).astype(np.float32)


def test_each_row_over_its_bias_is_the_image(lab):
    """One image: of any sign and size of the error; a unit that it does not excite shows nothing."""
    image = lab.rng("image").random((1, lab.side**2))
    errors = np.linspace(-2, 2, lab.hidden)[None]
    errors[0, 5] = 0.0
    rows, bias = read_rows(gradient_of(lab, image, errors), lab)
    excited = np.flatnonzero(errors[0])
    np.testing.assert_allclose(rows[excited], np.repeat(image, len(excited), 0), atol=1e-5)
    assert rows[5].tolist() == [0.0] * lab.side**2
    np.testing.assert_allclose(bias, errors[0], atol=1e-6)


def test_errors_that_cancel_in_the_bias_show_nothing(lab):
    """A quotient by zero would be infinite; the difference of two images is none."""
    images = np.stack([np.ones(lab.side**2), np.zeros(lab.side**2)])
    errors = np.ones((2, lab.hidden))
    errors[1] = -1
    rows, bias = read_rows(gradient_of(lab, images, errors), lab)
    assert not rows.any()
    assert not bias.any()


def test_mixtures_of_several_images_stay_between_black_and_white(lab):
    """Errors of opposite signs nearly cancel in the bias, so the quotient is far beyond."""
    images = lab.rng("image").random((2, lab.side**2))
    errors = np.ones((2, lab.hidden))
    errors[1] = -0.99
    rows, _ = read_rows(gradient_of(lab, images, errors), lab)
    assert rows.min() == 0.0
    assert rows.max() == 1.0


def test_the_nearest_image_is_by_the_mean_square():
    images = np.array([[0.0, 0.0], [0.6, 0.6], [1.0, 0.0]])
    assert nearest(images, np.array([0.9, 0.4], np.float32)).tolist() == [0.6, 0.6]


def test_a_single_image_is_read_exactly_without_a_mask_and_worse_than_guessed_under_one(lab):
    clear, masked = ({r.name: r for r in run(lab, mode)}["first-layer input, batch 1"] for mode in ("none", "rotation"))
    assert clear.success > 60
    assert clear.chance == masked.chance
    assert masked.success < masked.chance
    true, read = clear.pictures
    np.testing.assert_allclose(read.image, true.image, atol=1e-3)
