"""Federated averaging in pfl-research (Granqvist et al., 2024), `pip install pfl`, as its tutorials set it up for torch."""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional

from shoal_lab.bench.race.systems.models import accuracy, given, module
from shoal_lab.bench.race.tasks import Turns


class Model(nn.Module):
    """A model with its loss, as pfl-research wants it."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Any:
        """Return logits (n, 10)."""
        return self.layers(x)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:  # noqa: A002, ARG002
        """Return the mean cross entropy."""
        return functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:  # noqa: A002, ARG002
        """Return nothing: accuracy is measured outside."""
        return {}


class RoundEnds(TrainingProcessCallback):  # type: ignore[misc]
    """Ends a round, and waits for the next."""

    def __init__(self, turns: Turns, rounds: int) -> None:
        self._turns, self._rounds = turns, rounds

    def after_central_iteration(
        self,
        aggregate_metrics: Any,  # noqa: ARG002
        model: Any,  # noqa: ARG002
        *,
        central_iteration: int,
    ) -> tuple[bool, Any]:
        """Return that training goes on, and no metrics."""
        self._turns.trained()
        if central_iteration + 1 < self._rounds:
            self._turns.begin()
        return False, Metrics()


def main() -> None:
    """Train the rounds."""
    work, rounds = given()
    layers = module(work)
    model = PyTorchModel(
        Model(layers),
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(layers.parameters(), 1.0),
    )
    users = [Dataset([torch.from_numpy(x), torch.from_numpy(y)]) for x, y in zip(work.x, work.y, strict=True)]
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(len(users))))
    turns = Turns()
    turns.begin()
    FederatedAveraging().run(
        # Nothing is evaluated: the frequency lies beyond the last round.
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=2 * rounds,
            train_cohort_size=len(users),
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.task.lr, local_batch_size=work.task.batch),
        callbacks=[RoundEnds(turns, rounds)],
    )
    turns.tested(accuracy(layers, work))


if __name__ == "__main__":
    main()
