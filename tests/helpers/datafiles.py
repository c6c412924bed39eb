"""Tiny data sets in the true formats, as files."""

from __future__ import annotations

import gzip
import json

import numpy as np


def idx(array):
    """Return a uint8 array as IDX: 0, 0, 8, rank, big-endian sizes, bytes."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(s.to_bytes(4, "big") for s in array.shape) + array.tobytes()


def digits(folder, *, train=60, test=20, side=4, packed=True, seed=0):
    """Write a set of images like MNIST; every class is as frequent. Return (x_train, y_train, x_test, y_test), uint8."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for stem, count in (("train", train), ("t10k", test)):
        x = rng.integers(0, 256, (count, side, side), dtype=np.uint8)
        y = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{stem}-images-idx3-ubyte", x), (f"{stem}-labels-idx1-ubyte", y)):
            data = idx(array)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
        made += [x, y]
    return made


def cifar(folder, *, rows=2, seed=0):
    """Write CIFAR-10's binary version with few rows a batch; return labels and pixels of the first batch."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    first = None
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        labels = rng.integers(0, 10, (rows, 1), dtype=np.uint8)
        pixels = rng.integers(0, 256, (rows, 3072), dtype=np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, pixels], 1).tobytes())
        first = first or (labels[:, 0], pixels)
    return first


def leaf(folder, part, people):
    """Write LEAF's JSON: ``people`` is name -> (x, y)."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    document = {
        "users": list(people),
        "num_samples": [len(y) for _, y in people.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in people.items()},
    }
    path = folder / part / f"all_data_0_{part}_9.json"
    path.write_text(json.dumps(document))
    return path
