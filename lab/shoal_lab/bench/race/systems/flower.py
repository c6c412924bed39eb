"""Federated averaging in Flower's simulation on Ray, `pip install "flwr[simulation]"`, with one core a client."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional

from shoal_lab.bench.race.systems.models import accuracy, module
from shoal_lab.bench.race.tasks import Turns, Work


@cache
def work_of(path: str, task: str) -> Work:
    """Return the work; each of Ray's processes loads it once."""
    return Work.load(Path(path), task)


def client(path: str, task: str) -> ClientApp:
    """Return the app that trains a device's round."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        work = work_of(path, task)
        place = int(context.node_config["partition-id"])
        x, y = torch.from_numpy(work.x[place]), torch.from_numpy(work.y[place])
        model = module(work)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), work.task.lr)
        for rows in torch.split(torch.randperm(len(x)), work.task.batch):
            optimiser.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
        return Message(content=RecordDict(content), reply_to=message)

    return app


class PacedFedAvg(FedAvg):  # type: ignore[misc]
    """Federated averaging that waits before a round, and reports its end."""

    def __init__(self, turns: Turns, model: nn.Module, devices: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=devices, min_available_nodes=devices)
        self._turns, self._model = turns, model

    def configure_train(self, *arguments: Any) -> Any:
        """Wait for the request of a round, and begin it."""
        self._turns.begin()
        return super().configure_train(*arguments)

    def aggregate_train(self, *arguments: Any) -> Any:
        """Take the mean, and tell that the round is over."""
        arrays, metrics = super().aggregate_train(*arguments)
        self._model.load_state_dict(arrays.to_torch_state_dict())
        self._turns.trained()
        return arrays, metrics


def main() -> None:
    """Train the rounds."""
    torch.set_num_threads(1)
    path, task = str(Path(sys.argv[1]).resolve()), sys.argv[2]
    turns, work = Turns(processes=True), work_of(path, task)
    model = module(work)
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def run(grid: Grid, _context: Context) -> None:
        arrays = ArrayRecord(model.state_dict())
        PacedFedAvg(turns, model, len(work.x)).start(grid=grid, initial_arrays=arrays, num_rounds=int(sys.argv[3]))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client(path, task), num_supernodes=len(work.x), backend_config=resources)
    turns.tested(accuracy(model, work))


if __name__ == "__main__":
    # Ray's processes import the module by its name, so its functions must not belong to __main__.
    import_module("shoal_lab.bench.race.systems.flower").main()
