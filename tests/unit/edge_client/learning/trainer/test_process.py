"""The device's side of own training code."""

import numpy as np
import psutil
import pytest

from edge_client.learning.trainer.model import TrainerModel
from edge_client.learning.trainer.process import own_environment
from edge_client.learning.training import Cancelled
from shoal.protocol.recipe import LocalTraining
from tests.helpers.own_trainers import Begins, Hangs, bundle, command
from tests.helpers.tasks import CLASSES, INPUTS, samples


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        *((name, True) for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "LC_ALL", "TRAINER_CAMERA")),
        *((name, False) for name in ("SHOAL_EDGE_BROKER", "SHOAL_PASSPHRASE_FILE", "https_proxy", "HOMELY")),
        *((name, False) for name in ("CREDENTIALS_DIRECTORY", "AWS_SECRET")),
    ],
)
def test_names_that_are_passed_on(name, passed, monkeypatch):
    monkeypatch.setenv(name, "x")
    assert own_environment().get(name) == ("x" if passed else None)


def test_work_that_nobody_needs_is_stopped():
    model = TrainerModel(bundle(), command(Hangs))
    theta, (x, y) = np.zeros(INPUTS * CLASSES + 1, np.float32), samples(5)
    with pytest.raises(Cancelled):
        model.train(theta, x, y, LocalTraining(), seed=1, cancelled=lambda: True)
    assert not model._process.runs


def test_processes_of_own_code_end_with_it():
    """A loader of samples would hold its memory, and the device's data, for ever."""
    model = TrainerModel(bundle(), command(Begins))
    theta, (x, y) = np.zeros(INPUTS * CLASSES + 1, np.float32), samples(5)
    model.score(theta, x, y)
    (begun,) = psutil.Process(model._process._process.pid).children()
    model._process.end()
    psutil.wait_procs([begun], timeout=10)
    assert not begun.is_running() or begun.status() == psutil.STATUS_ZOMBIE
