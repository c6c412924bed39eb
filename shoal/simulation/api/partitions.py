"""Partitions, the data of `simulate`'s devices as a caller gives it: checked, and turned into the engine's population."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.errors import DataError, UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import Kind

Partition = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""One device's samples: ``train``, and optionally ``validation`` and ``test``, each (x, y)."""

SHARES: Final = ("train", "validation", "test")
SPLIT_HINT: Final = "shoal.split(x, y, ...) cuts every partition into train, validation and test"


def population_of(partitions: Sequence[Partition], kind: Kind, *, integer_inputs: bool) -> Population:
    """Return partitions as the engine takes them.

    Args:
        partitions: one a device; shapes of x (n, ...) and y (n, ...) are the same in all of them.
        kind: of task: classes become int64, regression targets float32.
        integer_inputs: x becomes int64, for models with embeddings; float32 otherwise.

    Raises:
        UsageError: there are no partitions, or one is not a mapping with a share ``train``.
        DataError: a share is empty that must not be, holds NaN, or does not fit the others.
    """
    if isinstance(partitions, Mapping) or not isinstance(partitions, Sequence) or not len(partitions):
        raise UsageError(
            "partitions must be a list of at least one mapping with train, validation and test", hint=SPLIT_HINT
        )
    shards: dict[str, list[Shard]] = {name: [] for name in SHARES}
    for i, partition in enumerate(partitions):
        if not isinstance(partition, Mapping) or "train" not in partition:
            raise UsageError(f"partition {i} is not a mapping with a share 'train'", hint=SPLIT_HINT)
        if unknown := sorted(set(map(str, partition)) - set(SHARES)):
            raise UsageError(f"partition {i} has an unknown share {unknown[0]!r}", hint=f"shares: {', '.join(SHARES)}")
        for name in SHARES:
            given = partition.get(name)
            shard = Shard.none() if given is None else _shard(given, f"partition {i}, {name}", kind, integer_inputs)
            shards[name].append(shard)
        if not len(shards["train"][-1]):
            raise DataError(f"partition {i} has no training samples", hint=SPLIT_HINT)
    _check_shapes(shards)
    return Population(tuple(shards["train"]), tuple(shards["validation"]), tuple(shards["test"]))


def require_validation(population: Population, strategy: str) -> None:
    """Return if every device has validation samples.

    Raises:
        DataError: one has none.
    """
    for i, shard in enumerate(population.validation):
        if not len(shard):
            raise DataError(
                f"{strategy} tries splits on devices' validation shares, and partition {i} has none",
                hint=f"{SPLIT_HINT}; or set validate to off, which trusts every split",
            )


def check_labels(population: Population, classes: int) -> None:
    """Return if every label is one of the model's classes.

    Raises:
        DataError: one is not.
    """
    for name in SHARES:
        for i, shard in enumerate(getattr(population, name)):
            if len(shard) and not 0 <= shard.y.min() <= shard.y.max() < classes:
                bad = int(shard.y.min() if shard.y.min() < 0 else shard.y.max())
                raise DataError(
                    f"partition {i}, {name}: label {bad} is out of range: the model has {classes} outputs",
                    hint=f"labels are 0 to {classes - 1}; give the model an output for each class",
                )


def _shard(given: Any, place: str, kind: Kind, integer_inputs: bool) -> Shard:
    if not isinstance(given, Sequence) or len(given) != 2:
        raise UsageError(f"{place}: not a pair of arrays (x, y)", hint=SPLIT_HINT)
    x, y = (_array(values, f"{place}: {name}") for values, name in zip(given, "xy", strict=True))
    if not x.ndim or not y.ndim or len(x) != len(y):
        raise DataError(f"{place}: x of shape {x.shape} and y of shape {y.shape}: they need one entry a sample each")
    if not len(x):
        return Shard.none()
    inputs = (
        _integers(x, f"{place}: x", "a model with embeddings takes indices")
        if integer_inputs
        else _floats(x, f"{place}: x")
    )
    if kind == "regression":
        return Shard(inputs, _floats(y, f"{place}: y"))
    rank = 2 if kind == "sequence" else 1
    if y.ndim != rank:
        raise DataError(
            f"{place}: y has shape {y.shape}, and a {kind} takes {'(n, positions)' if rank == 2 else '(n,)'}",
            hint="y holds the numbers of classes; flatten it with y.ravel(), or one-hot rows with y.argmax(1)",
        )
    return Shard(inputs, _integers(y, f"{place}: y", "for targets that are numbers give task='regression'"))


def _array(values: Any, place: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:  # rows of different lengths; tensors that are not in main memory
        raise DataError(f"{place} is no array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{place} holds {array.dtype}, not numbers")
    return array


def _floats(values: NDArray[Any], place: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(floats).all():
        raise DataError(f"{place} holds NaN, infinities or numbers too large for float32")
    return floats


def _integers(values: NDArray[Any], place: str, hint: str) -> NDArray[np.int64]:
    finite = values.dtype.kind != "f" or bool(np.isfinite(values).all())
    with np.errstate(invalid="ignore"):  # numbers beyond int64 become others, and are refused below
        integers = np.ascontiguousarray(values, np.int64) if finite else None
    if integers is None or (values.dtype.kind == "f" and not (integers == values).all()):
        raise DataError(f"{place} holds numbers that are not whole", hint=hint)
    return integers


def _check_shapes(shards: Mapping[str, Sequence[Shard]]) -> None:
    first = shards["train"][0]
    for name in SHARES:
        for i, shard in enumerate(shards[name]):
            for part in "xy":
                own, expected = getattr(shard, part).shape[1:], getattr(first, part).shape[1:]
                if len(shard) and own != expected:
                    raise DataError(
                        f"partition {i}, {name}: a sample of {part} has shape {own}, and in partition 0 {expected}",
                        hint="all devices train one model, so all samples have one shape",
                    )
