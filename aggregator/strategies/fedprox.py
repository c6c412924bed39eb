"""FedProx: fedgroup section II-A, Eq. 3, on top of fedgroup Alg. 1.

Devices minimise F(w) + mu/2 |w - w_t|^2, where w_t is the model that the round began with; the aggregator works as
in FedAvg. mu is ``prox_mu`` of the run's local training, which the device applies; this strategy only requires it.
"""

from __future__ import annotations

from aggregator.numerics.backend import Backend
from aggregator.strategies.base import Average, mean_update, require
from aggregator.strategies.fedavg import FedAvg
from shoal.protocol.documents import RunPlan


def require_proximal(run: RunPlan) -> None:
    """Raise ConfigError unless devices train with a proximal term."""
    require(
        run.local.prox_mu > 0,
        f"{run.algorithm} trains with a proximal term, but prox_mu is {run.local.prox_mu:g}",
        "set prox_mu of the local training above 0, for instance --local prox_mu=1, or take the algorithm without it",
    )


class FedProx(FedAvg):
    """FedAvg of devices that are held close to the model they were sent."""

    name = "fedprox"

    def __init__(self, run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> None:
        super().__init__(run, backend, average)
        require_proximal(run)
