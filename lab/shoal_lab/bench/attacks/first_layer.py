"""Input images from the gradient of a fully connected first layer: each row of weights over its bias.

Row j of the weights' gradient is the sum of g_ij x_i over the images, the bias's is the sum of g_ij. With one image the
quotient is the image, exactly: Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption" (2018).
With more it is a mixture, and images that alone excite a unit still come out whole: Boenisch et al., "When the
Curious Abandon Honesty" (2023).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.base import DB_MARGIN, Attack, Picture, Result, psnr_db
from shoal_lab.bench.attacks.lab import LR, Images, Lab

BATCHES: Final = (1, 16, 64)
WHO: Final = "aggregator with the model's layout and nothing else; the update is one step on one batch"


def read_rows(gradient: NDArray[np.float32], lab: Lab) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the images (units, pixels), clipped to [0, 1], and the bias gradients (units,) that a gradient (d,) shows."""
    units, pixels = lab.bundle.manifest.parameters[0].shape
    weights = gradient[: units * pixels].reshape(units, pixels).astype(np.float64)
    bias = gradient[units * pixels : units * (pixels + 1)].astype(np.float64)
    safe = np.where(np.abs(bias) > 1e-12, bias, np.inf)
    return np.clip(weights / safe[:, None], 0.0, 1.0), bias


def nearest(images: NDArray[np.float64], truth: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return that of ``images`` (n, pixels) with the smallest distance to ``truth`` (pixels,)."""
    best: NDArray[np.float64] = images[((images - truth) ** 2).mean(1).argmin()]
    return best


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the mean PSNR of the readings for each batch size.

    Of one image, the row with the largest bias gradient is the reading. Of several, every row is one, and each true
    image is compared with the nearest: an attacker who knows good from bad. Chance has the same privilege over as
    many images of the public's.
    """
    return [_batch(lab, mode, size) for size in BATCHES]


def _batch(lab: Lab, mode: str, size: int) -> Result:
    got, guessed = [], []
    pictures: tuple[Picture, ...] = ()
    for trial in range(lab.trials(12, 6)):
        batch = lab.pick(f"first layer {size} {trial}", size)
        rows, bias = read_rows(lab.masked(lab.update(batch), mode, round_=1 + trial % 6) / np.float32(-LR), lab)
        if size == 1:
            rows, others = rows[[int(np.abs(bias).argmax())]], lab.public.mean()[None].astype(np.float64)
        else:
            others = lab.pick(f"others {trial}", len(rows), lab.public).x.astype(np.float64)
        readings = [nearest(rows, x) for x in batch.x]
        got.append(np.mean([psnr_db(r, x) for r, x in zip(readings, batch.x, strict=True)]))
        guessed.append(np.mean([psnr_db(nearest(others, x), x) for x in batch.x]))
        if not trial:
            pictures = _pictures(lab, batch, readings)
    guess = "the mean image" if size == 1 else "the nearest of as many public images"
    return Result(
        name=f"first-layer input, batch {size}",
        attacker=WHO,
        success=float(np.mean(got)),
        chance=float(np.mean(guessed)),
        unit="dB",
        margin=DB_MARGIN,
        note=f"PSNR; chance shows {guess}",
        pictures=pictures,
    )


def _pictures(lab: Lab, batch: Images, readings: list[NDArray[np.float64]]) -> tuple[Picture, ...]:
    shape = (lab.side, lab.side)
    return (
        Picture("true", batch.x[0].reshape(shape)),
        Picture(f"first layer, batch {len(batch)}", readings[0].astype(np.float32).reshape(shape)),
    )


ATTACK: Final = Attack("first-layer input", "Phong et al. 2018; Boenisch et al. 2023", WHO, run)
