"""A minimal parser of ONNX's protobuf encoding: check a graph before an executor sees it, and edit one.

Field numbers are those of onnx.proto (ONNX IR specification); the encoding is protobuf's: a varint key
``number << 3 | wire_type``, then a varint, 4 or 8 fixed bytes, or a length and that many bytes. A field that is not named
below is refused, so that ONNX Runtime acts only on fields that were checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from shoal.errors import TaskError

MAX_GRAPH_BYTES: Final = 64 << 20
"""Largest ONNX graph a device loads; theta is an input, so even big models have small graphs."""

MAX_FIELDS: Final = 1_000_000
"""Most protobuf fields read in one graph; bounds the time that hostile bytes can take (2.3 s on the build machine)."""

MIN_OPSET: Final = 18
MAX_OPSET: Final = 23
"""Newest operator set that the oldest supported ONNX Runtime (1.23) implements in full."""

MAX_STEPS: Final = 1 << 14
"""Most steps of a Scan, the loop over a sequence: ten minutes of 25 Hz."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
TENSOR_FLOAT: Final = 1
"""TensorProto.DataType.FLOAT."""

# ModelProto
_MODEL_ALLOWED: Final = frozenset({1, 2, 3, 4, 5, 6, 7, 8})
_MODEL_GRAPH, _MODEL_OPSET, _MODEL_METADATA = 7, 8, 14
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_MODEL_FUNCTIONS: Final = 25
# GraphProto
_GRAPH_ALLOWED: Final = frozenset({1, 2, 5, 10, 11, 12, 13})
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 5, 11, 12
# NodeProto: input, output, name, op_type, attribute, doc_string, domain
_NODE_ALLOWED: Final = frozenset({1, 2, 3, 4, 5, 6, 7})
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 2, 3, 4, 5, 7
# AttributeProto: name, f, i, s, t, g, floats, ints, strings, tensors, doc_string, type
_ATTRIBUTE_ALLOWED: Final = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 20})
_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER, _ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH, _ATTRIBUTE_TENSORS = 1, 3, 5, 6, 10
# TensorProto: dims, data_type, *_data, name, raw_data, doc_string, data_location
_TENSOR_ALLOWED: Final = frozenset({1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14})
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 1, 2, 8, 9, 13, 14
_MESSAGE_NAME: Final = 1
"""``name`` is field 1 of ValueInfoProto; ``domain`` is field 1 of OperatorSetIdProto."""

# ValueInfoProto, TypeProto, TypeProto.Tensor, TensorShapeProto and its Dimension
_VALUE_TYPE, _TYPE_TENSOR, _TENSOR_KIND, _TENSOR_SHAPE, _SHAPE_DIMENSION, _DIMENSION_VALUE = 2, 1, 1, 2, 1, 1

NamedShape: TypeAlias = tuple[str, tuple[int, ...] | None]
"""Name and shape of an input or output; None for a shape that follows from the nodes."""

_STANDARD_DOMAINS: Final = frozenset({b"", b"ai.onnx"})


@dataclass(frozen=True, slots=True)
class Field:
    """One protobuf field.

    Attributes:
        number: its number in the message.
        wire_type: VARINT, FIXED64, LENGTH or FIXED32.
        value: the integer of a VARINT (below 2^64), 0 for fixed fields and for LENGTH.
        body: the bytes of a LENGTH field, empty otherwise.
        raw: the whole field as encoded, key included.
    """

    number: int
    wire_type: int
    value: int
    body: memoryview
    raw: memoryview


class Reader:
    """Splits messages into fields, at most MAX_FIELDS over its lifetime; each number of a packed list counts as one."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def _check_budget(self) -> None:
        if self._left < 0:
            raise TaskError(f"graph holds more than {MAX_FIELDS} protobuf fields")

    def fields(self, data: memoryview) -> Iterator[Field]:
        """Yield the fields of one message in order.

        Raises:
            TaskError: the bytes are not a protobuf message, or hold more fields than the budget.
        """
        at, end = 0, len(data)
        while at < end:
            self._left -= 1
            if self._left < 0:  # asked here too: a call a field takes time
                self._check_budget()
            start = at
            key, at = read_varint(data, at)
            number, wire_type = key >> 3, key & 7
            if number == 0:
                raise TaskError("graph is not valid protobuf: field number 0")
            value, body = 0, data[:0]
            if wire_type == VARINT:
                value, at = read_varint(data, at)
            elif wire_type == LENGTH:
                size, at = read_varint(data, at)
                if size > end - at:
                    raise TaskError("graph is not valid protobuf: a field is longer than its message")
                body = data[at : at + size]
                at += size
            elif wire_type in (FIXED32, FIXED64):
                at += 4 if wire_type == FIXED32 else 8
                if at > end:
                    raise TaskError("graph is not valid protobuf: it ends inside a number")
            else:
                raise TaskError(f"graph is not valid protobuf: wire type {wire_type}")
            yield Field(number, wire_type, value, body, data[start:at])

    def integers(self, field: Field) -> Iterator[int]:
        """Yield the signed 64-bit integers of a repeated field, which may be packed.

        Raises:
            TaskError: the field holds no integers, or more than are left of the budget.
        """
        if field.wire_type == VARINT:
            yield signed(field.value)
            return
        if field.wire_type != LENGTH:
            raise TaskError(f"graph is not valid ONNX: field {field.number} is no list of integers")
        at = 0
        while at < len(field.body):
            self._left -= 1
            self._check_budget()
            value, at = read_varint(field.body, at)
            yield signed(value)


def signed(value: int) -> int:
    """Return a varint (below 2^64) as the signed 64-bit integer that it encodes."""
    return value - (1 << 64) if value >> 63 else value


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read one base-128 varint of at most 10 bytes; return (value, next position)."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise TaskError("graph is not valid protobuf: it ends inside a varint")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # Ten groups of 7 bits hold 70, and protobuf ignores those above 64.
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise TaskError("graph is not valid protobuf: a varint has more than 10 bytes")


def encode_varint(value: int) -> bytes:
    """Return ``value`` (0 <= value < 2^64) as a base-128 varint."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_length(number: int, size: int) -> bytes:
    """Return the key and length that precede the ``size`` bytes of LENGTH field ``number``."""
    return encode_varint(number << 3 | LENGTH) + encode_varint(size)


def encode_bytes(number: int, body: bytes) -> bytes:
    """Return LENGTH field ``number`` holding ``body``."""
    return encode_length(number, len(body)) + body


def check_graph(model: bytes, what: str) -> int:
    """Return the operator set version of a serialised ONNX model that a device may load.

    Args:
        model: ModelProto bytes.
        what: the graph's name in error messages.

    Raises:
        TaskError: the model is too big or malformed, refers to external data, uses an operator domain other than ONNX's,
            or has local functions, control flow other than a Scan of known length, sparse tensors or metadata.
    """
    if len(model) > MAX_GRAPH_BYTES:
        raise TaskError(f"{what} has {len(model)} bytes, more than the limit of {MAX_GRAPH_BYTES}")
    reader = Reader()
    graphs: list[memoryview] = []
    versions: list[int] = []
    for field in reader.fields(memoryview(model)):
        if field.number == _MODEL_FUNCTIONS:
            raise TaskError(f"{what} defines local functions; only standard operators are allowed")
        _allow(field, _MODEL_ALLOWED, what, "model")
        if field.number == _MODEL_GRAPH:
            graphs.append(_message(field, what))
        elif field.number == _MODEL_OPSET:
            versions.append(_opset(reader, _message(field, what), what))
    if len(graphs) != 1 or len(versions) != 1:
        raise TaskError(f"{what} must hold exactly one graph and one operator set import")
    _check_nodes(reader, graphs[0], what)
    return versions[0]


def bind_input(model: bytes, name: str, length: int) -> bytes:
    """Return ``model`` with input ``name`` made a constant, except for the constant's ``length`` float32 numbers at the end.

    The graph is moved to the end of the model, and the constant to the end of the graph, so that the caller can write
    its raw data after the returned bytes.

    Args:
        model: ModelProto bytes that :func:`check_graph` accepts.
        name: the graph input to turn into an initializer of shape (length,), float32.
        length: coordinates.

    Raises:
        TaskError: the graph has no such input.
    """
    reader = Reader()
    encoded, size = name.encode(), 4 * length
    (head, graph), kept, found = _parts(reader, model), bytearray(), False
    for field in reader.fields(graph):
        if field.number == _GRAPH_INPUT and _name_of(reader, field.body) == encoded:
            found = True
        else:
            kept += field.raw
    if not found:
        raise TaskError(f"predict graph has no input {name!r}")
    tensor = encode_varint(_TENSOR_DIMS << 3 | VARINT) + encode_varint(length)
    tensor += encode_varint(_TENSOR_TYPE << 3 | VARINT) + encode_varint(TENSOR_FLOAT)
    tensor += encode_bytes(_TENSOR_NAME, encoded) + encode_length(_TENSOR_RAW, size)
    kept += encode_length(_GRAPH_INITIALIZER, len(tensor) + size) + tensor
    return head + encode_length(_MODEL_GRAPH, len(kept) + size) + bytes(kept)


def standardise_input(
    model: bytes,
    name: str,
    means: Sequence[float],
    deviations: Sequence[float],
    shape: tuple[int, ...],
    *,
    largest: float,
) -> bytes:
    """Return ``model`` with nodes in front that standardise the input ``name``; a value that is nan becomes 0.

    Args:
        model: ModelProto bytes that :func:`check_graph` accepts.
        name: a float32 input of shape (batch, *shape).
        means: of each value of a sample.
        deviations: of each value of a sample, above 0.
        shape: of one sample.
        largest: standardised values are limited to plus and minus this.

    Raises:
        TaskError: the graph has no such input.
    """
    reader = Reader()
    old, new = name.encode(), f"{name}/standardised".encode()
    (head, graph), body, found = _parts(reader, model), bytearray(), False
    for field in reader.fields(graph):
        found = found or (field.number == _GRAPH_INPUT and _name_of(reader, field.body) == old)
        body += _reading(reader, field.body, old, new) if field.number == _GRAPH_NODE else field.raw
    if not found:
        raise TaskError(f"predict graph has no input {name!r}")

    def local(part: str) -> str:
        return f"{name}/{part}"

    nodes = [
        # Operators that every executor has; nan alone differs from itself.
        _node("Equal", (name, name), local("present")),
        _node("Sub", (name, local("means")), local("centred")),
        _node("Div", (local("centred"), local("deviations")), local("scaled")),
        _node("Max", (local("scaled"), local("least")), local("raised")),
        _node("Min", (local("raised"), local("largest")), local("limited")),
        _node("Where", (local("present"), local("limited"), local("zero")), new.decode()),
    ]
    constants = [
        _floats(local("means"), means, shape),
        _floats(local("deviations"), deviations, shape),
        *(
            _floats(local(part), (value,), ())
            for part, value in (("least", -largest), ("largest", largest), ("zero", 0))
        ),
    ]
    # Nodes have to be in the order of the computation, so these come first.
    whole = b"".join(nodes) + bytes(body) + b"".join(constants)
    return head + encode_bytes(_MODEL_GRAPH, whole)


def add_softmax(model: bytes, name: str, probabilities: str) -> bytes:
    """Return ``model`` with one more output, of the type of output ``name``: the softmax of that over its last axis."""
    reader, renamed = Reader(), encode_bytes(_MESSAGE_NAME, probabilities.encode())
    head, graph = _parts(reader, model)
    outputs = (field.body for field in reader.fields(graph) if field.number == _GRAPH_OUTPUT)
    same = next(output for output in outputs if _name_of(reader, output) == name.encode())
    output = b"".join(renamed if part.number == _MESSAGE_NAME else part.raw for part in reader.fields(same))
    more = _node("Softmax", (name,), probabilities) + encode_bytes(_GRAPH_OUTPUT, output)
    return head + encode_bytes(_MODEL_GRAPH, bytes(graph) + more)


def add_metadata(model: bytes, entries: Mapping[str, str]) -> bytes:
    """Return ``model`` with more entries in its metadata, a map of texts; the model's own bytes stay last."""
    pairs = (
        encode_bytes(_ENTRY_KEY, key.encode()) + encode_bytes(_ENTRY_VALUE, value.encode())
        for key, value in entries.items()
    )
    return b"".join(encode_bytes(_MODEL_METADATA, pair) for pair in pairs) + model


def without_metadata(model: bytes) -> tuple[bytes, dict[str, str]]:
    """Return ``model`` as it was before `add_metadata`, and the metadata.

    Raises:
        TaskError: the model is malformed.
    """
    reader = Reader()
    fields = list(reader.fields(memoryview(model)))
    texts = [
        {part.number: bytes(part.body).decode(errors="replace") for part in reader.fields(field.body)}
        for field in fields
        if field.number == _MODEL_METADATA
    ]
    rest = b"".join(field.raw for field in fields if field.number != _MODEL_METADATA)
    return rest, {text.get(_ENTRY_KEY, ""): text.get(_ENTRY_VALUE, "") for text in texts}


def replace_in_graph(
    model: bytes,
    kept: Sequence[bool],
    *,
    inputs: Mapping[str, Sequence[NamedShape]],
    outputs: Mapping[str, Sequence[NamedShape]],
) -> bytes:
    """Return ``model`` without some nodes, and with other float32 inputs and outputs in the place of some.

    Args:
        model: ModelProto bytes that :func:`check_graph` accepts.
        kept: for each node, in order, whether it stays.
        inputs: name of an input -> those that take its place.
        outputs: name of an output -> those that take its place.
    """
    reader = Reader()
    (head, graph), body, stays = _parts(reader, model), bytearray(), iter(kept)
    replaced = {_GRAPH_INPUT: inputs, _GRAPH_OUTPUT: outputs}
    for field in reader.fields(graph):
        names = replaced.get(field.number, {})
        name = _name_of(reader, field.body).decode() if names else ""
        if name in names:
            body += b"".join(_float_value(field.number, *each) for each in names[name])
        elif field.number != _GRAPH_NODE or next(stays):
            body += field.raw
    return head + encode_bytes(_MODEL_GRAPH, bytes(body))


def _parts(reader: Reader, model: bytes) -> tuple[bytes, memoryview]:
    """Return all fields of a model but its graph, and the graph."""
    head, graph = bytearray(), memoryview(b"")
    for field in reader.fields(memoryview(model)):
        if field.number == _MODEL_GRAPH:
            graph = field.body
        else:
            head += field.raw
    return bytes(head), graph


def _reading(reader: Reader, node: memoryview, old: bytes, new: bytes) -> bytes:
    """Return a node, as a field of its graph, that reads the value ``new`` where it read ``old``."""
    fields = [
        encode_bytes(_NODE_INPUT, new) if field.number == _NODE_INPUT and bytes(field.body) == old else bytes(field.raw)
        for field in reader.fields(node)
    ]
    return encode_bytes(_GRAPH_NODE, b"".join(fields))


def _node(operator: str, inputs: tuple[str, ...], output: str) -> bytes:
    parts = [encode_bytes(_NODE_INPUT, value.encode()) for value in inputs]
    parts += [encode_bytes(_NODE_OUTPUT, output.encode()), encode_bytes(_NODE_NAME, output.encode())]
    return encode_bytes(_GRAPH_NODE, b"".join(parts) + encode_bytes(_NODE_OPERATOR, operator.encode()))


def _floats(name: str, values: Sequence[float], shape: tuple[int, ...]) -> bytes:
    """Return a float32 constant, as a field of its graph."""
    dims = b"".join(encode_varint(_TENSOR_DIMS << 3 | VARINT) + encode_varint(size) for size in shape)
    kind = encode_varint(_TENSOR_TYPE << 3 | VARINT) + encode_varint(TENSOR_FLOAT)
    raw = struct.pack(f"<{len(values)}f", *values)
    return encode_bytes(
        _GRAPH_INITIALIZER, dims + kind + encode_bytes(_TENSOR_NAME, name.encode()) + encode_bytes(_TENSOR_RAW, raw)
    )


def _float_value(number: int, name: str, shape: tuple[int, ...] | None) -> bytes:
    """Return an input or output, as field ``number`` of its graph: a ValueInfoProto of a float32 tensor."""
    tensor = encode_varint(_TENSOR_KIND << 3 | VARINT) + encode_varint(TENSOR_FLOAT)
    if shape is not None:
        sizes = (encode_varint(_DIMENSION_VALUE << 3 | VARINT) + encode_varint(size) for size in shape)
        tensor += encode_bytes(_TENSOR_SHAPE, b"".join(encode_bytes(_SHAPE_DIMENSION, size) for size in sizes))
    kind = encode_bytes(_TYPE_TENSOR, tensor)
    return encode_bytes(number, encode_bytes(_MESSAGE_NAME, name.encode()) + encode_bytes(_VALUE_TYPE, kind))


def _allow(field: Field, allowed: frozenset[int], what: str, where: str) -> None:
    if field.number not in allowed:
        raise TaskError(f"{what} has field {field.number} in a {where} message, which task graphs may not use")


def _message(field: Field, what: str) -> memoryview:
    if field.wire_type != LENGTH:
        raise TaskError(f"{what} is not valid ONNX: field {field.number} is not a message")
    return field.body


def _name_of(reader: Reader, value_info: memoryview) -> bytes:
    name = b""
    for field in reader.fields(value_info):
        if field.number == _MESSAGE_NAME:
            name = bytes(field.body)
    return name


def _opset(reader: Reader, body: memoryview, what: str) -> int:
    version = 0
    for field in reader.fields(body):
        if field.number == _MESSAGE_NAME:
            _check_domain(bytes(_message(field, what)), what)
        else:
            version = field.value
    if not MIN_OPSET <= version <= MAX_OPSET:
        raise TaskError(f"{what} uses operator set {version}; {MIN_OPSET} to {MAX_OPSET} are supported")
    return version


def _check_domain(domain: bytes, what: str) -> None:
    if domain not in _STANDARD_DOMAINS:
        raise TaskError(
            f"{what} uses operator domain {domain[:40]!r}",
            hint="only ONNX's standard operators are allowed on a device",
        )


def _check_nodes(reader: Reader, graph: memoryview, what: str, *, is_body: bool = False) -> None:
    """Check the nodes and constants of a graph, or of a Scan's body, which has no Scan itself."""
    loops, lengths = [], dict[bytes, int]()
    for field in reader.fields(graph):
        _allow(field, _GRAPH_ALLOWED, what, "graph")
        if field.number == _GRAPH_NODE:
            operator, inputs, attributes = _check_node(reader, _message(field, what), what)
            if operator == b"Scan" or any(each.body is not None for each in attributes):
                loops.append((operator, inputs, attributes))
        elif field.number == _GRAPH_INITIALIZER:
            name, length = _check_tensor(reader, _message(field, what), what)
            lengths[name] = max(length, lengths.get(name, 0))
    for operator, inputs, attributes in loops:
        values = {each.name: each for each in attributes}
        body, count = (values.get(name, _Attribute()) for name in (b"body", b"num_scan_inputs"))
        # No third attribute: neither other axes nor other directions.
        if is_body or operator != b"Scan" or len(attributes) != 2 or body.body is None or count.body is not None:
            raise TaskError(f"{what} uses control flow (If, Loop, a Scan in another form), whose time has no bound")
        rows = inputs[-count.integer :] if count.integer > 0 else []
        # ONNX has all of them equally long.
        if not any(0 < lengths.get(name, 0) <= MAX_STEPS for name in rows):
            raise TaskError(
                f"{what} has a Scan without a constant input that tells its steps, 1 to {MAX_STEPS}",
                hint="shorten the sequences, and compile the task again",
            )
        _check_nodes(reader, body.body, what, is_body=True)


class _Attribute(NamedTuple):
    """An attribute's name, and its value if it is an integer or a graph."""

    name: bytes = b""
    integer: int = 0
    body: memoryview | None = None


def _check_node(reader: Reader, node: memoryview, what: str) -> tuple[bytes, list[bytes], list[_Attribute]]:
    """Check a node but for a graph of its own; return its operator, inputs and attributes."""
    operator, inputs, attributes = b"", list[bytes](), list[_Attribute]()
    for part in reader.fields(node):
        _allow(part, _NODE_ALLOWED, what, "node")
        if part.number == _NODE_DOMAIN:
            _check_domain(bytes(_message(part, what)), what)
        elif part.number == _NODE_INPUT:
            inputs.append(bytes(part.body))
        elif part.number == _NODE_OPERATOR:
            operator = bytes(part.body)
        elif part.number == _NODE_ATTRIBUTE:
            attributes.append(_check_attribute(reader, _message(part, what), what))
    return operator, inputs, attributes


def _check_attribute(reader: Reader, attribute: memoryview, what: str) -> _Attribute:
    found = _Attribute()
    for part in reader.fields(attribute):
        _allow(part, _ATTRIBUTE_ALLOWED, what, "attribute")
        if part.number in (_ATTRIBUTE_TENSOR, _ATTRIBUTE_TENSORS):
            _check_tensor(reader, _message(part, what), what)
        elif part.number == _ATTRIBUTE_GRAPH and found.body is not None:  # protobuf would merge the two
            raise TaskError(f"{what} has an attribute with two graphs")
        elif part.number == _ATTRIBUTE_GRAPH:
            found = found._replace(body=_message(part, what))
        elif part.number == _ATTRIBUTE_NAME:
            found = found._replace(name=bytes(part.body))
        elif part.number == _ATTRIBUTE_INTEGER:
            found = found._replace(integer=signed(part.value))
    return found


def _check_tensor(reader: Reader, tensor: memoryview, what: str) -> tuple[bytes, int]:
    """Check a tensor; return its name and its length along the first dimension."""
    name, shape = b"", list[int]()
    for part in reader.fields(tensor):
        external = part.number == _TENSOR_EXTERNAL
        if external or (part.number == _TENSOR_LOCATION and (part.wire_type != VARINT or part.value != 0)):
            raise TaskError(
                f"{what} stores a tensor in another file", hint="task graphs contain their constants themselves"
            )
        _allow(part, _TENSOR_ALLOWED, what, "tensor")
        if part.number == _TENSOR_NAME:
            name = bytes(part.body)
        elif part.number == _TENSOR_DIMS and not shape:
            shape = list(reader.integers(part))[:1]
    return name, shape[0] if shape else 0
