"""Files in MNIST's format with images that a small network learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def idx(values: np.ndarray) -> bytes:
    """Return an array of bytes in MNIST's format."""
    return bytes([0, 0, 8, values.ndim]) + b"".join(int(s).to_bytes(4, "big") for s in values.shape) + values.tobytes()


def write_bars(folder: Path, *, seed: int, train: int, test: int) -> Path:
    """Write images whose label is the height of a bright bar, in MNIST's files, and return their folder."""
    rng = np.random.default_rng(seed)
    for name, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 + 2 * label : 5 + 2 * label, 4:24] = 230
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder
