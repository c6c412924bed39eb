"""A device's folder with finished models of a small task with named values, and what each of them answers."""

import numpy as np

from edge_client.storage.finished_models import FinishedModels, Validation
from edge_client.storage.state import OwnModel
from shoal.task.data_declaration import DataDeclaration
from shoal.util.files import private_directory
from tests.helpers.tasks import logistic_bundle

NAMED = DataDeclaration(features=("volt", "amp", "rpm", "temp"), labels=("ok", "hot", "worn"))
TASK = logistic_bundle(data=NAMED)


def theta_of(run):
    """Return a model whose answer is class ``run % 3`` for any sample, and whose outputs are multiples of the run's number."""
    bias = np.zeros(3, np.float32)
    bias[run % 3] = run
    return np.concatenate([np.zeros(12, np.float32), bias])


def finish(directory, run, theta=None, *, task=TASK, run_id=None, accuracy=None):
    """Let a run end on the device in ``directory``; the newest model answers unless ``accuracy`` is too low."""
    own = OwnModel(run, run_id or run.to_bytes(16), 9, 0, theta_of(run) if theta is None else theta)
    fit = Validation(0.5, run if accuracy is None else accuracy, 1000, 1000)
    store = FinishedModels(private_directory(directory))
    store.add(own, (), task, algorithm="fedavg", at_s=1, figures={own.run_id: fit})
    return own
