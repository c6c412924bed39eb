"""The device's side of own training code."""

import numpy as np
import pytest

from edge_client.learning.trainer.model import TrainerModel
from edge_client.learning.trainer.process import is_passed_on
from edge_client.learning.training import Cancelled
from shoal.protocol.recipe import LocalTraining
from tests.helpers.own_trainers import Hangs, bundle, command
from tests.helpers.tasks import CLASSES, INPUTS, samples


@pytest.mark.parametrize("name", ["PATH", "PYTHONPATH", "OMP_NUM_THREADS", "LC_ALL", "TRAINER_CAMERA"])
def test_names_that_are_passed_on(name):
    assert is_passed_on(name)


@pytest.mark.parametrize(
    "name",
    ["SHOAL_EDGE_BROKER", "SHOAL_PASSPHRASE_FILE", "https_proxy", "CREDENTIALS_DIRECTORY", "AWS_SECRET", "HOMELY"],
)
def test_others_are_not(name):
    assert not is_passed_on(name)


def test_work_that_nobody_needs_is_stopped():
    model = TrainerModel(bundle(), command(Hangs))
    theta, (x, y) = np.zeros(INPUTS * CLASSES + 1, np.float32), samples(5)
    with pytest.raises(Cancelled):
        model.train(theta, x, y, LocalTraining(), seed=1, cancelled=lambda: True)
    assert not model._process.runs
