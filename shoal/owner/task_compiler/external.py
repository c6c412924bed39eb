"""Tasks for devices' own training code: from files of initial values, without torch and without the code itself.

A layout is an .npz file with an array of initial values for each parameter, as ``numpy.savez`` writes. In the vector shared
parameters come first and private ones last; otherwise its order is the file's. A folder of such files, with the same names and
shapes, gives a starting model each, for algorithms that begin with several.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from shoal import limits
from shoal.errors import TaskError, UsageError
from shoal.protocol.recipe import LocalTraining
from shoal.task.bundle import TaskBundle
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import PRIVATE, SEGMENT_ORDER, Kind, Parameter, TaskManifest, TensorSpec, TrainerName
from shoal.util.files import read_limited

if TYPE_CHECKING:
    from numpy.typing import NDArray

ORIGINS_FILE: Final = "origins.f32"
"""In a task's folder: the starting models without private parameters, (k, d) float32 little-endian."""
MAX_LAYOUT_BYTES: Final = 9 * limits.MAX_COORDINATES
"""Largest layout: of float64 values, with their names."""
MAX_ORIGINS_BYTES: Final = 16 * 4 * limits.MAX_COORDINATES
"""Largest file of starting models: sixteen of the largest."""
_SAMPLE: Final = re.compile(r"(\d{1,9}(?:x\d{1,9})*)(?::(\d{1,12}))?")


def external_task(
    source: Path,
    trainer: str,
    *,
    name: str,
    sample: str,
    answer: str = "",
    classes: int = 0,
    shared: Sequence[str] = (),
    private: Sequence[str] = (),
    data: DataDeclaration,
) -> tuple[TaskBundle, NDArray[np.float32]]:
    """Return a task and its starting models, (k, d) float32, without private parameters.

    Args:
        source: a layout, or a folder of them.
        trainer: NAME:VERSION.
        name: the task's.
        sample: shape of a sample such as 3x32x32, of whole numbers below LIMIT with :LIMIT; empty for one number a feature.
        answer: shape of a label: of a regression without ``classes``, of a sequence with them; empty for one label.
        classes: number of classes; 0 for a regression, or for as many as the data name labels.
        shared: beginnings of names of shared parameters.
        private: beginnings of names of private ones.
        data: the declaration of the data.

    Raises:
        TaskError: a file is no layout, layouts differ, or they don't make a task.
    """
    layouts = [_read(path) for path in (sorted(source.glob("*.npz")) if source.is_dir() else [source])]
    if not layouts:
        raise TaskError(f"{source} holds no layout", hint="numpy.savez writes one, an array for each parameter")
    names = {prefix: segment for segment, prefixes in (("shared", shared), (PRIVATE, private)) for prefix in prefixes}
    for prefix in names:
        if not any(parameter.startswith(prefix) for parameter in layouts[0]):
            raise TaskError(f"no parameter begins with {prefix!r}", hint=f"there are {', '.join(layouts[0])[:200]}")
    parameters = sorted(
        (
            Parameter(key, value.shape, next((names[prefix] for prefix in names if key.startswith(prefix)), "cluster"))
            for key, value in layouts[0].items()
        ),
        key=lambda p: SEGMENT_ORDER.index(p.segment),
    )
    shapes = {p.name: p.shape for p in parameters}
    if any({key: value.shape for key, value in layout.items()} != shapes for layout in layouts):
        raise TaskError("the layouts have other names or shapes than one another", hint="only their values may differ")
    vectors = np.stack([np.concatenate([layout[p.name].ravel() for p in parameters]) for layout in layouts])
    if not np.isfinite(vectors).all():
        raise TaskError("the layouts hold numbers that are not finite")
    shape, limit = _shape(sample or f"{len(data.features)}")
    classes = classes or len(data.labels)
    kind: Kind = "regression" if not classes else "sequence" if answer else "classification"
    wanted, _, version = trainer.partition(":")
    manifest = TaskManifest(
        name=name,
        opset=0,
        kind=kind,
        parameters=tuple(parameters),
        input=TensorSpec(shape, "int64" if limit else "float32", limit),
        label=TensorSpec(_shape(answer)[0] if answer else (), "int64" if classes else "float32", classes),
        hyper=LocalTraining(),
        score_digest=_NONE,
        grad_digest=_NONE,
        predict_digest=_NONE,
        data=data,
        trainer=TrainerName(wanted, version),
    )
    kept = vectors[0, manifest.federated_length :].astype("<f4").tobytes()
    return TaskBundle.seal_digests(manifest, b"", b"", b"", kept), vectors[:, : manifest.federated_length]


_NONE: Final = "0" * 64
"""In place of a digest, until the bundle is made."""


def read_origins(folder: Path, bundle: TaskBundle, count: int) -> NDArray[np.float32]:
    """Return the first starting models of a task in ``folder``, (count, d) float32.

    Raises:
        UsageError: there are fewer.
        TaskError: the file is not the task's.
    """
    length = bundle.manifest.federated_length
    data = read_limited(folder / ORIGINS_FILE, MAX_ORIGINS_BYTES)
    if len(data) % (4 * length):
        raise TaskError(f"{folder / ORIGINS_FILE} does not hold the task's parameters", hint="make the task again")
    found = np.frombuffer(data, "<f4").astype(np.float32).reshape(-1, length)
    if len(found) < count:
        raise UsageError(
            f"the algorithm begins with {count} models, and the task has initial values for {len(found)}",
            hint="make the task from a folder of layouts with other values each, or begin --from an earlier run's models",
        )
    return found[:count]


def _read(path: Path) -> dict[str, NDArray[np.float32]]:
    data = io.BytesIO(read_limited(path, MAX_LAYOUT_BYTES))
    try:
        with np.load(data, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name], np.float32) for name in archive.files}
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise TaskError(
            f"{path} is no layout: {str(error)[:200]}", hint="numpy.savez writes one, an array for each parameter"
        ) from None


def _shape(text: str) -> tuple[tuple[int, ...], int]:
    found = _SAMPLE.fullmatch(text)
    if found is None or text == "0":
        raise TaskError(
            f"{text!r} is no shape",
            hint="--sample 3x32x32, or 20:5000 for 20 whole numbers below 5000; or name --features",
        )
    return tuple(map(int, found[1].split("x"))), int(found[2] or 0)
