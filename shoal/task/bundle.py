"""A task bundle: the manifest and the three ONNX graphs that a device scores, trains and predicts with.

Container (little-endian): magic ``SHTK``, u16 version, u16 section count (4), four u32 section lengths, then the
sections task.toml, score.onnx, grad.onnx, predict.onnx and nothing after them.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from shoal.errors import TaskError, WireError
from shoal.task.manifest import (
    GRAPH_NAMES,
    MAX_MANIFEST_BYTES,
    LocalTraining,
    Parameter,
    TaskManifest,
    TensorSpec,
)
from shoal.task.onnx_graph import MAX_GRAPH_BYTES, check_graph
from shoal.types import Segment
from shoal.util.files import write_atomic

__all__ = ["LocalTraining", "Parameter", "TaskBundle", "TaskManifest", "TensorSpec"]

MAGIC: Final = b"SHTK"
CONTAINER_VERSION: Final = 1
_HEADER: Final = struct.Struct("<4sHH4I")
_SECTION_LIMITS: Final = (MAX_MANIFEST_BYTES, MAX_GRAPH_BYTES, MAX_GRAPH_BYTES, MAX_GRAPH_BYTES)
MAX_BUNDLE_BYTES: Final = _HEADER.size + sum(_SECTION_LIMITS)


@dataclass(frozen=True, slots=True)
class TaskBundle:
    """A checked task: an instance exists only if its graphs match the manifest and may be loaded.

    Attributes:
        manifest: parameter layout, data contract, training recipe and graph digests.
        score: ONNX bytes, (theta (d,), x, y) -> mean loss, correct count.
        grad: ONNX bytes, (theta, x, y) -> mean loss, gradient (d,).
        predict: ONNX bytes, (theta, x) -> outputs.
    """

    manifest: TaskManifest
    score: bytes = field(repr=False)
    grad: bytes = field(repr=False)
    predict: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name in GRAPH_NAMES:
            graph: bytes = getattr(self, name)
            if len(graph) > MAX_GRAPH_BYTES:
                raise TaskError(f"{name}.onnx has {len(graph)} bytes, more than the limit of {MAX_GRAPH_BYTES}")
            if hashlib.sha256(graph).hexdigest() != getattr(self.manifest, f"{name}_digest"):
                raise TaskError(f"{name}.onnx is not the graph that task.toml names", hint="compile the task again")
            if check_graph(graph, f"{name}.onnx") != self.manifest.opset:
                raise TaskError(f"{name}.onnx uses another operator set than task.toml names")

    @classmethod
    def seal_digests(cls, manifest: TaskManifest, score: bytes, grad: bytes, predict: bytes) -> TaskBundle:
        """Return a bundle whose manifest is ``manifest`` with the digests of these graphs."""
        digests = {
            f"{n}_digest": hashlib.sha256(g).hexdigest()
            for n, g in zip(GRAPH_NAMES, (score, grad, predict), strict=True)
        }
        return cls(replace(manifest, **digests), score, grad, predict)  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        """Coordinates d of the model."""
        return self.manifest.length

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The mask's segments in vector order: ``shared`` (if any), then ``cluster`` (if any)."""
        runs = groupby(self.manifest.parameters, key=lambda p: p.segment)
        return tuple(Segment(name, sum(p.length for p in run)) for name, run in runs)

    @property
    def digest(self) -> bytes:
        """SHA-256 over :meth:`to_bytes`, 32 bytes: the task's identity."""
        hasher = hashlib.sha256()
        for part in self._parts():
            hasher.update(part)
        return hasher.digest()

    def to_bytes(self) -> bytes:
        """Return the container; :meth:`from_bytes` accepts exactly these bytes."""
        return b"".join(self._parts())

    def _parts(self) -> tuple[bytes, ...]:
        sections = (self.manifest.to_toml().encode(), self.score, self.grad, self.predict)
        header = _HEADER.pack(MAGIC, CONTAINER_VERSION, len(sections), *(len(section) for section in sections))
        return (header, *sections)

    @classmethod
    def from_bytes(cls, data: bytes) -> TaskBundle:
        """Read a container.

        Raises:
            WireError: the container is malformed, or task.toml is not in its one canonical form.
            TaskError: manifest or graphs are refused.
        """
        if len(data) < _HEADER.size or len(data) > MAX_BUNDLE_BYTES:
            raise WireError(f"task bundle has {len(data)} bytes, not {_HEADER.size} to {MAX_BUNDLE_BYTES}")
        magic, version, count, *sizes = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise WireError("not a task bundle")
        if version != CONTAINER_VERSION or count != len(_SECTION_LIMITS):
            raise WireError(f"task bundle version {version} with {count} sections is not supported")
        for size, limit in zip(sizes, _SECTION_LIMITS, strict=True):
            if size > limit:
                raise WireError(f"task bundle has a section of {size} bytes, more than {limit}")
        if _HEADER.size + sum(sizes) != len(data):
            raise WireError("task bundle's length does not match its section lengths")
        view, at, sections = memoryview(data), _HEADER.size, []
        for size in sizes:
            sections.append(bytes(view[at : at + size]))
            at += size
        manifest = TaskManifest.from_toml(sections[0])
        # The digest is the task's identity, so one manifest must not have two encodings.
        if manifest.to_toml().encode() != sections[0]:
            raise WireError("task.toml in the bundle is not in canonical form")
        return cls(manifest, *sections[1:])

    def to_dir(self, path: Path) -> None:
        """Write score.onnx, grad.onnx and predict.onnx, and last task.toml, which names their digests.

        Raises:
            TaskError: the folder can't be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TaskError(f"can't make {path}: {error.strerror}", hint="give a folder that can be written") from None
        for name in GRAPH_NAMES:
            write_atomic(path / f"{name}.onnx", getattr(self, name))
        write_atomic(path / "task.toml", self.manifest.to_toml().encode())

    @classmethod
    def from_dir(cls, path: Path) -> TaskBundle:
        """Read the four files of a task directory.

        Raises:
            TaskError: a file is missing, too big, or does not belong to the others.
        """
        manifest = TaskManifest.from_toml(_read(path / "task.toml", MAX_MANIFEST_BYTES))
        return cls(manifest, *(_read(path / f"{name}.onnx", MAX_GRAPH_BYTES) for name in GRAPH_NAMES))


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise TaskError(
            f"can't read {path}: {error.strerror}", hint="give a task directory made by 'shoal-fleet task compile'"
        ) from None
    if len(data) > limit_bytes:
        raise TaskError(f"{path} is bigger than {limit_bytes} bytes")
    return data
