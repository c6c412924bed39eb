"""A gradient graph without its two copies of the whole model.

The compiler's graphs split the vector theta into tensors first and join the tensors' gradients last, and each of the two copies
the whole model. `cut` takes these nodes out: the tensors become inputs, and their gradients outputs. Each is a part of a
vector, so an executor that reads and writes the caller's memory works on the two vectors in place.

    theta -> Split -> Reshape -> v1 ... v8 -> Reshape -> Concat -> grad        before
                                 v1 ... v8                                     after

A graph of another form is not cut: theta has another use, or one tensor is the gradient of two.

Example:
    found = cut(bundle.grad, "grad.onnx")
    found.inputs[0]  # Part(name="v1", start=0, shape=(8, 8))
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from shoal.errors import TaskError
from shoal.task.onnx_contents import Contents, Node, TensorType, read_graph
from shoal.task.onnx_graph import replace_in_graph

THETA: Final = "theta"
GRADIENT: Final = "grad"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that is a part of a vector.

    Attributes:
        name: of the graph's input or output.
        start: its first coordinate in the vector.
        shape: of an input; of an output (length,), which may have another shape in the graph.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of its coordinates."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The coordinate after its last one."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class CutGraph:
    """A graph that takes theta in parts and returns the gradient in parts.

    Attributes:
        model: ModelProto bytes; the other inputs and outputs are as before.
        inputs: the parts of theta, in order.
        outputs: the parts of the gradient, in order.
        whole_inputs: the inputs before, theta among them.
        whole_outputs: names of the outputs before.
    """

    model: bytes
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    whole_inputs: tuple[TensorType, ...]
    whole_outputs: tuple[str, ...]

    @property
    def length(self) -> int:
        """Coordinates of theta, and of the gradient."""
        return self.inputs[-1].stop


def cut(model: bytes, what: str) -> CutGraph | None:
    """Return the graph without the nodes that split theta and join the gradient; None if it has another form.

    Args:
        model: ModelProto bytes that `check_graph` accepts.
        what: the graph's name in error messages.
    """
    try:
        contents = read_graph(model, what)
    except TaskError:  # it has types that only ONNX Runtime reads
        return None
    links = _Links(contents)
    ends = links.split_and_concat()
    if ends is None:
        return None
    split, concat, sizes = ends
    starts = tuple(accumulate(sizes, initial=0))
    heads = [links.head(*each) for each in zip(links.nodes[split].outputs, starts, sizes, strict=False)]
    tails = [links.tail(*each) for each in zip(links.nodes[concat].inputs, starts, sizes, strict=False)]
    inputs, outputs = (tuple(part for part, _ in found) for found in (heads, tails))
    names = {part.name for part in (*inputs, *outputs)}
    if len(names) < 2 * len(sizes) or not links.makes(part.name for part in outputs):
        return None
    dropped = {split, concat, *(node for _, node in (*heads, *tails))}
    edited = replace_in_graph(
        model,
        [at not in dropped for at in range(len(links.nodes))],
        inputs={THETA: [(part.name, part.shape) for part in inputs]},
        outputs={GRADIENT: [(part.name, None) for part in outputs]},
    )
    return CutGraph(edited, inputs, outputs, contents.inputs, tuple(each.name for each in contents.outputs))


class _Links:
    """Which nodes make and read each value of a graph; a node is named by its position.

    Attributes:
        nodes: the graph's.
    """

    def __init__(self, contents: Contents) -> None:
        self.nodes: Sequence[Node] = contents.nodes
        self._constants = contents.constants
        self._makers = {name: at for at, node in enumerate(self.nodes) for name in node.outputs if name}
        self._readers: defaultdict[str, list[int | None]] = defaultdict(list)
        for at, node in enumerate(self.nodes):
            for name in node.reads:
                self._readers[name].append(at)
        for each in contents.outputs:
            self._readers[each.name].append(None)

    def split_and_concat(self) -> tuple[int, int, tuple[int, ...]] | None:
        """Return the Split of theta, the Concat of the gradient, and the sizes of the parts; None if there is another form."""
        split, concat = self._only_reader(THETA), self._makers.get(GRADIENT)
        if split is None or concat is None or self._readers[GRADIENT] != [None]:
            return None
        first, last = self.nodes[split], self.nodes[concat]
        lengths = self._constants.get(first.inputs[1]) if len(first.inputs) == 2 else None
        if (first.operator, last.operator) != ("Split", "Concat") or lengths is None:
            return None
        sizes = tuple(int(size) for size in lengths)
        fits = len(sizes) == len(first.outputs) == len(last.inputs) and all(first.outputs) and min(sizes) > 0
        return (split, concat, sizes) if fits else None

    def head(self, name: str, start: int, size: int) -> tuple[Part, int | None]:
        """Return the part of theta that takes the place of a Split's output, and the Reshape that it makes needless."""
        reader = self._only_reader(name)
        if reader is not None and self.nodes[reader].operator == "Reshape":
            shape = self._constants.get(self.nodes[reader].inputs[1])
            if shape is not None and min(shape, default=1) > 0 and math.prod(shape) == size:
                return Part(self.nodes[reader].outputs[0], start, tuple(int(n) for n in shape)), reader
        return Part(name, start, (size,)), None

    def tail(self, name: str, start: int, size: int) -> tuple[Part, int | None]:
        """Return the part of the gradient that takes the place of a Concat's input, and the Reshape that it makes needless."""
        maker = self._makers.get(name)
        if maker is not None and self.nodes[maker].operator == "Reshape" and len(self._readers[name]) == 1:
            source = self.nodes[maker].inputs[0]
            # Equal gradients, such as those of an LSTM's two biases, are Reshapes of one value: it can't be in two places.
            if source in self._makers and len(self._reshapes(source)) == 1:
                return Part(source, start, (size,)), maker
        return Part(name, start, (size,)), None

    def makes(self, names: Iterable[str]) -> bool:
        """Return whether nodes make all these values."""
        return all(name in self._makers for name in names)

    def _only_reader(self, name: str) -> int | None:
        """Return the one node that reads a value; None if there are several, or if it is an output."""
        found = self._readers[name]
        return found[0] if len(found) == 1 else None

    def _reshapes(self, name: str) -> list[int]:
        readers = {at for at in self._readers[name] if at is not None}
        return [at for at in readers if self.nodes[at].operator == "Reshape"]
