"""The contents of an ONNX graph as plain values: nodes, constants, and the types of inputs and outputs.

`onnx_graph.check_graph` decides whether a device may load a graph; this reads the nodes of one that passed, for an executor
that is not ONNX Runtime. Field numbers are those of onnx.proto. A tensor is read only if its bytes match its shape, so the
constants take no more memory than the graph's own bytes.

Example:
    contents = read_graph(bundle.grad, "grad.onnx")
    [node.operator for node in contents.nodes]  # ["Split", "Reshape", "Gemm", ...]
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.errors import TaskError
from shoal.task.onnx_graph import FIXED32, LENGTH, VARINT, Field, Reader, check_graph, signed

DTYPES: Final[Mapping[int, str]] = {1: "float32", 6: "int32", 7: "int64", 9: "bool"}
"""NumPy's name of each element type (TensorProto.DataType) that is read."""

T = TypeVar("T")
Attribute: TypeAlias = "int | float | str | tuple[int, ...] | NDArray[Any] | Contents"

_MODEL_GRAPH: Final = 7
_GRAPH_NODE, _GRAPH_CONSTANT, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 5, 11, 12
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE = 1, 2, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_TYPE = 1, 20
_FLOAT, _INTEGER, _STRING, _TENSOR, _GRAPH, _INTEGERS = 2, 3, 4, 5, 6, 8
_VALUE_OF_TYPE: Final[Mapping[int, int]] = {
    1: _FLOAT,
    2: _INTEGER,
    3: _STRING,
    4: _TENSOR,
    5: _GRAPH,
    7: _INTEGERS,
}
"""AttributeProto.AttributeType -> the field that holds the value."""
_DIMS, _DATA_TYPE, _FLOAT_DATA, _INT32_DATA, _INT64_DATA, _TENSOR_NAME, _RAW = 1, 2, 4, 5, 7, 8, 9
_DATA: Final = frozenset({_FLOAT_DATA, _INT32_DATA, 6, _INT64_DATA, _RAW, 10, 11})
_TYPED_DATA: Final[Mapping[str, int]] = {
    "float32": _FLOAT_DATA,
    "int32": _INT32_DATA,
    "bool": _INT32_DATA,
    "int64": _INT64_DATA,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    Attributes:
        operator: ONNX's name of the operator.
        inputs: names of the values it takes; an empty name stands for an optional input that is absent.
        outputs: names of the values it makes; an empty name for one that is not wanted.
        attributes: by name.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the values around a Scan that its body uses, besides those that it is given."""
        body = self.attributes.get("body")
        return body.foreign if isinstance(body, Contents) else ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all values that the node uses."""
        return (*self.inputs, *self.captured)


@dataclass(frozen=True, slots=True)
class TensorType:
    """Name and type of a graph's input or output; ``shape`` has None for a dimension that is not fixed."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A graph.

    Attributes:
        nodes: in the order of the file.
        constants: initializers by name, read-only arrays.
        inputs, outputs: the graph's own, without inputs that have an initializer.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, NDArray[Any]]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    @property
    def foreign(self) -> tuple[str, ...]:
        """Names that the nodes and outputs use, and that are neither inputs, nor constants, nor made by a node."""
        made = {*self.constants, *(each.name for each in self.inputs), *(o for n in self.nodes for o in n.outputs)}
        used = {*(name for node in self.nodes for name in node.inputs if name), *(each.name for each in self.outputs)}
        return tuple(sorted(used - made))


def read_graph(model: bytes, what: str) -> Contents:
    """Return the contents of a serialised ONNX model.

    Args:
        model: ModelProto bytes.
        what: the graph's name in error messages.

    Raises:
        TaskError: `check_graph` refuses the model, an element type is not in DTYPES, or a message is malformed.
    """
    check_graph(model, what)
    reader = _ContentsReader(what)
    body = next(f.body for f in reader.fields(memoryview(model)) if f.number == _MODEL_GRAPH)
    return reader.graph(body)


class _ContentsReader(Reader):
    """Reads the messages of one graph; ``what`` is the graph's name in errors."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def graph(self, body: memoryview) -> Contents:
        """Return the contents of a GraphProto."""
        nodes: list[Node] = []
        constants: dict[str, NDArray[Any]] = {}
        types: dict[int, list[TensorType]] = {_GRAPH_INPUT: [], _GRAPH_OUTPUT: []}
        for field in self.fields(body):
            if field.number == _GRAPH_NODE:
                nodes.append(self._node(field.body))
            elif field.number == _GRAPH_CONSTANT:
                name, value = self._tensor(field.body)
                if name in constants:
                    raise self._invalid(f"two constants are named {name[:40]!r}")
                constants[name] = value
            elif field.number in types:
                types[field.number].append(self._tensor_type(field))
        inputs = tuple(each for each in types[_GRAPH_INPUT] if each.name not in constants)
        return Contents(tuple(nodes), constants, inputs, tuple(types[_GRAPH_OUTPUT]))

    def _node(self, body: memoryview) -> Node:
        names: dict[int, list[str]] = {_NODE_INPUT: [], _NODE_OUTPUT: [], _NODE_OPERATOR: []}
        attributes: dict[str, Attribute] = {}
        for field in self.fields(body):
            if field.number in names:
                names[field.number].append(self._text(field))
            elif field.number == _NODE_ATTRIBUTE:
                name, value = self._attribute(field.body)
                if name in attributes:
                    raise self._invalid(f"a node has two attributes {name[:40]!r}")
                attributes[name] = value
        if len(names[_NODE_OPERATOR]) != 1:
            raise self._invalid("a node does not name one operator")
        return Node(names[_NODE_OPERATOR][0], tuple(names[_NODE_INPUT]), tuple(names[_NODE_OUTPUT]), attributes)

    def _attribute(self, body: memoryview) -> tuple[str, Attribute]:
        name, kind, fields = "", 0, list[Field]()
        for field in self.fields(body):
            if field.number == _ATTRIBUTE_NAME:
                name = self._text(field)
            elif field.number == _ATTRIBUTE_TYPE:
                kind = field.value
            else:
                fields.append(field)
        wanted = _VALUE_OF_TYPE.get(kind)
        if wanted is None:
            raise self._invalid(f"attribute {name[:40]!r} has type {kind}, which is not supported")
        values = [field for field in fields if field.number == wanted]
        if wanted == _INTEGERS:
            return name, tuple(number for field in values for number in self.integers(field))
        return name, self._single(wanted, values[-1] if values else None)

    def _single(self, wanted: int, field: Field | None) -> Attribute:
        """Return an attribute's value; protobuf leaves out a number of 0 and an empty text."""
        if wanted in (_TENSOR, _GRAPH):
            if field is None:
                raise self._invalid("an attribute's graph or tensor is missing")
            body = self._message(field)
            return self._tensor(body)[1] if wanted == _TENSOR else self.graph(body)
        if wanted == _STRING:
            return "" if field is None else self._text(field)
        if wanted == _INTEGER:
            return 0 if field is None else signed(self._of(VARINT, field).value)
        return 0.0 if field is None else _float(self._of(FIXED32, field))

    def _tensor(self, body: memoryview) -> tuple[str, NDArray[Any]]:
        name, kind, shape, data = "", 0, list[int](), list[Field]()
        for field in self.fields(body):
            if field.number == _DIMS:
                shape.extend(self.integers(field))
            elif field.number == _DATA_TYPE:
                kind = field.value
            elif field.number == _TENSOR_NAME:
                name = self._text(field)
            elif field.number in _DATA:
                data.append(field)
        values = self._data(self._dtype(kind), data)
        if min(shape, default=0) < 0 or math.prod(shape) != len(values):
            raise self._invalid(f"a tensor of shape {tuple(shape[:8])} has {len(values)} elements")
        return name, self._catch(lambda: values.reshape(shape))

    def _data(self, dtype: str, data: list[Field]) -> NDArray[Any]:
        """Return a tensor's elements, one dimension, read-only."""
        if {field.number for field in data} == {_RAW}:
            return self._raw(dtype, self._message(data[-1]))
        if any(field.number != _TYPED_DATA[dtype] for field in data):
            raise self._invalid(f"a tensor of {dtype} has elements of another type")
        if dtype == "float32":
            body = b"".join(_floats(field) for field in data)
            values = self._catch(lambda: np.frombuffer(body, "<f4").astype(np.float32))
        else:
            numbers = [number for field in data for number in self.integers(field)]
            values = self._catch(lambda: np.array(numbers, np.int64).astype(dtype, casting="unsafe"))
        values.flags.writeable = False
        return values

    def _raw(self, dtype: str, body: memoryview) -> NDArray[Any]:
        kind = np.dtype(dtype).newbyteorder("<")
        if len(body) % kind.itemsize:
            raise self._invalid(f"{len(body)} bytes are no whole number of {dtype} elements")
        if dtype == "bool" and len(body) and max(body) > 1:
            raise self._invalid("a bool is neither 0 nor 1")
        values = np.frombuffer(body, kind).astype(dtype)
        values.flags.writeable = False
        return values

    def _tensor_type(self, field: Field) -> TensorType:
        """Return a ValueInfoProto: name (1) and type (2), of which only tensor_type (1) may be there."""
        name, kind, shape = "", 0, list[int | None]()
        for part in self.fields(self._message(field)):
            if part.number == 1:
                name = self._text(part)
            elif part.number == 2:  # TypeProto
                tensor = self._only(part, 1)
                for inner in self.fields(tensor):  # elem_type, shape
                    if inner.number == 1:
                        kind = inner.value
                    elif inner.number == 2:
                        shape = [self._dimension(dim) for dim in self.fields(self._message(inner))]
        return TensorType(name, self._dtype(kind), tuple(shape))

    def _dimension(self, field: Field) -> int | None:
        """Return dim_value (1) of a dimension; None for a named one."""
        value = None
        for part in self.fields(self._message(field)):
            value = signed(part.value) if part.number == 1 else value
        return value

    def _only(self, field: Field, number: int) -> memoryview:
        found = [part for part in self.fields(self._message(field)) if part.number == number]
        if len(found) != 1:
            raise self._invalid("an input or output is no tensor")
        return self._message(found[0])

    def _dtype(self, kind: int) -> str:
        if kind not in DTYPES:
            raise TaskError(
                str(self._invalid(f"element type {kind} is not supported; {', '.join(DTYPES.values())} are")),
                hint="ONNX Runtime has them all: pip install 'shoal[edge]'",
            )
        return DTYPES[kind]

    def _message(self, field: Field) -> memoryview:
        return self._of(LENGTH, field).body

    def _text(self, field: Field) -> str:
        return self._catch(lambda: bytes(self._message(field)).decode())

    def _of(self, wire_type: int, field: Field) -> Field:
        if field.wire_type != wire_type:
            raise self._invalid(f"field {field.number} has wire type {field.wire_type}, not {wire_type}")
        return field

    def _catch(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except (ValueError, OverflowError) as error:
            raise self._invalid(str(error)[:100]) from None

    def _invalid(self, reason: str) -> TaskError:
        return TaskError(f"{self._what} is not a graph that this device can read: {reason}")


def _float(field: Field) -> float:
    (value,) = struct.unpack("<f", field.raw[-4:])
    return float(value)


def _floats(field: Field) -> bytes:
    """Return the little-endian float32 numbers of a repeated field, packed or not."""
    return bytes(field.body) if field.wire_type == LENGTH else bytes(field.raw[-4:])
