"""The task manifest: parameter layout, data contract, hyper-parameters and graph digests, with its TOML form."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from shoal import limits
from shoal.errors import ConfigError, DocumentError, OutOfRangeError, TaskError
from shoal.protocol.recipe import LocalTraining
from shoal.task.data_declaration import NO_DECLARATION, DataDeclaration
from shoal.types import check_name
from shoal.util.state_codec import decode_state, encode_state

FORMAT_VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 256 * 1024
STATISTICS_STEP: Final = 32
"""A device's statistics are filled up with zeros to a multiple of this, so that their number does not tell that of features."""
MAX_PARAMETERS: Final = 4096
"""Most parameter tensors of one model."""

MAX_RANK: Final = 8
MAX_SAMPLE_VALUES: Final = 1 << 24
"""Most numbers in one sample or one label."""

GRAPH_NAMES: Final = ("score", "grad", "predict")

PRIVATE: Final = "private"
"""The segment of parameters that never leave a device."""

SEGMENT_ORDER: Final = ("shared", "cluster", PRIVATE)
"""The segments in the order of the flat vector, so that the coordinates that devices upload come first."""

_PARAMETER_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_HEX_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

Kind = Literal["classification", "regression", "sequence"]
KINDS: Final[tuple[Kind, ...]] = ("classification", "regression", "sequence")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the model inside the flat vector.

    Attributes:
        name: torch's parameter name.
        shape: its shape; () is a scalar.
        segment: ``shared``, ``cluster`` or ``private``.
    """

    name: str
    shape: tuple[int, ...]
    segment: str

    def __post_init__(self) -> None:
        if not _PARAMETER_NAME.fullmatch(self.name):
            raise TaskError(f"parameter name {self.name[:80]!r} is not valid")
        if self.segment not in SEGMENT_ORDER:
            raise TaskError(
                f"parameter {self.name!r} has segment {self.segment!r}, not one of {', '.join(SEGMENT_ORDER)}"
            )
        _check_shape(self.shape, limits.MAX_COORDINATES, f"parameter {self.name!r}")

    @property
    def length(self) -> int:
        """Coordinates of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and range of one sample or label.

    Attributes:
        shape: without the batch dimension.
        dtype: ``float32`` or ``int64``.
        limit: for int64, values are in [0, limit); 0 sets no bound.
    """

    shape: tuple[int, ...]
    dtype: str
    limit: int = 0

    def __post_init__(self) -> None:
        _check_shape(self.shape, MAX_SAMPLE_VALUES, "data contract")
        if self.dtype not in ("float32", "int64"):
            raise TaskError(f"dtype {self.dtype!r} is not supported", hint="use float32 or int64")
        if type(self.limit) is not int or not 0 <= self.limit <= 1 << 40:
            raise TaskError(f"limit {self.limit!r} is not an integer from 0 to 2^40")


@dataclass(frozen=True, slots=True)
class TrainerName:
    """Name and version of the training code that devices have of their own; they only compare them."""

    name: str
    version: str

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("version", self.version)):
            if not _PARAMETER_NAME.fullmatch(text):
                raise TaskError(
                    f"a trainer's {what} {text[:80]!r} is not valid", hint="1 to 200 of A-Z, a-z, 0-9, '.', '_' and '-'"
                )


@dataclass(frozen=True, slots=True)
class TaskManifest:
    """A task's description: all of it except the graphs.

    Attributes:
        name: a-z, 0-9 and '-'.
        opset: ONNX operator set of all three graphs.
        kind: kind of labels: a class, a number, or a class for each position of a sequence.
        parameters: in the order of the flat vector: all ``shared`` ones first, all ``private`` ones last.
        input: one sample.
        label: one label; ``limit`` is the number of classes.
        hyper: default local training.
        score_digest: SHA-256 of score.onnx, lower-case hex.
        grad_digest: SHA-256 of grad.onnx.
        predict_digest: SHA-256 of predict.onnx.
        format_version: of this structure.
        data: names of columns and classes, and the preparation of the samples.
        trainer: the devices' own training code; None if they compute the task's graphs. With it the graphs are empty.
    """

    name: str
    opset: int
    kind: Kind
    parameters: tuple[Parameter, ...]
    input: TensorSpec
    label: TensorSpec
    hyper: LocalTraining
    score_digest: str
    grad_digest: str
    predict_digest: str
    format_version: int = FORMAT_VERSION
    data: DataDeclaration = NO_DECLARATION
    trainer: TrainerName | None = None

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise TaskError(
                f"task format {self.format_version!r} is not supported",
                hint="update shoal on this machine or recompile",
            )
        try:
            check_name(self.name, "task name")
        except ConfigError as error:
            raise TaskError(str(error), hint=error.hint) from None
        if self.kind not in KINDS:
            raise TaskError(f"task kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if type(self.opset) is not int:
            raise TaskError(f"opset {self.opset!r} is not an integer")
        for digest in (self.score_digest, self.grad_digest, self.predict_digest):
            if not _HEX_DIGEST.fullmatch(digest):
                raise TaskError("a graph digest is not 64 lower-case hex digits")
        self._check_parameters()
        rank = 1 if self.kind == "sequence" else 0
        if self.kind == "regression":
            if self.label.dtype != "float32" or self.label.limit:
                raise TaskError("a regression task needs float32 labels without a limit")
        elif self.label.dtype != "int64" or len(self.label.shape) != rank or self.label.limit < 2:
            raise TaskError(
                f"a {self.kind} task needs int64 labels of rank {rank} and at least 2 classes",
                hint="one label a sample is a classification, one for each position a sequence, numbers are a regression",
            )
        self._check_data()

    def _check_data(self) -> None:
        data, width = self.data, math.prod(self.input.shape)
        if data.features and len(data.features) != width:
            raise TaskError(
                f"the task declares {len(data.features)} features, and a sample has {width} values",
                hint="give the model as many inputs as there are features, such as --option inputs=NUMBER",
            )
        if data.labels and (self.kind != "classification" or len(data.labels) != self.label.limit):
            classes = f"{self.label.limit} classes" if self.kind == "classification" else "no named classes"
            raise TaskError(
                f"the task declares {len(data.labels)} labels, and a {self.kind} model of this size has {classes}",
                hint="give the model as many classes as there are labels, such as --option classes=NUMBER",
            )
        if data.target and self.kind != "regression":
            raise TaskError(f"a {self.kind} task has no range of targets", hint="leave --target away")
        if data.standardise != "off" and self.input.dtype != "float32":
            raise TaskError("samples of whole numbers can't be standardised", hint="declare --standardise off")
        if data.standardise == "federated" and any(p.segment == "shared" for p in self.parameters):
            raise TaskError(
                "federated standardisation does not go with shared layers", hint="declare --standardise local"
            )
        if data.standardise == "federated" and self.federated_length < statistics_length(width):
            raise TaskError(
                f"federated standardisation of {width} features needs {statistics_length(width)} coordinates, and devices "
                f"upload {self.federated_length}",
                hint="declare --standardise local, or train a larger model",
            )

    def _check_parameters(self) -> None:
        if not 1 <= len(self.parameters) <= MAX_PARAMETERS:
            raise TaskError(f"a task has 1 to {MAX_PARAMETERS} parameter tensors, not {len(self.parameters)}")
        if len({p.name for p in self.parameters}) != len(self.parameters):
            raise TaskError("two parameters have the same name")
        order = [SEGMENT_ORDER.index(p.segment) for p in self.parameters]
        if order != sorted(order):
            raise TaskError(f"parameters must be in the order of their segments: {', '.join(SEGMENT_ORDER)}")
        if not self.federated_length:
            raise TaskError("every parameter of the task is private", hint="leave some to train together")
        if self.length > limits.MAX_COORDINATES:
            raise TaskError(f"the model has {self.length} coordinates, more than {limits.MAX_COORDINATES}")

    @property
    def length(self) -> int:
        """Coordinates of the flat vector, d + p: those that are federated, then those that are private."""
        return sum(p.length for p in self.parameters)

    @property
    def federated_length(self) -> int:
        """Coordinates d that devices upload and average: the first ones of the flat vector."""
        return self.length - self.private_length

    @property
    def private_length(self) -> int:
        """Coordinates p that stay on each device: the last ones of the flat vector."""
        return sum(p.length for p in self.private_parameters)

    @property
    def private_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that stay on each device."""
        return tuple(p for p in self.parameters if p.segment == PRIVATE)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Coordinates of each tensor, in the order of the flat vector."""
        return tuple(p.length for p in self.parameters)

    @property
    def statistics_size(self) -> int:
        """Rows of the matrix that hides a device's statistics: their number, up to a multiple of 32 where the vector has room."""
        return min(self.federated_length, -(-statistics_length(self.width) // STATISTICS_STEP) * STATISTICS_STEP)

    @property
    def width(self) -> int:
        """Values of one sample."""
        return math.prod(self.input.shape)

    def to_toml(self) -> str:
        """Return the canonical TOML text of this manifest: equal manifests give equal bytes."""
        document = encode_state(
            _TomlFile(
                format_version=self.format_version,
                name=self.name,
                opset=self.opset,
                kind=self.kind,
                input=self.input,
                label=self.label,
                hyper=self.hyper,
                digests=_Digests(self.score_digest, self.grad_digest, self.predict_digest),
                parameters=self.parameters,
            )
        ).document
        blocks = [_pairs({k: v for k, v in document.items() if k not in _TABLES})]
        blocks += [f"[{name}]\n{_pairs(document[name])}" for name in _TABLES[:-1]]
        if self.data != NO_DECLARATION:  # tasks without one have the bytes, and the digest, that they had before
            declared = {k: v for k, v in encode_state(self.data).document.items() if k != "target" or v}
            blocks += [f"[{_DATA}]\n{_pairs(declared)}"]
        if self.trainer is not None:
            blocks += [f"[{_TRAINER}]\n{_pairs(encode_state(self.trainer).document)}"]
        blocks += [f"[[parameters]]\n{_pairs(p)}" for p in document["parameters"]]
        return "\n\n".join(blocks) + "\n"

    @classmethod
    def from_toml(cls, data: bytes) -> TaskManifest:
        """Read a manifest.

        Raises:
            TaskError: the text is too long, not TOML, has a missing, unknown or duplicated key, or a value out of range.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise TaskError(f"task.toml has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        try:
            document = tomllib.loads(data.decode("utf-8"))
            table, trainer = document.pop(_DATA, None), document.pop(_TRAINER, None)
            if isinstance(table, dict):
                table.setdefault("target", [])  # tasks without one have the bytes that they had before
            file = decode_state(_TomlFile, document)
            declared = NO_DECLARATION if table is None else decode_state(DataDeclaration, table)
            named = None if trainer is None else decode_state(TrainerName, trainer)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"task.toml is not valid TOML: {str(error)[:200]}") from None
        except (DocumentError, OutOfRangeError) as error:
            raise TaskError(f"task.toml: {error}") from None
        return cls(
            name=file.name,
            opset=file.opset,
            kind=file.kind,  # type: ignore[arg-type]  # __post_init__ checks it
            parameters=file.parameters,
            input=file.input,
            label=file.label,
            hyper=file.hyper,
            score_digest=file.digests.score,
            grad_digest=file.digests.grad,
            predict_digest=file.digests.predict,
            format_version=file.format_version,
            data=declared,
            trainer=named,
        )


def statistics_length(width: int) -> int:
    """Return the coordinates that a device's statistics of ``width`` features take: see `edge_client.learning.statistics`."""
    return 2 * width + 1


@dataclass(frozen=True, slots=True)
class _Digests:
    score: str
    grad: str
    predict: str


@dataclass(frozen=True, slots=True)
class _TomlFile:
    """task.toml: its keys and tables in the order in which they are written."""

    format_version: int
    name: str
    opset: int
    kind: str
    input: TensorSpec
    label: TensorSpec
    hyper: LocalTraining
    digests: _Digests
    parameters: tuple[Parameter, ...]


_TABLES: Final = ("input", "label", "hyper", "digests", "parameters")
_DATA: Final = "data"
"""The table of the declaration, which is left out if there is none."""
_TRAINER: Final = "trainer"
"""The table of the devices' own training code, likewise."""


def _pairs(table: Mapping[str, object]) -> str:
    """Return a table's lines; its strings, numbers and lists are the same in JSON and in TOML."""
    return "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items())


def _check_shape(shape: tuple[int, ...], most: int, what: str) -> None:
    if len(shape) > MAX_RANK or any(type(size) is not int or not 1 <= size <= most for size in shape):
        raise TaskError(f"{what} has shape {str(shape)[:80]}: up to {MAX_RANK} dimensions of at least 1 are allowed")
    if math.prod(shape) > most:
        raise TaskError(f"{what} holds {math.prod(shape)} numbers, more than {most}")
