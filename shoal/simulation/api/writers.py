"""Writers of a run's history: one line or point for each round, as soon as the round has closed.

A writer has two methods, `write` and `close`; `shoal.simulate(writer=...)` calls `write` for each round and leaves `close` to the
caller, who may use one writer for several runs. The writers here are context managers.

Example:
    >>> import shoal
    >>> with shoal.CsvWriter("run.csv") as writer:                                     # doctest: +SKIP
    ...     shoal.simulate(model, partitions, writer=writer)
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ConfigError
from shoal.simulation.api.result import Round
from shoal.simulation.closing import Closing
from shoal.util.files import write_failed

COLUMNS = tuple(field.name for field in dataclasses.fields(Round))
"""Names of a round's figures, in order."""


class HistoryWriter(Protocol):
    """What `shoal.simulate` takes as ``writer``."""

    def write(self, record: Round) -> None:
        """Write a closed round."""

    def close(self) -> None:
        """Make everything that was written complete."""


class CsvWriter(Closing):
    """A CSV file with one row a round; `sizes` are joined by spaces, and a figure that is not there is empty."""

    def __init__(self, path: Path | str) -> None:
        """Begin the file, in place of an earlier one.

        Raises:
            ConfigError: it can't be written.
        """
        self._path = Path(path)
        try:
            self._file = self._path.open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise write_failed(self._path, error) from error
        self._rows = csv.writer(self._file)
        self._rows.writerow(COLUMNS)

    def write(self, record: Round) -> None:
        """Append a row.

        Raises:
            ConfigError: it can't be written.
        """
        row = [getattr(record, name) for name in COLUMNS[:-1]]
        try:
            self._rows.writerow([*row, " ".join(map(str, record.sizes))])
            self._file.flush()
        except OSError as error:
            raise write_failed(self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter(Closing):
    """Curves for TensorBoard: one for each figure that a round has."""

    def __init__(self, folder: Path | str) -> None:
        """Begin a log in ``folder``.

        Raises:
            ConfigError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "curves for TensorBoard need tensorboard", hint="install it with: pip install tensorboard"
            ) from error
        self._log: Any = SummaryWriter(str(folder))

    def write(self, record: Round) -> None:
        """Add a point to each curve."""
        for name, value in _figures(record).items():
            self._log.add_scalar(name, value, record.round)

    def close(self) -> None:
        """Write what is left, and close the log."""
        self._log.close()


class MlflowWriter(Closing):
    """Metrics of the MLflow run that is active when a round closes; MLflow begins one if there is none."""

    def __init__(self) -> None:
        """Find MLflow.

        Raises:
            ConfigError: it is not installed.
        """
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError("metrics for MLflow need mlflow", hint="install it with: pip install mlflow") from error
        self._mlflow: Any = mlflow

    def write(self, record: Round) -> None:
        """Log each figure of a round."""
        self._mlflow.log_metrics(_figures(record), step=record.round)


def _figures(record: Round) -> dict[str, float]:
    """Return the numbers of a round by name, without those that it lacks."""
    values = {name: getattr(record, name) for name in COLUMNS if name not in ("round", "sizes")}
    return {name: float(value) for name, value in values.items() if value is not None}
