"""The demo's data: handwritten digits, split among devices that belong to hidden groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_client.learning.data_files import read_idx
from shoal.errors import DataError, UsageError

GROUPS: Final = 4
DIGIT_SIDE: Final = 8
MNIST_SIDE: Final = 28
MNIST_SAMPLES: Final = 300
"""Samples of MNIST for each device of the demo."""
CLASSES: Final = 10
SKEWS: Final = ("labels", "rotation")
DIGIT_LEVELS: Final = 16.0
FETCH_HINT: Final = "shoal data fetch mnist --to DIR, then --data-dir DIR"


@dataclass(frozen=True, slots=True)
class Hidden:
    """The devices' data, and their true groups, which no program of the fleet receives.

    Attributes:
        x: for each device (n, side * side), float32 in [0, 1]; y: (n,), int64.
        groups: the true group of each device.
        side: pixels of an image's side.
    """

    x: tuple[NDArray[np.float32], ...]
    y: tuple[NDArray[np.int64], ...]
    groups: tuple[int, ...]
    side: int

    def save(self, directory: Path) -> list[Path]:
        """Write one .npz a device and return the paths."""
        paths = [directory / f"device-{i:02d}.npz" for i in range(len(self.x))]
        for path, x, y in zip(paths, self.x, self.y, strict=True):
            np.savez(path, x=x, y=y)
        return paths


def load_images(name: str, data_dir: Path | None) -> tuple[NDArray[np.float32], NDArray[np.int64], int]:
    """Return images (n, side * side) in [0, 1], labels (n,) and the side, of ``digits`` or ``mnist``.

    Raises:
        DataError: MNIST's files are not in ``data_dir``.
        UsageError: ``name`` is another data set, or ``data_dir`` is missing for MNIST.
    """
    if name == "digits":
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return (pixels / DIGIT_LEVELS).astype(np.float32), labels.astype(np.int64), DIGIT_SIDE
    if name != "mnist":
        raise UsageError(f"no data {name!r}", hint="use digits or mnist")
    if data_dir is None:
        raise UsageError("MNIST needs its files", hint=FETCH_HINT)
    images = sorted(data_dir.glob("train-images*idx3-ubyte*"))
    if not images:
        raise DataError(f"{data_dir} holds no train-images-idx3-ubyte[.gz]", hint=FETCH_HINT)
    raw = read_idx(images[0])
    return raw.x.reshape(len(raw.x), -1).astype(np.float32), raw.y.astype(np.int64), MNIST_SIDE


def hide_groups(
    x: NDArray[np.float32], y: NDArray[np.int64], side: int, *, devices: int, skew: str, seed: int
) -> Hidden:
    """Deal the samples to devices and give each of the four groups its own labels or orientation.

    ``labels`` permutes the classes of each group (CFL's incongruent conditionals); ``rotation`` rotates the images by 0, 90,
    180 and 270 degrees (IFCA's). Group sizes differ by at most one device, and devices are assigned at random.
    """
    if skew not in SKEWS:
        raise UsageError(f"no skew {skew!r}", hint=f"use {' or '.join(SKEWS)}")
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.arange(devices) % GROUPS)
    # One group has the true labels; the draws are the same for both skews, so that samples and groups are too.
    renamed = [np.arange(CLASSES)] + [rng.permutation(CLASSES) for _ in range(GROUPS - 1)]
    order = rng.permutation(len(x))
    if side == MNIST_SIDE:
        order = order[: devices * MNIST_SAMPLES]
    xs, ys = [], []
    for rows, group in zip(np.array_split(order, devices), groups, strict=True):
        images, labels = x[rows], y[rows]
        if skew == "rotation":
            turned = np.rot90(images.reshape(-1, side, side), int(group), axes=(1, 2))
            images = np.ascontiguousarray(turned).reshape(len(rows), -1)
        else:
            labels = renamed[int(group)][labels].astype(np.int64)
        xs.append(images)
        ys.append(labels)
    return Hidden(tuple(xs), tuple(ys), tuple(int(g) for g in groups), side)
