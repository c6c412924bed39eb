"""The interface of an attack, and its result: success and the success of guessing, in the same unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from shoal_lab.bench.attacks.lab import Lab


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a report, (side, side), float32 in [0, 1], with its caption."""

    caption: str
    image: NDArray[np.float32] = field(repr=False)


def picture(caption: str, image: NDArray[Any]) -> Picture:
    """Return a picture of a square image (pixels,)."""
    side = math.isqrt(image.size)
    return Picture(caption, np.asarray(image, np.float32).reshape(side, side))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one attack on one mode; in every unit a larger value is better for the attacker.

    Attributes:
        name: the attack, with its variant.
        attacker: the attacker and the attacker's knowledge.
        success, chance: in ``unit``; chance is the best guess without the masked vectors, or the same attack on noise.
        unit: share, dB, cosine, AUC, accuracy or ARI.
        margin: the attack works if success exceeds chance by more than this.
        note: further findings, in one line.
        pictures: the true image first, then the reconstructions.
        keys: how long one mask key lasts: a ``round``, as in fleets, or the ``run``, for comparison.
        devices: devices whose uploads the attack uses in one round.
    """

    name: str
    attacker: str
    success: float
    chance: float
    unit: str
    margin: float = 0.1
    note: str = ""
    pictures: tuple[Picture, ...] = ()
    keys: str = "run"
    devices: int = 1

    @property
    def works(self) -> bool:
        """Whether the attack got more than guessing does."""
        return self.success > self.chance + self.margin

    def data(self) -> dict[str, Any]:
        """Return the figures as JSON takes them, without pictures."""
        return {
            "name": self.name,
            "attacker": self.attacker,
            "success": self.success,
            "chance": self.chance,
            "unit": self.unit,
            "works": self.works,
            "note": self.note,
            "keys": self.keys,
            "devices": self.devices,
        }


@dataclass(frozen=True, slots=True)
class Attack:
    """An entry of the registry.

    Attributes:
        name: a short name, without variants.
        source: the publication that it is from.
        attacker: the attacker and the attacker's knowledge.
        run: (lab, mode) -> one result for each variant.
    """

    name: str
    source: str
    attacker: str
    run: Callable[[Lab, str], Sequence[Result]]


PSNR_CAP_DB = 120.0
"""PSNR of an exact reading, which would be infinite."""
DB_MARGIN = 3.0
"""Decibels above chance from which a picture shows more than was known before."""


def psnr_db(image: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the peak signal-to-noise ratio in dB of two images of one shape with values in [0, 1], at most 120."""
    error = float(np.mean((np.asarray(image, np.float64) - np.asarray(truth, np.float64)) ** 2))
    return PSNR_CAP_DB if error <= 0 else min(PSNR_CAP_DB, -10.0 * float(np.log10(error)))


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the cosine of two vectors (d,); 0 where one of them is zero."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    lengths = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    return float(x @ y) / lengths if lengths else 0.0


def share_recovered(estimate: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the share of the non-zero coordinates of ``truth`` (d,) that ``estimate`` (d,) has, to a part in 1000."""
    x, y = np.asarray(estimate, np.float64), np.asarray(truth, np.float64)
    moved = y != 0
    if not moved.any():
        return 0.0
    tolerance = 1e-3 * np.abs(y) + 1e-5 * float(np.sqrt(np.mean(y**2)))
    return float((np.abs(x - y) <= tolerance)[moved].mean())


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """Return the area under the ROC curve: the chance that a member scores above another, ties counting half."""
    a, b = np.asarray(members)[:, None], np.asarray(others)[None]
    return float((a > b).mean() + 0.5 * (a == b).mean())


def balanced_accuracy(guess: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """Return the mean over the true classes of the share guessed right, both (n,), int64."""
    return float(np.mean([(guess[truth == c] == c).mean() for c in np.unique(truth)]))
