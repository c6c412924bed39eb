"""Images from masked one-image updates under a permutation: grey levels from one unit's coordinates, places from statistics.

A unit's gradient is g x, and its bias has g, so ratios of coordinates are grey levels (Phong et al., "Privacy-Preserving Deep
Learning via Additively Homomorphic Encryption", 2018), with signs or without. Columns are matched to pixels by the spread and
the correlations that public images have.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.structure.network import Rows
from shoal_lab.bench.attacks.structure.units import by_silence, silent_patterns

SWEEPS: Final = 30
LEVEL_TOLERANCE: Final = 0.02
"""Distance from a whole grey level up to which a ratio counts as one."""
COLOURED: Final = 0.12
"""Grey level above which a spike revives its unit, about."""
MIN_IMAGES: Final = 150
"""Least public images for statistics of their own."""
OVERLAP: Final = 4
"""Least images by which the columns of two units are matched."""
MOST: Final = 300
"""Most images that are."""
LEAST: Final = 0.3
"""Share of the pixels that a unit has to show."""
RARE: Final = 3
"""Most moves of a column that are no evidence."""
QUANTILES: Final = np.linspace(0.02, 0.98, 25)

Values = NDArray[np.float64]


class Reading(NamedTuple):
    """The grey levels that one unit's coordinates show.

    Attributes:
        alive: updates in which the unit is alive, (n,), bool.
        levels: the ratios in those updates, (alive, columns), in [0, 1]; their pixels are unknown.
    """

    alive: NDArray[np.bool_]
    levels: Values


def read_units(updates: Rows, units: int, levels: int, pixels: int) -> list[Reading]:
    """Return a reading for each unit that masked one-image updates (n, d) show, those most often alive first.

    Args:
        updates: masked under one permutation.
        units: hidden units.
        levels: grey levels above black.
        pixels: pixels of an image.
    """
    patterns = silent_patterns(updates, units)
    labels = by_silence(updates, patterns)
    readings = []
    for which, alive in enumerate(patterns):
        own = np.flatnonzero(labels == which)
        size = np.abs(updates[alive]).astype(np.float64)
        steady = own[(size[:, own] > 0).all(0)]
        fits = [_multiples(size[:, own], size[:, bias], levels).sum() for bias in steady]
        if not fits or max(fits) <= pixels * LEAST:
            continue
        bias = int(steady[int(np.argmax(fits))])
        # Rarely coloured pixels may have been taken for another unit's: any column that fits is one.
        inside = ~(updates[~alive] != 0).any(0) & ((size > 0).sum(0) > RARE)
        inside[own] = True
        inside[bias] = False
        columns = np.flatnonzero(inside)
        columns = columns[_multiples(size[:, columns], size[:, bias], levels)]
        columns = columns[np.argsort(-(size[:, columns] > 0).sum(0), kind="stable")[:pixels]]
        readings.append(Reading(alive, np.clip(size[:, columns] / size[:, [bias]], 0, 1)))
    return sorted(readings, key=lambda one: -int(one.alive.sum()))


def _multiples(size: Values, bias: Values, levels: int) -> NDArray[np.bool_]:
    """Return which columns of ``size`` (n, m) are whole grey levels times ``bias`` (n,), (m,)."""
    steps = size * (levels / bias[:, None])
    # Small gradients carry float32 rounding of the model, so that a few readings are off a whole level.
    whole = (np.abs(steps - np.rint(steps)) < LEVEL_TOLERANCE) & (steps < levels + LEVEL_TOLERANCE)
    moved = size > 0
    return np.asarray((whole & moved).sum(0) > 0.8 * np.maximum(moved.sum(0), 1))


def _match(cost: Values) -> NDArray[np.int64]:
    from scipy.optimize import linear_sum_assignment

    return np.asarray(linear_sum_assignment(cost)[1], np.int64)


def _correlations(values: Values) -> Values:
    rows = values - values.mean(0)
    rows /= np.linalg.norm(rows, axis=0) + 1e-9
    return np.asarray(rows.T @ rows, np.float64)


def place(levels: Values, public: Rows) -> NDArray[np.int64]:
    """Return the pixel of each column of ``levels`` (n, columns), by statistics of ``public`` images.

    A unit that a spike revived is alive for images in which the pixel of the spike is coloured, so that the statistics of such
    images are tried for every pixel, and the best match is taken.

    Args:
        levels: grey levels; a column is one pixel.
        public: images of the same kind, (m, pixels), at least as many pixels as columns.
    """
    images = public.astype(np.float64)
    some = [images[images[:, pixel] > COLOURED] for pixel in range(images.shape[1])]
    tried = [_placed(levels, one) for one in [images, *some] if len(one) >= MIN_IMAGES]
    return min(tried, key=lambda found: found[1])[0]


def _placed(levels: Values, images: Values) -> tuple[NDArray[np.int64], float]:
    """Return the pixel of each column by the statistics of ``images``, and the mean squared difference that is left."""
    own, known = np.quantile(levels, QUANTILES, axis=0).T, np.quantile(images, QUANTILES, axis=0).T
    spread = _distances(own, known)
    links, known_links = _correlations(levels), _correlations(images)
    pixels = _match(spread)
    for _ in range(SWEEPS):
        again = _match(_distances(links, known_links[:, pixels]) + spread)
        if np.array_equal(again, pixels):
            break
        pixels = again
    left = ((links - known_links[np.ix_(pixels, pixels)]) ** 2).mean() + spread[np.arange(len(pixels)), pixels].mean()
    return pixels, float(left)


def _distances(a: Values, b: Values) -> Values:
    """Return the mean squared difference of each row of ``a`` (n, k) and each of ``b`` (m, k), (n, m)."""
    sums = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.asarray(sums / a.shape[1], np.float64)


def align(levels: Values, images: Values) -> NDArray[np.int64]:
    """Return the pixel of each column of ``levels`` (n, columns), by the same images already read, (n, pixels)."""
    return _match(np.abs(levels[:, :, None] - images[:, None]).mean(0))


def read_images(
    sheets: list[tuple[Rows, NDArray[np.int64]]], public: Rows, units: int, levels: int, count: int
) -> Values:
    """Return ``count`` images (count, pixels), NaN where none was read.

    Args:
        sheets: masked one-image updates (n, d), each array under one key, and the image of each update, (n,), int64.
        public: images of the same kind, (m, pixels).
        units: hidden units.
        levels: grey levels above black.
        count: number of images.
    """
    images = np.full((count, public.shape[1]), np.nan)
    readings = [
        (which[one.alive], one.levels)
        for rows, which in sheets
        for one in read_units(rows, units, levels, public.shape[1])
    ]
    for which, found in sorted(readings, key=lambda r: -len(r[0])):
        read = ~np.isnan(images[which, 0])
        # Units overlap in the images for which both are alive; without an overlap there are public statistics alone.
        if read.sum() >= OVERLAP:
            pixels = align(found[read][:MOST], images[which[read]][:MOST])
        elif not read.any():
            pixels = place(found, public)
        else:
            continue
        fresh = which[~read]
        images[fresh] = 0
        images[fresh[:, None], pixels[None]] = found[~read]
    return images
