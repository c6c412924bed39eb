"""Images of devices, for an aggregator that announces a constant and a spike, or crafted means.

A constant is a fixed point of every permutation, so no key stops it: -0.1 in every coordinate kills all hidden units, and a
spike at one coordinate revives one, whose gradient is the image. Crafted models are those of Boenisch et al., "When the Curious
Abandon Honesty" (2023).

- Under a permutation, `read_images` reads grey levels from one unit's coordinates, and their places from statistics. A unit's
  gradient is g x, and its bias has g, so ratios of coordinates are grey levels (Phong et al., "Privacy-Preserving Deep Learning
  via Additively Homomorphic Encryption", 2018), with signs or without. Columns are matched to pixels by the spread and the
  correlations that public images have.
- Under a mask that mixes coordinates the attacker has the Gram matrix of the uploads, and announces the constant and the spike
  also through the public Hadamard transform. `guess` imitates the round with random models, describes each update by its norm and
  its cosines with the others, and shows the mean of the images whose descriptions are nearest. Shadow training is that of Shokri
  et al. (2017).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crypto.mask.hadamard import transform
from shoal_lab.bench.attacks.contents import levels_of
from shoal_lab.bench.attacks.lab import LIFETIMES, SPIKE, Attack, Lab, Lifetime, Result, Rows, picture, psnr_db, spiked
from shoal_lab.bench.attacks.structure.coordinates import SPREAD
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet, Network, by_silence, fleet_sizes, silent_patterns

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


def read_images(rows: Rows, public: Rows, units: int, levels: int) -> Values:
    """Return the image of each update, (n, pixels), NaN where none was read.

    Args:
        rows: masked one-image updates (n, d) under one key.
        public: images of the same kind, (m, pixels).
        units: hidden units.
        levels: grey levels above black.
    """
    images = np.full((len(rows), public.shape[1]), np.nan)
    for alive, found in read_units(rows, units, levels, public.shape[1]):
        which = np.flatnonzero(alive)
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


SHADOWS: Final = 1500
"""Shadow updates to learn from, about."""
NEIGHBOURS: Final = 60
TWELFTHS: Final = np.linspace(0, 1, 12)


def describe(updates: Rows) -> NDArray[np.float64]:
    """Return features of each update, (n, features), from the dot products of updates (n, d) alone."""
    gram = (updates @ updates.T).astype(np.float64)
    norms = np.sqrt(np.maximum(np.diag(gram), 1e-30))
    cosines = gram / norms[:, None] / norms[None]
    np.fill_diagonal(cosines, 0)
    size = np.log(norms) - np.median(np.log(norms))
    features = (size[:, None], np.quantile(cosines, TWELFTHS, axis=1).T, (cosines**2).mean(1)[:, None])
    return np.concatenate(features, axis=1)


def shadows(lab: Lab, network: Network, n: int, spread: float) -> tuple[NDArray[np.float64], Rows]:
    """Return features (m, features) and images (m, pixels) of shadow fleets of n devices.

    Their models are random: a mask that mixes coordinates turns whatever is announced into noise of the same norm.
    """

    def trained() -> tuple[NDArray[np.float64], Rows]:
        rng, features, images = lab.rng(f"shadow fleets {n}"), [], []
        for _ in range(max(1, SHADOWS // n)):
            own = lab.public.rows(rng.integers(0, len(lab.public), n))
            model = network.origin(rng) + rng.normal(0, spread, network.length).astype(np.float32)
            features.append(describe(network.updates(model, own.x[:, None], own.y[:, None])))
            images.append(own.x)
        return np.concatenate(features), np.concatenate(images)

    return lab.once(f"shadow fleets {n} {spread} {network.length}", trained)


def guess(lab: Lab, network: Network, updates: Rows, spread: float) -> NDArray[np.float64]:
    """Return a guess of the image of each one-image update, (n, pixels).

    Args:
        lab: holds the public images.
        network: the model's sizes.
        updates: one round's masked updates, (n, d).
        spread: standard deviation of the means that the attacker announced.
    """
    known, shown = shadows(lab, network, len(updates), spread)
    scale = known.std(0) + 1e-9
    seen, known = describe(updates) / scale, known / scale
    apart = (seen**2).sum(1)[:, None] - 2 * seen @ known.T + (known**2).sum(1)[None]
    nearest = np.argpartition(apart, min(NEIGHBOURS, len(known) - 1), axis=1)[:, :NEIGHBOURS]
    return np.asarray(shown[nearest].mean(1), np.float64)


WHO: Final = (
    "aggregator that crafts the means it announces, with public images of the kind; no device, no initial model"
)
CONSTANT: Final = -0.1
TRIES: Final = 8
"""Most spikes, each at another coordinate."""
ENOUGH: Final = 0.8
"""Share of devices that a revived unit has to be alive for; else another spike is sent."""
WATCHED: Final = 600
"""Updates under one key that the attacker watches, about."""
MARGIN: Final = 1.0
EXACT_DB: Final = 40.0
LEVEL_ERROR: Final = 1e-2


def public_form(vector: Rows, *, hadamard: bool = False) -> Rows:
    """Return a vector (d,) that is announced, with ``hadamard`` through the public transform."""
    if hadamard:
        transform(vector)
    return vector


def constant(length: int, *, hadamard: bool = False) -> Rows:
    """Return the constant that kills hidden units, (length,), float32."""
    return public_form(np.full(length, CONSTANT, np.float32), hadamard=hadamard)


def poke(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> tuple[MaskedFleet, Rows, Rows]:
    """Announce the constant and spikes until one revives a unit; return fleet, masked uploads under one key, and true images.

    Under fresh keys these are the uploads of one round. Under one key the attacker announces the best spike again, and
    devices train on another image in each round.
    """
    fleet = MaskedFleet(lab, mode, lifetime, devices, same_images=lifetime == "round")
    rng, length, mixes = lab.rng(f"spikes {devices}"), fleet.network.length, lab.keeps(mode) == "lengths"
    spikes = [
        public_form(spiked(length, int(rng.integers(length))), hadamard=mixes and one % 2 == 1) for one in range(TRIES)
    ]
    if lifetime == "round":
        for hadamard in (False, True)[: 1 + mixes]:
            fleet.announce(constant(length, hadamard=hadamard))
        for spike in spikes:
            rows, truth = watched(fleet, [spike])
            if revived(rows, fleet.network.classes) > ENOUGH:
                break
        return fleet, rows, truth
    shares = [revived(watched(fleet, [constant(length) + spike])[0], fleet.network.classes) for spike in spikes]
    best = constant(length) + spikes[int(np.argmax(shares))]
    return fleet, *watched(fleet, [best] * max(1, WATCHED // devices))


def watched(fleet: MaskedFleet, means: Iterable[Rows]) -> tuple[Rows, Rows]:
    """Announce means, a round each; return the masked uploads (n, d) and the images that devices trained on (n, pixels)."""
    rows, truth = [], []
    for mean in means:
        fleet.announce(mean)
        rows.append(fleet.uploads())
        truth.append(fleet.x[:, 0])
    return np.concatenate(rows), np.concatenate(truth)


def revived(rows: Rows, classes: int) -> float:
    """Return the share of updates (n, d) in which more coordinates move than the output biases, unless all of them do."""
    moves = (rows != 0).sum(1)
    return float(np.mean((moves > classes) & (moves < rows.shape[1] / 2)))


def crafted_images(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> tuple[MaskedFleet, Rows, Rows]:
    """Announce random means; return the fleet, the masked uploads of one key, and the true images."""
    fleet, rng = MaskedFleet(lab, mode, lifetime, devices), lab.rng(f"crafted images {devices}")
    rounds = max(1, WATCHED // devices) if lifetime == "run" else 1
    means = (rng.normal(0, SPREAD, fleet.network.length).astype(np.float32) for _ in range(rounds))
    return fleet, *watched(fleet, means)


def clear_images(network: Network, rows: Rows) -> NDArray[np.float64]:
    """Return the images (n, pixels) of clear one-image updates (n, d): each from the unit with the largest bias gradient."""
    images = []
    for row in rows:
        w1, b1, *_ = network.split(row)
        unit = int(np.abs(b1).argmax())
        images.append(np.clip(w1[unit] / b1[unit], 0, 1) if b1[unit] else np.full(network.pixels, np.nan))
    return np.asarray(images, np.float64)


def rebuild(lab: Lab, mode: str, fleet: MaskedFleet, rows: Rows, spread: float) -> NDArray[np.float64]:
    """Return the images (n, pixels) that the attacker reads, NaN where it reads none.

    Args:
        lab: holds the public images.
        mode: the mask's mode.
        fleet: the attacked one; only its sizes are used.
        rows: masked one-image updates (n, d).
        spread: standard deviation of the coordinates of the announced means, after a mask that mixes them.
    """
    keeps, network = lab.keeps(mode), fleet.network
    if keeps in ("values", "magnitudes"):
        return read_images(rows, lab.public.x, network.hidden, levels_of(lab))
    if keeps == "order":
        return clear_images(network, rows)
    rounds = (rows[at : at + fleet.devices] for at in range(0, len(rows), fleet.devices))
    return np.concatenate([guess(lab, network, one, spread) for one in rounds])


def results(lab: Lab, mode: str, lifetime: Lifetime, devices: int, name: str) -> list[Result]:
    """Return the PSNR of the images read, and the share of images whose grey levels are read in some order of pixels.

    Where no image is read the attacker shows the public mean image, which is also what chance shows everywhere.
    """
    make = poke if name == "image-active" else crafted_images
    fleet, rows, truth = make(lab, mode, lifetime, devices)
    usual = lab.public.mean().astype(np.float64)
    noise = SPIKE / fleet.network.length**0.5 if name == "image-active" else SPREAD
    images = rebuild(lab, mode, fleet, rows, noise)
    read = ~np.isnan(images[:, 0])
    shown = np.where(read[:, None], images, usual[None])
    quality = np.array([psnr_db(a, b) for a, b in zip(shown, truth, strict=True)])
    graded = [np.abs(np.sort(a) - np.sort(b)).max() < LEVEL_ERROR for a, b in zip(shown, truth, strict=True)]
    best = int(quality.argmax())
    image = Result(
        name=name,
        attacker=WHO,
        success=float(quality.mean()),
        chance=float(np.mean([psnr_db(usual, one) for one in truth])),
        unit="dB",
        margin=MARGIN,
        keys=lifetime,
        devices=devices,
        note=f"PSNR of {len(truth)} images, {np.mean(quality > EXACT_DB):.2f} of them exact; chance shows the mean image",
        pictures=(picture("true", truth[best]), picture(f"best of {devices} devices", shown[best])),
    )
    levels = Result(
        name=f"{name}, grey levels",
        attacker=WHO,
        success=float(np.mean(graded)),
        chance=0.0,
        unit="share",
        margin=0.1,
        keys=lifetime,
        devices=devices,
        note="images whose grey levels are all right, in any order of pixels",
    )
    return [image, levels]


def images(lab: Lab, mode: str) -> list[Result]:
    """Return both attacks' results for each key lifetime and fleet size."""
    names = ("image-active", "image-active, crafted means")
    return [
        r for name in names for keys in LIFETIMES for n in fleet_sizes(lab) for r in results(lab, mode, keys, n, name)
    ]


ATTACKS: Final = (Attack("image, active", "Boenisch et al. 2023 (malicious models); Phong et al. 2018", WHO, images),)
