"""Shoal: clustered federated learning whose server averages updates that it cannot read.

`simulate` trains a torch model on one partition of data per device, in this process. It uses the strategies, masks and
defaults of a real fleet; only devices and network are simulated. `split` makes partitions, `Strategy` is the interface
of an aggregation algorithm (provisional), and docs/researcher documents all three.

`load` answers with the model of a device on this machine. Otherwise this package is not an API for fleets of real devices;
programs run those: ``shoal-fleet`` (the owner, in this package),
``shoal-edge`` (`edge_client`) and ``shoal-aggregator`` (`aggregator`). The mask is not encryption:
docs/threat-model.md lists its guarantees and limits.

- A device masks its update with a secret orthonormal map. Norms and dot products survive, so the aggregator can cluster
  and average, but it never holds the map.
- The owner signs a run plan; devices refuse any announcement that the plan does not allow.
- Imports point downwards only: errors, limits and types; util; protocol; transport; membership and task; owner;
  simulation; demo; cli. `lint-imports` checks this. The lab (`shoal_lab`), a distribution of its own, imports all of them.

Example: ten devices label the same data, but five of them with the two classes swapped. IFCA finds both groups:

    import numpy as np, shoal
    from torch import nn

    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 30)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] > 0).astype(np.int64)
    partitions = shoal.split(x, y, "iid", devices=10)
    for partition in partitions[:5]:
        for share, (inputs, labels) in partition.items():
            partition[share] = (inputs, 1 - labels)
    result = shoal.simulate(nn.Linear(30, 2), partitions, strategy="ifca", settings={"k": 2}, rounds=20)
    print(result.accuracy.mean(), result.clusters)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal import errors

if TYPE_CHECKING:
    from aggregator.numerics.backend import Backend
    from aggregator.strategies.base import Average, Event, Outcome, RoundPlan, Strategy, StrategySettings
    from aggregator.strategies.base import ClientUpdate as ClientUpdate
    from aggregator.strategies.base import ClusterModel as ClusterModel
    from aggregator.strategies.fedavg import FedAvg
    from edge_client.answers.loaded_model import LoadedModel, load
    from shoal.protocol.documents import RunPlan
    from shoal.simulation.api.result import Result, Round
    from shoal.simulation.api.simulate import simulate
    from shoal.simulation.api.split import split
    from shoal.simulation.api.sweep import Sweep, sweep
    from shoal.simulation.api.writers import CsvWriter, HistoryWriter, MlflowWriter, TensorBoardWriter

    __version__: str

__all__ = [
    "Average",
    "Backend",
    "ClientUpdate",
    "ClusterModel",
    "CsvWriter",
    "Event",
    "FedAvg",
    "HistoryWriter",
    "LoadedModel",
    "MlflowWriter",
    "Outcome",
    "Result",
    "Round",
    "RoundPlan",
    "RunPlan",
    "Strategy",
    "StrategySettings",
    "Sweep",
    "TensorBoardWriter",
    "__version__",
    "errors",
    "load",
    "simulate",
    "split",
    "sweep",
]

# The images of devices and the aggregator hold this file without the modules named here, so a name is imported on first use.
# That also keeps `import shoal` fast: it loads neither numpy nor torch. import-linter doesn't see these strings. It sees the
# imports for type checkers above, which give no party a way to the others as long as nothing imports the bare package.
_LAZY = {
    "Average": "aggregator.strategies.base:Average",
    "Backend": "aggregator.numerics.backend:Backend",
    "ClientUpdate": "aggregator.strategies.base:ClientUpdate",
    "ClusterModel": "aggregator.strategies.base:ClusterModel",
    "CsvWriter": "shoal.simulation.api.writers:CsvWriter",
    "Event": "aggregator.strategies.base:Event",
    "FedAvg": "aggregator.strategies.fedavg:FedAvg",
    "HistoryWriter": "shoal.simulation.api.writers:HistoryWriter",
    "LoadedModel": "edge_client.answers.loaded_model:LoadedModel",
    "MlflowWriter": "shoal.simulation.api.writers:MlflowWriter",
    "Outcome": "aggregator.strategies.base:Outcome",
    "Result": "shoal.simulation.api.result:Result",
    "Round": "shoal.simulation.api.result:Round",
    "RoundPlan": "aggregator.strategies.base:RoundPlan",
    "RunPlan": "shoal.protocol.documents:RunPlan",
    "Strategy": "aggregator.strategies.base:Strategy",
    "StrategySettings": "aggregator.strategies.base:StrategySettings",
    "Sweep": "shoal.simulation.api.sweep:Sweep",
    "TensorBoardWriter": "shoal.simulation.api.writers:TensorBoardWriter",
    "load": "edge_client.answers.loaded_model:LoadedModel",
    "simulate": "shoal.simulation.api.simulate:simulate",
    "split": "shoal.simulation.api.split:split",
    "sweep": "shoal.simulation.api.sweep:sweep",
}
_UNINSTALLED = "0+source"


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Raises:
        AttributeError: there is no such name.
        ConfigError: this installation lacks a module that it needs.
    """
    if name == "__version__":
        value: Any = _version()
    elif name in _LAZY:
        module, _, attribute = _LAZY[name].partition(":")
        try:
            value = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise errors.ConfigError(
                f"shoal.{name} needs {error.name}, which is not installed here",
                hint="install all parts with: pip install 'shoal[all]'",
            ) from error
    else:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """Return the installed version; ``0+source`` if the package runs from a source tree without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("shoal")
    except PackageNotFoundError:
        return _UNINSTALLED
