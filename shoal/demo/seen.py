"""The aggregator's view: compare a stored masked update with the true one, and try to read an image from an update.

The comparison needs the mask of the update's round. It is possible in the demo, which runs all parties on one machine, but not
in a fleet.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.storage.store import DATABASE, UPDATES
from aggregator.storage.vector_log import checksum
from crypto.mask.derivation import MaskKey
from crypto.mask.masking import mask, unmask
from edge_client.learning.data import Dataset
from edge_client.learning.model import OrtModel
from edge_client.learning.training import train
from shoal.protocol.recipe import LocalTraining
from shoal.task.bundle import TaskBundle
from shoal.task.manifest import TaskManifest
from shoal.types import Float32Vector, MaskedVector

PSNR_CAP_DB: Final = 120.0
"""PSNR of an exact reading, which would be infinite."""
ONE_STEP: Final = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.1)


@dataclass(frozen=True, slots=True)
class Reading:
    """An attacker's reconstruction of an image, (side * side,) in [0, 1], and its PSNR against the true one."""

    image: NDArray[np.float32]
    psnr_db: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The aggregator's view beside the truth.

    Attributes:
        cosine: cosine of the update on the aggregator's disk and the true one.
        share_in_place: share of the non-zero coordinates whose value is at its true position.
        masked, none: images read from a one-image, one-step update with and without the mask.
        truth: the true image.
    """

    cosine: float
    share_in_place: float
    masked: Reading
    none: Reading
    truth: NDArray[np.float32]


def stored_update(run_directory: Path, length: int) -> tuple[int, Float32Vector] | None:
    """Return a round and one of its masked updates, (length,) float32, from the aggregator's disk; None if absent."""
    with contextlib.closing(
        sqlite3.connect(f"{(run_directory / DATABASE).absolute().as_uri()}?mode=ro", uri=True)
    ) as db:
        rows = db.execute("SELECT round, start, checksum FROM uploads ORDER BY round, device").fetchall()
    for round_, start, kept in rows:
        for path in (run_directory / UPDATES).glob(f"{round_:06d}.f32"):
            try:
                update = np.fromfile(path, "<f4", length, offset=start)
            except FileNotFoundError:
                continue  # removed since it was listed
            # Files are used again for later rounds: the checksum tells whether the bytes are still those of this round.
            if len(update) == length and checksum(update.tobytes()) == kept and update.any():
                return round_, update
    return None


def compare(view: Float32Vector, key: MaskKey) -> tuple[float, float]:
    """Return (cosine, share in place) of the aggregator's ``view`` (d,) and the update under its mask."""
    true = unmask(MaskedVector(view, key.key_id), key)
    lengths = float(np.linalg.norm(view)) * float(np.linalg.norm(true))
    moved = true != 0
    return float(np.dot(view, true)) / lengths, float((view[moved] == true[moved]).mean())


def one_image_update(bundle: TaskBundle, theta: Float32Vector, image: NDArray[np.float32], label: int) -> Float32Vector:
    """Return the update (d,) of one step on one image, made for the attack only."""
    batch = Dataset(image[None], np.array([label], np.int64))
    rng = np.random.default_rng(0)
    return train(theta, batch, ONE_STEP, OrtModel(bundle), rng, 0, lambda: False).delta


def read_image(update: Float32Vector, manifest: TaskManifest, truth: NDArray[np.float32]) -> Reading:
    """Read the training image from a one-image update: the gradient of a row of the first layer over that of its bias.

    For one image x the gradient of row j is g_j x and that of its bias g_j (the well-known leak of a fully connected first
    layer), so the row with the largest bias gradient gives x exactly. The attacker knows the model's layout.
    """
    weight, bias = manifest.parameters[0], manifest.parameters[1]
    rows, columns = weight.shape
    w = update[: rows * columns].reshape(rows, columns)
    b = update[rows * columns : rows * columns + bias.length]
    best = int(np.abs(b).argmax())
    image = np.clip(w[best] / (b[best] or 1.0), 0.0, 1.0).astype(np.float32)
    error = float(np.mean((image - truth) ** 2))
    return Reading(image, PSNR_CAP_DB if error <= 0 else min(PSNR_CAP_DB, -10.0 * float(np.log10(error))))


def look(
    view: Float32Vector,
    key: MaskKey,
    bundle: TaskBundle,
    theta: Float32Vector,
    image: NDArray[np.float32],
    label: int,
) -> Seen:
    """Compare ``view`` with the true update, and attack a one-image update with and without the mask.

    Args:
        view: shape (d,), float32, an update from the aggregator's disk.
        key: the mask of the update's round.
        bundle: the task.
        theta: shape (d,), float32, the model before the one step.
        image: shape (inputs,), float32 in [0, 1].
        label: its class.
    """
    cosine, in_place = compare(view, key)
    update = one_image_update(bundle, theta, image, label)
    return Seen(
        cosine,
        in_place,
        read_image(mask(update, key).values, bundle.manifest, image),
        read_image(update, bundle.manifest, image),
        image,
    )
