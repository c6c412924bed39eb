"""Sweeps over seeds."""

import math

import numpy as np
import pytest
from torch import nn

import shoal
from shoal.errors import UsageError

pytestmark = pytest.mark.torch


def partitions(seed=0, kind="classification"):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((240, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) if kind == "classification" else x[:, 0]
    return shoal.split(x, y, "iid", devices=4, seed=seed)


def test_mean_and_deviation_are_over_runs():
    found = shoal.sweep(lambda: nn.Linear(4, 2), partitions, seeds=(3, 1, 2), strategy="fedavg", rounds=2)
    alone = shoal.simulate(lambda: nn.Linear(4, 2), partitions(1), seed=1, strategy="fedavg", rounds=2)
    assert found.seeds == (3, 1, 2)
    assert found.values[1] == alone.accuracy.mean()
    assert found.mean == pytest.approx(np.mean(found.values))
    assert found.deviation == pytest.approx(np.std(found.values, ddof=1))
    assert str(found) == f"accuracy {found.mean:.4f} ± {found.deviation:.4f} over 3 seeds"


def test_one_seed_has_no_deviation():
    """One seed has no deviation and fixed partitions are used for all."""
    found = shoal.sweep(nn.Linear(4, 2), partitions(), seeds=[5], strategy="fedavg", rounds=1)
    assert math.isnan(found.deviation)
    assert len(found.results) == 1


def test_regression_is_summed_up_by_its_loss():
    found = shoal.sweep(
        nn.Linear(4, 1),
        partitions(kind="regression"),
        seeds=range(2),
        strategy="fedavg",
        rounds=2,
        task="regression",
        local={"lr": 0.01},
    )
    assert found.values == [float(r.loss.mean()) for r in found.results]
    assert str(found).startswith("test loss ")


def test_histories_have_their_seed():
    """Histories are stacked with their seed."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = shoal.sweep(nn.Linear(4, 2), partitions(), seeds=(0, 7), strategy="fedavg", rounds=2).to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame[["seed", "round"]].values.tolist() == [[0, 1], [0, 2], [7, 1], [7, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"seeds": ()}, "different whole numbers"), ({"seeds": (1, 1)}, "different"), ({"seed": 3}, "not one seed")],
)
def test_wrong_seeds_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        shoal.sweep(nn.Linear(4, 2), partitions(), **options)
