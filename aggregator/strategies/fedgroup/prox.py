"""FedGrouProx: fedgroup Alg. 2 with FedProx inside the groups (line 14).

The aggregator works as in FedGroup; the proximal term of Eq. 3 is ``prox_mu`` of the run's local training, which
must be above 0.
"""

from __future__ import annotations

from aggregator.numerics.backend import Backend
from aggregator.strategies.base import Average, mean_update
from aggregator.strategies.fedgroup.strategy import FedGroup
from aggregator.strategies.fedprox import require_proximal
from shoal.protocol.documents import RunPlan


class FedGrouProx(FedGroup):
    """FedGroup of devices that are held close to their group's model."""

    name = "fedgrouprox"

    def __init__(self, run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> None:
        super().__init__(run, backend, average)
        require_proximal(run)
