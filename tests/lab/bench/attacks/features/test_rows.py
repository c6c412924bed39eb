"""How the rows on statistics of features are scored."""

import numpy as np
from shoal_lab.bench.attacks.features.rows import errors

TRUTH = np.random.default_rng(5).uniform(-1, 1, (10, 5)).astype(np.float32)


def test_figures_are_right_in_any_order_and_with_any_sign():
    assert errors(-TRUTH[:, ::-1].astype(np.float64), TRUTH).max() == 0


def test_an_error_is_told_in_the_spread_of_the_figure_and_the_last_column_does_not_count():
    shifted = TRUTH.astype(np.float64) + 0.25 * TRUTH.std(0)
    np.testing.assert_allclose(errors(shifted, TRUTH), 0.25, rtol=1e-5)
    assert errors(np.zeros((10, 1)), TRUTH).min() > 0.9
