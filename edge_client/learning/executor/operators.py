"""The operators that the numpy executor has, with the inputs that each of them takes.

Those of every task without convolutions that the compiler makes from linear layers, ReLU, embeddings and LSTMs, and the
commonest others. Anything else is refused by name before a value is computed, and so is an attribute, a number of inputs or a
dtype that the operator does not have here: a graph is computed as ONNX says or not at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from edge_client.learning.executor import arithmetic, movement
from edge_client.learning.executor.arithmetic import Array, binary, unary, variadic
from shoal.errors import TaskError
from shoal.task.onnx_contents import Attribute, Node

STANDARD_EXTRA: Final = "install ONNX Runtime, which has all operators: pip install 'shoal[edge]'"

DTypes: TypeAlias = frozenset[np.dtype[Any]]


def _dtypes(*names: str) -> DTypes:
    return frozenset(np.dtype(name) for name in names)


FLOAT: Final = _dtypes("float32")
NUMBER: Final = _dtypes("float32", "int32", "int64")
BOOL: Final = _dtypes("bool")
ANY: Final = NUMBER | BOOL

_FIXED: Final[Mapping[str, DTypes]] = {
    "L": _dtypes("int64"),
    "I": _dtypes("int32", "int64"),
    "N": NUMBER,
    "B": BOOL,
    "A": ANY,
}
"""Letters of an operator's inputs: long (shapes, axes), index, number, bool, any. ``T`` stands for the operator's own dtypes."""

_MARKS: Final = str.maketrans("", "", "?*")

_KINDS: Final[Mapping[str, type]] = {
    "int": int,
    "int | None": int,
    "float": float,
    "str": str,
    "tuple[int, ...] | None": tuple,
    "Array": np.ndarray,
    "Array | None": np.ndarray,
}
"""Type of the value of an attribute, by the annotation of its keyword."""


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator.

    Attributes:
        compute: arrays and attributes -> an array, or a tuple of them.
        inputs: a letter for each input, see _FIXED; a ``*`` repeats the last one, and those after ``?`` may be absent.
        dtypes: of the inputs ``T``, which all have one of them in common.
    """

    compute: Callable[..., Array | tuple[Array, ...]]
    inputs: str
    dtypes: DTypes = ANY

    @property
    def letters(self) -> str:
        """The letters of the inputs alone."""
        return self.inputs.translate(_MARKS)

    @property
    def fewest(self) -> int:
        """Inputs that must be there."""
        required = self.inputs.partition("?")[0]
        return len(required.rstrip("*"))

    @property
    def most(self) -> float:
        """Inputs that may be there."""
        return float("inf") if self.inputs.endswith("*") else len(self.letters)

    def bind(self, node: Node) -> Callable[..., Array | tuple[Array, ...]]:
        """Return the function of a node's inputs.

        Raises:
            TaskError: the number of inputs or an attribute is not this operator's.
        """
        given = sum(1 for name in node.inputs[: self.fewest] if name)
        if given < self.fewest or len(node.inputs) > self.most:
            raise TaskError(f"{node.operator} does not take {len(node.inputs)} inputs")
        parameters = inspect.signature(self.compute).parameters
        keywords = {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        for name, value in node.attributes.items():
            _check_attribute(node.operator, name, value, keywords.get(name))
        missing = [name for name, keyword in keywords.items() if keyword.default is inspect.Parameter.empty]
        if absent := sorted(set(missing) - set(node.attributes)):
            raise TaskError(f"{node.operator} lacks the attribute {absent[0]!r}")
        return partial(self.compute, **node.attributes) if node.attributes else self.compute

    def check(self, name: str, inputs: Sequence[Array | None]) -> None:
        """Check the dtypes of a node's inputs; ``name`` is the operator's.

        Raises:
            TaskError: one of them is not a dtype of this operator.
        """
        letters, common = self.letters, None
        for place, value in enumerate(inputs):
            if value is None:
                continue
            letter, dtype = letters[min(place, len(letters) - 1)], value.dtype
            allowed = self.dtypes if letter == "T" else _FIXED[letter]
            if dtype not in allowed or (letter == "T" and common not in (None, dtype)):
                raise TaskError(f"{name} does not take {dtype} as input {place}")
            common = dtype if letter == "T" else common


def _check_attribute(operator: str, name: str, value: Attribute, keyword: inspect.Parameter | None) -> None:
    if keyword is None:
        raise TaskError(f"{operator} has the attribute {name[:40]!r}, which is not supported", hint=STANDARD_EXTRA)
    if not isinstance(value, _KINDS[str(keyword.annotation)]):
        raise TaskError(f"{operator}'s attribute {name!r} is of the wrong type")


def find(name: str) -> Operator:
    """Return an operator.

    Raises:
        TaskError: the numpy executor does not have it.
    """
    found = OPERATORS.get(name)
    if found is None:
        raise TaskError(f"the numpy executor does not have the operator {name[:40]!r}", hint=STANDARD_EXTRA)
    return found


OPERATORS: Final[Mapping[str, Operator]] = {
    "Abs": Operator(unary(np.abs), "T", NUMBER),
    "Add": Operator(binary(np.add), "TT", NUMBER),
    "And": Operator(binary(np.logical_and), "BB"),
    "ArgMax": Operator(arithmetic.argmax, "T", NUMBER),
    "Cast": Operator(arithmetic.cast, "A"),
    "Concat": Operator(movement.concat, "T*"),
    "Constant": Operator(movement.constant, ""),
    "ConstantOfShape": Operator(movement.constant_of_shape, "L"),
    "Div": Operator(arithmetic.divide, "TT", NUMBER),
    "Equal": Operator(binary(np.equal), "TT"),
    "Exp": Operator(unary(np.exp), "T", FLOAT),
    "Expand": Operator(movement.expand, "AL"),
    "Gather": Operator(movement.gather, "AI"),
    "GatherElements": Operator(movement.gather_elements, "AI"),
    "Gemm": Operator(arithmetic.gemm, "TT?T", FLOAT),
    "Greater": Operator(binary(np.greater), "TT", NUMBER),
    "GreaterOrEqual": Operator(binary(np.greater_equal), "TT", NUMBER),
    "Identity": Operator(movement.identity, "A"),
    "Less": Operator(binary(np.less), "TT", NUMBER),
    "LessOrEqual": Operator(binary(np.less_equal), "TT", NUMBER),
    "Log": Operator(unary(np.log), "T", FLOAT),
    "LogSoftmax": Operator(arithmetic.log_softmax, "T", FLOAT),
    "MatMul": Operator(arithmetic.matmul, "TT", FLOAT),
    "Max": Operator(variadic(np.maximum), "T*", NUMBER),
    "Min": Operator(variadic(np.minimum), "T*", NUMBER),
    "Mul": Operator(binary(np.multiply), "TT", NUMBER),
    "Neg": Operator(unary(np.negative), "T", NUMBER),
    "Not": Operator(unary(np.logical_not), "B"),
    "OneHot": Operator(movement.one_hot, "IIA"),
    "Or": Operator(binary(np.logical_or), "BB"),
    "Pow": Operator(arithmetic.power, "TN", FLOAT),
    "Reciprocal": Operator(unary(np.reciprocal), "T", FLOAT),
    "ReduceMean": Operator(arithmetic.reduce_mean, "T?L", FLOAT),
    "ReduceSum": Operator(arithmetic.reduce_sum, "T?L", NUMBER),
    "Relu": Operator(arithmetic.relu, "T", FLOAT),
    "Reshape": Operator(movement.reshape, "AL"),
    "ScatterElements": Operator(movement.scatter_elements, "TIT", NUMBER),
    "Shape": Operator(movement.shape, "A"),
    "Sigmoid": Operator(arithmetic.sigmoid, "T", FLOAT),
    "Sign": Operator(unary(np.sign), "T", NUMBER),
    "Slice": Operator(movement.slice_, "AII?II"),
    "Softmax": Operator(arithmetic.softmax, "T", FLOAT),
    "Split": Operator(movement.split, "A?L"),
    "Sqrt": Operator(unary(np.sqrt), "T", FLOAT),
    "Squeeze": Operator(movement.squeeze, "A?L"),
    "Sub": Operator(binary(np.subtract), "TT", NUMBER),
    "Tanh": Operator(unary(np.tanh), "T", FLOAT),
    "Transpose": Operator(movement.transpose, "A"),
    "Unsqueeze": Operator(movement.unsqueeze, "AL"),
    "Where": Operator(arithmetic.where, "BTT"),
}
"""Every operator of the numpy executor, by ONNX's name."""
