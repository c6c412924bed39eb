"""Writers of a run's history."""

import csv
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import shoal
from shoal.errors import ConfigError
from shoal.simulation.api.result import Round
from shoal.simulation.api.writers import CsvWriter, MlflowWriter, TensorBoardWriter

pytestmark = pytest.mark.torch
ROUNDS = (Round(1, 0.75, None, None, 2, (3, 1)), Round(2, None, 0.5, 0.25, 1, (4,)))


def test_csv_has_a_row_for_each_round(tmp_path):
    with CsvWriter(tmp_path / "run.csv") as writer:
        writer.write(ROUNDS[0])
        assert len((tmp_path / "run.csv").read_text().splitlines()) == 2  # at once, for whoever watches the file
        writer.write(ROUNDS[1])
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"round": "1", "loss": "0.75", "accuracy": "", "test_loss": "", "clusters": "2", "sizes": "3 1"},
        {"round": "2", "loss": "", "accuracy": "0.5", "test_loss": "0.25", "clusters": "1", "sizes": "4"},
    ]


def test_unwritable_csv_is_an_error(tmp_path):
    """A csv file that cannot be written is an error."""
    with pytest.raises(ConfigError, match="can't write"):
        CsvWriter(tmp_path / "missing" / "run.csv")


def test_writer_gets_each_closed_round():
    """Simulate gives each round to the writer when it closes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 4)).astype(np.float32)
    partitions = shoal.split(x, (x[:, 0] > 0).astype(np.int64), "iid", devices=4)
    seen = []
    result = shoal.simulate(
        nn.Linear(4, 2), partitions, strategy="fedavg", rounds=3, writer=SimpleNamespace(write=seen.append)
    )
    assert seen == result.history


def test_tensorboard_gets_each_figure(tmp_path, monkeypatch):
    """Tensorboard gets a point of each figure."""
    points = []

    class Log:
        def __init__(self, folder):
            points.append(folder)

        def add_scalar(self, *point):
            points.append(point)

        def close(self):
            points.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Log))
    with TensorBoardWriter(tmp_path) as writer:
        for record in ROUNDS:
            writer.write(record)
    assert points == [
        str(tmp_path),
        ("loss", 0.75, 1),
        ("clusters", 2.0, 1),
        ("accuracy", 0.5, 2),
        ("test_loss", 0.25, 2),
        ("clusters", 1.0, 2),
        "closed",
    ]


def test_mlflow_gets_figures_at_their_step(monkeypatch):
    """Mlflow gets the figures of a round at its step."""
    logged = []
    stand_in = SimpleNamespace(log_metrics=lambda figures, step: logged.append((step, figures)))
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    with MlflowWriter() as writer:
        writer.write(ROUNDS[0])
    assert logged == [(1, {"loss": 0.75, "clusters": 2.0})]


@pytest.mark.parametrize(
    ("make", "module", "package"),
    [(lambda: TensorBoardWriter("x"), "torch.utils.tensorboard", "tensorboard"), (MlflowWriter, "mlflow", "mlflow")],
)
def test_missing_package_has_a_hint(monkeypatch, make, module, package):
    """A writer without its package says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"need {package}") as caught:
        make()
    assert caught.value.hint == f"install it with: pip install {package}"
