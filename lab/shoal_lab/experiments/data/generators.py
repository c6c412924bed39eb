"""Generated data: Synthetic(alpha, beta). Linear mixtures are in `shoal_lab.experiments.ifca.linear`."""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal.errors import UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.shares import NINETY_TEN, Shares, by_shard

SYNTHETIC_INPUTS: Final = 60
SYNTHETIC_CLASSES: Final = 10
SYNTHETIC_LEAST: Final = 50
SIZE_LOG_MEAN: Final = 4.0
SIZE_LOG_SIGMA: Final = 2.0
COVARIANCE_POWER: Final = -1.2


def synthetic(alpha: float, beta: float, *, devices: int = 100, seed: int, shares: Shares = NINETY_TEN) -> Population:
    """Return Synthetic(alpha, beta) (Shamir et al. as in FedProx, section 5.1; FedGroup, section V-A).

    Device i labels x by argmax(W x + b), W (10, 60) and b drawn around u_i ~ N(0, alpha); x ~ N(v_i, diag(j^-1.2)), each
    coordinate of v_i around B_i ~ N(0, beta); it has 50 + lognormal(4, 2) samples. Alpha and beta are deviations, as in
    FedProx's generator.

    Raises:
        UsageError: alpha or beta is negative, or there is no device.
    """
    if alpha < 0 or beta < 0 or devices < 1:
        raise UsageError(f"Synthetic({alpha}, {beta}) with {devices} devices can't be made")
    rng = np.random.default_rng(seed)
    counts = rng.lognormal(SIZE_LOG_MEAN, SIZE_LOG_SIGMA, devices).astype(np.int64) + SYNTHETIC_LEAST
    model_means, input_means = rng.normal(0, alpha, devices), rng.normal(0, beta, devices)
    deviations = np.sqrt(np.arange(1, SYNTHETIC_INPUTS + 1, dtype=np.float64) ** COVARIANCE_POWER)
    shards = []
    for count, model_mean, input_mean in zip(counts, model_means, input_means, strict=True):
        centre = rng.normal(input_mean, 1, SYNTHETIC_INPUTS)
        weights = rng.normal(model_mean, 1, (SYNTHETIC_INPUTS, SYNTHETIC_CLASSES))
        bias = rng.normal(model_mean, 1, SYNTHETIC_CLASSES)
        x = centre + deviations * rng.standard_normal((int(count), SYNTHETIC_INPUTS))
        shards.append(Shard(x.astype(np.float32), (x @ weights + bias).argmax(1).astype(np.int64)))
    return by_shard(shards, seed=seed, shares=shares)
