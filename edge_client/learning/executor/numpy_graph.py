"""Executor by numpy: the nodes of a checked graph one after another, each value freed after its last use.

Rules:
1. A graph is refused when it is loaded if a node's operator, attributes or number of inputs is unknown, if a node uses a value
   that no earlier node makes (a cycle, or a wrong order), or if two nodes make the same value.
2. Before an operator takes memory its result's size is checked against `bounds`.
3. Float32 stays float32; infinities and NaN are results like any others, as in ONNX Runtime.
4. The same inputs give the same bits: one operator after another, no threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from edge_client.learning.executor.arithmetic import MAX_LIVE_BYTES, Array, checked
from edge_client.learning.executor.base import Graph
from edge_client.learning.executor.operators import Operator, find
from shoal.errors import TaskError
from shoal.task.onnx_contents import Contents, Node, TensorType, read_graph
from shoal.task.onnx_graph import MAX_STEPS


@dataclass(frozen=True, slots=True)
class _Step:
    """A node ready to be computed.

    Attributes:
        node: names of its operator, inputs and outputs.
        operator: checks the inputs' dtypes.
        compute: the operator with the node's attributes.
        spent: values that no later node uses.
    """

    node: Node
    operator: Operator
    compute: Callable[..., Array | tuple[Array, ...]]
    spent: tuple[str, ...] = ()

    def results(self, inputs: Sequence[Array | None]) -> tuple[Array, ...]:
        """Return the node's outputs; the inputs' dtypes are those that the operator takes.

        Raises:
            TaskError: the inputs do not fit the operator, or its outputs the node.
        """
        try:
            found = self.compute(*inputs)
        except (ValueError, IndexError, TypeError, OverflowError) as error:
            raise TaskError(f"{self.node.operator}: {str(error)[:200]}") from None
        except MemoryError:
            raise TaskError(f"{self.node.operator} needs more memory than there is") from None
        results = found if isinstance(found, tuple) else (found,)
        if len(results) != len(self.node.outputs):
            raise TaskError(f"{self.node.operator} has {len(results)} results, not {len(self.node.outputs)}")
        return results


class _Program:
    """The nodes of a graph, or of a Scan's body."""

    def __init__(self, contents: Contents, captured: Sequence[str] = ()) -> None:
        """Make the steps ready; ``captured`` are values around a body that its nodes use too.

        Raises:
            TaskError: see rule 1.
        """
        self._constants = contents.constants
        self._has_dtypes_checked = False
        self._steps = _steps(contents, captured)
        self._outputs = tuple(each.name for each in contents.outputs)

    def run(self, feed: Mapping[str, Array]) -> list[Array]:
        """Return the outputs."""
        values: dict[str, Array] = {**self._constants, **feed}
        live = sum(value.nbytes for value in values.values())
        for step in self._steps:
            inputs = [values[name] if name else None for name in step.node.reads]
            if not self._has_dtypes_checked:  # they follow from the inputs' dtypes, so one run answers for all
                step.operator.check(step.node.operator, inputs)
            results = step.results(inputs)
            for name, value in zip(step.node.outputs, results, strict=True):
                if name:
                    values[name] = value
                    live += value.nbytes
            if live > MAX_LIVE_BYTES:
                raise TaskError(f"{step.node.operator}: the graph's values take more than {MAX_LIVE_BYTES} bytes")
            for name in step.spent:
                live -= values.pop(name).nbytes
        self._has_dtypes_checked = True
        return [values[name] for name in self._outputs]


class _Scan:
    """ONNX's Scan: a body that is run for each step of some inputs, with states that it hands on."""

    def __init__(self, node: Node) -> None:
        """Make the body ready.

        Raises:
            TaskError: the body is not valid, or does not fit the node.
        """
        body, count = node.attributes.get("body"), node.attributes.get("num_scan_inputs")
        if not isinstance(body, Contents) or not isinstance(count, int):
            raise TaskError("Scan has no body")
        self._carried, self._given = len(node.inputs) - count, len(node.inputs)
        self._names = (*(each.name for each in body.inputs), *node.captured)
        self._program = _Program(body, node.captured)

    def __call__(self, *values: Array) -> tuple[Array, ...]:
        """Return the states after the last step, and what each step adds to the stacked outputs."""
        states, rows, fixed = values[: self._carried], values[self._carried : self._given], values[self._given :]
        lengths = {len(row) for row in rows}
        steps = max(lengths, default=0)
        if len(lengths) != 1 or not 0 < steps <= MAX_STEPS:
            raise TaskError(f"Scan over sequences of {sorted(lengths)[:8]} steps, not one length of 1 to {MAX_STEPS}")
        stacks: list[Array] = []
        for at in range(steps):
            taken = (row[at, ...] for row in rows)
            found = self._program.run(dict(zip(self._names, (*states, *taken, *fixed), strict=True)))
            if [(a.shape, a.dtype) for a in states] != [(b.shape, b.dtype) for b in found[: self._carried]]:
                raise TaskError("Scan's body changes the form of a state")
            states, added = tuple(found[: self._carried]), found[self._carried :]
            stacks = stacks or _stacks(steps, added)
            for stack, value in zip(stacks, added, strict=True):
                stack[at] = value
        return (*states, *stacks)


def _stacks(steps: int, values: Sequence[Array]) -> list[Array]:
    """Return memory for what each of the steps adds.

    Raises:
        TaskError: it is more than the limits.
    """
    if steps * sum(value.nbytes for value in values) > MAX_LIVE_BYTES:
        raise TaskError(f"Scan: the outputs of {steps} steps take more than {MAX_LIVE_BYTES} bytes")
    return [np.empty(checked((steps, *value.shape)), value.dtype) for value in values]


_SCAN: Final = Operator(_Scan.__call__, "A*")
"""The operator with a body; `OPERATORS` has those without."""


class NumpyExecutor:
    """A graph in numpy; see `Executor`."""

    def __init__(self, graph: Graph) -> None:
        """Load a graph.

        Raises:
            TaskError: the graph is not valid, or needs an operator that numpy's executor lacks.
        """
        self._file = graph.file
        contents = read_graph(graph.model, graph.file)
        self.inputs: Sequence[TensorType] = contents.inputs
        self.outputs: Sequence[str] = tuple(each.name for each in contents.outputs)
        try:
            self._program = _Program(contents)
        except TaskError as error:
            raise self._refused(error) from None

    def run(self, feed: Mapping[str, Array]) -> list[Array]:
        """Return the outputs; see `Executor.run`."""
        try:
            self._check_feed(feed)
            with np.errstate(all="ignore"):
                found = self._program.run(feed)
        except TaskError as error:
            raise self._refused(error) from None
        return _owned(found, feed)

    def _check_feed(self, feed: Mapping[str, Array]) -> None:
        if set(feed) != {each.name for each in self.inputs}:
            raise TaskError(f"the inputs are {', '.join(sorted(each.name for each in self.inputs))[:200]}")
        for each in self.inputs:
            value = feed[each.name]
            if value.dtype.name != each.dtype or not _fits(value.shape, each.shape):
                raise TaskError(f"input {each.name!r} is {value.dtype} of shape {value.shape}")

    def _refused(self, error: TaskError) -> TaskError:
        return TaskError(f"{self._file} can't be computed with numpy: {error}", hint=error.hint)


def _steps(contents: Contents, captured: Sequence[str]) -> tuple[_Step, ...]:
    """Return the nodes with the values that are spent after each; ``captured`` are values from around the graph.

    Raises:
        TaskError: see rule 1.
    """
    known = {*captured, *contents.constants, *(each.name for each in contents.inputs)}
    steps = []
    for node in contents.nodes:
        operator = _SCAN if node.operator == "Scan" else find(node.operator)
        if unknown := [name for name in node.reads if name and name not in known]:
            raise TaskError(f"{node.operator} uses {unknown[0][:40]!r}, which no earlier node makes")
        outputs = [name for name in node.outputs if name]
        if len(set(outputs)) < len(outputs) or not known.isdisjoint(outputs):
            raise TaskError(f"{node.operator} makes a value that exists already")
        known.update(outputs)
        steps.append(_Step(node, operator, _Scan(node) if operator is _SCAN else operator.bind(node)))
    wanted = [each.name for each in contents.outputs]
    if missing := [name for name in wanted if name not in known]:
        raise TaskError(f"no node makes the output {missing[0][:40]!r}")
    return _with_spent(steps, {*wanted, *contents.constants})


def _with_spent(steps: Sequence[_Step], needed: set[str]) -> tuple[_Step, ...]:
    """Return the steps with the values that are not in ``needed`` and that no later step uses."""
    later, found = set(needed), []
    for step in reversed(steps):
        used = {name for name in (*step.node.reads, *step.node.outputs) if name}
        found.append(replace(step, spent=tuple(sorted(used - later))))
        later |= used
    return tuple(reversed(found))


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))


def _owned(outputs: Sequence[Array], feed: Mapping[str, Array]) -> list[Array]:
    """Return the outputs as contiguous arrays that share no memory with an input, a constant or each other."""
    owned: list[Array] = []
    for value in outputs:
        flags = value.flags
        alone = value.base is None and flags.owndata and flags.writeable and flags.c_contiguous
        shared = any(value is other for other in (*feed.values(), *owned))
        owned.append(value if alone and not shared else np.array(value, order="C"))
    return owned
