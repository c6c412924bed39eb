"""A server or a client of Flower on gRPC without TLS, the fastest of its ways: a program of Flower's own environment.

It imports nothing of Shoal's; `beside` starts it. Its one argument is a JSON object: ``{"devices": 10, "rounds": 29, ...}`` is a
server, which tells of each round that is over, and ``{"data": "data-0.npz", "client": "torch", ...}`` a client.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[np.float32]]


def train_numpy(
    theta: Arrays, x: NDArray[np.float32], y: NDArray[np.int64], batches: Sequence[NDArray[np.int64]], lr: float
) -> Arrays:
    """Return the model after a step of SGD on each batch of rows, without torch."""
    w1, b1, w2, b2 = theta = [part.copy() for part in theta]
    for rows in batches:
        hidden = np.maximum(x[rows] @ w1.T + b1, np.float32(0))
        scores = hidden @ w2.T + b2
        delta = np.exp(scores - scores.max(axis=1, keepdims=True))
        delta *= np.float32(lr / len(rows)) / delta.sum(axis=1, keepdims=True)
        delta[np.arange(len(rows)), y[rows]] -= np.float32(lr / len(rows))
        inner = (delta @ w2) * (hidden > 0)
        w2 -= delta.T @ hidden
        w1 -= inner.T @ x[rows]
        b2 -= delta.sum(axis=0)
        b1 -= inner.sum(axis=0)
    return theta


def train_torch(
    theta: Arrays, x: NDArray[np.float32], y: NDArray[np.int64], batches: Sequence[NDArray[np.int64]], lr: float
) -> Arrays:
    """Return the model after a step of SGD on each batch of rows, with torch."""
    import torch

    hidden, inputs = theta[0].shape
    model = torch.nn.Sequential(
        torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, len(theta[3]))
    )
    for parameter, part in zip(model.parameters(), theta, strict=True):
        parameter.data = torch.tensor(part)
    optimiser = torch.optim.SGD(model.parameters(), lr)
    for rows in batches:
        optimiser.zero_grad()
        scores = model(torch.from_numpy(x[rows]))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(y[rows])).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def serve(told: dict[str, Any]) -> None:
    """Run the server."""
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig, start_server
    from flwr.server.strategy import FedAvg

    class Telling(FedAvg):  # type: ignore[misc]
        def aggregate_fit(self, *given: Any) -> Any:
            mean = super().aggregate_fit(*given)
            sys.stdout.write(told["over"])
            sys.stdout.flush()
            return mean

    rng = np.random.default_rng(0)
    initial = [rng.uniform(-0.05, 0.05, shape).astype(np.float32) for shape in told["shapes"]]
    strategy = Telling(
        fraction_evaluate=0.0,
        min_fit_clients=told["devices"],
        min_available_clients=told["devices"],
        accept_failures=False,
        initial_parameters=ndarrays_to_parameters(initial),
    )
    start_server(server_address=told["address"], config=ServerConfig(num_rounds=told["rounds"]), strategy=strategy)


def train(told: dict[str, Any]) -> None:
    """Run a client."""
    from flwr.client import NumPyClient, start_client

    training = train_torch if told["client"] == "torch" else train_numpy
    x, y = (np.load(told["data"])[name][: told["samples"]] for name in ("x", "y"))
    rng = np.random.default_rng()

    class Client(NumPyClient):  # type: ignore[misc]
        def fit(self, parameters: Arrays, _config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
            batches = np.split(rng.permutation(len(y)), range(told["batch"], len(y), told["batch"]))
            return training(parameters, x, y, batches, told["lr"]), len(y), {}

    start_client(server_address=told["address"], client=Client().to_client(), insecure=True)


if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    (train if "data" in words else serve)(words)
