"""A task bundle: the manifest, the three ONNX graphs that a device scores, trains and predicts with, and private values.

Container (little-endian): magic ``SHTK``, u16 version, u16 section count, a u32 length for each section, then the sections
task.toml, score.onnx, grad.onnx, predict.onnx and nothing after them. A task with private parameters has a fifth section,
private.f32: their initial values, float32. The graphs of a task that names a trainer are empty.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from shoal import limits
from shoal.digests import sha256
from shoal.errors import TaskError, WireError
from shoal.protocol.recipe import LocalTraining
from shoal.task.manifest import GRAPH_NAMES, MAX_MANIFEST_BYTES, PRIVATE, Parameter, TaskManifest, TensorSpec
from shoal.task.onnx_graph import MAX_GRAPH_BYTES, check_graph
from shoal.types import Segment
from shoal.util.files import write_atomic

__all__ = ["LocalTraining", "Parameter", "TaskBundle", "TaskManifest", "TensorSpec"]

MAGIC: Final = b"SHTK"
CONTAINER_VERSION: Final = 1
PRIVATE_FILE: Final = "private.f32"
"""Name of the file with the initial values of the private parameters, in a task directory."""

_HEADER: Final = struct.Struct("<4sHH")
_SIZE_BYTES: Final = 4
_GRAPH_SECTIONS: Final = 1 + len(GRAPH_NAMES)
_SECTION_LIMITS: Final = (
    MAX_MANIFEST_BYTES,
    *(MAX_GRAPH_BYTES for _ in GRAPH_NAMES),
    4 * limits.MAX_COORDINATES,
)
MAX_BUNDLE_BYTES: Final = _HEADER.size + _SIZE_BYTES * len(_SECTION_LIMITS) + sum(_SECTION_LIMITS)


@dataclass(frozen=True, slots=True)
class TaskBundle:
    """A checked task: an instance exists only if its graphs match the manifest and may be loaded.

    Attributes:
        manifest: parameter layout, data contract, training recipe and graph digests.
        score: ONNX bytes, (theta, x, y) -> mean loss, correct count; theta is (d + p,), private coordinates last.
        grad: ONNX bytes, (theta, x, y) -> mean loss, gradient (d + p,).
        predict: ONNX bytes, (theta, x) -> outputs.
        private: initial values of the private coordinates, (p,) float32 little-endian; empty if there are none.
    """

    manifest: TaskManifest
    score: bytes = field(repr=False)
    grad: bytes = field(repr=False)
    predict: bytes = field(repr=False)
    private: bytes = field(repr=False, default=b"")

    def __post_init__(self) -> None:
        for name in GRAPH_NAMES:
            graph: bytes = getattr(self, name)
            if self.manifest.trainer is not None and graph:
                raise TaskError(f"a task for a trainer has no {name}.onnx", hint="make the task again")
            if len(graph) > MAX_GRAPH_BYTES:
                raise TaskError(f"{name}.onnx has {len(graph)} bytes, more than the limit of {MAX_GRAPH_BYTES}")
            if sha256(graph).hex() != getattr(self.manifest, f"{name}_digest"):
                raise TaskError(f"{name}.onnx is not the graph that task.toml names", hint="compile the task again")
            if self.manifest.trainer is None and check_graph(graph, f"{name}.onnx") != self.manifest.opset:
                raise TaskError(f"{name}.onnx uses another operator set than task.toml names")
        if len(self.private) != 4 * self.manifest.private_length:
            raise TaskError(
                f"{len(self.private)} bytes of initial values for {self.manifest.private_length} private coordinates",
                hint="compile the task again",
            )

    @classmethod
    def seal_digests(
        cls, manifest: TaskManifest, score: bytes, grad: bytes, predict: bytes, private: bytes = b""
    ) -> TaskBundle:
        """Return a bundle whose manifest is ``manifest`` with the digests of these graphs."""
        digests = {f"{n}_digest": sha256(g).hex() for n, g in zip(GRAPH_NAMES, (score, grad, predict), strict=True)}
        return cls(replace(manifest, **digests), score, grad, predict, private)  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        """Coordinates d + p of the model, with those that are private."""
        return self.manifest.length

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The mask's segments in vector order, d coordinates: ``shared`` (if any), then ``cluster`` (if any)."""
        runs = groupby(self.manifest.parameters, key=lambda p: p.segment)
        return tuple(Segment(name, sum(p.length for p in run)) for name, run in runs if name != PRIVATE)

    @property
    def digest(self) -> bytes:
        """SHA-256 over :meth:`to_bytes`, 32 bytes: the task's identity."""
        return sha256(*self._parts())

    def to_bytes(self) -> bytes:
        """Return the container; :meth:`from_bytes` accepts exactly these bytes."""
        return b"".join(self._parts())

    def _parts(self) -> tuple[bytes, ...]:
        sections = [self.manifest.to_toml().encode(), self.score, self.grad, self.predict]
        if self.private:
            sections.append(self.private)
        sizes = struct.pack(f"<{len(sections)}I", *(len(section) for section in sections))
        return (_HEADER.pack(MAGIC, CONTAINER_VERSION, len(sections)) + sizes, *sections)

    @classmethod
    def from_bytes(cls, data: bytes) -> TaskBundle:
        """Read a container.

        Raises:
            WireError: the container is malformed, or task.toml is not in its one canonical form.
            TaskError: manifest or graphs are refused.
        """
        if len(data) < _HEADER.size or len(data) > MAX_BUNDLE_BYTES:
            raise WireError(f"task bundle has {len(data)} bytes, not {_HEADER.size} to {MAX_BUNDLE_BYTES}")
        magic, version, count = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise WireError("not a task bundle")
        if version != CONTAINER_VERSION or count not in (_GRAPH_SECTIONS, len(_SECTION_LIMITS)):
            raise WireError(f"task bundle version {version} with {count} sections is not supported")
        head = _HEADER.size + _SIZE_BYTES * count
        if len(data) < head:
            raise WireError("task bundle ends inside its section lengths")
        sizes = struct.unpack_from(f"<{count}I", data, _HEADER.size)
        for size, limit in zip(sizes, _SECTION_LIMITS, strict=False):
            if size > limit:
                raise WireError(f"task bundle has a section of {size} bytes, more than {limit}")
        if head + sum(sizes) != len(data):
            raise WireError("task bundle's length does not match its section lengths")
        if count > _GRAPH_SECTIONS and not sizes[-1]:
            raise WireError("task bundle has an empty section of private values")  # it would have two encodings
        view, at, sections = memoryview(data), head, []
        for size in sizes:
            sections.append(bytes(view[at : at + size]))
            at += size
        manifest = TaskManifest.from_toml(sections[0])
        # The digest is the task's identity, so one manifest must not have two encodings.
        if manifest.to_toml().encode() != sections[0]:
            raise WireError("task.toml in the bundle is not in canonical form")
        return cls(manifest, *sections[1:])

    def to_dir(self, path: Path) -> None:
        """Write score.onnx, grad.onnx, predict.onnx and private.f32, and last task.toml, which names the graphs' digests.

        A task without private parameters has no private.f32; that of another task is removed.

        Raises:
            TaskError: the folder can't be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TaskError(f"can't make {path}: {error.strerror}", hint="give a folder that can be written") from None
        for name in GRAPH_NAMES if self.manifest.trainer is None else ():
            write_atomic(path / f"{name}.onnx", getattr(self, name))
        if self.private:
            write_atomic(path / PRIVATE_FILE, self.private)
        else:
            (path / PRIVATE_FILE).unlink(missing_ok=True)
        write_atomic(path / "task.toml", self.manifest.to_toml().encode())

    @classmethod
    def from_dir(cls, path: Path) -> TaskBundle:
        """Read the files of a task directory.

        Raises:
            TaskError: a file is missing, too big, or does not belong to the others.
        """
        manifest = TaskManifest.from_toml(_read(path / "task.toml", MAX_MANIFEST_BYTES))
        graphs = manifest.trainer is None
        sections = [_read(path / f"{name}.onnx", MAX_GRAPH_BYTES) if graphs else b"" for name in GRAPH_NAMES]
        if manifest.private_length:
            sections.append(_read(path / PRIVATE_FILE, 4 * manifest.private_length))
        return cls(manifest, *sections)


def read_manifest(path: Path) -> TaskManifest:
    """Return the manifest of a task, from its directory or from its file task.toml alone; the graphs are not looked at.

    Raises:
        TaskError: the file is missing, too big, or no manifest.
    """
    return TaskManifest.from_toml(_read(path / "task.toml" if path.is_dir() else path, MAX_MANIFEST_BYTES))


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
