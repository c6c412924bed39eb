"""Images of devices, for an aggregator that announces a constant and a spike, or crafted means.

A constant is a fixed point of every permutation, so no key stops it: -0.1 in every coordinate kills all hidden units, and a
spike at one coordinate revives one, whose gradient is the image. Crafted models are those of Boenisch et al., "When the Curious
Abandon Honesty" (2023). Under a mask that mixes coordinates the attacker has the Gram matrix of the uploads (`products`), and
announces the constant and the spike also through the public Hadamard transform.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.hadamard import transform
from shoal_lab.bench.attacks.base import Attack, Picture, Result, psnr_db
from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.pixel_values import levels_of
from shoal_lab.bench.attacks.structure import sizes
from shoal_lab.bench.attacks.structure.active import SPREAD
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet
from shoal_lab.bench.attacks.structure.keys import LIFETIMES, Lifetime
from shoal_lab.bench.attacks.structure.network import Network, Rows
from shoal_lab.bench.attacks.structure.pixels import read_images
from shoal_lab.bench.attacks.structure.products import guess

WHO: Final = (
    "aggregator that crafts the means it announces, with public images of the kind; no device, no initial model"
)
CONSTANT: Final = -0.1
SPIKE: Final = 20.0
TRIES: Final = 8
"""Most spikes, each at another coordinate."""
ENOUGH: Final = 0.8
"""Share of devices that a revived unit has to be alive for; else another spike is sent."""
WATCHED: Final = 600
"""Updates under one key that the attacker watches, about."""
MARGIN: Final = 1.0
EXACT_DB: Final = 40.0
LEVEL_ERROR: Final = 1e-2

Sheet = tuple[Rows, NDArray[np.int64]]


def spiked(length: int, at: int, *, hadamard: bool = False) -> Rows:
    """Return a spike at coordinate ``at``, (length,), float32; with ``hadamard`` through the public transform."""
    spike = np.zeros(length, np.float32)
    spike[at] = SPIKE
    if hadamard:
        transform(spike)
    return spike


def constant(length: int, *, hadamard: bool = False) -> Rows:
    """Return the constant that kills hidden units, (length,), float32; with ``hadamard`` through the public transform."""
    vector = np.full(length, CONSTANT, np.float32)
    if hadamard:
        transform(vector)
    return vector


def poke(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> tuple[MaskedFleet, list[Sheet], Rows]:
    """Announce the constant and spikes until one revives a unit; return fleet, masked uploads under one key, and true images.

    Under fresh keys these are the uploads of one round. Under one key the attacker announces the best spike again, and
    devices train on another image in each round.
    """
    fleet = MaskedFleet(lab, mode, lifetime, devices, same_images=lifetime == "round")
    rng, length, mixes = lab.rng(f"spikes {devices}"), fleet.network.length, lab.keeps(mode) == "lengths"
    spikes = [spiked(length, int(rng.integers(length)), hadamard=mixes and one % 2 == 1) for one in range(TRIES)]
    if lifetime == "round":
        for hadamard in (False, True)[: 1 + mixes]:
            fleet.announce(constant(length, hadamard=hadamard))
        for spike in spikes:
            fleet.announce(spike)
            rows = fleet.uploads()
            if revived(rows, fleet.network.classes) > ENOUGH:
                break
        return fleet, [(rows, np.arange(devices))], fleet.x[:, 0]
    shares = []
    for spike in spikes:
        fleet.announce(constant(length) + spike)
        shares.append(revived(fleet.uploads(), fleet.network.classes))
    best, heard, truth = spikes[int(np.argmax(shares))], [], []
    for _ in range(max(1, WATCHED // devices)):
        fleet.announce(constant(length) + best)
        heard.append(fleet.uploads())
        truth.append(fleet.x[:, 0])
    sent = np.concatenate(heard)
    return fleet, [(sent, np.arange(len(sent)))], np.concatenate(truth)


def revived(rows: Rows, classes: int) -> float:
    """Return the share of updates (n, d) in which more coordinates move than the output biases, unless all of them do."""
    moves = (rows != 0).sum(1)
    return float(np.mean((moves > classes) & (moves < rows.shape[1] / 2)))


def crafted_sheets(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> tuple[MaskedFleet, list[Sheet], Rows]:
    """Announce random means; return the fleet, the masked uploads of one key, and the true images."""
    fleet, rng = MaskedFleet(lab, mode, lifetime, devices), lab.rng(f"crafted images {devices}")
    rows, truth = [], []
    for _ in range(max(1, WATCHED // devices) if lifetime == "run" else 1):
        fleet.announce(rng.normal(0, SPREAD, fleet.network.length).astype(np.float32))
        rows.append(fleet.uploads())
        truth.append(fleet.x[:, 0])
    sent = np.concatenate(rows)
    return fleet, [(sent, np.arange(len(sent)))], np.concatenate(truth)


def clear_images(network: Network, rows: Rows) -> NDArray[np.float64]:
    """Return the images (n, pixels) of clear one-image updates (n, d): each from the unit with the largest bias gradient."""
    images = []
    for row in rows:
        w1, b1, *_ = network.split(row)
        unit = int(np.abs(b1).argmax())
        images.append(np.clip(w1[unit] / b1[unit], 0, 1) if b1[unit] else np.full(network.pixels, np.nan))
    return np.asarray(images, np.float64)


def rebuild(
    lab: Lab, mode: str, fleet: MaskedFleet, sheets: list[Sheet], count: int, spread: float
) -> NDArray[np.float64]:
    """Return the images (count, pixels) that the attacker reads from its sheets, NaN where it reads none.

    Args:
        lab: holds the public images.
        mode: the mask's mode.
        fleet: the attacked one; only its sizes are used.
        sheets: masked one-image updates (n, d), and the image of each.
        count: number of images.
        spread: standard deviation of the coordinates of the announced means, after a mask that mixes them.
    """
    keeps, network = lab.keeps(mode), fleet.network
    if keeps in ("values", "magnitudes"):
        return read_images(sheets, lab.public.x, network.hidden, levels_of(lab), count)
    images = np.full((count, network.pixels), np.nan)
    for rows, which in sheets:
        clear = keeps == "order"
        found = clear_images(network, rows) if clear else _from_products(lab, network, rows, fleet.devices, spread)
        blank = np.isnan(images[which, 0])
        images[which[blank]] = found[blank]
    return images


def _from_products(lab: Lab, network: Network, rows: Rows, devices: int, spread: float) -> NDArray[np.float64]:
    rounds = [rows[at : at + devices] for at in range(0, len(rows), devices)]
    return np.concatenate([guess(lab, network, one, spread) for one in rounds])


def results(lab: Lab, mode: str, lifetime: Lifetime, devices: int, name: str) -> list[Result]:
    """Return the PSNR of the images read, and the share of images whose grey levels are read in some order of pixels.

    Where no image is read the attacker shows the public mean image, which is also what chance shows everywhere.
    """
    make = poke if name == "image-active" else crafted_sheets
    fleet, sheets, truth = make(lab, mode, lifetime, devices)
    usual = lab.public.mean().astype(np.float64)
    noise = SPIKE / fleet.network.length**0.5 if name == "image-active" else SPREAD
    images = rebuild(lab, mode, fleet, sheets, len(truth), noise)
    read = ~np.isnan(images[:, 0])
    shown = np.where(read[:, None], images, usual[None])
    quality = np.array([psnr_db(a, b) for a, b in zip(shown, truth, strict=True)])
    graded = [np.abs(np.sort(a) - np.sort(b)).max() < LEVEL_ERROR for a, b in zip(shown, truth, strict=True)]
    best, shape = int(quality.argmax()), (lab.side, lab.side)
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
        pictures=(
            Picture("true", truth[best].reshape(shape)),
            Picture(f"best of {devices} devices", shown[best].astype(np.float32).reshape(shape)),
        ),
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


def run(lab: Lab, mode: str) -> list[Result]:
    """Return both attacks' results for each key lifetime and fleet size."""
    names = ("image-active", "image-active, crafted means")
    return [
        r for name in names for keys in LIFETIMES for n in sizes.fleets(lab) for r in results(lab, mode, keys, n, name)
    ]


ATTACK: Final = Attack("image, active", "Boenisch et al. 2023 (malicious models); Phong et al. 2018", WHO, run)
