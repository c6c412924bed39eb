"""The file of a task."""

import numpy as np
import pytest
from shoal_lab.bench.race.tasks import TASKS, Work

pytestmark = pytest.mark.torch


def test_the_file_of_a_task_holds_all_of_its_work(work_file):
    path, work = work_file("mlp")
    found = Work.load(path, "mlp")
    assert found.task == TASKS["mlp"]
    assert work.x.shape == (10, 30, 784)
    assert (work.x.dtype, work.y.dtype, work.theta.dtype) == (np.float32, np.int64, np.float32)
    for name in ("x", "y", "x_test", "y_test", "theta"):
        np.testing.assert_array_equal(getattr(found, name), getattr(work, name))
    assert len(work.theta) == 784 * 200 + 200 + 200 * 10 + 10
