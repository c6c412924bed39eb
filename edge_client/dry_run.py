"""A dry run of samples against a task, before any run: what was read, what was left out, and what is doubted.

`shoal-fleet task check` and `shoal-edge doctor` print it. Nothing is trained.

Example: ``dry_run(Path("sensor.csv"), manifest, AS_FOUND).lines()`` names each column with its range, and counts each label.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.data import Dataset, files_of, load, split
from edge_client.learning.data_doubts import IMAGE_RANK, doubts

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from edge_client.learning.reading import LeftOut, Reading
    from shoal.task.manifest import TaskManifest

MOST_SHOWN: Final = 64
"""Columns and classes that are listed; of samples with more columns without names, the range of all values is."""


@dataclass(frozen=True, slots=True)
class Column:
    """The range of the values that are there, None without one, and how many are missing."""

    name: str
    least: float | None
    most: float | None
    missing: int

    @classmethod
    def of(cls, name: str, values: NDArray[Any]) -> Column:
        """Return the range of an array of any shape."""
        there = values[~np.isnan(values)]
        least, most = (float(there.min()), float(there.max())) if there.size else (None, None)
        return cls(name, least, most, int(values.size - there.size))

    def __str__(self) -> str:
        span = "no value" if self.least is None else f"{self.least:g} to {self.most:g}"
        return f"{self.name}: {span}" + (f", missing: {self.missing}" if self.missing else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a dry run has found.

    Attributes:
        dataset: the samples.
        files: number of files that hold them.
        shares: samples for training, validation and test.
        columns: of the features; classes: samples of each label, by its name; target: the range of numbers to predict.
        unused: columns of tables and endings of files that are not read.
        doubts: each ends with the thing to do.
    """

    dataset: Dataset = field(repr=False)
    source: str
    files: int
    shares: tuple[int, int, int]
    columns: tuple[Column, ...]
    classes: dict[str, int]
    target: Column | None
    unused: tuple[str, ...]
    left_out: LeftOut
    doubts: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return all but the samples, for JSON."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "dataset"}
        plain = {
            "columns": [asdict(column) for column in self.columns],
            "left_out": asdict(self.left_out),
        }
        target = None if self.target is None else asdict(self.target)
        return {"fits": True, "samples": len(self.dataset), **named, **plain, "target": target}

    def lines(self) -> list[str]:
        """Return the same for people; each doubt begins with ``doubt``."""
        train, validation, test = self.shares
        read = (
            f"{self.source}: {len(self.dataset)} samples ({train} to train, {validation} to validate, {test} to test)"
        )
        shown = [f"column {column}" for column in self.columns]
        shown += (
            ["labels: " + ", ".join(f"{name} {count}" for name, count in self.classes.items())] if self.classes else []
        )
        shown += [] if self.target is None else [f"target {self.target}"]
        shown += [f"not read: {', '.join(self.unused)[:200]}"] if self.unused else []
        shown += [str(self.left_out)] if self.left_out.count else []
        return [read, *(f"  {line}" for line in shown), *(f"  doubt: {doubt}" for doubt in self.doubts)]


def dry_run(source: Path, manifest: TaskManifest, reading: Reading) -> DryRun:
    """Read the samples of ``source`` as a device with these options would for a run of this task.

    Raises:
        DataError: a device would refuse them.
    """
    files = len(files_of(source))
    dataset = load(source, manifest, reading)
    shares = split(dataset, b"")
    number = manifest.kind == "regression"
    return DryRun(
        dataset=dataset,
        source=str(source),
        files=files,
        shares=(len(shares.train), len(shares.validation), len(shares.test)),
        columns=_columns(dataset.x, manifest),
        classes={} if number else _classes(dataset.y, manifest),
        target=Column.of(manifest.data.label or "to predict", dataset.y) if number else None,
        unused=dataset.unused,
        left_out=dataset.left_out,
        doubts=doubts(dataset, manifest),
    )


def _columns(x: NDArray[Any], manifest: TaskManifest) -> tuple[Column, ...]:
    flat, names = x.reshape(len(x), -1), manifest.data.features
    if not names and (len(manifest.input.shape) >= IMAGE_RANK or flat.shape[1] > MOST_SHOWN):
        return (Column.of(f"all {flat.shape[1]} values", flat),)
    names = names or tuple(f"value {at}" for at in range(flat.shape[1]))
    return tuple(Column.of(name, flat[:, at]) for at, name in enumerate(names[:MOST_SHOWN]))


def _classes(y: NDArray[Any], manifest: TaskManifest) -> dict[str, int]:
    counts = np.bincount(y.ravel(), minlength=min(manifest.label.limit, MOST_SHOWN))
    shown = range(len(counts)) if len(counts) <= MOST_SHOWN else np.flatnonzero(counts)[:MOST_SHOWN].tolist()
    return {manifest.data.labels[at] if manifest.data.labels else str(at): int(counts[at]) for at in shown}
