"""The race in small: ten devices with thirty images whose label is the height of a bright bar."""

import dataclasses

import pytest
from shoal_lab.bench.race import benchmark
from shoal_lab.bench.race.tasks import TASKS

from tests.helpers.mnist import write_bars


@pytest.fixture(scope="session")
def bars(tmp_path_factory):
    return write_bars(tmp_path_factory.mktemp("mnist"), seed=0, train=400, test=200)


@pytest.fixture
def work_file(bars, tmp_path, monkeypatch):
    """A function that writes a task's file, and returns its path and the work."""
    monkeypatch.setenv("SHOAL_DATA_DIR", str(bars))
    monkeypatch.setattr(benchmark, "DEVICES", 10)
    monkeypatch.setattr(benchmark, "SAMPLES", 30)

    def write(name, seed=0, **changes):
        monkeypatch.setattr(benchmark, "SEED", seed)
        work = benchmark.work(dataclasses.replace(TASKS[name], **changes))
        work.save(tmp_path / f"{name}.npz")
        return tmp_path / f"{name}.npz", work

    return write
