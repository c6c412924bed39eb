"""`split`, which deals a data set of the caller's own to devices as partitions for `shoal.simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge_client.learning.data import MIN_SAMPLES
from shoal.errors import DataError, UsageError
from shoal.simulation.api.partitions import SHARES
from shoal.simulation.shares import CFL_SHARES, cut, dirichlet_rows
from shoal.util.extensions import SPLITS_GROUP, extension_names, load_extension

Arrays = tuple[NDArray[Any], NDArray[Any]]
Rows = list[NDArray[np.int64]]


def split(x: ArrayLike, y: ArrayLike, kind: str, *, devices: int = 20, seed: int = 0) -> list[dict[str, Arrays]]:
    """Deal every sample to one of ``devices`` partitions, each cut 60/20/20 into train, validation and test.

    Args:
        x: shape (n, ...).
        y: shape (n, ...).
        kind: ``iid``, random samples in equal numbers; ``dirichlet:ALPHA``, each class by a Dirichlet draw, more skewed
            the smaller ALPHA is; ``shards:N``, samples sorted by y and cut, N pieces a device (McMahan et al.); or
            ``NAME`` or ``NAME:VALUE`` of an installed package's function (`shoal.util.extensions`). It is called with y,
            ``devices``, VALUE as text and a numpy generator, and returns each device's places in y, (k,) int64.
        devices: number of partitions.
        seed: equal seeds give equal partitions.

    Raises:
        UsageError: there is no such kind, or no such split gives each device at least five samples.
        DataError: x and y differ in length, or y does not fit the kind.
    """
    inputs, labels = np.asarray(x), np.asarray(y)
    if not inputs.ndim or not labels.ndim or len(inputs) != len(labels):
        raise DataError(f"x of shape {inputs.shape} and y of shape {labels.shape}: they need one entry a sample each")
    name, _, value = kind.partition(":")
    deal = _KINDS.get(name) or load_extension(SPLITS_GROUP, name)
    if deal is None or (name in _KINDS and bool(value) != (name != "iid")):
        others = "".join(f", {other}" for other in extension_names(SPLITS_GROUP))
        raise UsageError(
            f"no split {kind!r}", hint=f"there are iid, dirichlet:ALPHA (dirichlet:0.3), shards:N (shards:2){others}"
        )
    if devices < 1 or devices * MIN_SAMPLES > len(inputs):
        raise UsageError(
            f"{len(inputs)} samples can't give each of {devices} devices {MIN_SAMPLES}", hint="take fewer devices"
        )
    rows = deal(labels, devices, value, np.random.default_rng(seed))
    if name not in _KINDS:
        _check_rows(rows, len(labels), devices, name)
    found = []
    for mine in rows:
        shards = cut(inputs, labels, mine, CFL_SHARES)
        found.append({share: (s.x, s.y) for share, s in zip(SHARES, shards, strict=True)})
    return found


def _check_rows(rows: Any, samples: int, devices: int, name: str) -> None:
    """Check what a package's function has dealt.

    Raises:
        DataError: it is not one list of places for each device, a place is out of range or dealt twice, or a device has too few.
    """
    try:
        dealt = [np.asarray(mine, np.int64) for mine in rows]
        places = np.concatenate(dealt)
    except (TypeError, ValueError) as error:
        raise DataError(f"split {name!r} gave no lists of places: {error}") from error
    if len(dealt) != devices or any(mine.ndim != 1 for mine in dealt):
        raise DataError(f"split {name!r} gave {len(dealt)} lists of places for {devices} devices")
    if places.min() < 0 or places.max() >= samples or len(np.unique(places)) != len(places):
        raise DataError(f"split {name!r} dealt a sample twice, or one that is not there")
    if min(map(len, dealt)) < MIN_SAMPLES:
        raise DataError(f"split {name!r} leaves a device fewer than {MIN_SAMPLES} samples")


def _iid(y: NDArray[Any], devices: int, _value: str, rng: np.random.Generator) -> Rows:
    return np.array_split(rng.permutation(len(y)), devices)


def _dirichlet(y: NDArray[Any], devices: int, value: str, rng: np.random.Generator) -> Rows:
    alpha = _number(float, "ALPHA", value)
    if y.ndim != 1 or y.dtype.kind not in "biu":
        raise DataError(
            f"dirichlet deals classes, and y is {y.dtype} of shape {y.shape}",
            hint="give y as integers (n,), or take iid",
        )
    return dirichlet_rows(y, np.unique(y).tolist(), devices=devices, alpha=alpha, rng=rng, least=MIN_SAMPLES)


def _shards(y: NDArray[Any], devices: int, value: str, rng: np.random.Generator) -> Rows:
    each = _number(int, "N", value)
    if y.ndim != 1:
        raise DataError(f"shards sorts by y, which has shape {y.shape}", hint="give y as (n,), or take iid")
    order = rng.permutation(len(y))
    pieces = np.array_split(order[np.argsort(y[order], kind="stable")], devices * each)
    dealt = rng.permutation(len(pieces)).reshape(devices, each)
    rows = [rng.permutation(np.concatenate([pieces[i] for i in mine])) for mine in dealt]
    if min(map(len, rows)) < MIN_SAMPLES:
        raise UsageError(f"shards:{value} leaves a device fewer than {MIN_SAMPLES} samples", hint="take fewer devices")
    return rows


def _number(kind: Callable[[str], float], name: str, text: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < 1e6:
        raise UsageError(f"{name} of a split is a number above 0, not {text!r}")
    return number


_KINDS: Final[Mapping[str, Callable[[NDArray[Any], int, str, np.random.Generator], Rows]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _shards,
}
