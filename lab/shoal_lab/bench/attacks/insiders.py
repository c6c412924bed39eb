"""An aggregator that departs from the protocol, and one that a device helps with its keys."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.masking import unmask
from edge_client.learning.update import LOSS_DECIMALS
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.bench.attacks.contents import read_rows
from shoal_lab.bench.attacks.lab import (
    DB_MARGIN,
    LIFETIMES,
    LR,
    ONE_EPOCH,
    Attack,
    FleetKeys,
    Images,
    Lab,
    Lifetime,
    Result,
    balanced_accuracy,
    device_model,
    picture,
    psnr_db,
    share_recovered,
    spiked,
)
from shoal_lab.bench.attacks.places import forest, of_each

FORGES_MEANS: Final = (
    "aggregator that departs from the protocol, with data of the same kind and the clear initial model"
)
LIES: Final = "aggregator that lies about how many devices a mean is of, and a curious device that reads it"
PER_LAYER: Final = 40
SAMPLES: Final = 40


def answer(lab: Lab, theta: Float32Vector, images: Images) -> tuple[Float32Vector, float]:
    """Train a device from ``theta`` (d,) and return its clear update and its reported, rounded loss."""
    delta, loss = lab.report(images, ONE_EPOCH, theta=theta)
    return delta, round(loss, LOSS_DECIMALS)


def signs(delta: NDArray[np.float32], loss: float, at: int | np.int64) -> list[float]:
    """Return features of an upload, masked or not, that depend on the changed coordinate but not on its position."""
    size = np.abs(delta).astype(np.float64)
    norm = float(np.sqrt((size**2).sum())) + 1e-12
    # The small terms keep the logarithms of zeros finite.
    return [loss, np.log(norm), np.log(size.max() + 1e-12), float((delta == 0).mean()), np.log(size[at] / norm + 1e-9)]


def learned(lab: Lab) -> Any:
    """Return a classifier of answers by tensor, from spikes at known places in the attacker's own copy."""
    at = of_each(lab.layers, lab.rng("probing, own"), 2 * PER_LAYER)
    own = lab.pick("probing, own", SAMPLES, lab.public)

    def answers() -> NDArray[np.float64]:
        return np.array([signs(*answer(lab, lab.origin + spiked(lab.length, i), own), i) for i in at])

    return forest(lab, "probing learned", at, answers)


def probing(lab: Lab, mode: str) -> list[Result]:
    """Return the accuracy of naming the tensor of a masked coordinate by one probe each, and the gain from a false count.

    Under a permutation, a spike in one masked coordinate of a forged mean changes one clear coordinate; devices train on it and
    report loss and norm. Malicious models in Boenisch et al., "When the Curious Abandon Honesty" (2023); here the attacker does
    not know the positions of the weights and probes for them.
    """
    truth = lab.layer_of(mode)
    at = of_each(truth, lab.rng("probing"), lab.trials(PER_LAYER, PER_LAYER // 2))
    theirs = lab.pick("probing", SAMPLES)
    rows = []
    for i in at:
        delta, loss = answer(lab, device_model(lab, mode, spiked(lab.length, i)), theirs)
        rows.append(signs(lab.masked(delta, mode), loss, i))
    guess = learned(lab).predict(np.array(rows))
    return [
        Result(
            name="probing: layer of a coordinate",
            attacker=FORGES_MEANS,
            success=balanced_accuracy(guess, truth[at]),
            chance=1 / len(np.unique(truth)),
            unit="accuracy",
            margin=0.1,
            note="one crafted mean a coordinate",
        ),
        _false_count(lab, mode),
    ]


def _false_count(lab: Lab, mode: str) -> Result:
    """Return how much of one device's update another reads: a mean of one is that update, if a larger count is claimed."""
    victim = lab.update(lab.pick("false count", 80), ONE_EPOCH)
    others = [lab.update(lab.pick(f"false count {i}", 80), ONE_EPOCH, seed=i) for i in (1, 2)]
    sent = lab.masked(victim, mode)
    honest = np.stack([sent, *(lab.masked(u, mode) for u in others)]).mean(0)
    read = [device_model(lab, mode, offset) - lab.origin for offset in (sent, honest)]
    return Result(
        name="false count: a device reads another's update",
        attacker=LIES,
        success=share_recovered(read[0], victim),
        chance=share_recovered(read[1], victim),
        unit="share",
        margin=0.1,
        note="sent as a mean of three, which the device's checks accept; chance is from a true mean of three",
    )


HAS_KEYS: Final = "aggregator with the round's keys from one device"


def opened(lab: Lab, masked: Float32Vector, mode: str, owner: str = "fleet") -> Float32Vector:
    """Unmask ``masked`` (d,) with the key of a fleet, which may be another one."""
    key = lab.key(mode, owner=owner)
    return unmask(MaskedVector(masked, key.key_id), key)


def collusion(lab: Lab, mode: str) -> list[Result]:
    """Return the share of another device's update that a round's key opens, and the PSNR of an image read from it.

    Every device holds the same keys, so one that hands them to the aggregator opens the whole round. The limit of any scheme with
    a key that all clients share; Bonawitz et al., "Practical Secure Aggregation" (2017), for why pairwise masks differ.
    """
    update = lab.update(lab.pick("collusion", 80), ONE_EPOCH)
    shares = [
        share_recovered(opened(lab, lab.masked(update, mode), mode, owner), update) for owner in ("fleet", "nobody")
    ]
    guess = lab.update(lab.pick("collusion, own", 80, lab.public), ONE_EPOCH)
    image = lab.pick("collusion, image", 1)
    rows, bias = read_rows(opened(lab, lab.masked(lab.update(image), mode), mode) / np.float32(-LR), lab)
    reading = rows[int(np.abs(bias).argmax())]
    return [
        Result(
            name="collusion: coordinates of an update",
            attacker=HAS_KEYS,
            success=shares[0],
            chance=share_recovered(guess, update),
            unit="share",
            margin=0.1,
            note=f"with a made-up key {shares[1]:.4f}; chance is the attacker's own training",
        ),
        Result(
            name="collusion: an image",
            attacker=HAS_KEYS,
            success=psnr_db(reading, image.x[0]),
            chance=psnr_db(lab.public.mean(), image.x[0]),
            unit="dB",
            margin=DB_MARGIN,
            note="PSNR; chance shows the mean image",
            pictures=(picture("true", image.x[0]), picture("with one device's key", reading)),
        ),
        *(_one_key(lab, mode, lifetime, update, share_recovered(guess, update)) for lifetime in LIFETIMES),
    ]


def _one_key(lab: Lab, mode: str, lifetime: Lifetime, update: Float32Vector, chance: float) -> Result:
    """Return the share of ``update`` (d,) that the key of its round opens, with that of another round's key in the note."""
    keys = FleetKeys(lab, mode, lifetime, lab.length)
    same, other = (keys.unmasked(keys.masked(update[None], sent), 2)[0] for sent in (2, 1))
    return Result(
        name="colluding-device",
        attacker="aggregator with the mask key that one device holds in one round",
        success=share_recovered(same, update),
        chance=chance,
        unit="share",
        margin=0.1,
        note=f"of an update of another round {share_recovered(other, update):.4f}",
        keys=lifetime,
    )


ATTACKS: Final = (
    Attack("active aggregator", "Boenisch et al. 2023 (malicious models)", FORGES_MEANS, probing),
    Attack("collusion", "Bonawitz et al. 2017 (why masks must be pairwise)", HAS_KEYS, collusion),
)
