"""cfl-noise: the draws, the chances and the guarantee of Theorem 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
from shoal_lab.experiments.cfl import gap as cfl_noise

from shoal.errors import UsageError
from tests.helpers.studies import run


def test_the_noisiest_device_is_as_asked() -> None:
    """Eq. 16's gamma is exact for the noisiest device; without noise the groups' gradients add up to zero."""
    rows, groups = cfl_noise.draw(4, 0.0, 50, np.random.default_rng(1))
    assert len(groups) == 12
    assert np.abs(rows[::3].sum(0)).max() < 1e-5
    noisy, _ = cfl_noise.draw(4, 0.8, 50, np.random.default_rng(1))
    gammas = np.linalg.norm(noisy - rows, axis=1) / np.linalg.norm(rows, axis=1)
    assert gammas.max() == pytest.approx(0.8, rel=1e-4)
    assert gammas.min() > 0.3


def test_theorem_1_keeps_its_promise() -> None:
    """Near 1 for k > 10 and gamma = 1, as published; far lower when noise drowns the gradients."""
    assert cfl_noise.chance(12, 1.0, 20, 100, 0)[0] > 0.9
    assert max(cfl_noise.chance(12, 6.0, 20, 100, 0)) < 0.1
    assert cfl_noise.guaranteed(2, 0.3)
    assert not cfl_noise.guaranteed(2, 0.9)
    assert not cfl_noise.guaranteed(5, 1.5)
    data = run("cfl-noise", settings={"trials": 4})
    assert (data["guaranteed_wrong"], data["parameters"]["mask"]) == (0, "nothing leaves a device")
    assert {row["k"] for row in data["history"]} == set(cfl_noise.GROUPS["default"])


def test_bounds_across_groups() -> None:
    """Eq. 19: minus H for two groups (Remark 1), and none beyond the angle between more of them."""
    assert cfl_noise.cross_max_bound(2, 0.3) == pytest.approx(-0.3)
    assert cfl_noise.cross_max_bound(5, math.cos(math.pi / 4) - 1e-3) == 1.0
    assert cfl_noise.cross_max_bound(5, 1.0) == pytest.approx(math.cos(math.pi / 4))


def chances(k: int, *pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"k": k, "gamma": gamma, "chance": chance} for gamma, chance in pairs]


def test_gamma_counts_to_the_first_failure() -> None:
    """A later success does not count, nor does another number of groups; 95 % is enough."""
    history = [*chances(3, (2.0, 1.0), (0.5, 1.0), (1.0, 0.95), (1.5, 0.94)), *chances(4, (0.5, 0.2), (1.0, 1.0))]
    assert cfl_noise.largest_gamma(history, 3) == 1.0
    assert cfl_noise.largest_gamma(history, 4) is None
    assert cfl_noise.largest_gamma(history, 9) is None


def test_a_point_does_not_depend_on_the_grid() -> None:
    """Each point has a stream of its own, by seed, groups and gamma."""
    one = cfl_noise.draw(3, 1.5, 20, np.random.default_rng(2))[0]
    assert one.dtype == np.float32
    assert one.shape == (9, 20)
    assert cfl_noise.chance(5, 2.0, 9, 20, 0) == cfl_noise.chance(5, 2.0, 9, 20, 0)
    found = {cfl_noise.chance(5, 2.0, 40, 20, seed)[0] for seed in range(6)}
    assert len(found) > 1


@pytest.mark.parametrize("settings", [{"trials": "0"}, {"dimensions": "1"}])
def test_a_sweep_without_draws_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"trials in \d+ dimensions"):
        run("cfl-noise", settings=settings)
