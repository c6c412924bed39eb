"""One device hands the keys of a round to the aggregator: every device holds the same ones, so the whole round is open.

The limit of any scheme with a key that all clients share; Bonawitz et al., "Practical Secure
Aggregation" (2017), for why pairwise masks differ.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from crypto.mask.masking import unmask
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.bench.attacks.base import DB_MARGIN, Attack, Picture, Result, psnr_db, share_recovered
from shoal_lab.bench.attacks.first_layer import read_rows
from shoal_lab.bench.attacks.lab import LR, ONE_EPOCH, Lab
from shoal_lab.bench.attacks.structure.keys import LIFETIMES, FleetKeys, Lifetime

WHO: Final = "aggregator with the round's keys from one device"


def opened(lab: Lab, masked: Float32Vector, mode: str, owner: str = "fleet") -> Float32Vector:
    """Unmask ``masked`` (d,) with the key of a fleet, which may be another one."""
    key = lab.key(mode, owner=owner)
    return unmask(MaskedVector(masked, key.key_id), key)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the share of another device's update that is opened, and the PSNR of an image read from it."""
    update = lab.update(lab.pick("collusion", 80), ONE_EPOCH)
    shares = [
        share_recovered(opened(lab, lab.masked(update, mode), mode, owner), update) for owner in ("fleet", "nobody")
    ]
    guess = lab.update(lab.pick("collusion, own", 80, lab.public), ONE_EPOCH)
    image = lab.pick("collusion, image", 1)
    rows, bias = read_rows(opened(lab, lab.masked(lab.update(image), mode), mode) / np.float32(-LR), lab)
    reading = rows[int(np.abs(bias).argmax())]
    square = (lab.side, lab.side)
    pictures = (
        Picture("true", image.x[0].reshape(square)),
        Picture("with one device's key", reading.astype(np.float32).reshape(square)),
    )
    return [
        Result(
            name="collusion: coordinates of an update",
            attacker=WHO,
            success=shares[0],
            chance=share_recovered(guess, update),
            unit="share",
            margin=0.1,
            note=f"with a made-up key {shares[1]:.4f}; chance is the attacker's own training",
        ),
        Result(
            name="collusion: an image",
            attacker=WHO,
            success=psnr_db(reading, image.x[0]),
            chance=psnr_db(lab.public.mean(), image.x[0]),
            unit="dB",
            margin=DB_MARGIN,
            note="PSNR; chance shows the mean image",
            pictures=pictures,
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


ATTACK: Final = Attack("collusion", "Bonawitz et al. 2017 (why masks must be pairwise)", WHO, run)
