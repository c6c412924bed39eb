"""The interface of an executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.task.onnx_contents import TensorType


SCORE_ROWS: Final = 100
"""Samples in one forward pass: the activations of larger chunks cost memory and gain no speed."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of a checked task.

    Attributes:
        name: score, grad or predict.
        model: ModelProto bytes that `shoal.task.onnx_graph.check_graph` accepts.
        threads: threads of one operation, at least 1; numpy has as many as its BLAS was started with.
    """

    name: str
    model: bytes = field(repr=False)
    threads: int = 1

    @property
    def file(self) -> str:
        """The graph's name in error messages."""
        return f"{self.name}.onnx"


class Executor(Protocol):
    """One loaded graph.

    Attributes:
        inputs: name, dtype and shape of each input.
        outputs: names of the outputs.
    """

    inputs: Sequence[TensorType]
    outputs: Sequence[str]

    def run(self, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs in the order of ``outputs``; the caller may overwrite them, and so may the next call.

        Args:
            feed: an array of the right dtype and shape for each input.

        Raises:
            TaskError: the graph can't be computed on these inputs.
        """


MakeExecutor: TypeAlias = Callable[[Graph], Executor]
"""Loads a graph; raises TaskError if it is not valid or has an operator that the executor lacks."""


def in_chunks(compute: Callable[[NDArray[Any]], NDArray[np.float32]], x: NDArray[Any]) -> NDArray[np.float32]:
    """Return the outputs for n > 0 samples, (n, ...) float32, given what computes them for at most SCORE_ROWS."""
    parts = [compute(x[at : at + SCORE_ROWS]) for at in range(0, len(x), SCORE_ROWS)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
