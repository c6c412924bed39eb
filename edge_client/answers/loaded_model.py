"""The model in use as a program of the device's machine has it: `shoal.load(DIR)` answers in its process.

It reads ``model.onnx`` alone (see `edge_client.answers.model_in_use`), which is replaced by a rename: names and model are always
of one run. It needs numpy, and ONNX Runtime if that is installed; no torch, no broker, and none of the device's keys.

Example: a program that asks once a second, and takes each new model.

    import shoal

    model = shoal.load("/var/lib/shoal-edge")
    while True:
        model.reload_if_new()
        print(model.predict(read_sensors()), model.facts["run"])
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.executor.base import Executor, Graph, in_chunks
from edge_client.learning.executor.choice import AUTO, NUMPY, choose
from shoal.errors import ConfigError, DataError, TaskError
from shoal.task.onnx_graph import without_metadata
from shoal.util.files import read_failed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray


MODEL_FILE: Final = "model.onnx"
REGRESSION: Final = "regression"


def answers_of(outputs: NDArray[Any], kind: str) -> NDArray[Any]:
    """Return what a task's outputs say: the class of the largest, (n, ...) int64, or the outputs themselves for regression."""
    return outputs if kind == REGRESSION else np.asarray(outputs.argmax(axis=-1))


def probabilities_of(outputs: NDArray[Any], kind: str) -> NDArray[np.float64]:
    """Return the probabilities that logits (..., classes) stand for, in float64.

    Raises:
        ConfigError: the task has no classes.
    """
    if kind == REGRESSION:
        raise ConfigError("a regression model has no probabilities", hint="leave --probabilities away, or use predict")
    logits = outputs.astype(np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One version of the file: what tells it from others, its metadata, and what computes its outputs."""

    mark: tuple[int, ...]
    facts: Mapping[str, str]
    executor: Executor

    def names(self, of: str) -> tuple[str, ...]:
        return tuple(filter(None, self.facts.get(of, "").split("\n")))

    def outputs(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return the outputs for samples, (n, ...), or for one sample, (...)."""
        (given,) = self.executor.inputs
        shape, samples = given.shape[1:], np.asarray(x)
        rows = samples[np.newaxis] if samples.shape == shape else samples
        if rows.shape[1:] != shape or not len(rows) or not np.can_cast(rows.dtype, given.dtype, "same_kind"):
            raise DataError(
                f"the samples are {samples.dtype} of shape {samples.shape}, and the model takes {given.dtype} of (n, "
                f"{', '.join(map(str, shape))})",
                hint=f"one sample is: {', '.join(self.names('features'))[:400] or 'values in the order of the task'}",
            )
        found = in_chunks(lambda part: self.executor.run({"x": part})[0], rows.astype(given.dtype, order="C"))
        return found[0] if rows is not samples else found


class LoadedModel:
    """A model that answers; any number of threads may call it at once.

    Args:
        path: a device's directory, or another folder with model.onnx; or an ONNX file of `shoal-edge export`.
        executor: auto, onnxruntime or numpy.

    Raises:
        ConfigError: the file is missing or can't be read, or the executor is not installed.
        TaskError: the file is no model, or has an operator that the executor lacks.
    """

    def __init__(self, path: Path | str, executor: str = AUTO) -> None:
        self._path = Path(path, MODEL_FILE) if Path(path).is_dir() else Path(path)
        self._executor = choose(executor)
        self._lock = threading.Lock()
        self._loaded = self._read()

    def predict(self, x: ArrayLike) -> Any:
        """Return an answer for each sample: the label if the task names them, else the class; numbers for regression.

        Args:
            x: samples (n, *shape) in the units of the data, in the order of `features`; or one sample, for one answer.
                A missing value is nan, if the task takes missing values.

        Raises:
            DataError: the samples have another shape.
        """
        loaded = self._loaded
        answers, labels = answers_of(loaded.outputs(x), loaded.facts["kind"]), loaded.names("labels")
        return np.array(labels)[answers] if labels else answers

    def probabilities(self, x: ArrayLike) -> NDArray[np.float64]:
        """Return the probability of each class in the order of `labels`, (n, ..., classes); arguments as for `predict`.

        Raises:
            ConfigError: the task has no classes.
            DataError: the samples have another shape.
        """
        loaded = self._loaded
        return probabilities_of(loaded.outputs(x), loaded.facts["kind"])

    def reload_if_new(self) -> bool:
        """Take the device's new model if there is one; return whether there was. It costs one look at the file.

        Calls under way end with the model that they began with.

        Raises:
            ConfigError, TaskError: as for a new `LoadedModel`; the one before stays in use.
        """
        with self._lock:
            before, self._loaded = self._loaded, self._read(self._loaded)
            return self._loaded is not before

    @property
    def facts(self) -> Mapping[str, str]:
        """The file's metadata: task, kind, run, round, validation_accuracy and others; see docs/operator/programs.md."""
        return self._loaded.facts

    @property
    def features(self) -> tuple[str, ...]:
        """Name of each value of a sample, in order; empty if the task takes them by position."""
        return self._loaded.names("features")

    @property
    def labels(self) -> tuple[str, ...]:
        """Name of each class, in order; empty if they are numbers."""
        return self._loaded.names("labels")

    def _read(self, before: _Loaded | None = None) -> _Loaded:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                mark = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
                if before is not None and before.mark == mark:
                    return before
                model, facts = without_metadata(file.read())
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no model in {self._path.parent} yet: {self._path.name} is missing",
                hint="it comes when a run finishes; a task with own training code has model.bin: docs/operator/programs.md",
            ) from error
        except OSError as error:
            raise read_failed(self._path, error) from error
        graph = Graph("predict", model)
        if self._executor == NUMPY:
            from edge_client.learning.executor.numpy_graph import NumpyExecutor

            executor: Executor = NumpyExecutor(graph)
        else:
            from edge_client.learning.executor.onnx_runtime import OrtExecutor

            executor = OrtExecutor(graph)
        if [each.name for each in executor.inputs] != ["x"] or "kind" not in facts:
            raise TaskError(f"{self._path} is no model of Shoal's", hint="give a device's directory")
        return _Loaded(mark, facts, executor)


load = LoadedModel
